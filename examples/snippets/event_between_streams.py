"""An event makes one stream wait for another one, and Python waits for neither."""

import torch

a = torch.ones(4096, 4096, device="cuda")
ready = torch.cuda.Event()
side = torch.cuda.Stream()
b = a @ a
ready.record()
with torch.cuda.stream(side):
    side.wait_event(ready)
    c = b @ b
d = a + a
torch.cuda.synchronize()
