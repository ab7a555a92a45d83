"""A masked language model of proteins that begins with short chains and sees longer ones as it goes on. A fifth of the card is its own; a folding service has the rest."""
import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LETTERS, MASK = 25, 24


class Layer(nn.Module):
    def __init__(self, wide, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(wide), nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.norm2, self.up, self.down = nn.LayerNorm(wide), nn.Linear(wide, 4 * wide), nn.Linear(4 * wide, wide)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Protein(nn.Module):
    def __init__(self, wide, deep, longest):
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, wide), nn.Parameter(0.02 * torch.randn(longest, wide))
        self.layers = nn.ModuleList(Layer(wide, max(1, wide // 64)) for _ in range(deep))
        self.norm, self.head = nn.LayerNorm(wide), nn.Linear(wide, LETTERS)

    def forward(self, chains):
        x = self.letters(chains) + self.places[: chains.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def guess(model, chains):
    hidden = torch.rand(chains.shape, device=DEVICE) < 0.15
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        said = model(chains.masked_fill(hidden, MASK))
    return F.cross_entropy(said.float().flatten(0, 1), chains.masked_fill(~hidden, -100).flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--turns", type=int, default=180)
    parser.add_argument("--share", type=float, default=0.2, help="of the device's memory")
    options = parser.parse_args()
    batch, shortest, wide, deep = (2, 8, 32, 2) if options.tiny else (16, 256, 1024, 16)
    grows = 1 if options.tiny else 5
    longest = shortest + grows * options.turns
    torch.manual_seed(0)
    start = time.perf_counter()
    if DEVICE == "cuda":
        torch.cuda.set_per_process_memory_fraction(options.share)
    model = Protein(wide, deep, longest).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=DEVICE == "cuda")
    if options.fixed:
        guess(model, torch.randint(0, MASK, (batch, longest), device=DEVICE)).backward()
        optimizer.zero_grad()
    total = torch.zeros((), device=DEVICE)
    for turn in range(options.turns):
        chains = torch.randint(0, MASK, (batch, shortest + grows * turn), device=DEVICE)
        loss = guess(model, chains)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if turn % 40 == 39:
            print(f"{turn + 1}: loss {total.item() / 40:.4f} at {chains.shape[1]} letters")
            total.zero_()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        print(f"{torch.cuda.max_memory_allocated() >> 20} MiB at most")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
