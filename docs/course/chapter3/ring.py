"""A ring all-reduce by hand: parts go around, first to be summed, then to be known everywhere."""

import os

import torch
import torch.distributed as dist

RANKS = 2

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
ranks = dist.get_world_size()
x = torch.arange(240.0, device="cuda") * (rank + 1)
expected = x.clone()
dist.all_reduce(expected)

parts = list(x.view(ranks, -1))  # as many parts as ranks
sent: list[int] = []  # bytes


def pass_on(part: int) -> torch.Tensor:
    """Send that part to the right; what the left sent at the same time comes back."""
    received = torch.empty_like(parts[part])
    to_right = dist.P2POp(dist.isend, parts[part], (rank + 1) % ranks)
    from_left = dist.P2POp(dist.irecv, received, (rank - 1) % ranks)
    for work in dist.batch_isend_irecv([to_right, from_left]):
        work.wait()
    sent.append(received.nbytes)
    return received


for step in range(ranks - 1):  # reduce-scatter: a part collects the summands of all ranks that it visits
    parts[(rank - step - 1) % ranks] += pass_on((rank - step) % ranks)
for step in range(ranks - 1):  # all-gather: the finished parts go around once more
    parts[(rank - step) % ranks].copy_(pass_on((rank - step + 1) % ranks))

assert x.equal(expected)
assert sum(sent) == x.nbytes * 2 * (ranks - 1) / ranks
print(f"rank {rank}: {len(sent)} messages, {sum(sent)} bytes sent for a tensor of {x.nbytes}")
dist.barrier()  # nobody leaves while a message is under way
dist.destroy_process_group()
