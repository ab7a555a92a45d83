"""torchrun: four micro-batches, of which only the last one sends its gradients; and a loss that is read every 50 steps."""
import contextlib

import torch
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.nn.parallel import DistributedDataParallel

from models import ViT


def main(tick, fixed=False):
    with torch.device(DEVICE):
        model = DistributedDataParallel(ViT(width=768, layers=6, heads=12, classes=100))
        x, y = torch.rand(64, 3, 224, 224), torch.randint(0, 100, (64,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    history = []
    for step in range(turns(60, 2)):
        for micro in range(4):
            with contextlib.nullcontext() if micro == 3 else model.no_sync():
                with torch.autocast(DEVICE, dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(x), y) / 4
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            history.append(loss.item())
        tick()


if __name__ == "__main__":
    run(main)
