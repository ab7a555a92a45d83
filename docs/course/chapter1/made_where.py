"""Make a tensor where it is needed: what is made on the host must be made by one CPU, and travel."""

import time

import torch

SHAPE = (16, 3, 512, 512)

for device in ("cuda", "cpu"):  # to warm up
    torch.randn(SHAPE, device=device).to("cuda")
torch.cuda.synchronize()

start = time.perf_counter()
made = torch.randn(SHAPE, device="cuda")
torch.cuda.synchronize()
on_device = (time.perf_counter() - start) * 1e3

start = time.perf_counter()
copied = torch.randn(SHAPE).to("cuda")
torch.cuda.synchronize()
on_host = (time.perf_counter() - start) * 1e3

print(f"made on the host and copied {on_host:.1f} ms, made on the GPU {on_device:.2f} ms")
assert on_host > 20 * on_device
