"""torchrun: rank 1 reads its pictures from a far store, and rank 0 keeps histograms of gradients, both in the same moments.

So mending one alone gains nothing: the other rank is still as late.
"""
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from models import Residual, size

BATCH, EDGE = size(192, 2), size(160, 16)


class Store(Dataset):
    """Whole batches, each by one request that takes `answer` seconds."""

    def __init__(self, count, answer):
        self.count, self.answer, self.images = count, answer, torch.randint(0, 256, (BATCH, 3, EDGE, EDGE), dtype=torch.uint8)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(self.answer)
        return self.images.roll(index, 0), (torch.arange(BATCH) + index) % 1000


def main(tick, fixed=False):
    """`fixed` may also be "loader" or "histograms", to mend one of the two alone."""
    enough, unread = fixed in (True, "loader"), fixed in (True, "histograms")
    torch.manual_seed(0)
    rank, steps, wide = dist.get_rank(), turns(280, 2), size(64, 4)
    with torch.device(DEVICE):
        model = nn.Sequential(
            nn.Conv2d(3, wide, 5, 2, 2), Residual(wide, wide, 1), Residual(wide, 2 * wide, 2), Residual(2 * wide, 4 * wide, 2),
            Residual(4 * wide, 8 * wide, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * wide, 1000),
        ).to(memory_format=torch.channels_last)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    watched = [parameter for name, parameter in model.module.named_parameters() if name.startswith("3.body")]
    far = rank == 1
    loader = DataLoader(
        Store(steps, size(0.11, 0.01) if far else size(0.01, 0.001)), batch_size=None, pin_memory=DEVICE == "cuda",
        num_workers=size(14 if far and enough else 4, 1),
    )
    histograms = []
    for images, labels in loader:  # STALL: peer_late
        x = images.to(DEVICE, non_blocking=True).float().div_(255).contiguous(memory_format=torch.channels_last)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), labels.to(DEVICE, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        if rank == 0:
            if unread:
                histograms.append([torch.histc(parameter.grad, 64, -0.1, 0.1) for parameter in watched])
            else:
                histograms.append([np.histogram(parameter.grad.cpu().numpy(), 64) for parameter in watched])  # STALL: peer_late
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
