"""Copy on one stream, compute on another: both run at once."""

import torch

batches = [torch.ones(2048, 2048).pin_memory() for _ in range(4)]
weights = torch.ones(2048, 2048, device="cuda")
copying = torch.cuda.Stream()
results = []
for batch in batches:
    with torch.cuda.stream(copying):
        x = batch.to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(copying)
    x.record_stream(torch.cuda.current_stream())  # its memory is not used again before this stream is done with it
    for _ in range(4):
        x = x @ weights
    results.append(x)
torch.cuda.synchronize()
