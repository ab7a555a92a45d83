"""Three ways for the same bytes: within a GPU, to its neighbour, and to the host."""

import torch

GPUS = 2
MEBIBYTES = 256

x = torch.ones(MEBIBYTES * 2**18, device="cuda:0")
within, next_door = torch.empty_like(x), torch.empty_like(x, device="cuda:1")
home = torch.empty(x.shape, pin_memory=True)


def rate(target: torch.Tensor) -> float:
    """In GB/s, by the GPU's own clock."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(2):  # the first time to warm up
        torch.cuda.synchronize()
        begin.record()
        target.copy_(x, non_blocking=True)
        end.record()
        end.synchronize()
    return x.nbytes / begin.elapsed_time(end) / 1e6


rates = {"within the GPU": rate(within), "to the next GPU": rate(next_door), "to the host": rate(home)}
for name, found in rates.items():
    print(f"{name:16}{found:6.0f} GB/s")
assert MEBIBYTES < 64 or rates["within the GPU"] > 3 * rates["to the next GPU"] > 9 * rates["to the host"]
