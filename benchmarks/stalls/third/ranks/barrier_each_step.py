"""torchrun: each step begins and ends with a barrier and a synchronize, so that its time can be logged."""
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from script import DEVICE, run, synchronize, turns
from torch.nn.parallel import DistributedDataParallel

from models import TextClassifier, size

BATCH, LENGTH = size(32, 2), size(128, 8)


def main(tick, fixed=False):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = DistributedDataParallel(TextClassifier(width=512, layers=8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    times, start = [], time.perf_counter()
    for step in range(turns(600, 2)):
        if not fixed:
            dist.barrier()
            start = time.perf_counter()
        tokens = torch.randint(0, 8192, (BATCH, LENGTH), device=DEVICE)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(tokens), tokens[:, 0] % 20)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not fixed:
            synchronize()
            dist.barrier()  # STALL: host_sync
            times.append(time.perf_counter() - start)
        tick()
    if fixed:
        synchronize()
        times.append(time.perf_counter() - start)


if __name__ == "__main__":
    run(main)
