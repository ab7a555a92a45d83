"""A copy from ordinary memory: `non_blocking=True` alone does not make it asynchronous."""

import torch

x = torch.ones(4096, 4096)
y = x.to("cuda", non_blocking=True)
z = y @ y
torch.cuda.synchronize()
