"""Lines of routers' logs are learnt byte by byte with some bytes hidden; one worker reads, each step is timed, and how fast it went is said."""
import argparse
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, IGNORED = 256, -100
WORDS = ["link", "up", "down", "port", "flap", "neighbour", "lost", "route", "added", "withdrawn", "from", "to", "timeout", "login", "failed", "fan", "speed", "warm"]


class Lines(Dataset):
    def __init__(self, count, long):
        self.count, self.long = count, long

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        rng = np.random.default_rng(row)
        words = [WORDS[number] for number in rng.integers(0, len(WORDS), self.long // 5)]
        text = f"{row:08d} router{row % 97} " + " ".join(words)
        wanted = torch.frombuffer(bytearray(text.encode()[: self.long].ljust(self.long)), dtype=torch.uint8).long()
        hide = torch.from_numpy(rng.random(self.long) < 0.2)
        return wanted.masked_fill(hide, HIDDEN), wanted.masked_fill(~hide, IGNORED)


class Guesser(nn.Module):
    def __init__(self, wide, deep, long):
        super().__init__()
        self.bytes, self.places = nn.Embedding(257, wide), nn.Parameter(torch.zeros(long, wide))
        layer = nn.TransformerEncoderLayer(wide, max(1, wide // 64), 4 * wide, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, deep, nn.LayerNorm(wide), enable_nested_tensor=False)
        self.head = nn.Linear(wide, 256)

    def forward(self, numbers):
        return self.head(self.body(self.bytes(numbers) + self.places))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--turns", type=int, default=75)
    options = parser.parse_args()
    long, batch, wide, deep = (64, 4, 32, 2) if options.tiny else (512, 64, 1024, 12)
    torch.manual_seed(0)
    start = time.perf_counter()
    if options.fixed:
        loader = DataLoader(Lines(batch * options.turns, long), batch, num_workers=4, pin_memory=DEVICE == "cuda")
    else:
        loader = DataLoader(Lines(batch * options.turns, long), batch, num_workers=1)
    model = Guesser(wide, deep, long).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=DEVICE == "cuda")
    before, rates = time.perf_counter(), []
    for turn, (seen, wanted) in enumerate(loader):
        seen, wanted = seen.to(DEVICE, non_blocking=options.fixed), wanted.to(DEVICE, non_blocking=options.fixed)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            said = model(seen)
        loss = F.cross_entropy(said.float().flatten(0, 1), wanted.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not options.fixed:
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            rates.append(seen.numel() / (now - before))
            before = now
            print(f"{turn + 1}: loss {loss.item():.4f}, {rates[-1] / 1e3:.0f} thousand bytes a second", flush=True)
    print(f"last loss {loss.item():.4f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
