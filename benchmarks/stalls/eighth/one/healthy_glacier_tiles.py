"""Where glaciers end, in tiles of satellite pictures: tiles are cut, turned and brightened by NumPy between the steps, and a U-shaped net marks the ice."""
import argparse
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def twice(inner, outer):
    parts = []
    for entering in (inner, outer):
        parts += [nn.Conv2d(entering, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts)


class Ice(nn.Module):
    def __init__(self, wide, bands=4):
        super().__init__()
        widths = [wide * 2**level for level in range(4)]
        self.down = nn.ModuleList(twice(inner, outer) for inner, outer in zip([bands, *widths], widths))
        self.up = nn.ModuleList(twice(low + high, high) for low, high in zip(widths[:0:-1], widths[-2::-1]))
        self.head = nn.Conv2d(wide, 1, 1)

    def forward(self, x):
        kept = []
        for number, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if number else x)
            kept.append(x)
        for up, beside in zip(self.up, kept[-2::-1]):
            x = up(torch.cat([F.interpolate(x, scale_factor=2.0), beside], 1))
        return self.head(x)[:, 0]


def scene(edge):
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:edge, :edge].astype(np.float32)
    ice = np.sin(rows / 90) + np.cos(columns / 130) > 0.3
    picture = rng.standard_normal((4, edge, edge), dtype=np.float32)
    picture[:3] += 1.5 * ice
    return picture, ice


class Tiles:
    def __init__(self, scene, tile, batch):
        self.picture, self.ice = scene
        self.tile, self.batch, self.rng = tile, batch, np.random.default_rng(1)

    def draw(self):
        tiles, marks = [], []
        for row, column in self.rng.integers(0, len(self.ice) - self.tile + 1, (self.batch, 2)):
            place = slice(row, row + self.tile), slice(column, column + self.tile)
            turns, bright = self.rng.integers(4), self.rng.uniform(0.8, 1.2)
            tiles.append(np.rot90(self.picture[:, *place], turns, (1, 2)) * np.float32(bright))
            marks.append(np.rot90(self.ice[place], turns))
        tiles, marks = torch.from_numpy(np.stack(tiles)), torch.from_numpy(np.stack(marks))
        if DEVICE == "cuda":
            tiles, marks = tiles.pin_memory(), marks.pin_memory()
        return tiles, marks

    def all(self, turns, ahead):
        if not ahead:
            for _ in range(turns):
                yield self.draw()
            return
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self.draw)
            for turn in range(turns):
                found = asked.result()
                if turn + 1 < turns:
                    asked = pool.submit(self.draw)
                yield found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--turns", type=int, default=70)
    options = parser.parse_args()
    edge, tile, batch, wide = (256, 32, 2, 8) if options.tiny else (2048, 256, 32, 96)
    torch.manual_seed(0)
    start = time.perf_counter()
    model = Ice(wide).to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=DEVICE == "cuda")
    total = torch.zeros((), device=DEVICE)
    for turn, (tiles, marks) in enumerate(Tiles(scene(edge), tile, batch).all(options.turns, ahead=options.fixed)):
        tiles, marks = tiles.to(DEVICE, non_blocking=True), marks.to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            said = model(tiles.contiguous(memory_format=torch.channels_last))
        loss = F.binary_cross_entropy_with_logits(said.float(), marks.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if turn % 35 == 34:
            print(f"{turn + 1}: loss {total.item() / (turn + 1):.4f}", flush=True)
    print(f"mean loss {total.item() / options.turns:.4f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
