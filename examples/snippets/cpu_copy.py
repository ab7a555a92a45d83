"""`.cpu()` waits until the tensor is computed and has come over."""

import torch

x = torch.ones(4096, 4096, device="cuda")
kept = []
for _ in range(4):
    y = x @ x
    kept.append(y.cpu())
