"""A network in stages, one a GPU; a batch goes through in pieces. How is the argument: each piece there and back before
the next one, all of them together, or by PyTorch's own schedule."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

HOW, WIDTH, LAYERS, ROWS, PIECES, STEPS = sys.argv[1], 4096, 8, 32768, 8, 6


def rate(out, _target=None):
    return out.float().square().mean() / PIECES


dist.init_process_group("nccl")
rank, last = dist.get_rank(), dist.get_world_size() - 1
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
stage = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))).to(device).bfloat16()
optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-4, fused=True)
batch = torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16)
schedule = ScheduleGPipe(PipelineStage(stage, rank, last + 1, device), PIECES, loss_fn=rate, scale_grads=False)


def received(like, peer):
    got = torch.empty_like(like)
    dist.recv(got, peer)
    return got


def forward(piece):
    x = received(piece, rank - 1).requires_grad_() if rank else piece
    out = stage(x)
    if rank < last:
        dist.send(out.detach(), rank + 1)
    return x, out


def backward(x, out):
    out.backward(received(out, rank + 1)) if rank < last else rate(out).backward()
    if rank:
        dist.send(x.grad, rank - 1)


for _ in range(STEPS):
    if HOW == "each":
        for piece in batch.chunk(PIECES):
            backward(*forward(piece))
    elif HOW == "together":
        for both in [forward(piece) for piece in batch.chunk(PIECES)]:
            backward(*both)
    else:
        schedule.step(*[batch] * (rank == 0), **{"target": batch} if rank == last else {})
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
