"""torchrun: after every fifth step rank 0 evaluates alone; the others wait for it in their next all-reduce."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from models import STEPS, resnet, run, size


@torch.no_grad()
def count_right(model, x, y, batches):
    model.eval()
    right = torch.zeros((), device="cuda")
    for _ in range(batches):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            right += (model(x).argmax(1) == y).sum()
    model.train()
    return right


def main(tick, fixed=False):
    rank, world, batches = dist.get_rank(), dist.get_world_size(), size(8, 2)
    model = DistributedDataParallel(resnet(width=80), device_ids=[torch.cuda.current_device()])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    x = torch.randn(size(192, 2), 3, size(192, 32), size(192, 32), device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, x.shape[:1], device="cuda")
    for step in range(STEPS):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4 and fixed:  # each rank its share
            dist.all_reduce(count_right(model.module, x, y, batches // world))
        elif step % 5 == 4 and rank == 0:
            count_right(model.module, x, y, batches)  # STALL: peer_late
        tick()


if __name__ == "__main__":
    run(main)
