"""A forgotten event: two streams use the same memory, and nothing says who comes first."""

import torch

WAITS = False
MILLISECOND = 1_980_000  # cycles of an H200

x = torch.zeros(1024, device="cuda")
side, ready = torch.cuda.Stream(), torch.cuda.Event()
for stream in (torch.cuda.current_stream(), side):  # what is first on a stream takes memory and loads code, which waits
    with torch.cuda.stream(stream):
        x += 0
        x.sum()
    torch.cuda.synchronize()

torch.cuda._sleep(10 * MILLISECOND)  # whatever keeps the stream busy
x += 1
ready.record()
with torch.cuda.stream(side):
    if WAITS:
        side.wait_event(ready)
    total = x.sum()
    print(f"the sum is {total.item():.0f}")
