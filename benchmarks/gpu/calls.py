"""Operators at plain shapes, chosen before anything was measured and for no program: what a call is, and its tensors.

A call is a label and a function that prepares its tensors and returns what to time. `operator_costs.py` measures
them on a GPU; on the virtual one the same calls run, so what they take there can be held against it.
"""

from collections.abc import Callable, Iterator

import torch

Prepare = Callable[[], Callable[[], object]]
Call = tuple[str, Prepare]
Make = Callable[[], tuple[Callable[[], torch.Tensor], list[torch.Tensor]]]
"""Something to compute, and the leaves of its gradient."""
HALF, FULL = torch.bfloat16, torch.float32


def new(*shape: int, dtype: torch.dtype = FULL, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_(grad)


def below(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, device="cuda")


def both(label: str, make: Make) -> Iterator[Call]:
    """Forward, and the gradient of its result with respect to its leaves."""

    def backward() -> Callable[[], object]:
        does, leaves = make()
        result = does()
        grad = torch.ones_like(result)
        return lambda: torch.autograd.grad(result, leaves, grad, retain_graph=True)

    yield label, lambda: make()[0]
    yield f"{label} backward", backward
