"""`empty_cache` gives the memory back to the driver, and the next allocation has to ask for it again."""

import torch

for _ in range(5):
    x = torch.ones(4096, 4096, device="cuda")
    y = x @ x
    del x, y
    torch.cuda.empty_cache()
