"""The queue is long but not endless: with about a thousand tasks in it, the next launch waits for a place."""

import time

import torch

x = torch.randn(2048, 2048, device="cuda")
y = x @ x
torch.cuda.synchronize()

waited = 0
for task in range(1, 1501):
    start = time.perf_counter()
    torch.mm(x, x, out=y)
    if time.perf_counter() - start > 100e-6 and not waited:
        waited = task
print(f"launch {waited} was the first to wait for a place in the queue")
torch.cuda.synchronize()
assert 900 < waited < 1200
