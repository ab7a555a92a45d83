"""torchrun: rank 0 draws the noise of the step on its CPU and sends it to the others."""
import torch
import torch.distributed as dist
from script import DEVICE, run, turns
from torch.nn.parallel import DistributedDataParallel

from models import UNet


def main(tick, fixed=False):
    with torch.device(DEVICE):
        model = DistributedDataParallel(UNet(width=64))
        x, noise = torch.rand(2, 32, 3, 128, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    for step in range(turns(100, 2)):
        if fixed:
            noise.normal_(generator=None)
        elif dist.get_rank() == 0:
            noise.copy_(torch.randn(32, 3, 128, 128))  # STALL: peer_late
        if not fixed:
            dist.broadcast(noise, 0)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = (model(x + noise) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
