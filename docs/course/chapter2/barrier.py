"""A barrier holds Python until every rank has come. An all-reduce holds only the GPU."""

import os
import time

import torch
import torch.distributed as dist

RANKS = 2

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
x = torch.ones(1024, device="cuda")


def held(what: str) -> float:
    """How long the call holds Python, in milliseconds, when rank 1 comes 20 ms late."""
    dist.barrier()
    time.sleep(0.02 * rank)
    start = time.perf_counter()
    dist.barrier() if what == "barrier" else dist.all_reduce(x)
    held = (time.perf_counter() - start) * 1e3
    time.sleep(0.05 - 0.02 * rank)  # whatever else Python has to do
    return held


held("all_reduce")  # the first one also makes the connections
torch.cuda.synchronize()
for what in ("all_reduce", "barrier"):
    print(f"rank {rank}: {what:10} held Python for {(taken := held(what)):5.2f} ms")
    assert (taken > 15) == (what == "barrier" and rank == 0)
dist.destroy_process_group()
