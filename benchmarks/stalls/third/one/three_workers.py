"""Spectrograms from three workers: every third step finds the queue empty."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.utils.data import DataLoader, Dataset

from models import Residual, size

BATCH, SAMPLES, WINDOW = size(64, 2), size(32000, 1600), size(512, 64)


class Clips(Dataset):
    def __init__(self, count):
        self.count = count
        self.noise = np.random.default_rng(0).standard_normal(SAMPLES * 4).astype(np.float32)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        start = index * 7919 % (3 * SAMPLES)
        wave = self.noise[start : start + SAMPLES]
        frames = np.lib.stride_tricks.sliding_window_view(wave, WINDOW)[:: WINDOW // 4] * np.hanning(WINDOW)
        power = np.log1p(np.abs(np.fft.rfft(frames, axis=1)) ** 2)[:, :-1].astype(np.float32)
        return torch.from_numpy((power - power.mean()) / power.std())[None], index % 50


def main(tick, fixed=False):
    steps = turns(160, 3)
    loader = DataLoader(Clips(BATCH * steps), batch_size=BATCH, num_workers=size(12, 2) if fixed else size(3, 1), pin_memory=DEVICE == "cuda")
    width = size(32, 4)
    model = nn.Sequential(
        Residual(1, width, 2), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2), Residual(4 * width, 8 * width, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 50),
    ).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, y in loader:  # STALL: input_late
        x, y = x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
