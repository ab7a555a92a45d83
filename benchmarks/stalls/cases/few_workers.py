"""A DataLoader with two workers, as in the tutorial, for samples that need more."""
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from models import STEPS, resnet, run, size

BATCH, EDGE = size(96, 4), size(160, 32)


class Photos(Dataset):
    def __len__(self):
        return (STEPS + 8) * BATCH

    def __getitem__(self, index):
        random = np.random.default_rng(index)
        image = random.integers(0, 255, (EDGE, EDGE, 3), dtype=np.uint8)
        image = np.roll(image, random.integers(0, 20), axis=1)[:, :: random.choice([-1, 1])]
        image = (image.astype(np.float32) / 255 - 0.45) / 0.22
        return torch.from_numpy(image.transpose(2, 0, 1).copy()), index % 1000


def main(tick, fixed=False):
    loader = DataLoader(Photos(), batch_size=BATCH, num_workers=size(12 if fixed else 2, 1), pin_memory=True, prefetch_factor=2, drop_last=True)
    model = resnet(width=64, blocks=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    batches = iter(loader)
    for step in range(STEPS):
        x, y = next(batches)  # STALL: input_late
        x = x.to("cuda", non_blocking=True, memory_format=torch.channels_last)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y.to("cuda", non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
