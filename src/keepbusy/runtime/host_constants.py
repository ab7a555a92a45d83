"""CPU tensors that are made of numbers of the program alone, such as labels, masks and positions.

    positions = torch.arange(length).to(device)

They are the same at each call, so a graph may contain their copy to the GPU, if that is from pinned memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from keepbusy.torch_names.pytorch import TorchDispatchMode, tree_leaves, tree_map

_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


class CapturedConstants(TorchDispatchMode):  # type: ignore[misc]  # PyTorch is not typed here
    """During a capture, tracks such tensors as they are made, and copies them from pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        """Pinned tensors from which the graph copies."""
        self._by_memory: dict[int, Tensor] = {}
        """By storage, which their views share."""
        self._making = _MadeOfNumbers(self)

    def __enter__(self) -> Self:
        self._making.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._making.__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, name = dict(kwargs or {}), function.overloadpacket.__name__
        if name == "_to_copy" and self.holds(args[0]) and torch.device(options.get("device") or "cpu").type == "cuda":
            args, options = (self._pinned(args[0]), *args[1:]), options | {"non_blocking": True}
        elif name == "copy_" and args[0].is_cuda and self.holds(args[1]):
            args = (args[0], self._pinned(args[1]), True)
        elif name in _INDEXING and args[0].is_cuda:
            args = (args[0], tree_map(partial(self._sent, args[0].device), args[1]), *args[2:])
        result = function(*args, **options)
        self._note(function, args, options, result)
        return result

    def _note(self, function: Any, args: Any, options: Any, result: Any) -> None:
        """A result of constants alone, without random numbers, is a constant. One written by anything else is none any
        longer."""
        inputs = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.device.type == "cpu"]
        name, is_drawn = function.overloadpacket.__name__, torch.Tag.nondeterministic_seeded in function.tags
        if is_drawn or not all(map(self.holds, inputs)) or "lift_fresh" in name or (not inputs and "empty" in name):
            for tensor in outputs:
                self._by_memory.pop(_memory_of(tensor), None)
        else:
            self._by_memory |= {_memory_of(tensor): tensor for tensor in outputs}

    def add(self, constant: Tensor) -> None:
        self._by_memory[_memory_of(constant)] = constant

    def holds(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == "cpu" and _memory_of(value) in self._by_memory

    def _pinned(self, constant: Tensor) -> Tensor:
        self.kept.append(constant.pin_memory())
        return self.kept[-1]

    def _sent(self, device: torch.device, index: Any) -> Any:
        return self._pinned(index).to(device, non_blocking=True) if self.holds(index) else index


class _MadeOfNumbers(TorchFunctionMode):  # type: ignore[misc]
    """Makes `torch.tensor([1.0], device="cuda")` on the CPU and copies it, as PyTorch does where no mode sees it."""

    def __init__(self, constants: CapturedConstants) -> None:
        super().__init__()
        self._constants = constants

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, name = dict(kwargs or {}), getattr(function, "__name__", "")
        if name not in ("tensor", "as_tensor", "new_tensor"):
            return function(*args, **options)
        if name == "new_tensor":
            function, (like, *args) = torch.tensor, args
            options = {"dtype": like.dtype, "device": like.device} | options
        if not all(isinstance(leaf, int | float | complex) for leaf in tree_leaves((args[:1], options.get("data", 0)))):
            return function(*args, **options)
        device = options.pop("device", None) or torch.get_default_device()
        is_trained = options.pop("requires_grad", False)
        constant = function(*args, **options, device="cpu")
        self._constants.add(constant)
        return constant.to(device).requires_grad_(is_trained)


def _memory_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
