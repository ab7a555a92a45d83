"""A forgotten event: two streams use the same memory, and nothing says who comes first."""

import torch

WAITS = False
MILLISECOND = 1_980_000  # cycles of an H200

x = torch.zeros(1024, device="cuda")
x += x.sum()  # the first call of a kernel loads it, which waits
side, ready = torch.cuda.Stream(), torch.cuda.Event()
torch.cuda.synchronize()

torch.cuda._sleep(10 * MILLISECOND)  # whatever keeps the stream busy
x += 1
ready.record()
with torch.cuda.stream(side):
    if WAITS:
        side.wait_event(ready)
    total = x.sum()
    print(f"the sum is {total.item():.0f}")
