"""torchrun: seven figures of each step are averaged over the ranks, and read, one by one, and the next batch is prepared afterwards."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.nn.parallel import DistributedDataParallel

from models import ViT


def main(tick, fixed=False):
    with torch.device(DEVICE):
        model = DistributedDataParallel(ViT(width=768, layers=6, heads=12, classes=100))
        x, y = torch.rand(48, 3, 224, 224), torch.randint(0, 100, (48,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    history = []
    for step in range(turns(100, 2)):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            out = model(x)
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        figures = [loss.detach(), out.mean(), out.std(), out.amax(), out.amin(), out.abs().mean(), out.square().mean()]
        for figure in [] if fixed else figures:
            dist.all_reduce(figure)
            history.append(figure.item())  # STALL: host_sync
        if fixed:
            dist.all_reduce(torch.stack(figures))
        torch.randn(256, 256).sort()  # the host's part of the next batch
        tick()


if __name__ == "__main__":
    run(main)
