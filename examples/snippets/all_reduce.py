"""Two ranks and an all-reduce: rank 0 alone computes an accuracy and prints it, and rank 1 waits for it."""

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
x = torch.ones(4096, 4096, device="cuda")
if rank == 0:
    for _ in range(20):
        accuracy = (x @ x).mean()
    print(f"accuracy {accuracy.item():.0f}")
dist.all_reduce(x)
torch.cuda.synchronize()
dist.destroy_process_group()
