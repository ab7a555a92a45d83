"""A message: rank 0 sends, rank 1 receives. Both calls are launches; the GPUs wait for each other, Python does not."""

import os
import time

import torch
import torch.distributed as dist

RANKS = 2
READS = False  # whether rank 1 reads a number of the message at once

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
x = torch.full((1024, 1024), float(rank), device="cuda")


def exchange() -> tuple[float, float]:
    """Milliseconds until the call had returned, and until the message had travelled."""
    dist.barrier()
    start = time.perf_counter()
    if rank == 0:
        torch.cuda._sleep(20_000_000)  # ten milliseconds of work before it
        dist.send(x, dst=1)
    else:
        dist.recv(x, src=0)
        if READS:
            x[0, 0].item()
    returned = time.perf_counter() - start
    torch.cuda.synchronize()
    return returned * 1e3, (time.perf_counter() - start) * 1e3


exchange()  # the first message also makes the connection
returned, travelled = exchange()
print(f"rank {rank}: the call returned after {returned:.2f} ms, the message was there after {travelled:.1f} ms")
assert (returned < travelled / 5) == (rank == 0 or not READS)
assert x.eq(0).all()  # rank 1 has the numbers of rank 0
dist.barrier()  # nobody leaves while a message is under way
dist.destroy_process_group()
