"""A stopwatch of the host measures launches, unless it waits for the GPU."""

import time

import torch

x = torch.randn(4096, 4096, device="cuda")
x @ x
torch.cuda.synchronize()

start = time.perf_counter()
y = x @ x
wrong = time.perf_counter() - start
torch.cuda.synchronize()  # the host waits here until every stream is empty
right = time.perf_counter() - start

print(f"without waiting {wrong * 1e3:.2f} ms, with waiting {right * 1e3:.2f} ms")
print(f"which would be {2 * 4096**3 / wrong / 1e12:,.0f} or {2 * 4096**3 / right / 1e12:,.0f} TFLOP/s")
assert right > 10 * wrong
