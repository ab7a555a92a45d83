"""When it pays: a layer alone, and on two GPUs with one sum behind it."""

import os

import torch
import torch.distributed as dist

RANKS = 2
WIDTH = 8192

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
ranks = dist.get_world_size()


def timed(rows: int, parts: int) -> float:
    """Milliseconds for four layers of two matrices, each cut into so many parts."""
    x = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
    first = torch.randn(WIDTH, 4 * WIDTH // parts, device="cuda", dtype=torch.bfloat16)
    second = torch.randn(4 * WIDTH // parts, WIDTH, device="cuda", dtype=torch.bfloat16)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(2):  # the first time to warm up
        dist.barrier()
        torch.cuda.synchronize()
        begin.record()
        for _ in range(4):
            y = (x @ first) @ second
            if parts > 1:
                dist.all_reduce(y)
        end.record()
        end.synchronize()
    return begin.elapsed_time(end)


for rows in (16, 256, 4096):
    alone, beside = timed(rows, 1), timed(rows, ranks)
    if rank == 0:
        print(f"{rows:5} rows: {alone:6.2f} ms alone, {beside:6.2f} ms on {ranks}, {alone / beside:.2f} times as fast")
dist.destroy_process_group()
