"""Whatever needs a value of the GPU waits for it. Whatever needs a shape does not."""

import time
from collections.abc import Callable

import torch

x = torch.randn(4096, 4096, device="cuda")


def held(what: Callable[[torch.Tensor], object]) -> float:
    """How long it holds the host, in milliseconds, right behind a product that takes the GPU a while."""
    for _ in range(2):  # the first time to warm up
        y = (x @ x)[:2, :2]
        start = time.perf_counter()
        what(y)
        taken = (time.perf_counter() - start) * 1e3
        torch.cuda.synchronize()
    return taken


waiting = {
    "y.sum().item()": held(lambda y: y.sum().item()),
    "if y[0, 0] > 0": held(lambda y: bool(y[0, 0] > 0)),
    "y.cpu()": held(lambda y: y.cpu()),
    "str(y), as print does": held(str),
    "y[y > 0]": held(lambda y: y[y > 0]),
}
free = {
    "y.shape": held(lambda y: y.shape),
    "y.numel() > 3": held(lambda y: y.numel() > 3),
    "y.sum()": held(lambda y: y.sum()),
    "torch.where(y > 0, y, 0)": held(lambda y: torch.where(y > 0, y, 0)),
}
for name, taken in (waiting | free).items():
    print(f"{name:25} held the host for {taken:7.3f} ms")
assert min(waiting.values()) > 3 * max(free.values())
