"""Masked pictures in epochs, with a reading of the loss at the end of each: the device is never short of work."""
import torch
import torch.nn.functional as F
from script import DEVICE, run, turns

from models import ViT, size

BATCH, EDGE = size(256, 2), size(224, 32)


def main(tick, fixed=False):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = ViT(width=768, layers=8, heads=12, classes=768)
        pictures = torch.rand(4, BATCH, 3, EDGE, EDGE)
        targets = torch.randn(4, BATCH, 768)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    history = []
    for epoch in range(turns(5, 1)):
        total = torch.zeros((), device=DEVICE)
        for step in range(size(40, 2)):
            x = pictures[step % 4]
            keep = (torch.rand(BATCH, 1, EDGE // 16, EDGE // 16, device=DEVICE) > 0.5).float()
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                loss = F.smooth_l1_loss(model(x * F.interpolate(keep, size=EDGE)).float(), targets[step % 4])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            tick()
        history.append(total.item())


if __name__ == "__main__":
    run(main)
