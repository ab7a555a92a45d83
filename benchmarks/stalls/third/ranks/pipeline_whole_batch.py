"""torchrun: each rank holds a stage of the network, and a batch passes through in one piece, so one stage works at a time."""
import torch
import torch.distributed as dist
import torch.nn as nn
from script import DEVICE, run, turns

from models import encoder, size

BATCH, LENGTH, WIDTH = size(64, 8), size(256, 8), size(1024, 32)


def main(tick, fixed=False):
    torch.manual_seed(0)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    with torch.device(DEVICE):
        stage = encoder(1024, layers=8, heads=16)
        head = nn.Linear(WIDTH, WIDTH)
    parameters = [*stage.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=DEVICE == "cuda")
    pieces = 8 if fixed else 1
    shape = (BATCH // pieces, LENGTH, WIDTH)
    whole = torch.randn(BATCH, LENGTH, WIDTH, device=DEVICE)
    for step in range(turns(140, 2)):
        inputs, outputs, under_way = [], [], []
        for x in whole.chunk(pieces):
            if rank > 0:
                x = torch.empty(shape, device=DEVICE)
                dist.recv(x, rank - 1)  # STALL: peer_late
                x.requires_grad_()
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                out = stage(x).float()
            if rank < last:
                under_way.append((out.detach(), dist.isend(out.detach(), rank + 1)))
            inputs.append(x), outputs.append(out)
        for x, out in zip(inputs, outputs):
            if rank < last:
                slope = torch.empty(shape, device=DEVICE)
                dist.recv(slope, rank + 1)  # STALL: peer_late
                out.backward(slope)
            else:
                with torch.autocast(DEVICE, dtype=torch.bfloat16):
                    loss = head(out).square().mean() / pieces
                loss.backward()
            if rank > 0:
                under_way.append((x.grad, dist.isend(x.grad, rank - 1)))
        for _, work in under_way:
            work.wait()
        optimizer.step()
        optimizer.zero_grad()
        tick()


if __name__ == "__main__":
    run(main)
