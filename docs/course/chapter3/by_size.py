"""How long an all-reduce takes, by its size: a latency that every one has, and a rate that only large ones reach."""

import os

import torch
import torch.distributed as dist

RANKS = 2

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
ranks = dist.get_world_size()


def taken(numbers: int) -> float:
    """Microseconds: the mean of three in a row."""
    x = torch.ones(numbers, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(2):  # the first time to warm up
        dist.barrier()
        begin.record()
        for _ in range(3):
            dist.all_reduce(x)
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / 3 * 1e3


sizes = [2**power for power in (10, 14, 18, 22, 24, 26)]
times = {size: taken(size // 4) for size in sizes}
for size, time in times.items():
    crossed = size * 2 * (ranks - 1) / ranks  # bytes that each GPU sends
    if rank == 0:
        print(f"{size / 1024:8.0f} KiB {time:7.0f} µs {crossed / time / 1e3:6.1f} GB/s")
assert times[2**14] < 2 * times[2**10]  # sixteen times the bytes, and yet
assert times[2**26] > 2.5 * times[2**22]  # and here at last
dist.destroy_process_group()
