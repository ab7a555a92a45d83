"""`nonzero` and `unique` make tensors whose size the host has to ask for."""

import torch

x = torch.ones(2048, 2048, device="cuda")
for _ in range(10):
    y = x @ x
    places = (y > 0).nonzero()
    kinds = y.unique()
