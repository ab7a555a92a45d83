"""An old film gets its colours: scenes are cut into pieces, a net colours each by the one before, and every frame is packed and written."""
import argparse
import collections
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn as nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Colourist(nn.Module):
    def __init__(self, wide, deep, piece):
        super().__init__()
        self.piece = piece
        self.enter = nn.Conv2d(4, wide, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, wide), nn.SiLU(), nn.Conv2d(wide, wide, 3, padding=1), nn.SiLU(), nn.Conv2d(wide, wide, 3, padding=1)) for _ in range(deep)
        )
        self.leave = nn.Conv2d(wide, 3, 3, padding=1)

    def forward(self, grey, before):
        x = self.enter(torch.cat([grey, before], 1))
        for block in self.blocks:
            x = x + block(x)
        return (grey + 0.3 * self.leave(x)).sigmoid()


def scenes(lengths, piece, height, width):
    """Scene by scene, the grey frames of its pieces."""
    chance = torch.Generator().manual_seed(0)
    stock = torch.rand(8, piece, 1, height // 8, width // 8, generator=chance).flatten(0, 1)
    stock = nn.functional.interpolate(stock, scale_factor=8, mode="bilinear").add(0.02 * torch.randn(8 * piece, 1, height, width, generator=chance))
    stock = stock.unflatten(0, (8, piece))
    if DEVICE == "cuda":
        stock = stock.pin_memory()
    for number, length in enumerate(lengths):
        yield number, (stock[(number + part) % 8] for part in range(length))


@torch.inference_mode()
def coloured(model, film):
    """The coloured pieces as bytes, still on the device; each scene starts without colours."""
    for number, pieces in film:
        before = None
        for part, grey in enumerate(pieces):
            grey = grey.to(DEVICE, non_blocking=True)
            before = grey.new_zeros(len(grey), 3, *grey.shape[2:]) if before is None else before
            with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
                colours = model(grey, before).float()
            before = colours
            yield f"{number:03d}-{part:03d}", colours.mul(255).byte().permute(0, 2, 3, 1).contiguous()


def pack(path, frame):
    packed = zlib.compress(frame.numpy(), 4)
    path.write_bytes(packed)
    return len(packed)


def write(pieces, folder):
    size = 0
    for name, frames in pieces:
        for number, frame in enumerate(frames.cpu()):
            size += pack(folder / f"{name}-{number}.z", frame)
    return size


def write_behind(pieces, folder):
    """Each piece is fetched while the next ones are coloured, and packed by threads."""
    size, fetched, packed = 0, collections.deque(), collections.deque()

    def hand_over():
        name, home, ready = fetched.popleft()
        if ready:
            ready.synchronize()
        packed.extend(pool.submit(pack, folder / f"{name}-{number}.z", frame) for number, frame in enumerate(home))

    with ThreadPoolExecutor(8) as pool:
        for name, frames in pieces:
            home = torch.empty(frames.shape, dtype=frames.dtype, pin_memory=DEVICE == "cuda").copy_(frames, non_blocking=True)
            fetched.append((name, home, torch.cuda.Event() if DEVICE == "cuda" else None))
            if fetched[-1][2]:
                fetched[-1][2].record()
            if len(fetched) > 2:
                hand_over()
            while len(packed) > 64:
                size += packed.popleft().result()
        while fetched:
            hand_over()
        return size + sum(one.result() for one in packed)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--scenes", type=int, default=14)
    options = parser.parse_args()
    wide, deep, height, width, count = (16, 1, 32, 48, 3) if options.tiny else (128, 14, 288, 384, options.scenes)
    torch.manual_seed(0)
    start = time.perf_counter()
    model = Colourist(wide, deep, 4).eval().to(DEVICE)
    lengths = [2 + 7 * number % 19 for number in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        size = (write_behind if options.fixed else write)(coloured(model, scenes(lengths, 4, height, width)), Path(folder))
    print(f"{sum(lengths)} pieces, {size} bytes")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
