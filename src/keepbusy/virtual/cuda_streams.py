"""`torch.cuda.Stream` and `torch.cuda.Event`, on the virtual clock."""

from __future__ import annotations

from typing import Any, Self

import torch

from keepbusy.virtual import sync_debug
from keepbusy.virtual.clock import BEGINNING
from keepbusy.virtual.current import CURRENT
from keepbusy.virtual.machine import MACHINE

_CUDA = 1  # c10::DeviceType


class Event:
    """A point in the order of a stream. Until it is recorded, nobody waits for it."""

    def __init__(
        self,
        device: Any = None,
        *,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        if interprocess:
            raise NotImplementedError("keepbusy's virtual GPU has no events that processes share.")
        self.moment = BEGINNING
        self.device: torch.device | None = None if device is None else torch.device("cuda", CURRENT.index(device))
        self._has_timing, self._is_external = enable_timing, external

    @property
    def cuda_event(self) -> int:
        return id(self)

    event_id = cuda_event

    def record(self, stream: Stream | None = None) -> None:
        stream = current_stream() if stream is None else stream
        self.device = stream.device
        if self._is_external and stream.is_capturing():
            raise NotImplementedError("keepbusy's virtual GPU records no external events within CUDA graphs.")
        self.moment = MACHINE.clock.record(stream.lane)

    def wait(self, stream: Stream | None = None) -> None:
        (current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        return self.moment is BEGINNING or MACHINE.clock.query(self.moment)

    def synchronize(self) -> None:
        with _here("cudaEventSynchronize"):
            MACHINE.clock.sync_moment(self.moment)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds."""
        if not (self._has_timing and end_event._has_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if BEGINNING in (self.moment, end_event.moment):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return MACHINE.clock.elapsed(self.moment, end_event.moment) / 1e6

    def ipc_handle(self) -> bytes:
        raise NotImplementedError("keepbusy's virtual GPU has no events that processes share.")

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {'uninitialized' if self.moment is BEGINNING else hex(id(self))}>"


class Stream:
    """An in-order queue of one device; two objects of the same queue are equal."""

    lane: int
    device_index: int
    priority: int

    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Self:
        index = given.get("device_index", CURRENT.index(device))
        lane = given.get("stream_id")
        return cls._of(index, MACHINE.clock.new_stream(index) if lane is None else lane, priority)

    @classmethod
    def _of(cls, index: int, lane: int, priority: int = 0) -> Self:
        stream = object.__new__(cls)
        stream.device_index, stream.lane, stream.priority = index, lane, priority
        return stream

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    @property
    def stream_id(self) -> int:
        return self.lane

    @property
    def cuda_stream(self) -> int:
        return 0 if self.lane == MACHINE.clock.default_stream(self.device_index) else self.lane

    native_handle = cuda_stream
    device_type = _CUDA

    def synchronize(self) -> None:
        sync_debug.about_to_wait()
        with _here("cudaStreamSynchronize"):
            MACHINE.clock.sync_stream(self.lane)

    def wait_event(self, event: Event) -> None:
        MACHINE.clock.wait(self.lane, event.moment)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return MACHINE.clock.idle(self.lane)

    def is_capturing(self) -> bool:
        return MACHINE.clock.capturing(self.lane)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.lane, self.device_index) == (other.lane, other.device_index)

    def __hash__(self) -> int:
        return hash((self.lane, self.device_index))

    def __enter__(self) -> Self:
        self._inside = StreamContext(self)
        self._inside.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._inside.__exit__(*error)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5


class StreamContext:
    """`with torch.cuda.stream(...)`: its stream and device are the current ones inside."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            MACHINE.clock.spend(MACHINE.device.host.event)
            self._device = CURRENT.change(self.stream.device_index)
            self._before = MACHINE.choose_stream(self.stream.device_index, self.stream.lane)

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            MACHINE.clock.spend(MACHINE.device.host.event)
            MACHINE.choose_stream(self.stream.device_index, self._before)
            CURRENT.change(self._device)


def current_stream(device: Any = None) -> Stream:
    index = CURRENT.index(device)
    return Stream._of(index, MACHINE.stream(index))


def default_stream(device: Any = None) -> Stream:
    index = CURRENT.index(device)
    return Stream._of(index, MACHINE.clock.default_stream(index))


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        CURRENT.change(stream.device_index)
        MACHINE.choose_stream(stream.device_index, stream.lane)


def synchronize(device: Any = None) -> None:
    with _here("cudaDeviceSynchronize"):
        MACHINE.clock.sync_device(CURRENT.index(device))


class _here:  # noqa: N801  # reads as a word: with _here("cudaDeviceSynchronize")
    """What happens inside stands at the line that called."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        MACHINE.begin(self.name)

    def __exit__(self, *error: object) -> None:
        MACHINE.end()
