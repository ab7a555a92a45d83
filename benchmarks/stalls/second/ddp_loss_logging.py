"""torchrun: the mean loss of all ranks is reduced and printed every step. The GPUs are busy throughout: nothing to gain."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from models import STEPS, ViT, run, size


def main(tick, fixed=False):
    with torch.device("cuda"):
        model = ViT(width=768, layers=6, heads=12)
    model = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()], find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(size(128, 2), 3, size(224, 32), size(224, 32), device="cuda")
    y = torch.randint(0, 1000, x.shape[:1], device="cuda")
    for step in range(STEPS):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        if not fixed or step % 20 == 19:
            print(f"{step}: loss {mean.item():.4f}")  # STALL: host_sync
        tick()


if __name__ == "__main__":
    run(main)
