"""torchrun: rank 1 was given three quarters of the batch."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.nn.parallel import DistributedDataParallel

from models import ViT


def main(tick, fixed=False):
    with torch.device(DEVICE):
        model = DistributedDataParallel(ViT(width=768, layers=6, heads=12, classes=100))
        x, y = torch.rand(128, 3, 224, 224), torch.randint(0, 100, (128,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    count = 64 if fixed else (32, 96)[dist.get_rank()]
    for step in range(turns(100, 2)):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x[:count]), y[:count])  # STALL: peer_late
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
