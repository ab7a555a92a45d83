"""`if` on a tensor of the GPU reads its value, as `.item()` does."""

import torch

x = torch.ones(4096, 4096, device="cuda")
for _ in range(10):
    x = x @ x / 4096
    if x.isnan().any():
        break
