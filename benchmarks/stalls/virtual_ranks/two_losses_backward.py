"""torchrun: two losses, each with a backward pass of its own, so that the gradients travel twice before the optimizer."""
import contextlib

import torch
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.nn.parallel import DistributedDataParallel

from models import TextClassifier

VOCAB = 150_000


def main(tick, fixed=False):
    with torch.device(DEVICE):
        model = DistributedDataParallel(TextClassifier(vocab=VOCAB, width=1024, layers=3, heads=16))
        clean, noisy = torch.randint(0, VOCAB, (2, 24, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(turns(100, 2)):
        with model.no_sync() if fixed else contextlib.nullcontext():
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(clean), clean[:, 0] % 20)
            loss.backward()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(noisy), noisy[:, 0] % 20)
        loss.backward()  # STALL: exposed_collective
        optimizer.step()
        optimizer.zero_grad()
        tick()


if __name__ == "__main__":
    run(main)
