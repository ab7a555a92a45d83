"""`readback`: a value of the device that arrives on the host later. Nobody waits for it before somebody needs it.

Numbers are written home by a kernel, into pinned memory; tensors are set aside on the device and copied there beside
the compute.
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
"""They are pinned at once: about as many values as can be under way before a launch has to wait anyway."""
_PACKED_BELOW = 1 << 20
"""Bytes. Tensors below travel as one."""
_COPIED_UNASKED = 64 << 20
"""So many bytes are set aside without asking how much room there is."""
_NUMBERS = (int, float, complex)
_ONE_DOUBLE: dict[torch.dtype, type] = {
    **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), float), torch.bool: bool,
    **dict.fromkeys((torch.int32, torch.int16, torch.int8, torch.uint8), int),
}  # fmt: skip
"""And what Python makes of it."""
_DOUBLES = {**dict.fromkeys(_ONE_DOUBLE, 1), torch.int64: 2, torch.float64: 2}
"""A double holds each value of most types; two hold the halves of the others."""
_SENDING, _LANDING, _UNPACKING, _PINNING = Lock(), Lock(), Lock(), Lock()


def readback(value: Any) -> Any:
    """Read a value of the device without making the host wait: `losses.append(keepbusy.readback(loss))`.

    Returns a `Reading` for a tensor; for dicts, lists, tuples and whatever else PyTorch knows as a pytree the same with
    a `Reading` for each tensor, all of them brought home by one copy. A reading is the value as it is now: what happens
    to the tensor afterwards (an update in place, the next replay of a graph) does not change it.

    `float(reading)` and its like wait only if the value is not there yet, and then for this value alone, not for what
    was launched after it. Read a step later, it is usually there. Tensors of the host are read at once; numbers stay
    as they are. While a CUDA graph is being captured nothing can be read: return the tensor, read it after the replay.
    """
    if isinstance(value, Tensor):
        return Reading(send([whole(value)]))
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
        tensor = whole(leaves[place])
        by_device.setdefault(tensor.device, {})[place] = tensor
    for tensors in by_device.values():  # those of one device travel together
        arriving = send(list(tensors.values()))
        for number, place in enumerate(tensors):
            leaves[place] = Reading(arriving, number)
    return tree_unflatten(leaves, structure)


class Reading:
    """A value of the device on its way to the host. It is a number once it is asked for one, not before."""

    __slots__ = ("_place", "_sent")

    def __init__(self, sent: Arriving, place: int = 0) -> None:
        self._sent, self._place = sent, place

    @property
    def ready(self) -> bool:
        """Whether it is there, so that reading it will not wait."""
        return self._sent.ready

    @property
    def tensor(self) -> Tensor:
        """The value as a tensor of the host."""
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
    """Means and checks of many values, for one copy a step and without making the host wait for the step it is in.

        readings = Readings()
        for step, batch in enumerate(loader):
            ...
            readings.add(loss=loss, accuracy=accuracy, rate=schedule.get_last_lr()[0])
            if readings.nonfinite():
                break
            if step % 100 == 0:
                print(readings.means())
        print(readings.means(last=True))

    Every answer is one step late: it is about all steps but the last one added, so that the device still has that one
    to do while the host reads. It does not depend on how fast anything ran. `last=True` counts the last step too, and
    waits for it: that is for the end of an epoch. Sums are kept in double precision.
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
                found = f"a tensor of shape {tuple(value.shape)}" if is_tensor else f"a {type(value).__name__}"
                raise ValueError(
                    f"add({name}=...) was given {found}, and a mean is kept of single numbers; give {name}'s own mean."
                )
        self._uncounted.append(readback(values))
        while len(self._uncounted) > 1 and all(getattr(value, "ready", True) for value in self._uncounted[0].values()):
            self._count(self._uncounted.popleft())

    def means(self, *, last: bool = False) -> dict[str, float]:
        """Of each name the mean since the last `reset()`."""
        self._read(last)
        return {name: total / self._counts[name] for name, total in self._sums.items()}

    def nonfinite(self, *, last: bool = False) -> list[str]:
        """The names that were infinite or not a number since the last `reset()`: a check that does not stall."""
        self._read(last)
        return list(self._nonfinite)

    def reset(self) -> None:
        """Begin anew. What has not been counted yet, the step added last, belongs to the new beginning."""
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
"""Of each device what has not arrived as far as anybody looked, in the order in which it was sent."""


def send(tensors: list[Tensor]) -> Arriving:
    """All of one device, on their way."""
    device = tensors[0].device
    if device.type != "cuda":
        return HostReadback(tensors)
    refuse_capture("readback()", "return the tensor from what is captured, and read it back after the replay")
    sent = ScalarReadback.send(tensors, device) or TensorReadback(tensors).send()
    with _SENDING:
        under_way = _UNDER_WAY.get(device)
        if under_way is None:
            under_way = _UNDER_WAY[device] = deque()
        # readings may be kept for long: what has arrived leaves its memory to others. This one is only being sent
        while under_way and under_way[0].ready:
            under_way.popleft().land()
        under_way.append(sent)
    return sent


class ScalarReadback:
    """Numbers as they are now, brought home by no copy: a kernel writes them into the host's memory.

    It runs in the order of the current stream, so it reads what the program meant, whatever happens to the tensors
    afterwards. Converting to double is what makes it a kernel: a plain copy, and the stream with it, would wait for
    the copy engine whenever something large is on its way home.
    """

    __slots__ = ("_arrived", "_device", "_doubles", "_places", "_slot")

    def __init__(self, device: torch.device, slot: PinnedSlot) -> None:
        self._device, self._slot, self._arrived = device, slot, False
        self._places: list[tuple[int, torch.dtype, torch.Size]] = []
        self._doubles: list[float] = []

    @classmethod
    def send(cls, tensors: Sequence[Tensor], device: torch.device) -> ScalarReadback | None:
        """None where they are no numbers, or the device cannot write home. Called every step: each operation counts."""
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
            dtype, bare = tensor.dtype, tensor.detach() if tensor.requires_grad else tensor
            sent._places.append((start, dtype, tensor.shape))
            if _DOUBLES[dtype] == 1:
                slot.double(start).copy_(bare.view(()) if bare.ndim else bare)
                start += 1
            else:
                slot.on_device[start : start + 2].copy_(bare.view(1).view(torch.int32))
                start += 2
        slot.event.record(current_stream(device))
        return sent

    @property
    def ready(self) -> bool:
        """Whether they are there."""
        if not self._arrived:
            self._arrived = bool(self._slot.event.query())
        return self._arrived

    def land(self) -> None:
        """Wait for them, if it must, and leave the pinned memory to others."""
        if not self.ready:
            self._slot.event.synchronize()
            self._arrived = True
        if not self._doubles:
            with _LANDING:
                if not self._doubles:
                    self._doubles = self._slot.on_host.tolist()
                    _give_back(self._device, self._slot)

    def number(self, place: int) -> Any:
        """One of the numbers, without a tensor for it on the way."""
        self.land()
        start, dtype, _ = self._places[place]
        return _ONE_DOUBLE[dtype](self._doubles[start]) if dtype in _ONE_DOUBLE else self.open(place).item()

    def open(self, place: int) -> Tensor:
        """One of the numbers, as a tensor of the host."""
        self.land()
        start, dtype, shape = self._places[place]
        if _DOUBLES[dtype] == 1:
            return torch.tensor(self._doubles[start], dtype=dtype, device="cpu").view(shape)
        halves = [int(half) for half in self._doubles[start : start + 2]]
        return torch.tensor(halves, dtype=torch.int32, device="cpu").view(dtype).view(shape)


def whole(tensor: Tensor) -> Tensor:
    """Of a tensor that ranks share the value of the whole: all of them read it, as all of them hold a part."""
    return tensor if tensor.__class__ is Tensor or not hasattr(tensor, "full_tensor") else tensor.full_tensor()


def refuse_capture(who: str, remedy: str) -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{who} was called while a CUDA graph is being captured, where nothing can be read; {remedy}."
        )


class Arriving(Protocol):
    """Values that arrive on the host."""

    @property
    def ready(self) -> bool:
        """Whether they are there."""

    def land(self) -> None:
        """Wait for them, if it must, and leave the memory that they travelled in to others."""

    def open(self, place: int) -> Tensor:
        """One of the values, on the host."""


class HostReadback:
    """Values that need no way home, as they were at the call."""

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

    They are copied on the device first, in the order of the current stream. A copy that is nobody else's can be neither
    overwritten nor freed on its way home, so nothing has to wait for it; it is kept until it is known to be there.
    Where the device has no room for copies, the current stream, and nobody else, waits until the tensors are home.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._device, self._inference = tensors[0].device, torch.is_inference_mode_enabled()
        self._stream = readback_stream(self._device)
        plain = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
        self._kinds = [_Kind(tensor.nbytes, tensor.dtype, tensor.shape) for tensor in plain]
        small = [tensor for tensor in plain if tensor.nbytes < _PACKED_BELOW]
        if len(small) < 2:  # a single one keeps its type
            packed = [tensor.clone(memory_format=torch.contiguous_format) for tensor in small]
        else:  # small tensors of any types travel as one tensor of bytes, made by a single launch
            packed = [torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in small])]
        self._pieces = [*packed, *self._copies_of([tensor for tensor in plain if tensor.nbytes >= _PACKED_BELOW])]
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(self._device))
        self._slots: list[PinnedSlot] = []
        self._on_host: list[Tensor] = []
        self._tensors: list[Tensor] = []

    def _copies_of(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """On the device. What it has no room for goes home at once, and whatever the current stream does next waits."""
        current = torch.cuda.current_stream(self._device)
        room = _room(self._device, sum(tensor.nbytes for tensor in tensors))
        for tensor in tensors:
            room -= tensor.nbytes
            copied = None
            if room >= 0:
                with suppress(torch.cuda.OutOfMemoryError):
                    copied = tensor.clone()
            if copied is None:
                self._stream.wait_stream(current)
                with torch.cuda.stream(self._stream):
                    copied = tensor.to("cpu", non_blocking=True)
                current.wait_stream(self._stream)
            yield copied

    def send(self) -> TensorReadback:
        """Bring them home, on a stream of their own."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._event)
            for piece in self._pieces:
                if piece.nbytes > _SLOT_BYTES:
                    # told not to wait, PyTorch takes pinned memory, which its caching allocator keeps
                    self._on_host.append(piece.to("cpu", non_blocking=True))
                else:
                    self._slots.append(_take(self._device))
                    host = self._slots[-1].bytes[: piece.nbytes].view(piece.dtype).view(piece.shape)
                    self._on_host.append(host.copy_(piece, non_blocking=True))
            self._event = self._stream.record_event()
        return self

    @property
    def ready(self) -> bool:
        """Whether they are all there."""
        return bool(self._tensors) or bool(self._event.query())

    def land(self) -> None:
        """Wait if it must: for them, and for nothing that was launched after them."""
        if not self._tensors and not self._event.query():
            self._event.synchronize()
        with _UNPACKING:
            if not self._tensors:
                with torch.inference_mode(self._inference):  # of when they were sent
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
    """Small ones go into memory of their own: the pinned memory is for what is still on its way."""
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


def _room(device: torch.device, wanted: int) -> int:
    """Bytes to set aside: half of what this process at its peak and all others have left of the device."""
    if wanted <= _COPIED_UNASKED:
        return wanted
    free, _ = torch.cuda.mem_get_info(device)
    return (free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)) // 2


@cache
def readback_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class PinnedSlot:
    """A piece of pinned memory as the host sees it, and as the device does where it can write there itself.

    It is pinned a page at a time: pinning more makes the host wait for the device.
    """

    __slots__ = ("_doubles", "bytes", "event", "on_device", "on_host")

    def __init__(self, on_host: Tensor, on_device: Tensor | None) -> None:
        self.on_host, self.bytes, self.on_device = on_host, on_host.view(torch.uint8), on_device
        self.event = torch.cuda.Event()
        self._doubles: dict[int, Tensor] = {}

    def double(self, place: int) -> Tensor:
        """One double, as the device sees it."""
        double = self._doubles.get(place)
        if double is None:
            assert self.on_device is not None
            double = self._doubles[place] = self.on_device[place]
        return double


class _DeviceArray:
    """Pinned memory, said to be an array of the device: CUDA lets kernels write there."""

    def __init__(self, page: Tensor) -> None:
        self.page = page  # kept for as long as tensors lie in it
        place, shape = (page.data_ptr(), False), tuple(page.shape)
        self.__cuda_array_interface__ = {"data": place, "shape": shape, "typestr": "<f8", "version": 2}


_UNUSED: dict[torch.device, list[PinnedSlot]] = {}
_FRESH: dict[torch.device, Iterator[PinnedSlot]] = {}


def _take(device: torch.device) -> PinnedSlot:
    """A slot that nothing travels to."""
    try:
        return _UNUSED[device].pop()
    except (KeyError, IndexError):
        with _PINNING:
            _UNUSED.setdefault(device, [])
            return next(_FRESH.setdefault(device, _fresh(device)))


def _give_back(device: torch.device, slot: PinnedSlot) -> None:
    _UNUSED[device].append(slot)


def _fresh(device: torch.device) -> Iterator[PinnedSlot]:
    while True:
        # whoever reads first during an evaluation will read during the next training
        with torch.inference_mode(False), torch.cuda.device(device):
            page = torch.zeros(_SLOTS_PER_PAGE * SLOT_DOUBLES, dtype=torch.float64, device="cpu", pin_memory=True)
            on_device = None
            with suppress(RuntimeError, TypeError, ValueError):  # this build of PyTorch or the driver may not offer it
                shown = torch.as_tensor(_DeviceArray(page), device=device)
                on_device = shown if shown.data_ptr() == page.data_ptr() else None
        for start in range(0, len(page), SLOT_DOUBLES):
            piece = slice(start, start + SLOT_DOUBLES)
            yield PinnedSlot(page[piece], None if on_device is None else on_device[piece])
