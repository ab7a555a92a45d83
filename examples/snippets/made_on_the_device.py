"""The same tensor, made where it is used."""

import torch

weights = torch.ones(4096, 4096, device="cuda")
for _ in range(3):
    noise = torch.randn(4096, 4096, device="cuda")
    y = weights @ noise
torch.cuda.synchronize()
