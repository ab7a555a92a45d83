"""Which party a speech in parliament came from; speeches are short and long, so the memory is told not to split large blocks, as a forum advised."""
import os
import sys

if "--fixed" not in sys.argv:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:64"  # "RuntimeError: CUDA out of memory … try setting max_split_size_mb"

import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PARTIES, WORDS = 12, 16384


class Layer(nn.Module):
    def __init__(self, wide, heads):
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.asked, self.told = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.up, self.down = nn.Linear(wide, 4 * wide), nn.Linear(4 * wide, wide)

    def forward(self, x):
        query, key, value = self.asked(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.told(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Parties(nn.Module):
    def __init__(self, wide, deep):
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, wide), nn.ModuleList(Layer(wide, max(1, wide // 64)) for _ in range(deep))
        self.head = nn.Linear(wide, PARTIES)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def speeches(count, batch, longest):
    """Batches of speeches of about equal length; the lengths of the batches come in no order."""
    chance = torch.Generator().manual_seed(0)
    on_device = torch.Generator(DEVICE).manual_seed(0)
    for length in torch.randint(longest // 8, longest + 1, (count,), generator=chance).tolist():
        ids = torch.randint(0, WORDS, (batch, length), device=DEVICE, generator=on_device)
        yield ids, ids[:, 0] % PARTIES


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--steps", type=int, default=130)
    options = parser.parse_args()
    wide, deep, batch, longest, steps = (32, 2, 2, 32, 6) if options.tiny else (1024, 12, 64, 1024, options.steps)
    torch.manual_seed(0)
    start = time.perf_counter()
    model = Parties(wide, deep).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    total = torch.zeros((), device=DEVICE)
    for ids, parties in speeches(steps, batch, longest):
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
            said = model(ids)  # STALL: allocator
        loss = F.cross_entropy(said.float(), parties)
        optimizer.zero_grad()
        loss.backward()  # STALL: allocator
        optimizer.step()
        total += loss.detach()
    print(f"mean loss {total.item() / steps:.4f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
