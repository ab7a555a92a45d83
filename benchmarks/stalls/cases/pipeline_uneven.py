"""torchrun: pairs of ranks form pipelines of two stages, and the first has three of the four layers."""
import torch
import torch.distributed as dist

from models import STEPS, encoder, run, size

MICRO, BATCH, LENGTH, WIDTH = 4, size(24, 2), size(256, 8), 1024


def main(tick, fixed=False):
    rank = dist.get_rank()
    first, peer = rank % 2 == 0, rank ^ 1
    layers = 2 if fixed else (3 if first else 1)  # STALL: peer_late
    with torch.device("cuda"):
        stage = encoder(WIDTH, layers, heads=16)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-4, fused=True)
    shape = (BATCH, LENGTH, size(WIDTH, 32))
    for step in range(STEPS):
        ins, outs = [], []
        for _ in range(MICRO):
            x = torch.randn(shape, device="cuda")
            if not first:
                dist.recv(x, peer)
            ins.append(x.requires_grad_(not first))
            with torch.autocast("cuda", dtype=torch.bfloat16):
                outs.append(stage(x).float())
            if first:
                dist.send(outs[-1].detach(), peer)
        for x, out in zip(ins, outs):
            if first:
                slope = torch.empty(shape, device="cuda")
                dist.recv(slope, peer)
                out.backward(slope)
            else:
                out.square().mean().backward()
                dist.send(x.grad, peer)
        optimizer.step()
        optimizer.zero_grad()
        tick()


if __name__ == "__main__":
    run(main)
