"""torchrun: a network in stages, one a rank; a batch goes through in four pieces, each there and back before the next begins."""
import torch
import torch.distributed as dist
import torch.nn as nn
from script import DEVICE, run, turns

from models import encoder, size

BATCH, LENGTH, WIDTH, PIECES = size(32, 4), size(256, 8), size(2048, 32), 4


class Stage:
    def __init__(self):
        self.rank, self.last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
        with torch.device(DEVICE):
            self.layers, self.head = encoder(2048, layers=4, heads=16), nn.Linear(WIDTH, WIDTH)
        self.parameters, self.under_way = [*self.layers.parameters(), *self.head.parameters()], []

    def forward(self, x):
        if self.rank:
            x = torch.empty_like(x)
            dist.recv(x, self.rank - 1)  # STALL: peer_late
            x.requires_grad_()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            out = self.layers(x).float()
        if not self.last:
            self.send(out.detach(), self.rank + 1)
        return x, out

    def backward(self, x, out):
        if self.last:
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                loss = self.head(out).square().mean() / PIECES
            loss.backward()
        else:
            slope = torch.empty_like(out)
            dist.recv(slope, self.rank + 1)  # STALL: peer_late
            out.backward(slope)
        if self.rank:
            self.send(x.grad, self.rank - 1)

    def send(self, tensor, peer):
        self.under_way.append((tensor, dist.isend(tensor, peer)))

    def finish(self):
        for _, work in self.under_way:
            work.wait()
        self.under_way.clear()


def main(tick, fixed=False):
    torch.manual_seed(0)
    stage = Stage()
    optimizer = torch.optim.AdamW(stage.parameters, lr=1e-4, fused=DEVICE == "cuda")
    batch = torch.randn(BATCH, LENGTH, WIDTH, device=DEVICE)
    for step in range(turns(150, 2)):
        if fixed:  # all pieces there, then all back: while one rank works at a piece, the other has the next
            for x, out in [stage.forward(piece) for piece in batch.chunk(PIECES)]:
                stage.backward(x, out)
        else:
            for piece in batch.chunk(PIECES):
                stage.backward(*stage.forward(piece))
                stage.finish()
        stage.finish()
        optimizer.step()
        optimizer.zero_grad()
        tick()


if __name__ == "__main__":
    run(main)
