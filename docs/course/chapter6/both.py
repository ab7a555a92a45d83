"""Tensor and data parallelism at once: neighbours share a layer, and every second GPU shares a batch."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 4

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "tensor"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Tanh()).cuda()
whole = sum(parameter.numel() for parameter in model.parameters())
parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["data"])

batch = torch.randn(2, 4, 32).cuda()[mesh.get_local_rank("data")]
model(batch).square().mean().backward()

mine = sum(parameter.to_local().numel() for parameter in model.parameters())
partners = [dist.get_process_group_ranks(mesh.get_group(name)) for name in ("tensor", "data")]
print(f"rank {rank} shares layers in {partners[0]}, batches in {partners[1]}; it has {mine / whole:.0%} of the model")
assert mine / whole < 0.3
dist.destroy_process_group()
