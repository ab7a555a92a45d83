"""Tensors that are made of numbers of the program alone, such as labels, masks and positions.

    positions = torch.arange(length).to(device)
    others = similarity[~torch.eye(length, dtype=torch.bool, device=device)]

They are the same at each call, so a graph may contain their copy to the GPU, if that is from pinned memory, and what
the host reads of them is known from the call before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, is_tensor
from torch.overrides import TorchFunctionMode

from keepbusy.torch_names.dispatcher import schema_of
from keepbusy.torch_names.pytorch import TorchDispatchMode, tree_leaves, tree_map

_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
_READING = ("_local_scalar_dense", "nonzero", "_unique2", "unique_consecutive", "masked_select", "repeat_interleave")
"""Operators for whose result the host waits."""


class ConstantReads:
    """What the host reads of such tensors in a call, in order: found while it runs eagerly, and known in captures."""

    def __init__(self, reason: BaseException | None = None) -> None:
        """`reason`: why the step could not be captured without them."""
        self.results: list[Any] = []
        self.reason = reason
        self._known: Iterator[Any] | None = None

    @property
    def in_capture(self) -> bool:
        return self._known is not None

    def known(self) -> ConstantReads:
        """From here on they are."""
        self._known = iter(self.results)
        return self

    def result(self, read: Callable[[], Any]) -> Any:
        """Its own at each call, since the step may write to it."""
        found = next(self._known, None) if self._known is not None else None
        if found is None:
            found = read()
            if self._known is None:
                self.results.append(found)
        return tree_map(lambda leaf: leaf.clone() if is_tensor(leaf) else leaf, found)


class CapturedConstants(TorchDispatchMode):  # type: ignore[misc]  # PyTorch is not typed here
    """During a capture, or the eager call before it, tracks such tensors as they are made. Copies of them are from
    pinned memory, and what the host reads of them is known."""

    def __init__(self, reads: ConstantReads) -> None:
        super().__init__()
        self._reads = reads
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
        inputs = [leaf for leaf in tree_leaves((args, options)) if is_tensor(leaf)]
        if name == "_to_copy" and self.holds(args[0]) and torch.device(options.get("device") or "cpu").type == "cuda":
            args, options = (self._pinned(args[0]), *args[1:]), options | {"non_blocking": True}
        elif name == "copy_" and args[0].is_cuda and self.holds(args[1]):
            args = (args[0], self._pinned(args[1]), True)
        elif name in _INDEXING and args[0].is_cuda and not _fills(*args[2:4]):
            indices = [self._indices(index, args[0].device) for index in args[1]]
            args = (args[0], [*chain.from_iterable(indices)], *args[2:])
        if name in _READING and inputs and all(map(self._is_constant, inputs)):
            result = self._reads.result(lambda: function(*args, **options))
        else:
            result = function(*args, **options)
        self._note(function, inputs, result)
        return result

    def _note(self, function: Any, inputs: list[Tensor], result: Any) -> None:
        """A result of constants alone, without random numbers, is a constant. One written by anything else is none any
        longer."""
        outputs = [leaf for leaf in tree_leaves(result) if is_tensor(leaf)]
        if not outputs and schema_of(function).is_mutable:  # as of lists
            outputs = inputs
        name, is_drawn = function.overloadpacket.__name__, torch.Tag.nondeterministic_seeded in function.tags
        is_other = is_drawn or "lift_fresh" in name or (not inputs and "empty" in name)
        if is_other or not all(map(self._is_constant, inputs)):
            for tensor in outputs:
                self._by_memory.pop(_memory_of(tensor), None)
        else:
            self._by_memory |= {_memory_of(tensor): tensor for tensor in outputs}

    def read_by_graph(self) -> list[Any]:
        """What has to live as long as the graph."""
        return [*self.kept, *self._reads.results]

    def add(self, constant: Tensor) -> None:
        self._by_memory[_memory_of(constant)] = constant

    def holds(self, value: Any) -> bool:
        """Whether it is a constant on the CPU."""
        return is_tensor(value) and value.device.type == "cpu" and self._is_constant(value)

    def _is_constant(self, tensor: Tensor) -> bool:
        return _memory_of(tensor) in self._by_memory

    def _indices(self, index: Any, device: torch.device) -> list[Any]:
        """What stands for an index: of a mask the places that it chooses, on the GPU."""
        if is_tensor(index) and index.dtype in (torch.bool, torch.uint8) and self._is_constant(index):
            return [*self._reads.result(lambda: index.nonzero().to(device)).unbind(1)]
        return [self._sent(device, index)]

    def _pinned(self, constant: Tensor) -> Tensor:
        """In an eager call, what it is."""
        if not self._reads.in_capture:
            return constant
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


def _fills(values: Tensor | None = None, accumulate: bool = False) -> bool:
    """Whether a mask chooses what becomes one number: for that PyTorch does not look where it is."""
    return values is not None and values.numel() == 1 and not accumulate


def _memory_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
