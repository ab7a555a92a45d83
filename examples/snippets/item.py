"""`.item()` waits for the GPU."""

import torch

x = torch.ones(4096, 4096, device="cuda")
total = 0.0
for _ in range(10):
    y = x @ x
    total += y.mean().item()
