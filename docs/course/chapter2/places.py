"""NCCL moves tensors between GPUs, gloo between hosts' memories. One group can have both, each for its devices."""

import os
import time

import torch
import torch.distributed as dist

RANKS = 2

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("cpu:gloo,cuda:nccl")
on_host, on_gpu = torch.tensor([float(rank)]), torch.tensor([float(rank)], device="cuda")
dist.all_reduce(on_gpu)
torch.cuda.synchronize()
dist.barrier()

torch.cuda._sleep(20_000_000)  # ten milliseconds of work for the GPU
start = time.perf_counter()
dist.all_reduce(on_host)
seen = on_host.item()
by_gloo = (time.perf_counter() - start) * 1e3
dist.all_reduce(on_gpu)
assert seen == 1
assert on_gpu.item() == 2  # summed twice
by_nccl = (time.perf_counter() - start) * 1e3

names = [""] * dist.get_world_size()
dist.all_gather_object(names, f"rank {rank}")  # any Python object, pickled
assert names == ["rank 0", "rank 1"]
print(f"rank {rank} read a sum of the host after {by_gloo:.1f} ms, and one of the GPU after {by_nccl:.1f} ms")
assert by_gloo < by_nccl / 2
dist.destroy_process_group()
