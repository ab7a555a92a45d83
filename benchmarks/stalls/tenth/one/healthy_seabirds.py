"""Seabirds are marked in pictures from an aeroplane; a thread packs the marks as PNG with OpenCV and writes them, one batch behind the device."""
import argparse
import queue
import tempfile
import threading
import time
from pathlib import Path

import cv2
import torch
import torch.nn as nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Marks(nn.Module):
    def __init__(self, wide, deep):
        super().__init__()
        self.enter = nn.Conv2d(3, wide, 2, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.GroupNorm(8, wide), nn.GELU(), nn.Conv2d(wide, wide, 3, padding=1)) for _ in range(deep))
        self.leave = nn.Conv2d(wide, 1, 1)

    def forward(self, pictures):
        x = self.enter(pictures)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x).sigmoid()


class Writer(threading.Thread):
    """Waits nearly always: for a batch to be given, and for its copy to have come home."""

    def __init__(self, folder):
        super().__init__(daemon=True)
        self.folder, self.given, self.size, self.count = folder, queue.Queue(), 0, 0

    def give(self, marks):
        home = torch.empty(marks.shape, dtype=marks.dtype, pin_memory=DEVICE == "cuda").copy_(marks, non_blocking=True)
        ready = torch.cuda.Event() if DEVICE == "cuda" else None
        if ready:
            ready.record()
        self.given.put((home, ready))

    def run(self):
        while (item := self.given.get()) is not None:
            home, ready = item
            if ready:
                ready.synchronize()
            for marks in home.numpy():
                _, packed = cv2.imencode(".png", marks[0], [cv2.IMWRITE_PNG_COMPRESSION, 1])
                (self.folder / f"{self.count}.png").write_bytes(packed)
                self.size, self.count = self.size + len(packed), self.count + 1


class Eraser(Writer):
    """Writes nothing."""

    def run(self):
        while self.given.get() is not None:
            self.count += 1


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--batches", type=int, default=150)
    options = parser.parse_args()
    wide, deep, batch, edge, batches = (16, 2, 2, 64, 4) if options.tiny else (96, 14, 8, 1536, options.batches)
    torch.manual_seed(0)
    start = time.perf_counter()
    model = Marks(wide, deep).eval().to(DEVICE, memory_format=torch.channels_last)
    film = torch.randint(0, 256, (4, batch, edge, edge, 3), dtype=torch.uint8, device=DEVICE).permute(0, 1, 4, 2, 3)
    with tempfile.TemporaryDirectory() as folder:
        writer = (Eraser if options.fixed else Writer)(Path(folder))
        writer.start()
        for number in range(batches):
            pictures = film[number % 4].float().div(255)
            with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
                marks = model(pictures)
            small = nn.functional.avg_pool2d(marks.float(), 2)
            writer.give(small.mul(255).byte().contiguous())
        writer.given.put(None)
        writer.join()
    print(f"{writer.count} pictures, {writer.size} bytes")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
