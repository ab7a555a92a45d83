"""torchrun: clicks are predicted from 32 hashed features; rows are looked up on the rank that keeps them and sent back."""
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.nn.parallel import DistributedDataParallel

from models import size

BATCH, TABLES, ROWS, WIDTH = size(16384, 8), size(32, 4), size(100_000, 50), size(128, 8)


class Exchange(torch.autograd.Function):
    """Rows to the other ranks, and their gradients back the same way. None stands for equal parts."""

    @staticmethod
    def forward(ctx, rows, theirs, mine):
        ctx.splits = theirs, mine
        out = rows.new_empty((len(rows) if theirs is None else sum(theirs), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), theirs, mine)
        return out

    @staticmethod
    def backward(ctx, slopes):
        theirs, mine = ctx.splits
        out = slopes.new_empty((len(slopes) if mine is None else sum(mine), *slopes.shape[1:]))
        dist.all_to_all_single(out, slopes.contiguous(), mine, theirs)
        return out, None, None


class ByRow:
    """A row is kept by the rank that its number, modulo the ranks, names: how many go where is known on the device only."""

    def __init__(self, world):
        self.world, self.table = world, torch.zeros(TABLES * ROWS // world + 1, WIDTH, device=DEVICE).normal_(std=0.01)

    def look_up(self, ids):
        rows = (ids + torch.arange(TABLES, device=DEVICE) * ROWS).flatten()
        owner = rows % self.world
        order = owner.argsort()
        counts = (owner[:, None] == torch.arange(self.world, device=DEVICE)).sum(0)
        asked = torch.empty_like(counts)
        dist.all_to_all_single(asked, counts)
        mine, theirs = counts.tolist(), asked.tolist()  # STALL: host_sync
        self.wanted = torch.empty(sum(theirs), dtype=torch.long, device=DEVICE)
        dist.all_to_all_single(self.wanted, rows[order] // self.world, theirs, mine)
        self.vectors = self.table[self.wanted].requires_grad_()
        got = Exchange.apply(self.vectors, mine, theirs)
        return torch.zeros_like(got).index_copy(0, order, got).view(len(ids), TABLES * WIDTH)

    def update(self, rate):
        self.table.index_add_(0, self.wanted, self.vectors.grad, alpha=-rate)


class ByTable(ByRow):
    """Each rank keeps whole tables, so that every rank sends as much to every other."""

    def look_up(self, ids):
        own = TABLES // self.world
        wanted = torch.empty(self.world, own, len(ids), dtype=torch.long, device=DEVICE)
        dist.all_to_all_single(wanted, ids.T.contiguous())
        self.wanted = (wanted + torch.arange(own, device=DEVICE)[:, None] * ROWS).flatten()
        self.vectors = self.table[self.wanted].requires_grad_()
        got = Exchange.apply(self.vectors, None, None)
        return got.view(TABLES, len(ids), WIDTH).transpose(0, 1).reshape(len(ids), TABLES * WIDTH)


def hashed(raw, salts):
    """What a click log holds, as row numbers."""
    mixed = (raw ^ salts) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed ^ (mixed >> np.uint64(29))) % np.uint64(ROWS)).astype(np.int64)


def main(tick, fixed=False):
    """`fixed` may also be "splits", "losses" or "check", to mend one of the three alone."""
    torch.manual_seed(dist.get_rank())
    pinned = fixed in (True, "splits") and DEVICE == "cuda"
    unread, seldom = fixed in (True, "losses"), 50 if fixed in (True, "check") else 1
    tables = (ByTable if fixed in (True, "splits") else ByRow)(dist.get_world_size())
    wide = size(2048, 16)
    over = nn.Sequential(nn.Linear(TABLES * WIDTH, wide), nn.ReLU(), nn.Linear(wide, wide // 2), nn.ReLU(), nn.Linear(wide // 2, 1)).to(DEVICE)
    over = DistributedDataParallel(over)
    optimizer = torch.optim.Adagrad(over.parameters(), lr=0.01)
    rng = np.random.default_rng(dist.get_rank())
    log = rng.integers(0, 2**62, (8, BATCH, TABLES), dtype=np.uint64)
    clicks = torch.from_numpy(rng.random((8, BATCH)) < 0.1).float().to(DEVICE)
    salts = rng.integers(0, 2**62, TABLES, dtype=np.uint64)
    losses, sound = [], torch.ones((), dtype=torch.bool, device=DEVICE)
    for step in range(turns(400, 3)):
        ids = torch.from_numpy(hashed(log[step % 8], salts))
        ids = ids.pin_memory().to(DEVICE, non_blocking=True) if pinned else ids.to(DEVICE)  # STALL: blocking_copy
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            scores = over(tables.look_up(ids))[:, 0]
        loss = F.binary_cross_entropy_with_logits(scores.float(), clicks[step % 8])
        optimizer.zero_grad()
        loss.backward()
        sound &= nn.utils.clip_grad_norm_(over.parameters(), 10.0).isfinite()
        if step % seldom == seldom - 1 and not sound:  # STALL: host_sync
            raise RuntimeError(f"no finite gradient by step {step}")
        optimizer.step()
        tables.update(0.1)
        losses.append(loss.detach() if unread else loss.item())  # STALL: host_sync
        tick()


if __name__ == "__main__":
    run(main)
