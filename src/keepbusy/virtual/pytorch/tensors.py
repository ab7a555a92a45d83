"""Device tensors over host memory, pinned memory, and runs without values."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from keepbusy.torch_names.dispatcher import DispatchKey, DispatchKeySet, from_capsule, to_capsule

# Device tensors over host memory.
#
# A DLPack capsule names its device in one word. With another word it makes a tensor of another device over the same
# memory: `to_device` turns a host tensor into a device tensor, and `to_host` does the reverse. Dispatch, autograd and
# autocast then work with a real CUDA tensor.

CPU, META = torch.device("cpu"), torch.device("meta")

_HOST_WORD, _CUDA_WORD = 1, 2  # DLDevice: {int32 type, int32 number}
_DEVICE_AT = 8  # its offset in DLManagedTensor, after the data pointer

_word_at = ctypes.c_int64.from_address
_pointer = ctypes.PyDLL(None).PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def to_host(tensor: Tensor) -> Tensor:
    """A host tensor over the same memory, without conjugate and negative bits, as kernels below those keys expect."""
    capsule = to_capsule(tensor)
    _word_at(_pointer(capsule, b"dltensor") + _DEVICE_AT).value = _HOST_WORD
    return from_capsule(capsule)


def to_device(tensor: Tensor, index: int) -> Tensor:
    """A device tensor over the same memory. It allocates no device memory: see `DeviceTensors.place_on`."""
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"keepbusy's virtual GPU has no {str(tensor.layout).removeprefix('torch.')} tensors; only dense ones."
        )
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    capsule = to_capsule(tensor)
    _word_at(_pointer(capsule, b"dltensor") + _DEVICE_AT).value = _CUDA_WORD | index << 32
    return from_capsule(capsule)


def map_tensors(function: Any, value: Any) -> Any:
    """Apply `function` to each tensor in nested lists."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return [map_tensors(function, item) for item in value]
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested lists."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, value)
    return tensors


# Sparse tensors (COO) consist of two dense ones.

SPARSE_KEYS = DispatchKeySet(DispatchKey.SparseCPU)
_aten = torch.ops.aten


def pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors of which a tensor consists."""
    if tensor.layout is not torch.sparse_coo:
        return (tensor,)
    return tuple(part.redispatch(SPARSE_KEYS, tensor) for part in (_aten._indices.default, _aten._values.default))


def sparse_like(tensor: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """A sparse tensor of other parts, on their device."""
    return _aten._sparse_coo_tensor_with_dims_and_tensors.default.redispatch(
        SPARSE_KEYS,
        tensor.sparse_dim(),
        tensor.dense_dim(),
        list(tensor.shape),
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=tensor.is_coalesced(),
    )


# Host memory: untouched pages and pinned addresses.


class Pages:
    """Bytes of host memory that results hold, and how many were touched so far.

    The kernel maps untouched memory page by page, which takes several times as long as a copy. Freed memory is touched
    already, except for large blocks.
    """

    def __init__(self, mapped: int) -> None:
        """`mapped`: blocks of at least this size are never reused."""
        self.mapped = mapped
        self._held = self._touched = 0

    def take(self, size: int, holder: Any) -> int:
        """Memory is used until `holder` is freed; returns how much of it is touched for the first time."""
        if size >= self.mapped:
            return size
        self._held += size
        weakref.finalize(holder, self._free, size)
        new = max(0, self._held - self._touched)
        self._touched += new
        return min(size, new)

    def _free(self, size: int) -> None:
        self._held -= size


_NativeCall: TypeAlias = tuple[tuple[CodeType, int], ...]
"""The functions on the stack, each with its current instruction."""
_HOOKS = (__name__, "keepbusy.virtual.cpp_hooks")
"""Modules whose functions native code calls."""


class _Registered:
    """Memory pinned by `cudaHostRegister`."""

    def expired(self) -> bool:
        return False


_PINNED: dict[int, StorageWeakRef | _Registered] = {}
_SWEEP_AT = 4096
_pins_within: dict[int, _NativeCall] = {}
"""By thread, the call in which native code got the allocator of pinned memory and has not yet asked about the
memory."""


def is_pinned(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and _is_pinned_address(_address(tensor))


def memory_at(address: int) -> object:
    """An object that identifies the pinned memory of the storage at an address; None if it is not pinned."""
    return _PINNED.get(address) if _is_pinned_address(address) else None


def _is_pinned_address(address: int) -> bool:
    """`address`: that of a storage."""
    storage = _PINNED.get(address)
    return storage is not None and not storage.expired()


def native_pins() -> None:
    """Native code is about to allocate pinned memory; its address is not reported to us."""
    _pins_within[get_ident()] = _native_call()


def native_is_pinned(address: int) -> bool:
    """Answer native code whether an address is pinned. DDP asks about memory that it has just allocated, whose address
    is unknown to us: an unknown address is that memory if the same call allocated it."""
    if _is_pinned_address(address):
        return True
    thread = get_ident()
    return thread in _pins_within and _pins_within.pop(thread) == _native_call()


def _native_call() -> _NativeCall:
    """The stack from which native code was called; empty in a thread of native code."""
    calls: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if calls or not frame.f_globals.get("__name__", "").startswith(_HOOKS):
            calls.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(calls)


def pin(tensor: Tensor) -> Tensor:
    """Mark a host tensor's memory as pinned; returns the tensor."""
    if len(_PINNED) > _SWEEP_AT:
        for address in [address for address, storage in _PINNED.items() if storage.expired()]:
            del _PINNED[address]
    _PINNED[_address(tensor)] = StorageWeakRef(tensor.untyped_storage())
    return tensor


def host_register(address: int, _size: int, _flags: int) -> int:
    """`cudaHostRegister` for the memory of a storage."""
    _PINNED[address] = _Registered()
    return 0


def host_unregister(address: int) -> int:
    """`cudaHostUnregister`."""
    _PINNED.pop(address, None)
    return 0


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


# Runs without values: shapes come from PyTorch's meta kernels, and memory is reserved but never touched.
#
# Device tensors read as zero, except small ones that came from the host and were not changed, such as sizes, indices
# and objects of other ranks. A shape that depends on values is assumed to be half of the largest.

_OUTLINES: dict[Any, Any] = {}
_MAX_OUTLINES = 20_000
CARRIED_SIZE = 1 << 20
"""Bytes. Tensors from the host that are no larger keep their values."""


class Values:
    """Whether this process computes values; and if it does not, which device memory has values all the same."""

    def __init__(self) -> None:
        self.real = True
        self.storages: set[int] = set()  # addresses of storages with values

    def readable(self, tensor: Tensor) -> bool:
        """Whether the tensor has values."""
        if self.real or not tensor.is_cuda:
            return True
        return bool(self.storages) and tensor.untyped_storage().data_ptr() in self.storages

    def keep(self, tensor: Tensor) -> None:
        """The whole tensor has got values."""
        if not self.real:
            self.storages.add(tensor.untyped_storage().data_ptr())

    def forget(self, tensor: Tensor) -> None:
        """The tensor was written to without values."""
        if self.storages:
            self.storages.discard(tensor.untyped_storage().data_ptr())

    def carried(self, source: Tensor) -> bool:
        """Whether a copy of the tensor has values."""
        return self.real or (source.nbytes <= CARRIED_SIZE and self.readable(source))

    def worth_keeping(self, source: Tensor, target: Tensor) -> bool:
        """Whether the target has values after a copy."""
        if self.real or not target.is_cuda:
            return self.readable(source)
        fills_storage = target.numel() * target.element_size() == target.untyped_storage().nbytes()
        return target.nbytes <= CARRIED_SIZE and self.readable(source) and (fills_storage or self.readable(target))


VALUES = Values()


def outline(tensor: Tensor) -> Tensor:
    """A meta tensor of the same shape, strides and type."""
    return _aten.empty_strided.default(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def reserved(outlined: Tensor) -> Tensor:
    """An untouched host tensor of the same shape, strides and type."""
    return _aten.empty_strided.default(outlined.shape, outlined.stride(), dtype=outlined.dtype)


def zeroed(host: Tensor) -> Tensor:
    """Zeros of the same shape. Large ones are new pages, which take no memory until they are written."""
    size = host.untyped_storage().nbytes()
    if size <= CARRIED_SIZE:
        return host.zero_()
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=host.dtype).as_strided(host.shape, host.stride())


def computed(call: Callable[..., Any], short: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operator's results, with untouched memory. Shapes of earlier calls are cached."""
    key = (call, _shape_key(args), _shape_key(kwargs))
    result = _OUTLINES.get(key, _OUTLINES)
    if result is _OUTLINES:
        if len(_OUTLINES) > _MAX_OUTLINES:
            _OUTLINES.clear()
        args, kwargs = _outlined(args), {name: _outlined(option) for name, option in kwargs.items()}
        if short in _BY_VALUES:
            result = _BY_VALUES[short](*args, **kwargs)
        elif short in _INDEXING:
            result = call(*map(_without_masks, args), **kwargs)
        else:
            result = call(*args, **kwargs)
        if short == "convolution":  # meta kernels forget that it keeps the layout of images or filters
            form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(result.dim(), torch.contiguous_format)
            if any(part.is_contiguous(memory_format=form) and not part.is_contiguous() for part in args[:2]):
                result = result.contiguous(memory_format=form)
        _OUTLINES[key] = result
    return map_tensors(reserved, result)


def _outlined(value: Any) -> Any:
    """Arguments as outlines, except numbers in host tensors, which fit any device."""
    return map_tensors(lambda tensor: outline(tensor) if tensor.is_cuda or tensor.dim() else tensor, value)


def _shape_key(value: Any) -> Any:
    """The part of the arguments on which shapes of results depend."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_cuda
    if isinstance(value, list | tuple):
        return tuple([_shape_key(item) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _shape_key(item)) for name, item in value.items()])
    return type(value), value


def _without_masks(value: Any) -> Any:
    """Indices in which each mask is replaced by as many indices as half of its size."""
    if not isinstance(value, list):
        return value
    indices: list[Any] = []
    for index in value:
        is_mask = isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
        indices += [_outline((_half(index.numel()),)) for _ in range(index.dim())] if is_mask else [index]
    return indices


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


_INDEXING = ("index", "_unsafe_index")
_BY_VALUES: dict[str, Callable[..., Any]] = {
    "nonzero": lambda tensor: _outline((_half(tensor.numel()), tensor.dim())),
    "masked_select": _masked_select,
    "_unique2": _unique,
    "repeat_interleave": lambda tensor, *, output_size=None: _outline(
        (tensor.numel() if output_size is None else output_size,)
    ),
    "bincount": lambda tensor, weights=None, minlength=0: _outline(
        (max(1, minlength),), torch.int64 if weights is None else torch.float64
    ),
    "equal": lambda *_args: False,
    # labels read as zero, so the largest is the first class
    "one_hot": lambda tensor, classes=-1: _outline((*tensor.shape, max(1, classes))),
}
