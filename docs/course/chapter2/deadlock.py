"""Two ranks that both send first wait for each other for ever. Here, on the host, they give up after a second."""

from datetime import timedelta

import torch
import torch.distributed as dist

RANKS = 2
BOTH_SEND_FIRST = True

dist.init_process_group("gloo")
rank = dist.get_rank()
other = 1 - rank
mine, theirs = torch.full((1000,), float(rank)), torch.empty(1000)
dist.barrier()

try:
    if BOTH_SEND_FIRST or rank == 0:
        dist.isend(mine, other).wait(timedelta(seconds=1))  # as dist.send(mine, other), which waits longer
        dist.recv(theirs, other)
    else:
        dist.recv(theirs, other)
        dist.isend(mine, other).wait(timedelta(seconds=1))
    print(f"rank {rank} sent {mine[0]:.0f} and received {theirs[0]:.0f}")
    assert theirs.eq(other).all()
    assert not BOTH_SEND_FIRST
except RuntimeError:
    print(f"rank {rank} waited for rank {other} to receive, and gave up")
    assert BOTH_SEND_FIRST
