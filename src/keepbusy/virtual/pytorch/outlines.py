"""Runs without values: shapes come from PyTorch's meta kernels, and memory is reserved but never touched.

Whatever the device is asked for reads as zero, but for the little that came from the host and was
not changed: sizes, indices and objects that ranks tell each other. Where a shape depends on values,
half of what is possible is taken: half of a mask is true.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from keepbusy.virtual.pytorch.tensors import map_tensors

_aten = torch.ops.aten
_OUTLINES: dict[Any, Any] = {}
_MAX_OUTLINES = 20_000
META = torch.device("meta")


CARRIED_SIZE = 1 << 20
"""What comes from the host and is no larger comes back as it was."""


class Values:
    """Whether this process computes at all, and if it does not, which memory of the device has values yet."""

    def __init__(self) -> None:
        self.real = True
        self.kept: set[int] = set()  # addresses of storages

    def known(self, tensor: Tensor) -> bool:
        """Whether there are values to read."""
        if self.real or not tensor.is_cuda:
            return True
        return bool(self.kept) and tensor.untyped_storage().data_ptr() in self.kept

    def keep(self, tensor: Tensor) -> None:
        """It was given values, all of it."""
        if not self.real:
            self.kept.add(tensor.untyped_storage().data_ptr())

    def forget(self, tensor: Tensor) -> None:
        """It was written to by what computes nothing."""
        if self.kept:
            self.kept.discard(tensor.untyped_storage().data_ptr())

    def carried(self, source: Tensor) -> bool:
        """Whether values go along with a tensor that moves."""
        return self.real or (source.nbytes <= CARRIED_SIZE and self.known(source))

    def worth_keeping(self, source: Tensor, target: Tensor) -> bool:
        """Whether what is copied shall be there afterwards."""
        if self.real or not target.is_cuda:
            return self.known(source)
        whole = target.numel() * target.element_size() == target.untyped_storage().nbytes()
        return target.nbytes <= CARRIED_SIZE and self.known(source) and (whole or self.known(target))


VALUES = Values()


def outline(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, strides and type, with nothing in it."""
    return _aten.empty_strided.default(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def reserved(outlined: Tensor) -> Tensor:
    """Host memory for such a shape, which nobody touches."""
    return _aten.empty_strided.default(outlined.shape, outlined.stride(), dtype=outlined.dtype)


def zeroed(host: Tensor) -> Tensor:
    """The same in zeros. Large memory is taken as pages that read as zero, and have no room until they are written."""
    size = host.untyped_storage().nbytes()
    if size <= CARRIED_SIZE:
        return host.zero_()
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=host.dtype).as_strided(host.shape, host.stride())


def computed(call: Callable[..., Any], short: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operator returns, with memory that nobody touches. Shapes seen before are not worked out again."""
    key = (call, _shape_key(args), _shape_key(kwargs))
    found = _OUTLINES.get(key, _OUTLINES)
    if found is _OUTLINES:
        if len(_OUTLINES) > _MAX_OUTLINES:
            _OUTLINES.clear()
        found = _OUTLINES[key] = _outlines(call, short, *map(_outlined, (args, kwargs)))
    return map_tensors(reserved, found)


def _outlines(call: Callable[..., Any], short: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """As outlines or plain values."""
    guess = _BY_VALUES.get(short)
    if guess is not None:
        return guess(*args, **kwargs)
    found = call(*[_without_masks(one) if short in _INDEXING else one for one in args], **kwargs)
    return _with_layout(found, args[:2]) if short == "convolution" else found


def _with_layout(result: Tensor, given: Any) -> Tensor:
    """Convolutions keep the layout of their images or filters; meta kernels forget it."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(result.dim())
    if last is None or not any(one.is_contiguous(memory_format=last) and not one.is_contiguous() for one in given):
        return result
    return result.contiguous(memory_format=last)


def _outlined(given: Any) -> Any:
    """A number in a tensor of the host may stand beside outlines of any device."""
    if isinstance(given, dict):
        return {name: _outlined(one) for name, one in given.items()}
    return map_tensors(lambda one: outline(one) if one.is_cuda or one.dim() else one, given)


def _shape_key(value: Any) -> Any:
    """Of arguments, what the shapes of results depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_cuda
    if isinstance(value, list | tuple):
        return tuple([_shape_key(one) for one in value])
    if isinstance(value, dict):
        return tuple([(name, _shape_key(one)) for name, one in value.items()])
    return type(value), value


def _without_masks(value: Any) -> Any:
    """Indices with a mask among them: as many places as half of the mask."""
    if not isinstance(value, list):
        return value
    found: list[Any] = []
    for one in value:
        is_mask = isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8)
        found += [_outline((_half(one.numel()),)) for _ in range(one.dim())] if is_mask else [one]
    return found


def _half(count: int) -> int:
    return max(1, count // 2)


def _outline(shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
    return _aten.empty.memory_format(shape, dtype=dtype, device=META)


def _masked_select(tensor: Tensor, mask: Tensor) -> Tensor:
    count = math.prod(torch.broadcast_shapes(tensor.shape, mask.shape))
    return _outline((_half(count),), tensor.dtype)


def _unique(tensor: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    count = _half(tensor.numel())
    return _outline((count,), tensor.dtype), _outline(tuple(tensor.shape)), _outline((count,))


def _bincount(tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    return _outline((max(1, minlength),), torch.int64 if weights is None else torch.float64)


_INDEXING = ("index", "_unsafe_index")
_BY_VALUES: dict[str, Callable[..., Any]] = {
    "nonzero": lambda one: _outline((_half(one.numel()), one.dim())),
    "masked_select": _masked_select,
    "_unique2": _unique,
    "repeat_interleave": lambda one, *, output_size=None: _outline(
        (one.numel() if output_size is None else output_size,)
    ),
    "bincount": _bincount,
    "equal": lambda *_args: False,
}
