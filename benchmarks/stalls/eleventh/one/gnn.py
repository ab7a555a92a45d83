"""Graph-level property prediction with a residual message-passing network.

Graphs are random and collated into batches once, at start-up; every batch
then lives on the device for the whole run.
"""
import math
import os
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

T0 = time.perf_counter()
FIXED = "--fixed" in sys.argv
SMALL = os.environ.get("BLIND_SMALL") == "1"
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

GRAPHS_PER_BATCH = 16 if SMALL else 48
TRAIN_BATCHES = 8 if SMALL else 25
VAL_BATCHES = 2 if SMALL else 5
EPOCHS = 4 if SMALL else 20
HIDDEN = 32 if SMALL else 192
LAYERS = 2 if SMALL else 5
FEATS = 32


@dataclass
class GraphBatch:
    x: torch.Tensor        # [nodes, FEATS]
    src: torch.Tensor      # [edges]
    dst: torch.Tensor      # [edges]
    graph_id: torch.Tensor  # [nodes]
    inv_deg: torch.Tensor  # [nodes, 1]
    y: torch.Tensor        # [graphs]
    num_graphs: int

    def to(self, dev):
        return GraphBatch(*(v.to(dev) if torch.is_tensor(v) else v
                            for v in vars(self).values()))


def make_batch(rng, teacher):
    sizes = rng.integers(90, 150, GRAPHS_PER_BATCH)
    start = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    gid = np.repeat(np.arange(GRAPHS_PER_BATCH), sizes)
    n = gid.shape[0]
    x = rng.standard_normal((n, FEATS), dtype=np.float32)
    x += rng.standard_normal((GRAPHS_PER_BATCH, FEATS), dtype=np.float32)[gid] * 0.5
    dst = np.repeat(np.arange(n), 4)
    src = start[gid[dst]] + (rng.random(dst.shape[0]) * sizes[gid[dst]]).astype(np.int64)
    y = np.zeros(GRAPHS_PER_BATCH, dtype=np.float32)
    np.add.at(y, gid, np.tanh(x @ teacher) / sizes[gid])
    deg = np.bincount(dst, minlength=n).astype(np.float32)[:, None]
    t = torch.from_numpy
    return GraphBatch(t(x), t(src), t(dst), t(gid), t(1.0 / deg), t(y), GRAPHS_PER_BATCH)


class MessageLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.msg = nn.Linear(dim, dim)
        self.upd = nn.Sequential(nn.Linear(2 * dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, h, g):
        z = self.norm(h)
        m = self.msg(z).index_select(0, g.src)
        agg = torch.zeros_like(z).index_add_(0, g.dst, m) * g.inv_deg
        return h + self.upd(torch.cat([z, agg], dim=1))


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATS, HIDDEN)
        self.layers = nn.ModuleList(MessageLayer(HIDDEN) for _ in range(LAYERS))
        self.head = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, 1))

    def readout(self, h, g):
        if FIXED:
            total = h.new_zeros(g.num_graphs, h.shape[1]).index_add_(0, g.graph_id, h)
            count = h.new_zeros(g.num_graphs).index_add_(0, g.graph_id, h.new_ones(h.shape[0]))
            return total / count[:, None]
        pooled = []
        for i in range(g.num_graphs):
            pooled.append(h[g.graph_id == i].mean(dim=0))  # FAULT
        return torch.stack(pooled)

    def forward(self, g):
        h = self.embed(g.x)
        for layer in self.layers:
            h = layer(h, g)
        return self.head(self.readout(h, g)).squeeze(1)


@torch.no_grad()
def validate(model, batches):
    model.eval()
    err = torch.zeros((), device=device)
    for g in batches:
        err += F.l1_loss(model(g), g.y)
    model.train()
    return (err / len(batches)).item()


def main():
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    teacher = rng.standard_normal(FEATS).astype(np.float32)
    train = [make_batch(rng, teacher).to(device) for _ in range(TRAIN_BATCHES)]
    val = [make_batch(rng, teacher).to(device) for _ in range(VAL_BATCHES)]

    model = GraphNet().to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=device.type == "cuda")
    total_steps = EPOCHS * TRAIN_BATCHES
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: 0.5 * (1 + math.cos(math.pi * s / total_steps)))

    for epoch in range(EPOCHS):
        running = torch.zeros((), device=device)
        for b in rng.permutation(TRAIN_BATCHES):
            g = train[b]
            loss = F.smooth_l1_loss(model(g), g.y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            running += loss.detach()
        line = f"epoch {epoch:3d}  train {running.item() / TRAIN_BATCHES:.4f}"
        if (epoch + 1) % 4 == 0:
            line += f"  val mae {validate(model, val):.4f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
    if device.type == "cuda":
        torch.cuda.synchronize()
    print("RUN_SECONDS %.3f" % (time.perf_counter() - T0))
