"""torchrun: rank 1's shard of the data is packed with zlib at its highest level, and two workers unpack it; rank 0's is not packed."""
import zlib

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from models import Residual, size

BATCH, EDGE = size(64, 2), size(160, 16)


class Shard(Dataset):
    def __init__(self, count, packed):
        random = np.random.default_rng(0)
        pictures = [random.integers(0, 60, (EDGE, EDGE, 3), dtype=np.uint8).tobytes() for _ in range(32)]
        self.count, self.packed = count, packed
        self.files = [zlib.compress(picture, 9) for picture in pictures] if packed else pictures

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        raw = self.files[index % len(self.files)]
        picture = np.frombuffer(zlib.decompress(raw) if self.packed else raw, dtype=np.uint8).reshape(EDGE, EDGE, 3)
        if self.packed:  # the packed shard was also stored as differences
            picture = np.cumsum(picture, axis=0, dtype=np.uint8)
        return torch.from_numpy(picture.transpose(2, 0, 1).astype(np.float32) / 255), index % 100


def main(tick, fixed=False):
    torch.manual_seed(0)
    steps = turns(320, 2)
    shard = Shard(BATCH * steps, packed=dist.get_rank() == 1 and not fixed)
    width = size(64, 4)
    with torch.device(DEVICE):
        model = nn.Sequential(
            nn.Conv2d(3, width, 5, 2, 2), Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 100),
        )
    model = DistributedDataParallel(model.to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for x, y in DataLoader(shard, batch_size=BATCH, num_workers=size(2, 1), pin_memory=DEVICE == "cuda"):  # STALL: peer_late
        x, y = x.to(DEVICE, non_blocking=True, memory_format=torch.channels_last), y.to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
