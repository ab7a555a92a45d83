"""Copy and compute on one stream: one after the other, even from pinned memory."""

import torch

batches = [torch.ones(2048, 2048).pin_memory() for _ in range(4)]
weights = torch.ones(2048, 2048, device="cuda")
results = []
for batch in batches:
    x = batch.to("cuda", non_blocking=True)
    for _ in range(4):
        x = x @ weights
    results.append(x)
torch.cuda.synchronize()
