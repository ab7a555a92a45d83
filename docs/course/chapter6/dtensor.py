"""The same without a line by hand: DTensor cuts the weights, and knows where a sum is due."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 2
BY_ROWS = True  # the second layer

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)).cuda()
x = torch.randn(4, 32).cuda().requires_grad_()
whole = model(x).detach()

mesh = init_device_mesh("cuda", (dist.get_world_size(),))
gathered = ColwiseParallel(output_layouts=Replicate())  # each rank gets the others' columns, too
cuts = {"0": ColwiseParallel(), "2": RowwiseParallel()} if BY_ROWS else {"0": gathered, "2": gathered}
parallelize_module(model, mesh, cuts)
with CommDebugMode() as exchanged:
    y = model(x)
    y.square().sum().backward()

assert torch.allclose(y, whole, atol=1e-5)
for name in ("0", "2"):
    weight = model.get_parameter(f"{name}.weight")
    print(f"rank {rank}: layer {name} is {tuple(weight.shape)}, of which {tuple(weight.to_local().shape)} lie here")
if rank == 0:
    print(f"exchanges, there and back: {exchanged.get_total_counts()}")
dist.destroy_process_group()
