"""The virtual machine of this process: clock, streams and memory, for kernels and patches."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import median
from threading import get_ident
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from keepbusy.program.lines import Places
from keepbusy.program.loops.iteration_counts import VIRTUAL_LIMIT, IterationCounter
from keepbusy.program.loops.run_loops import LoopEvidence, with_loops
from keepbusy.timeline.model import Direction, FrameKind, Timeline
from keepbusy.timeline.races import DataRace
from keepbusy.timeline.run_facts import allocator_settings
from keepbusy.torch_names.dispatcher import precision_of
from keepbusy.torch_names.distributed import LOCAL_PART
from keepbusy.virtual.clock.engine import Clock
from keepbusy.virtual.clock.host_thread import NOISE_LIMIT, HostThread
from keepbusy.virtual.clock.order import Origin
from keepbusy.virtual.clock.real_time import HostTime, PlaceSampler, UncountedWork
from keepbusy.virtual.costs.device import Device
from keepbusy.virtual.costs.operator_costs import OperatorCosts
from keepbusy.virtual.device_memory import Memory
from keepbusy.virtual.device_tensors import DeviceTensors
from keepbusy.virtual.found_races import FoundRaces
from keepbusy.virtual.pytorch.backward_streams import ForwardStreams
from keepbusy.virtual.pytorch.tensors import Pages, to_host

_NATIVE_CALL, _NATIVE_RELEASE = 3_000, 500
"""Nanoseconds of PyTorch itself for calling an operator from Python, without its launch, and for freeing a tensor."""
_BATCHES, _CALLS, _PASSES = 6, 50, 4
_FOREVER = 1 << 62


class Current(threading.local):
    """The current device of the calling thread."""

    count = 1  # how many devices there are; the same in every thread
    device = 0

    def change(self, device: int) -> int:
        """Make `device` current and return the previous one; a negative number changes nothing."""
        before = self.device
        if device >= 0:
            self.device = self._known(device)
        return before

    def index(self, device: torch.device | int | str | None) -> int:
        """The number of a device; None, or a device without a number, is the current one."""
        number = device if device is None or isinstance(device, int) else torch.device(device).index
        return self.device if number is None or number < 0 else self._known(number)

    def _known(self, device: int) -> int:
        if device >= self.count:
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        return device


CURRENT = Current()


def _accelerator_error(text: str, code: int) -> Exception:
    """The exception that PyTorch raises for a CUDA error."""
    error: Exception = torch.AcceleratorError(text)
    error.error_code = code  # type: ignore[attr-defined]
    return error


@cache
def _name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`: the key of costs."""
    return str(dtype).removeprefix("torch.")


class Machine(DeviceTensors):
    """Everything that is virtual in this process."""

    device: Device
    costs: OperatorCosts
    places: Places
    rank: int | None = None
    """The rank of this process; None until the program makes a process group."""
    alike = 1
    """How many equal ranks this process stands for."""
    iterations = IterationCounter(lambda: 0)
    uncounted: UncountedWork | None = None
    """Host work that a modelled clock leaves out."""
    compiled_eagerly = False
    """Whether the program called `torch.compile`, which runs eagerly on the virtual GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] | None = []  # notes for the report; None, as in tests: failures are raised instead

    def start(self, device: Device, devices: int, rank: int, measured: bool) -> None:
        Current.count = devices
        self.device = device
        self._options = (device, rank, devices, measured)
        self._call_overhead = self.release_overhead = self._calls = 0
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Start with an empty clock. A forked process has its own time, and must not inherit a lock that is held."""
        device, rank, devices, measured = self._options
        self._sampler: PlaceSampler | None = None
        self.forward_streams = ForwardStreams()
        self.clock = Clock(device, rank, HostTime if measured else None)
        self.memory = Memory(self.clock, devices)
        self.pages = Pages(device.copies.mapped)
        self.costs = OperatorCosts(device, lambda: precision_of("cuda", "matmul") == "tf32", self.notes)
        self.clock.captures.raises = _accelerator_error
        self.iterations.end()
        self.iterations = IterationCounter(self.clock.first_thread.moment, VIRTUAL_LIMIT)
        self.iterations.begin()
        self.places = Places(self.clock.place)
        self._busy_lines: dict[tuple[int, int], int] = {}  # by the places of two calls, the place between
        self.recording = None

    def calibrate(self) -> None:
        """Measure our own share of host time, which is left out: per operator call, and per tensor that is freed."""
        options = self._options
        if not options[-1]:
            self.uncounted = UncountedWork(self.clock.first_thread)
            self.uncounted.begin()
            return
        quick = replace(self.device, host=replace(self.device.host, operator=0, launch=0))
        self._options = quick, *options[1:]
        self._begin()  # with a host that costs nothing, only real time passes
        square, bias = (torch.ones(size, device="cuda", requires_grad=True) for size in ((16, 16), (16,)))
        releases = []
        for _ in range(_BATCHES):
            batch = [torch.add(square, square) for _ in range(_CALLS)]
            begun = perf_counter_ns()
            batch.clear()
            releases.append((perf_counter_ns() - begun) // _CALLS)
        calls = round(median(self._time_between_operators(square, bias) for _ in range(_BATCHES)))
        self.release_overhead = max(0, min(releases) - _NATIVE_RELEASE)
        self._call_overhead = max(0, calls - _NATIVE_CALL)
        self._options = options
        self._begin()
        host = self.clock.first_thread
        assert isinstance(host.real, HostTime)
        self._sampler = PlaceSampler(host, host.real, self.places.current_place)
        self._sampler.begin()

    def _time_between_operators(self, square: Tensor, bias: Tensor) -> int:
        """Measured with typical layers: in a short loop all our code would be cached."""
        before, calls_before = self.clock.now(), self._calls
        for _ in range(_PASSES):
            x = functional.layer_norm(square, (16,), bias, bias)
            x = square + functional.gelu(functional.linear(x, square, bias))
            x = functional.linear(x.view(4, 4, 16).transpose(0, 1), square)
            functional.softmax(x.reshape(4, 4, 16), -1).sum()
        return (self.clock.now() - before) // (self._calls - calls_before)

    # operators

    def pause(self) -> HostThread:
        """The dispatcher called us. Stop real time, less the overhead that a GPU's kernel would not have."""
        self._calls += 1
        host = self.clock.threads.get(get_ident()) or self.clock.host()
        host.pause(self._call_overhead)
        return host

    def pause_at(self) -> tuple[HostThread, int]:
        """The same, and the place of the call: see `place`."""
        host = self.pause()
        place, sampler = self.places.current_place(), self._sampler
        if sampler is not None and (sampler.samples or host.unwritten_time > NOISE_LIMIT):
            self._catch_up(sampler, host, place)
        return host, place

    def enter(self, kind: FrameKind, name: str) -> None:
        """A frame of the program begins: see `Clock.enter`."""
        with self.clock.host():
            self.clock.enter(kind, name, self.place())

    def place(self) -> int:
        """The place of the call, after the program's work up to it is written down."""
        place = self.places.current_place()
        if self._sampler is not None:
            self._catch_up(self._sampler, self.clock.host(), place)
        return place

    def _catch_up(self, sampler: PlaceSampler, host: HostThread, place: int) -> None:
        """Attribute the time up to a call at `place`. The program was at the line of the last sample until the call.
        Samples are a millisecond apart; without one, it was where it was the last time between the same two calls."""
        if not isinstance(host.real, HostTime) or get_ident() != sampler.thread:
            return
        cost, samples = sampler.take()
        host.unwritten_time -= cost
        between = host.place, place
        busy_lines = [line for moment, line in samples if self.clock.attribute(line, host.real.at(moment))]
        if busy_lines:
            self._busy_lines[between] = busy_lines[-1]
        if between in self._busy_lines and (busy_lines or host.unwritten_time > NOISE_LIMIT):
            self.clock.attribute(self._busy_lines[between], _FOREVER)

    def kernels(
        self, name: str, inputs: Iterable[Tensor], outputs: Iterable[Tensor], arguments: Mapping[str, Any] | None = None
    ) -> Sequence[tuple[str, int]]:
        """The kernels that a GPU would run for an operator. `arguments`: those that its cost depends on."""
        operands = tuple((tensor.shape, _name(tensor.dtype), tensor.stride()) for tensor in inputs)
        results = tuple((tensor.shape, _name(tensor.dtype), tensor.stride()) for tensor in outputs)
        return self.costs.kernels(name, operands, results, arguments)

    def launch(self, device: int, name: str, inputs: Any, outputs: Any, arguments: Mapping[str, Any]) -> None:
        """Launch an operator's kernels, after the operator has begun."""
        self.clock.launch(self.stream(device), self.kernels(name, inputs, outputs, arguments))

    def copy(
        self, device: int, size: int, direction: Direction, *, pinned: bool, non_blocking: bool, fresh: int = 0
    ) -> None:
        """A copy between host and device. `fresh`: bytes of host memory that were never touched."""
        self.clock.copy(self.stream(device), direction, size, pinned, non_blocking, fresh)

    def read_clock(self) -> tuple[int, bool]:
        """The program reads its clock. Returns the time of the calling thread, and whether the clock knows that thread;
        an unknown thread, which does not use the device, gets the time of the first one."""
        if get_ident() not in self.clock.threads:
            return self.clock.first_thread.now, False
        with self.clock.host():
            return self.clock.read(self.place()), True

    def end(self) -> None:
        """The program ends. Its last work belongs to the run; leaving Python does not."""
        self.read_clock()
        self.clock.pause()

    def peek(self, read: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        """The result of a function on the tensor's values. Nothing is copied, and no time passes."""
        with self.clock.host():
            own = getattr(tensor, LOCAL_PART, tensor)  # this rank's part of a distributed tensor
            return read(to_host(own.data) if own.is_cuda else own)

    def origin_here(self) -> Origin:
        """The place where a stream or an event is made, by which its name in the program is found."""
        with self.clock.host():
            return self.clock.order.new_origin(self.places.current_place())

    def timeline(self, **facts: Any) -> Timeline:
        """The run so far, with its loops if it used a device. `facts` are added to those known here."""
        timeline = self.clock.timeline(**{**self.facts(), **facts})
        timeline = timeline.change(lanes=FoundRaces(self.clock, self.places.lines).named(timeline.lanes))
        if not timeline.on_device.any():
            return timeline
        lines, lane, counted = self.places.lines, self.clock.first_thread.lane, self.iterations.counted
        evidence = LoopEvidence(lines, lane, counted, self.clock.queues.wires, self.clock.rows.announced)
        return with_loops(timeline, evidence)

    def races(self) -> tuple[DataRace, ...]:
        """The data races so far."""
        return FoundRaces(self.clock, self.places.lines).all(self.memory.accesses)

    def facts(self) -> dict[str, Any]:
        """Values of `RunFacts`."""
        return {
            "torch": torch.__version__,
            "allocator": allocator_settings(),
            "modelled": not self._options[-1],
            "compiled_eagerly": self.compiled_eagerly,
            "races": self.races(),
            "notes": (*dict.fromkeys(self.notes or ()), *([_EAGER] if self.compiled_eagerly else [])),
        }


_EAGER = (
    "torch.compile ran eagerly here: compiled, this program launches fewer kernels and computes faster. "
    "What is said of kernel launches holds for the eager program only."
)
MACHINE = Machine()


class DeviceCall:
    """What happens within is shown in the timeline under the name of a call, at the program's line."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> int:
        """The place of the call."""
        host, place = MACHINE.pause_at()
        MACHINE.clock.begin(self._name, place)
        host.resume()
        return place

    def __exit__(self, *error: object) -> None:
        MACHINE.clock.end()
