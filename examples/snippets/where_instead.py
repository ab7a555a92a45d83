"""`torch.where` keeps the shape, and nobody has to wait."""

import torch

x = torch.ones(4096, 4096, device="cuda")
for _ in range(10):
    y = x @ x
    chosen = torch.where(y > 0, y, 0.0)
torch.cuda.synchronize()
