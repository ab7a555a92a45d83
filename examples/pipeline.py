"""Train a model that is cut in two, a half on each GPU. Every batch passes through in four parts."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

device = "cuda"
width, layers, part, parts = 4096, 8, 8192, 4

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
half = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]).to(device)
optimizer = torch.optim.AdamW(half.parameters(), lr=1e-4, fused=True)
rows = torch.randn(parts, part, width, device=device)


def first_half():
    outs = []
    for mine in rows:
        outs.append(half(mine))
        dist.send(outs[-1].detach(), dst=1)
    for out in outs:
        gradient = torch.empty_like(out)
        dist.recv(gradient, src=1)
        out.backward(gradient)


def second_half():
    handed = [torch.empty(part, width, dtype=torch.bfloat16, device=device) for _ in rows]
    losses = []
    for mine, wanted in zip(handed, rows):
        dist.recv(mine, src=0)
        losses.append(F.mse_loss(half(mine.requires_grad_()), wanted))
    for mine, loss in zip(handed, losses):
        loss.backward()
        dist.send(mine.grad, dst=0)


for step in range(8):
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.bfloat16):
        first_half() if rank == 0 else second_half()
    optimizer.step()
dist.destroy_process_group()
