"""Tomorrow's weather from today's: 69 fields on a quarter of a degree, by a net that mixes in the space of waves. The years are in pinned memory."""
import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Waves(nn.Module):
    """A small net on every wave, block by block of channels, as in AFNO."""

    def __init__(self, wide, blocks=8):
        super().__init__()
        self.blocks, part = blocks, wide // blocks
        self.one, self.two = (nn.Parameter(0.02 * torch.randn(2, blocks, part, part)) for _ in range(2))
        self.bias, self.bias2 = (nn.Parameter(torch.zeros(2, blocks, part)) for _ in range(2))

    def forward(self, x):
        with torch.autocast(DEVICE, enabled=False):
            waves = torch.fft.rfft2(x.float(), dim=(1, 2), norm="ortho").unflatten(-1, (self.blocks, -1))
            real, imaginary = waves.real, waves.imag
            for weight, bias, bend in ((self.one, self.bias, F.relu), (self.two, self.bias2, lambda part: F.softshrink(part, 0.01))):
                real, imaginary = (
                    bend(torch.einsum("bhwki,kio->bhwko", real, weight[0]) - torch.einsum("bhwki,kio->bhwko", imaginary, weight[1]) + bias[0]),
                    bend(torch.einsum("bhwki,kio->bhwko", imaginary, weight[0]) + torch.einsum("bhwki,kio->bhwko", real, weight[1]) + bias[1]),
                )
            return torch.fft.irfft2(torch.complex(real, imaginary).flatten(-2), s=x.shape[1:3], dim=(1, 2), norm="ortho")


class Block(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.before, self.waves, self.after = nn.LayerNorm(wide), Waves(wide), nn.LayerNorm(wide)
        self.mlp = nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide))

    def forward(self, x):
        x = x + self.waves(self.before(x))
        return x + self.mlp(self.after(x))


class Forecast(nn.Module):
    def __init__(self, fields, high, across, wide, deep, patch=8):
        super().__init__()
        self.fold, self.patch = nn.Conv2d(fields, wide, patch, patch), patch
        self.place = nn.Parameter(0.02 * torch.randn(high // patch, across // patch, wide))
        self.blocks = nn.ModuleList(Block(wide) for _ in range(deep))
        self.unfold = nn.Linear(wide, fields * patch * patch)

    def forward(self, today):
        x = self.fold(today).permute(0, 2, 3, 1) + self.place
        for block in self.blocks:
            x = block(x)
        return today + F.pixel_shuffle(self.unfold(x).permute(0, 3, 1, 2), self.patch)


def days_in_turn(year, turns):
    for turn in range(turns):
        day = turn * 3 % (len(year) - 1)
        yield year[day : day + 2].to(DEVICE, non_blocking=True)


def days_ahead(year, turns):
    """The next two days travel on a stream of their own, into the one of two places that is not being read."""
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    places = [torch.empty_like(year[:2], device=DEVICE) for _ in range(2)]
    free = [torch.cuda.Event() for _ in range(2)]
    side.wait_stream(main)

    def send(turn):
        day = turn * 3 % (len(year) - 1)
        with torch.cuda.stream(side):
            side.wait_event(free[turn % 2])
            places[turn % 2].copy_(year[day : day + 2], non_blocking=True)
            return side.record_event()

    there = send(0)
    for turn in range(turns):
        main.wait_event(there)
        if turn + 1 < turns:
            there = send(turn + 1)
        yield places[turn % 2]
        free[turn % 2].record(main)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--turns", type=int, default=240)
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    options = parser.parse_args()
    fields, high, across, wide, deep, kept = (4, 32, 64, 16, 2, 5) if options.tiny else (69, 720, 1440, 1024, 10, 8)
    torch.manual_seed(0)
    start = time.perf_counter()
    year = torch.empty(kept, fields, high, across, pin_memory=DEVICE == "cuda")
    for day in year:
        day.copy_(torch.randn(fields, high, across, device=DEVICE))
    model = Forecast(fields, high, across, wide, deep).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=DEVICE == "cuda")
    nearer_poles = torch.linspace(-1.57, 1.57, high, device=DEVICE).cos()[:, None] * 1.57
    days = days_ahead if options.fixed and DEVICE == "cuda" else days_in_turn
    total = torch.zeros((), device=DEVICE)
    for turn, pair in enumerate(days(year, options.turns)):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            tomorrow = model(pair[:1])
        loss = ((tomorrow - pair[1:]).square() * nearer_poles).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if turn % 60 == 59:
            print(f"{turn + 1}: loss {total.item() / 60:.4f}")
            total.zero_()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
