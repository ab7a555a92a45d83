"""Pinning right before the copy: the pinning itself costs more than it saves."""

import torch

x = torch.ones(4096, 4096)
w = torch.ones(4096, 4096, device="cuda")
w = w @ w
y = x.pin_memory().to("cuda", non_blocking=True)
z = y @ w
torch.cuda.synchronize()
