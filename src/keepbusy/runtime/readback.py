"""`readback`: a device value that arrives on the host later; only reading it waits.

A kernel writes numbers into pinned host memory. Tensors are copied on the device first, and then to pinned memory
beside the compute.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from threading import Lock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from keepbusy.torch_names.pytorch import current_stream, tree_flatten, tree_unflatten

SLOT_DOUBLES = 32
_SLOT_BYTES = 8 * SLOT_DOUBLES
_SLOTS_PER_PAGE = 1024
"""Slots pinned at once: about as many values as a full queue of launches holds."""
_PACKED_BELOW = 1 << 20
"""Bytes. Smaller tensors are copied as one."""
_COPIED_UNASKED = 64 << 20
"""Bytes that are copied on the device without asking how much memory is free."""
_NUMBERS = (int, float, complex)
_PYTHON_TYPES: dict[torch.dtype, type] = {
    **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), float), torch.bool: bool,
    **dict.fromkeys((torch.int32, torch.int16, torch.int8, torch.uint8), int),
}  # fmt: skip
"""The Python types of dtypes whose values fit a double."""
_DOUBLES = {**dict.fromkeys(_PYTHON_TYPES, 1), torch.int64: 2, torch.float64: 2}
"""How many doubles hold a value; two hold the halves of a value of eight bytes."""
_SENDING, _LANDING, _UNPACKING, _PINNING = Lock(), Lock(), Lock(), Lock()


def readback(value: Any) -> Any:
    """Read a device value without making the host wait: `losses.append(keepbusy.readback(loss))`.

    Returns a `Reading` for a tensor. For dicts, lists, tuples and other pytrees of PyTorch it returns the same with a
    `Reading` for each tensor, all copied at once. A reading is the value as it is now: later changes of the tensor (an
    update in place, the next replay of a graph) do not change it.

    `float(reading)` and the like wait only if the value has not arrived, and then for this value alone, not for later
    launches. A step later it has usually arrived. Host tensors are read at once; numbers stay as they are. During the
    capture of a CUDA graph nothing can be read: return the tensor, and read it after the replay.
    """
    if isinstance(value, Tensor):
        return Reading(send([full_value(value)]))
    leaves, structure = tree_flatten(value)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if not places and not all(isinstance(leaf, _NUMBERS) for leaf in leaves):
        kind = f"a {type(value).__name__}" if value is not None else "None"
        raise TypeError(
            f"readback() takes tensors, and dicts, lists and tuples of them, but was given {kind}; "
            "give it the tensors inside."
        )
    by_device: dict[torch.device, dict[int, Tensor]] = {}
    for place in places:
        tensor = full_value(leaves[place])
        by_device.setdefault(tensor.device, {})[place] = tensor
    for tensors in by_device.values():  # one copy for each device
        arriving = send(list(tensors.values()))
        for number, place in enumerate(tensors):
            leaves[place] = Reading(arriving, number)
    return tree_unflatten(leaves, structure)


class Reading:
    """A device value on its way to the host, which becomes a number when it is read."""

    __slots__ = ("_place", "_sent")

    def __init__(self, sent: Arriving, place: int = 0) -> None:
        self._sent, self._place = sent, place

    @property
    def ready(self) -> bool:
        """Whether the value has arrived, so that reading it does not wait."""
        return self._sent.ready

    @property
    def tensor(self) -> Tensor:
        """The value as a host tensor."""
        return self._sent.open(self._place)

    def item(self) -> Any:
        """The value as a Python number."""
        if isinstance(self._sent, ScalarReadback):
            return self._sent.number(self._place)
        tensor = self.tensor
        if tensor.numel() != 1:
            raise ValueError(
                f"this reading holds {tensor.numel()} values of shape {tuple(tensor.shape)}, not one number; "
                "take its .tensor, or read back the mean."
            )
        return tensor.item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __format__(self, specification: str) -> str:
        return format(self.item(), specification) if specification else str(self)

    def __str__(self) -> str:
        tensor = self.tensor
        return str(tensor.item() if tensor.numel() == 1 else tensor)

    def __repr__(self) -> str:
        return f"Reading({self})" if self.ready else "Reading(on its way)"


_Step = dict[str, Reading | float]


class Readings:
    """Means and checks of many values, by one copy a step, without making the host wait for the current step.

        readings = Readings()
        for step, batch in enumerate(loader):
            ...
            readings.add(loss=loss, accuracy=accuracy, rate=schedule.get_last_lr()[0])
            if readings.nonfinite():
                break
            if step % 100 == 0:
                print(readings.means())
        print(readings.means(last=True))

    Every answer is one step late: it covers all steps but the last one added, so that the device has that one to
    compute while the host reads. The answer does not depend on timing. `last=True` includes the last step, and waits
    for it, as at the end of an epoch. Sums have double precision.
    """

    def __init__(self) -> None:
        self._uncounted: deque[_Step] = deque()
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._nonfinite: dict[str, None] = {}

    def add(self, **values: Any) -> None:
        """A step's values by name: tensors with one element, on any device, or numbers. Steps may differ in names."""
        for name, value in values.items():
            is_tensor = isinstance(value, Tensor)
            if not (value.numel() == 1 if is_tensor else isinstance(value, Reading | int | float)):
                kind = f"a tensor of shape {tuple(value.shape)}" if is_tensor else f"a {type(value).__name__}"
                raise ValueError(
                    f"add({name}=...) was given {kind}, and a mean is kept of single numbers; give {name}'s own mean."
                )
        self._uncounted.append(readback(values))
        while len(self._uncounted) > 1 and all(getattr(value, "ready", True) for value in self._uncounted[0].values()):
            self._count(self._uncounted.popleft())

    def means(self, *, last: bool = False) -> dict[str, float]:
        """The mean of each name since the last `reset()`."""
        self._read(last)
        return {name: total / self._counts[name] for name, total in self._sums.items()}

    def nonfinite(self, *, last: bool = False) -> list[str]:
        """The names that were infinite or not a number since the last `reset()`: a check that does not stall."""
        self._read(last)
        return list(self._nonfinite)

    def reset(self) -> None:
        """Start from zero. The step added last, which is not counted yet, belongs to the new start."""
        self._read(last=False)
        self._sums, self._counts, self._nonfinite = {}, {}, {}

    def _read(self, last: bool) -> None:
        while len(self._uncounted) > (0 if last else 1):
            self._count(self._uncounted.popleft())

    def _count(self, step: _Step) -> None:
        for name, reading in step.items():
            value = float(reading)
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1
            if not math.isfinite(value):
                self._nonfinite[name] = None


_UNDER_WAY: dict[torch.device, deque[Arriving]] = {}
"""By device, values not known to have arrived, in the order in which they were sent."""


def send(tensors: list[Tensor]) -> Arriving:
    """Send tensors of one device to the host."""
    device = tensors[0].device
    if device.type != "cuda":
        return HostReadback(tensors)
    refuse_capture("readback()", "return the tensor from what is captured, and read it back after the replay")
    sent = ScalarReadback.send(tensors, device) or TensorReadback(tensors).send()
    with _SENDING:
        under_way = _UNDER_WAY.get(device)
        if under_way is None:
            under_way = _UNDER_WAY[device] = deque()
        # readings may be kept for long, so values that have arrived leave their pinned memory
        while under_way and under_way[0].ready:
            under_way.popleft().land()
        under_way.append(sent)
    return sent


class ScalarReadback:
    """Numbers as they are now, written into host memory by a kernel.

    It runs in the order of the current stream, so later changes of the tensors do not matter. The conversion to double
    makes it a kernel: a plain copy, and the stream with it, would wait while the copy engine is busy with large copies.
    """

    __slots__ = ("_arrived", "_device", "_doubles", "_places", "_slot")

    def __init__(self, device: torch.device, slot: PinnedSlot) -> None:
        self._device, self._slot, self._arrived = device, slot, False
        self._places: list[tuple[int, torch.dtype, torch.Size]] = []
        self._doubles: list[float] = []

    @classmethod
    def send(cls, tensors: Sequence[Tensor], device: torch.device) -> ScalarReadback | None:
        """None for other tensors, or if the device cannot write to host memory. Each operation counts."""
        count = 0
        for tensor in tensors:
            size = _DOUBLES.get(tensor.dtype, SLOT_DOUBLES + 1)
            if tensor.numel() != 1 or (size == 2 and tensor.is_neg()):
                return None
            count += size
        if count > SLOT_DOUBLES:
            return None
        slot = _take(device)
        if slot.on_device is None:
            _give_back(device, slot)
            return None
        sent = cls(device, slot)
        start = 0
        for tensor in tensors:
            dtype, detached = tensor.dtype, tensor.detach() if tensor.requires_grad else tensor
            sent._places.append((start, dtype, tensor.shape))
            if _DOUBLES[dtype] == 1:
                slot.double(start).copy_(detached.view(()) if detached.ndim else detached)
                start += 1
            else:
                slot.on_device[start : start + 2].copy_(detached.view(1).view(torch.int32))
                start += 2
        slot.event.record(current_stream(device))
        return sent

    @property
    def ready(self) -> bool:
        """Whether the numbers have arrived."""
        if not self._arrived:
            self._arrived = bool(self._slot.event.query())
        return self._arrived

    def land(self) -> None:
        """Wait for the numbers, if necessary, and give the pinned memory back."""
        if not self.ready:
            self._slot.event.synchronize()
            self._arrived = True
        if not self._doubles:
            with _LANDING:
                if not self._doubles:
                    self._doubles = self._slot.on_host.tolist()
                    _give_back(self._device, self._slot)

    def number(self, place: int) -> Any:
        """One of the numbers, without making a tensor."""
        self.land()
        start, dtype, _ = self._places[place]
        return _PYTHON_TYPES[dtype](self._doubles[start]) if dtype in _PYTHON_TYPES else self.open(place).item()

    def open(self, place: int) -> Tensor:
        """One of the numbers, as a host tensor."""
        self.land()
        start, dtype, shape = self._places[place]
        if _DOUBLES[dtype] == 1:
            return torch.tensor(self._doubles[start], dtype=dtype, device="cpu").view(shape)
        halves = [int(half) for half in self._doubles[start : start + 2]]
        return torch.tensor(halves, dtype=torch.int32, device="cpu").view(dtype).view(shape)


def full_value(tensor: Tensor) -> Tensor:
    """The full value of a tensor; a sharded one is gathered, so all ranks that hold a part must call."""
    return tensor if tensor.__class__ is Tensor or not hasattr(tensor, "full_tensor") else tensor.full_tensor()


def refuse_capture(call: str, remedy: str) -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{call} was called while a CUDA graph is being captured, where nothing can be read; {remedy}."
        )


class Arriving(Protocol):
    """Values on their way to the host."""

    @property
    def ready(self) -> bool:
        """Whether the values have arrived."""

    def land(self) -> None:
        """Wait for the values, if necessary, and give pinned memory back."""

    def open(self, place: int) -> Tensor:
        """One of the values, on the host."""


class HostReadback:
    """Copies of host values as they were at the call."""

    ready = True

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.detach().to("cpu", copy=True) for tensor in tensors]

    def send(self) -> HostReadback:
        return self

    def land(self) -> None: ...

    def open(self, place: int) -> Tensor:
        return self._tensors[place]


class TensorReadback:
    """Tensors of one CUDA device as they are now, whatever the program does to them afterwards.

    They are copied on the device first, in the order of the current stream. The program can neither overwrite nor free
    such a copy, so nothing has to wait until it has reached the host. If the device has no room for copies, the current
    stream waits until the tensors are on the host.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._device, self._inference = tensors[0].device, torch.is_inference_mode_enabled()
        self._stream = readback_stream(self._device)
        plain = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
        self._kinds = [_Kind(tensor.nbytes, tensor.dtype, tensor.shape) for tensor in plain]
        small = [tensor for tensor in plain if tensor.nbytes < _PACKED_BELOW]
        if len(small) < 2:  # a single tensor keeps its type
            packed = [tensor.clone(memory_format=torch.contiguous_format) for tensor in small]
        else:  # small tensors of any types are joined to bytes by a single launch
            packed = [torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in small])]
        self._pieces = [*packed, *self._copies_of([tensor for tensor in plain if tensor.nbytes >= _PACKED_BELOW])]
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(self._device))
        self._slots: list[PinnedSlot] = []
        self._on_host: list[Tensor] = []
        self._tensors: list[Tensor] = []

    def _copies_of(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Copies on the device. Tensors without room there go to the host at once, and the current stream waits."""
        current = torch.cuda.current_stream(self._device)
        room = _room(self._device, sum(tensor.nbytes for tensor in tensors))
        for tensor in tensors:
            room -= tensor.nbytes
            copy = None
            if room >= 0:
                with suppress(torch.cuda.OutOfMemoryError):
                    copy = tensor.clone()
            if copy is None:
                self._stream.wait_stream(current)
                with torch.cuda.stream(self._stream):
                    copy = tensor.to("cpu", non_blocking=True)
                current.wait_stream(self._stream)
            yield copy

    def send(self) -> TensorReadback:
        """Copy the tensors to the host, on another stream."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._event)
            for piece in self._pieces:
                if piece.nbytes > _SLOT_BYTES:
                    # a copy that does not block goes to pinned memory, which PyTorch's allocator caches
                    self._on_host.append(piece.to("cpu", non_blocking=True))
                else:
                    self._slots.append(_take(self._device))
                    host = self._slots[-1].bytes[: piece.nbytes].view(piece.dtype).view(piece.shape)
                    self._on_host.append(host.copy_(piece, non_blocking=True))
            self._event = self._stream.record_event()
        return self

    @property
    def ready(self) -> bool:
        """Whether all tensors have arrived."""
        return bool(self._tensors) or bool(self._event.query())

    def land(self) -> None:
        """Wait for the tensors, if necessary, and for nothing that was launched after them."""
        if not self._tensors and not self._event.query():
            self._event.synchronize()
        with _UNPACKING:
            if not self._tensors:
                with torch.inference_mode(self._inference):  # as when they were sent
                    self._tensors = list(_unpacked(self._on_host, self._kinds))
                for slot in self._slots:
                    _give_back(self._device, slot)
                self._pieces, self._on_host, self._slots = [], [], []

    def open(self, place: int) -> Tensor:
        """One of the tensors, on the host."""
        self.land()
        return self._tensors[place]


class _Kind(NamedTuple):
    size: int
    dtype: torch.dtype
    shape: torch.Size


def _unpacked(on_host: Sequence[Tensor], kinds: Sequence[_Kind]) -> Iterator[Tensor]:
    """The tensors; small ones are copied, so that their pinned memory can be reused."""
    remaining, start = iter(on_host), 0
    small = [kind for kind in kinds if kind.size < _PACKED_BELOW]
    pack = next(remaining) if small else None
    for kind in kinds:
        if pack is None or kind.size >= _PACKED_BELOW:
            yield next(remaining)
        elif len(small) == 1:
            yield pack.clone()
        else:
            yield pack[start : start + kind.size].clone().view(kind.dtype).view(kind.shape)
            start += kind.size


def _room(device: torch.device, size: int) -> int:
    """Bytes for copies on the device: half of what is free beside this process's peak and other processes."""
    if size <= _COPIED_UNASKED:
        return size
    free, _ = torch.cuda.mem_get_info(device)
    return (free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)) // 2


@cache
def readback_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class PinnedSlot:
    """A piece of pinned memory for the host, and for the device if that can write there itself.

    Memory is pinned a page of slots at a time, since pinning makes the host wait for the device.
    """

    __slots__ = ("_doubles", "bytes", "event", "on_device", "on_host")

    def __init__(self, on_host: Tensor, on_device: Tensor | None) -> None:
        self.on_host, self.bytes, self.on_device = on_host, on_host.view(torch.uint8), on_device
        self.event = torch.cuda.Event()
        self._doubles: dict[int, Tensor] = {}

    def double(self, place: int) -> Tensor:
        """One double, as a device tensor."""
        double = self._doubles.get(place)
        if double is None:
            assert self.on_device is not None
            double = self._doubles[place] = self.on_device[place]
        return double


class _DeviceArray:
    """Pinned memory as a device array: CUDA lets kernels write there."""

    def __init__(self, page: Tensor) -> None:
        self.page = page  # kept while tensors use it
        place, shape = (page.data_ptr(), False), tuple(page.shape)
        self.__cuda_array_interface__ = {"data": place, "shape": shape, "typestr": "<f8", "version": 2}


_FREE_SLOTS: dict[torch.device, list[PinnedSlot]] = {}
_NEW_SLOTS: dict[torch.device, Iterator[PinnedSlot]] = {}


def _take(device: torch.device) -> PinnedSlot:
    """A slot that is not in use."""
    try:
        return _FREE_SLOTS[device].pop()
    except (KeyError, IndexError):
        with _PINNING:
            _FREE_SLOTS.setdefault(device, [])
            return next(_NEW_SLOTS.setdefault(device, _new_slots(device)))


def _give_back(device: torch.device, slot: PinnedSlot) -> None:
    _FREE_SLOTS[device].append(slot)


def _new_slots(device: torch.device) -> Iterator[PinnedSlot]:
    while True:
        # made outside of inference mode: slots of an evaluation are used in training, too
        with torch.inference_mode(False), torch.cuda.device(device):
            page = torch.zeros(_SLOTS_PER_PAGE * SLOT_DOUBLES, dtype=torch.float64, device="cpu", pin_memory=True)
            on_device = None
            with suppress(RuntimeError, TypeError, ValueError):  # PyTorch or the driver may not support it
                device_view = torch.as_tensor(_DeviceArray(page), device=device)
                on_device = device_view if device_view.data_ptr() == page.data_ptr() else None
        for start in range(0, len(page), SLOT_DOUBLES):
            piece = slice(start, start + SLOT_DOUBLES)
            yield PinnedSlot(page[piece], None if on_device is None else on_device[piece])
