"""torchrun: `average_gradients` as an old tutorial has it, one all-reduce per parameter once the backward pass is over."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from models import STEPS, TextClassifier, run, size


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # STALL: exposed_collective
        parameter.grad /= dist.get_world_size()


def main(tick, fixed=False):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = TextClassifier(width=1792, layers=8, heads=14)
    if fixed:
        model = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()], gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    x = torch.randint(0, 8192, (size(16, 2), size(256, 8)), device="cuda")
    y = torch.randint(0, 20, x.shape[:1], device="cuda")
    for step in range(STEPS):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if not fixed:
            average_gradients(model)
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
