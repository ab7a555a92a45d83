"""An all-reduce runs on a stream of its own. With async_op=True the computation need not wait for it."""

import os

import torch
import torch.distributed as dist

RANKS = 2
PAUSE = 500_000  # cycles: a quarter of a millisecond, in which a gradient is computed

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
gradients = [torch.ones(2**23, device="cuda") for _ in range(4)]  # 32 MiB each
dist.all_reduce(gradients[0])  # the first one also makes the connections


def step(at_once: bool) -> float:
    """Compute four gradients and sum each over the ranks: how long the GPU took, in milliseconds."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    dist.barrier()
    begin.record()
    under_way = []
    for gradient in gradients:
        torch.cuda._sleep(PAUSE)
        work = dist.all_reduce(gradient, async_op=not at_once)
        if work:
            under_way.append(work)
    for work in under_way:
        work.wait()  # the stream waits here, not Python
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


step(True)
one_by_one, beside = step(True), step(False)
if rank == 0:
    print(f"each sum at once {one_by_one:.2f} ms, sums beside the computation {beside:.2f} ms")
assert gradients[3].eq(8).all()
assert beside < one_by_one
dist.destroy_process_group()
