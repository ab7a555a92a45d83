"""Timing with events: the GPU notes the time, and Python asks once, at the end."""

import torch

x = torch.ones(2048, 2048, device="cuda")
begin = torch.cuda.Event(enable_timing=True)
end = torch.cuda.Event(enable_timing=True)
begin.record()
for _ in range(10):
    y = x @ x
end.record()
end.synchronize()
each = begin.elapsed_time(end) / 10
