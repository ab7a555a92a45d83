"""What is known of a tensor is on the host. Its numbers are on the device, and whoever prints one waits for it."""

import time

import torch

x = torch.randn(4096, 4096, device="cuda")
str((x @ x)[0, 0])  # to warm up
torch.cuda.synchronize()

start = time.perf_counter()
y = x @ x
shape = y.shape  # known: Python goes on at once
asked = time.perf_counter() - start
z = y @ x
text = str(z[0, 0])  # what print(z[0, 0]) does: it waits until z is there
printed = time.perf_counter() - start
w = z @ x  # launched only now
torch.cuda.synchronize()

print(f"the shape was there after {asked * 1e3:.2f} ms, the number after {printed * 1e3:.2f} ms")
assert asked < printed / 10
