"""The same without a line by hand: DTensor cuts the weights, and knows where a sum is due."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 2

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)).cuda()
x = torch.randn(4, 32).cuda()
whole = model(x).detach()

mesh = init_device_mesh("cuda", (dist.get_world_size(),))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
y = model(x)
y.square().sum().backward()

assert torch.allclose(y, whole, atol=1e-5)
for name in ("0", "2"):
    weight = model.get_parameter(f"{name}.weight")
    print(f"rank {rank}: layer {name} is {tuple(weight.shape)}, of which {tuple(weight.to_local().shape)} lie here")
dist.destroy_process_group()
