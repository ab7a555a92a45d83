"""Tensors of the device: over memory of the host, which may be pinned, or over none where nothing is computed."""

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

# Tensors that carry the CUDA device over host memory.
#
# A DLPack capsule names its device in one word. Written anew, it makes a tensor of the other device
# over the same memory, without a copy: `to_device` lets a host tensor be seen as one of the device,
# `to_host` back again. Dispatch, autograd and autocast then see a CUDA tensor, not an imitation.

CPU, META = torch.device("cpu"), torch.device("meta")

_HOST_WORD, _CUDA_WORD = 1, 2  # DLDevice: {int32 type, int32 number}
_DEVICE_AT = 8  # its place in DLManagedTensor, after the data pointer

_to_capsule, _from_capsule = torch._C._to_dlpack, torch._C._from_dlpack
_word_at = ctypes.c_int64.from_address
_pointer = ctypes.PyDLL(None).PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def to_host(tensor: Tensor) -> Tensor:
    """The same memory as a host tensor. Conjugate and negative bits are dropped, as kernels below those keys expect."""
    capsule = _to_capsule(tensor)
    _word_at(_pointer(capsule, b"dltensor") + _DEVICE_AT).value = _HOST_WORD
    return _from_capsule(capsule)


def to_device(tensor: Tensor, index: int) -> Tensor:
    """The same memory as a tensor of a device. Nothing is accounted for: see `memory`."""
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"keepbusy's virtual GPU has no {str(tensor.layout).removeprefix('torch.')} tensors; only dense ones."
        )
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    capsule = _to_capsule(tensor)
    _word_at(_pointer(capsule, b"dltensor") + _DEVICE_AT).value = _CUDA_WORD | index << 32
    return _from_capsule(capsule)


def map_tensors(does: Any, value: Any) -> Any:
    """`does` on every tensor in a value of nested lists."""
    if isinstance(value, Tensor):
        return does(value)
    if isinstance(value, list | tuple):
        return [map_tensors(does, item) for item in value]
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a value of nested lists."""
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found


# Sparse tensors (COO) are made of two dense ones, on whatever device these are.

SPARSE_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCPU)
_aten = torch.ops.aten


def pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that it is made of."""
    if tensor.layout is not torch.sparse_coo:
        return (tensor,)
    return tuple(part.redispatch(SPARSE_KEYS, tensor) for part in (_aten._indices.default, _aten._values.default))


def sparse_like(tensor: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Made of other parts, and on their device."""
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


# Memory of the host: what of it was never touched, which addresses are pinned, and how tensors come to be there.


class Pages:
    """Bytes that results hold in memory of the host, and how many of them were touched at once so far.

    The kernel maps untouched memory page by page, which takes several times as long as a copy. Memory that was freed
    is touched, but for large blocks.
    """

    def __init__(self, mapped: int) -> None:
        """`mapped`: so large blocks are never handed out again."""
        self.mapped = mapped
        self._held = self._touched = 0

    def take(self, size: int, holder: Any) -> int:
        """Memory that lasts as long as `holder`; returns how much of it is touched for the first time."""
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
"""Each function on the stack, and the instruction that it is at."""
_HOOKS = (__name__, "keepbusy.virtual.cpp_hooks")
"""Modules whose functions native code calls back."""


class _Registered:
    """Memory that is pinned until it is said not to be."""

    def expired(self) -> bool:
        return False


_PINNED: dict[int, StorageWeakRef | _Registered] = {}
_SWEEP_AT = 4096
_pins_within: dict[int, _NativeCall] = {}
"""By thread, the call in which native code was given an allocator of pinned memory and has not yet looked at what
came of it."""


def is_pinned(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and _is_pinned_address(_address(tensor))


def memory_at(address: int) -> object:
    """What stands for the pinned memory of a storage that begins there, and for no other; None if it is not pinned."""
    return _PINNED.get(address) if _is_pinned_address(address) else None


def _is_pinned_address(address: int) -> bool:
    """`address`: where a storage begins."""
    storage = _PINNED.get(address)
    return storage is not None and not storage.expired()


def native_pins() -> None:
    """Native code takes memory that shall be pinned; where it lies, nobody tells us."""
    _pins_within[get_ident()] = _native_call()


def native_is_pinned(address: int) -> bool:
    """What native code hears of an address. DDP asks about memory that it has just taken, whose address nobody told us:
    an unknown address is that memory within the call that took it."""
    if _is_pinned_address(address):
        return True
    thread = get_ident()
    return thread in _pins_within and _pins_within.pop(thread) == _native_call()


def _native_call() -> _NativeCall:
    """Where the program, and PyTorch's Python, called into native code; nowhere in a thread of its own."""
    found: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if found or not frame.f_globals.get("__name__", "").startswith(_HOOKS):
            found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def pin(tensor: Tensor) -> Tensor:
    """Say of a host tensor's memory that it is pinned; returns the tensor."""
    if len(_PINNED) > _SWEEP_AT:
        for address in [address for address, storage in _PINNED.items() if storage.expired()]:
            del _PINNED[address]
    _PINNED[_address(tensor)] = StorageWeakRef(tensor.untyped_storage())
    return tensor


def host_register(address: int, _size: int, _flags: int) -> int:
    """cudaHostRegister, of a storage from its begin."""
    _PINNED[address] = _Registered()
    return 0


def host_unregister(address: int) -> int:
    """cudaHostUnregister."""
    _PINNED.pop(address, None)
    return 0


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


# Runs without values: shapes come from PyTorch's meta kernels, and memory is reserved but never touched.
#
# Tensors of the device read as zero, unless they came from the host, are small and were not changed, as sizes, indices
# and objects of other ranks. Where a shape depends on values, half of what is possible is taken.

_OUTLINES: dict[Any, Any] = {}
_MAX_OUTLINES = 20_000
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
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=host.dtype).as_strided(host.shape, host.stride())


def computed(call: Callable[..., Any], short: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operator returns, with memory that nobody touches. Shapes seen before are not worked out again."""
    key = (call, _shape_key(args), _shape_key(kwargs))
    found = _OUTLINES.get(key, _OUTLINES)
    if found is _OUTLINES:
        if len(_OUTLINES) > _MAX_OUTLINES:
            _OUTLINES.clear()
        args, kwargs = _outlined(args), {name: _outlined(option) for name, option in kwargs.items()}
        if short in _BY_VALUES:
            found = _BY_VALUES[short](*args, **kwargs)
        elif short in _INDEXING:
            found = call(*map(_without_masks, args), **kwargs)
        else:
            found = call(*args, **kwargs)
        if short == "convolution":  # which keeps the layout of its images or filters; meta kernels forget it
            last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(found.dim(), torch.contiguous_format)
            if any(it.is_contiguous(memory_format=last) and not it.is_contiguous() for it in args[:2]):
                found = found.contiguous(memory_format=last)
        _OUTLINES[key] = found
    return map_tensors(reserved, found)


def _outlined(given: Any) -> Any:
    """A number in a tensor of the host may stand beside outlines of any device."""
    return map_tensors(lambda tensor: outline(tensor) if tensor.is_cuda or tensor.dim() else tensor, given)


def _shape_key(value: Any) -> Any:
    """What of the arguments the shapes of results depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_cuda
    if isinstance(value, list | tuple):
        return tuple([_shape_key(item) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _shape_key(item)) for name, item in value.items()])
    return type(value), value


def _without_masks(value: Any) -> Any:
    """Indices with a mask among them: as many places as half of the mask."""
    if not isinstance(value, list):
        return value
    found: list[Any] = []
    for index in value:
        is_mask = isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
        found += [_outline((_half(index.numel()),)) for _ in range(index.dim())] if is_mask else [index]
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
