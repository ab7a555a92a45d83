"""Messages that belong together are posted together: no order to get wrong, and both directions at once."""

import os

import torch
import torch.distributed as dist

RANKS = 2

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
ranks = dist.get_world_size()
left, right = (rank - 1) % ranks, (rank + 1) % ranks

mine, received = torch.full((4,), float(rank), device="cuda"), torch.empty(4, device="cuda")
total = mine.clone()
for _ in range(ranks - 1):  # around the ring, until everybody has seen everything
    messages = [dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, received, left)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    total += received
    mine, received = received, mine

print(f"rank {rank}: the sum over all ranks is {total.tolist()}")
assert total.eq(sum(range(ranks))).all()
dist.barrier()  # nobody leaves while a message is under way
dist.destroy_process_group()
