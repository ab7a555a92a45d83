"""Mixup with a permutation from the CPU, and the class weights made from a list every step: two waits that cost nothing here."""

import random

import torch
import torch.nn as nn

from models import STEPS, resnet, run, size


def main(tick, fixed=False):
    random.seed(0)
    counts = [random.randrange(50, 500) for _ in range(200)]
    model = resnet(width=80, classes=len(counts))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    x = torch.randn(size(768, 4), 3, size(192, 32), size(192, 32), device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, len(counts), x.shape[:1], device="cuda")
    kept = torch.tensor([100 / count for count in counts], device="cuda")
    for step in range(STEPS):
        share = random.betavariate(0.4, 0.4)
        if fixed:
            order = torch.randperm(len(x), device="cuda")
        else:
            order = torch.randperm(len(x))
        mixed = share * x + (1 - share) * x[order]  # STALL: made_on_host
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(mixed)
            weights = kept if fixed else torch.tensor([100 / count for count in counts], device="cuda")  # STALL: blocking_copy
            judge = nn.CrossEntropyLoss(weight=weights)
            loss = share * judge(out, y) + (1 - share) * judge(out, y[order])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
