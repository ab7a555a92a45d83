"""torchrun: a ViT large enough that the loss, read and tested in every step, costs nothing."""
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.nn.parallel import DistributedDataParallel

from models import ViT, size

BATCH, EDGE = size(112, 2), size(224, 32)


def main(tick, fixed=False):
    torch.manual_seed(dist.get_rank())
    with torch.device(DEVICE):
        model = ViT(width=1024, layers=12, heads=16)
        images, labels = torch.randn(2, BATCH, 3, EDGE, EDGE), torch.randint(0, 1000, (2, BATCH))
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    smooth = None
    for step in range(turns(140, 2)):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images[step % 2]), labels[step % 2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if not fixed:
            now = loss.item()
            if not math.isfinite(now):
                raise RuntimeError(f"loss {now} at step {step}")
            smooth = now if smooth is None else 0.9 * smooth + 0.1 * now
        tick()


if __name__ == "__main__":
    run(main)
