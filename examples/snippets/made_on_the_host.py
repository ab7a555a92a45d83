"""A random tensor made on the CPU and then sent."""

import torch

weights = torch.ones(4096, 4096, device="cuda")
for _ in range(3):
    noise = torch.randn(4096, 4096).to("cuda")
    y = weights @ noise
torch.cuda.synchronize()
