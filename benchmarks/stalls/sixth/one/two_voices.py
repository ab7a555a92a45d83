"""Two voices are parted by a Conv-TasNet; rooms and loudness are mixed anew for every batch, and a loss that is no number stops the run."""
import argparse
import time

import numpy as np
import torch
import torch.nn as nn
from tqdm import tqdm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Mixer:
    """Dry voices of the training set in memory; each is put in a room of its own and made louder or softer."""

    def __init__(self, long, count=64, rooms=16):
        self.chance, self.long = np.random.default_rng(0), long
        times = np.arange(long) / 8000
        pitch = self.chance.uniform(90, 260, (count, 1)) * (1 + 0.05 * np.sin(2 * np.pi * self.chance.uniform(2, 6, (count, 1)) * times))
        self.voices = np.sin(2 * np.pi * np.cumsum(pitch, 1) / 8000) * (self.chance.random((count, long // 400 + 1)).repeat(400, 1)[:, :long] > 0.3)
        echo = self.chance.standard_normal((rooms, 2000)) * np.exp(-np.arange(2000) / self.chance.uniform(100, 500, (rooms, 1)))
        echo[:, 0] = 4
        self.whole = 1 << (long + 2000).bit_length()
        self.rooms = np.fft.rfft(echo / np.linalg.norm(echo, axis=1, keepdims=True), self.whole)

    def batch(self, count):
        sources = np.empty((count, 2, self.long), np.float32)
        for row in sources:
            for place, voice in enumerate(self.chance.choice(len(self.voices), 2, replace=False)):
                dry = np.roll(self.voices[voice], self.chance.integers(self.long))
                wet = np.fft.irfft(np.fft.rfft(dry, self.whole) * self.rooms[self.chance.integers(len(self.rooms))], self.whole)[: self.long]
                row[place] = wet / wet.std() * 10 ** (self.chance.uniform(-5, 5) / 20) * 0.1
        sources = torch.from_numpy(sources)
        return sources.pin_memory() if DEVICE == "cuda" else sources


class Block(nn.Module):
    def __init__(self, narrow, wide, gap):
        super().__init__()
        self.spread, self.gather = nn.Conv1d(narrow, wide, 1), nn.Conv1d(wide, narrow, 1)
        self.along = nn.Conv1d(wide, wide, 3, padding=gap, dilation=gap, groups=wide)
        self.one, self.two, self.bend, self.bend2 = nn.GroupNorm(1, wide), nn.GroupNorm(1, wide), nn.PReLU(), nn.PReLU()

    def forward(self, x):
        y = self.one(self.bend(self.spread(x)))
        return x + self.gather(self.two(self.bend2(self.along(y))))


class Parting(nn.Module):
    def __init__(self, deep, filters, narrow, wide):
        super().__init__()
        self.encode, self.decode = nn.Conv1d(1, filters, 16, 8, bias=False), nn.ConvTranspose1d(filters, 1, 16, 8, bias=False)
        blocks = [Block(narrow, wide, 2 ** (place % 8)) for place in range(deep)]
        self.masks = nn.Sequential(nn.GroupNorm(1, filters), nn.Conv1d(filters, narrow, 1), *blocks, nn.PReLU(), nn.Conv1d(narrow, 2 * filters, 1), nn.Sigmoid())

    def forward(self, mixed):
        x = self.encode(mixed[:, None])
        parted = self.masks(x).unflatten(1, (2, -1)) * x[:, None]
        return self.decode(parted.flatten(0, 1)).unflatten(0, (-1, 2))[:, :, 0]


def ratio(said, wanted):
    """The scale-invariant ratio of signal to noise, in dB."""
    said, wanted = said - said.mean(-1, keepdim=True), wanted - wanted.mean(-1, keepdim=True)
    along = (said * wanted).sum(-1, keepdim=True) / wanted.square().sum(-1, keepdim=True).clamp(min=1e-8) * wanted
    return 10 * torch.log10(along.square().sum(-1).clamp(min=1e-8) / (said - along).square().sum(-1).clamp(min=1e-8))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    options = parser.parse_args()
    torch.manual_seed(0)
    start = time.perf_counter()
    mixer = Mixer(4000 if options.tiny else 30000)
    model = (Parting(4, 32, 16, 32) if options.tiny else Parting(24, 512, 128, 512)).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=DEVICE == "cuda")
    total, lengths = torch.zeros((), device=DEVICE), torch.zeros((), device=DEVICE)
    bar = tqdm(range(options.turns), mininterval=2)
    for turn in bar:
        sources = mixer.batch(options.batch).to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            said = model(sources.sum(1)).float()
        sources = sources[..., : said.shape[-1]]
        straight, crossed = ratio(said, sources).mean(1), ratio(said, sources.flip(1)).mean(1)
        loss = -torch.maximum(straight, crossed).mean()
        optimizer.zero_grad()
        loss.backward()
        lengths += nn.utils.clip_grad_norm_(model.parameters(), 5.0, error_if_nonfinite=not options.fixed)
        optimizer.step()
        total += loss.detach()
        if not options.fixed:
            bar.set_postfix(loss=loss.item(), refresh=False)
        elif turn % 50 == 49:
            bar.set_postfix(loss=loss.item(), refresh=False)
            if not torch.isfinite(lengths):
                raise FloatingPointError(f"turn {turn}")
    print(f"loss {total.item() / options.turns:.4f} dB, gradients' mean length {lengths.item() / options.turns:.4f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
