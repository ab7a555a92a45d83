"""Timing each part with `synchronize`: correct, and it stops the pipeline."""

import time

import torch

x = torch.ones(2048, 2048, device="cuda")
times = []
for _ in range(10):
    torch.cuda.synchronize()
    began = time.perf_counter()
    y = x @ x
    torch.cuda.synchronize()
    times.append(time.perf_counter() - began)
