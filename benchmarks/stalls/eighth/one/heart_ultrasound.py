"""How much blood a heart ejects, from clips of ultrasound: a ResNet sees each picture, and what it saw is averaged over the clip."""
import argparse
import time

import numpy as np
import torch
import torch.nn as nn
from torchvision.models import resnet18

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MEAN, SPREAD = 31.0, 48.0


class Ejection(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = resnet18(weights=None, num_classes=64)
        self.net.conv1 = nn.Conv2d(1, 64, 7, 2, 3, bias=False)
        self.head = nn.Linear(128, 1)

    def forward(self, clips):
        seen = self.net(clips.flatten(0, 1)[:, None].contiguous(memory_format=torch.channels_last)).unflatten(0, clips.shape[:2])
        return self.head(torch.cat([seen.mean(1), seen.amax(1)], 1))[:, 0]


def recordings(count, frames, edge):
    rng = np.random.default_rng(0)
    ejected = rng.uniform(0.2, 0.75, count).astype(np.float32)
    clips = rng.integers(0, 64, (count, frames, edge, edge), dtype=np.uint8)
    for clip, part in zip(clips, ejected):
        for number, picture in enumerate(clip):
            high = int(edge * (0.3 - 0.2 * part * np.sin(number / 3) ** 2))
            picture[edge // 2 - high : edge // 2 + high, edge // 3 : -edge // 3] += 90
    return clips, ejected


class Clips:
    def __init__(self, clips, ejected, batch):
        self.clips, self.ejected, self.batch = clips, ejected, batch
        self.rng = np.random.default_rng(1)

    def draw(self):
        rows = self.rng.integers(0, len(self.clips), self.batch)
        clips = (self.clips[rows].astype(np.float32) - MEAN) / SPREAD
        clips, ejected = torch.from_numpy(clips), torch.from_numpy(self.ejected[rows])
        if DEVICE == "cuda":
            clips, ejected = clips.pin_memory(), ejected.pin_memory()
        return clips.to(DEVICE), ejected.to(DEVICE)


class ClipsAsBytes(Clips):
    """The bytes go to the device from one of two pinned places, and become numbers there."""

    def __init__(self, *what):
        super().__init__(*what)
        self.turn, self.ejected = 0, torch.from_numpy(self.ejected).to(DEVICE)
        self.places = [torch.empty(self.batch, *self.clips.shape[1:], dtype=torch.uint8, pin_memory=DEVICE == "cuda") for _ in range(2)]
        self.left = [torch.cuda.Event() for _ in range(2)] if DEVICE == "cuda" else None

    def draw(self):
        rows, number = self.rng.integers(0, len(self.clips), self.batch), self.turn % 2
        if self.left:
            self.left[number].synchronize()
        np.take(self.clips, rows, axis=0, out=self.places[number].numpy(), mode="clip")
        clips = self.places[number].to(DEVICE, non_blocking=True)
        rows = torch.from_numpy(rows)
        rows = (rows.pin_memory() if self.left else rows).to(DEVICE, non_blocking=True)
        if self.left:
            self.left[number].record()
        self.turn += 1
        return (clips.float() - MEAN) / SPREAD, self.ejected[rows]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--turns", type=int, default=95)
    options = parser.parse_args()
    count, frames, edge, batch = (6, 4, 32, 2) if options.tiny else (320, 16, 112, 96)
    torch.manual_seed(0)
    start = time.perf_counter()
    torch.backends.cudnn.benchmark = True
    clips = (ClipsAsBytes if options.fixed else Clips)(*recordings(count, frames, edge), batch)
    model = Ejection().to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=DEVICE == "cuda")
    mean, off = 0.0, torch.zeros((), device=DEVICE)
    for turn in range(options.turns):
        pictures, ejected = clips.draw()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            said = model(pictures)
        loss = nn.functional.smooth_l1_loss(said.float(), ejected, beta=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if options.fixed:
            off = torch.lerp(loss.detach(), off, 0.9)
        else:
            mean = 0.9 * mean + 0.1 * loss.item()
        if turn % 25 == 24:
            print(f"{turn + 1}: loss of late {off.item() if options.fixed else mean:.4f}")
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
