"""torchrun: the last rank's shard holds large scans that its workers must shrink; everybody waits for that rank's input."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from models import STEPS, resnet, run, size

BATCH, EDGE = size(64, 2), size(160, 32)


class Scans(Dataset):
    def __init__(self, scale):
        self.scale = scale

    def __len__(self):
        return (STEPS + 8) * BATCH

    def __getitem__(self, index):
        image = torch.full((3, EDGE * self.scale, EDGE * self.scale), index % 7 / 7.0)
        if self.scale > 1:
            image = F.interpolate(image[None], size=(EDGE, EDGE), mode="bilinear", antialias=True)[0]
        return image, index % 1000


def main(tick, fixed=False):
    rank, world = dist.get_rank(), dist.get_world_size()
    large = rank == world - 1 and not fixed  # mended: shrunk once, before training
    loader = DataLoader(Scans(2 if large else 1), batch_size=BATCH, num_workers=size(4, 1), pin_memory=True, prefetch_factor=2)
    model = DistributedDataParallel(resnet(width=64, blocks=2), device_ids=[torch.cuda.current_device()])
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
