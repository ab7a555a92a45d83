"""Windows of sensor data from a stream with one worker, which scales each of them in float64."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from models import STEPS, run, size

BATCH, LENGTH, SENSORS, WIDTH = size(192, 2), size(256, 16), size(32, 4), size(384, 8)


class Windows(IterableDataset):
    def __init__(self):
        self.series = np.random.default_rng(0).standard_normal((size(100000, 400), SENSORS)).astype(np.float32)

    def __iter__(self):
        random = np.random.default_rng(get_worker_info().id)
        while True:
            start = random.integers(0, len(self.series) - LENGTH - 1)
            window = self.series[start : start + LENGTH + 1].astype(np.float64)
            window = (window - window.mean(0)) / (window.std(0) + 1e-8)
            yield torch.from_numpy(window[:-1].astype(np.float32)), torch.from_numpy(window[-1].astype(np.float32))


class Block(nn.Module):
    def __init__(self, gap):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=gap, dilation=gap), nn.BatchNorm1d(WIDTH), nn.SiLU())

    def forward(self, x):
        return x + self.body(x)


def main(tick, fixed=False):
    loader = DataLoader(Windows(), batch_size=BATCH, num_workers=size(8 if fixed else 1, 1), pin_memory=True)
    with torch.device("cuda"):
        model = nn.Sequential(nn.Conv1d(SENSORS, WIDTH, 1), *(Block(2**level) for level in range(7)))
        head = nn.Linear(WIDTH, SENSORS)
    optimizer = torch.optim.RMSprop([*model.parameters(), *head.parameters()], lr=1e-4)
    for step, (x, y) in enumerate(loader):  # STALL: input_late
        x, y = x.to("cuda", non_blocking=True), y.to("cuda", non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.huber_loss(head(model(x.transpose(1, 2)).mean(2)).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()
        if step == STEPS - 1:
            break


if __name__ == "__main__":
    run(main)
