"""What the program itself reads from and writes to pinned memory, while copies from or to it may be under way.

PyTorch says of each function that Python calls which tensors go in and come out. That is looked at only from the first
copy on that does not block, and only of pinned tensors that a copy has used since the host last waited for it. A view
reads nothing; an array of `Tensor.numpy()` does not tell what is done with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from keepbusy.virtual.accesses import HOST
from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.pytorch.tensors import is_pinned, tensors_in

_READS_VALUES = frozenset([
    "tolist", "item", "equal", "allclose", "is_nonzero", "__float__", "__int__", "__bool__", "__index__", "__complex__",
    "__contains__", "__repr__", "__format__", "__deepcopy__",
])  # fmt: skip
"""Functions that read values and return no tensor that shows it."""
_ONLY_FORM = frozenset([
    "requires_grad_", "share_memory_", "detach_", "resize_", "resize_as_", "unsqueeze_", "squeeze_", "transpose_", "t_",
    "swapaxes_", "swapdims_", "as_strided_", "set_", "rename_", "apply_",
])  # fmt: skip
"""Functions whose names say that they write, and that change a tensor's form alone."""


class PinnedUses(TorchFunctionMode):  # type: ignore[misc]  # PyTorch is not typed here
    """At the bottom of a thread's modes, for the program's own come and go above it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = tensors_in((*args, *kwargs.values()))
        if any(map(_is_in_use, given)):
            host = MACHINE.clock.pause()
            try:
                _note(getattr(func, "__name__", ""), args, kwargs, given, result)
            finally:
                host.resume()
        return result


class _Watched(threading.local):
    is_on = False


_WATCHED = _Watched()


def watch() -> None:
    """From now on, in this thread."""
    if _WATCHED.is_on:
        return
    _WATCHED.is_on = True
    above = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    for mode in (PinnedUses(), *reversed(above)):
        torch._C._push_on_torch_function_stack(mode)


def read(tensor: Tensor) -> None:
    """The program reads its values in a way that is no function of a tensor's: it pickles it."""
    if tensor.layout is torch.strided and _is_in_use(tensor):
        MACHINE.memory.accesses.use_pinned(tensor, False, HOST, 0, MACHINE.places.here())


def _is_in_use(tensor: Tensor) -> bool:
    return is_pinned(tensor) and MACHINE.memory.accesses.is_in_use(tensor)


def _note(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: list[Tensor], result: Any) -> None:
    made = tensors_in(result)
    if any(one.is_cuda for one in (*given, *made)):
        return  # a copy, whose operator has noted it
    written = tensors_in(kwargs.get("out"))
    if args and _writes(name):
        written += tensors_in(args[0])
    reads = name in _READS_VALUES or bool(written)
    if not (name.endswith("_like") or name.startswith("new_") or name in _ONLY_FORM):
        known = {one.untyped_storage().data_ptr() for one in given}
        reads |= any(one.untyped_storage().data_ptr() not in known for one in made if _is_dense(one))
    place = MACHINE.places.here()
    for one in filter(_is_in_use, given):
        writes = any(one is each for each in written)
        if writes or reads:
            MACHINE.memory.accesses.use_pinned(one, writes, HOST, 0, place)


def _writes(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__int__", "__index__", "__invert__"))
    return name.endswith("_") and name not in _ONLY_FORM


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta
