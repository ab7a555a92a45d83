"""A launch puts a task into a queue and returns. The work is done later."""

import time

import torch

WIDTH = 4096

x = torch.randn(WIDTH, WIDTH, device="cuda")
x @ x  # the first product also loads a library
torch.cuda.synchronize()

start = time.perf_counter()
for _ in range(8):
    y = x @ x
launched = time.perf_counter() - start
torch.cuda.synchronize()
finished = time.perf_counter() - start

print(f"8 products launched after {launched * 1e3:.2f} ms, finished after {finished * 1e3:.2f} ms")
assert launched < finished / 10 or WIDTH < 4096
