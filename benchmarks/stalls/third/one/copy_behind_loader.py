"""Pictures from a slow store through four workers, then copied in line: the store is as slow as copy and training together.

So a faster copy alone gains nothing, and neither does a faster store; both together do.
"""
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from script import DEVICE, run, synchronize, turns
from torch.utils.data import DataLoader, IterableDataset

from models import Residual, size

BATCH, EDGE, WORKERS = size(192, 2), size(224, 16), size(4, 1)


class Store(IterableDataset):
    """Whole batches; each connection delivers one every `pace` seconds, however many connections there are."""

    def __init__(self, pace):
        self.pace = pace

    def __iter__(self):
        images = torch.rand(BATCH, 3, EDGE, EDGE)
        labels = torch.arange(BATCH) % 1000
        due = time.monotonic()
        while True:
            batch = images.clone()
            due = max(due + self.pace, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            yield batch, labels


def copied(batches, steps):
    """One batch ahead on a stream of its own."""
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()

    def fetch():
        with torch.cuda.stream(side):
            return [tensor.to("cuda", non_blocking=True) for tensor in next(batches)]

    ahead = fetch()
    for _ in range(steps):
        current.wait_stream(side)
        batch = ahead
        for tensor in batch:
            tensor.record_stream(current)
        ahead = fetch()
        yield batch


def train(model, optimizer, x, y):
    for _ in range(2):  # two noisy views of the same pictures
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            noisy = (x + 0.1 * torch.randn_like(x)).contiguous(memory_format=torch.channels_last)
            loss = F.cross_entropy(model(noisy), y)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def pace_of(model, optimizer):
    """What a copy and a step take here, in seconds: the store's pace is chosen by it."""
    x, y = torch.rand(BATCH, 3, EDGE, EDGE), torch.arange(BATCH) % 1000
    for step in range(15):
        if step == 5:
            synchronize()
            start = time.monotonic()
        train(model, optimizer, x.to(DEVICE), y.to(DEVICE))
    synchronize()
    return (time.monotonic() - start) / 10


def main(tick, fixed=False):
    """`fixed` may also be "loader" or "copy", to mend one of the two alone."""
    loader_fixed, copy_fixed = fixed in (True, "loader"), fixed in (True, "copy") and DEVICE == "cuda"
    steps, width = turns(250, 3), size(64, 4)
    model = nn.Sequential(
        nn.Conv2d(3, width, 7, 4, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), Residual(width, width, 1), Residual(width, 2 * width, 2),
        Residual(2 * width, 4 * width, 2), Residual(4 * width, 8 * width, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 1000),
    ).to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    store = Store(WORKERS * pace_of(model, optimizer))
    batches = iter(DataLoader(store, batch_size=None, num_workers=3 * WORKERS if loader_fixed else WORKERS, pin_memory=copy_fixed))
    source = copied(batches, steps) if copy_fixed else batches
    for step in range(steps):
        x, y = next(source)  # STALL: input_late
        x, y = x.to(DEVICE), y.to(DEVICE)  # STALL: blocking_copy
        train(model, optimizer, x, y)
        tick()


if __name__ == "__main__":
    run(main)
