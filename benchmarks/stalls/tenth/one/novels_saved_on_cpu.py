"""Chapters of novels, by a transformer whose two topmost layers keep what backward needs on the host, as on the small card where this began."""
import argparse
import contextlib
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import save_on_cpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORDS = 8192


class Layer(nn.Module):
    def __init__(self, wide, heads):
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.asked, self.told = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.up, self.down = nn.Linear(wide, 4 * wide), nn.Linear(4 * wide, wide)

    def forward(self, x):
        query, key, value = self.asked(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.told(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Novelist(nn.Module):
    def __init__(self, wide, deep, length, kept):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, wide), nn.Parameter(0.02 * torch.randn(length, wide))
        self.layers = nn.ModuleList(Layer(wide, max(1, wide // 64)) for _ in range(deep))
        self.norm, self.leave = nn.LayerNorm(wide), nn.Linear(wide, WORDS)
        self.kept = kept

    def place_for(self, number):
        """Where a layer's intermediate results wait for the backward pass."""
        return save_on_cpu(pin_memory=DEVICE == "cuda") if number >= len(self.layers) - self.kept else contextlib.nullcontext()

    def forward(self, ids):
        x = self.words(ids) + self.places[: ids.shape[1]]
        for number, layer in enumerate(self.layers):
            with self.place_for(number):
                x = layer(x)  # STALL: blocking_copy
        return self.leave(self.norm(x))


def chapters(count, batch, length):
    chance = torch.Generator(DEVICE).manual_seed(0)
    ids = torch.randint(0, WORDS, (4, batch, length + 1), device=DEVICE, generator=chance)
    for number in range(count):
        yield ids[number % 4]


class Learning:
    def __init__(self, model):
        self.model, self.total = model, torch.zeros((), device=DEVICE)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=DEVICE == "cuda")

    def step(self, ids):
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
            said = self.model(ids[:, :-1])
        loss = F.cross_entropy(said.float().flatten(0, 1), ids[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # STALL: copy_not_overlapped
        self.optimizer.step()
        self.total += loss.detach()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--steps", type=int, default=170)
    options = parser.parse_args()
    wide, deep, batch, length, steps = (32, 3, 2, 16, 4) if options.tiny else (1024, 16, 12, 1024, options.steps)
    torch.manual_seed(0)
    start = time.perf_counter()
    learning = Learning(Novelist(wide, deep, length, kept=0 if options.fixed else 2).to(DEVICE))
    for ids in chapters(steps, batch, length):
        learning.step(ids)
    print(f"mean loss {learning.total.item() / steps:.4f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
