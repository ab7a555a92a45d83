"""The virtual machine of this process: its clock, its streams, its memory, as kernels and patches see them."""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import median
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from keepbusy.instrument.lines import Places
from keepbusy.instrument.run_loops import RunLoops
from keepbusy.timeline.model import Direction, FrameKind, Timeline
from keepbusy.timeline.races import DataRace
from keepbusy.timeline.run_facts import allocator_settings
from keepbusy.virtual.clock.engine import Clock
from keepbusy.virtual.clock.lanes import NOISE_LIMIT, HostThread
from keepbusy.virtual.clock.order import Made
from keepbusy.virtual.clock.real_time import HostTime, Onlooker, UncountedWork
from keepbusy.virtual.costs.device import Device
from keepbusy.virtual.costs.operator_costs import OperatorCosts
from keepbusy.virtual.device_memory import Block, Memory, OutOfMemory
from keepbusy.virtual.found_races import FoundRaces
from keepbusy.virtual.pytorch.backward_streams import NOT_CHOSEN, ForwardStreams
from keepbusy.virtual.pytorch.tensors import VALUES, Pages, is_pinned, memory_at, tensors_in, to_device, to_host

if TYPE_CHECKING:
    from keepbusy.virtual.pytorch.cuda_graphs import Recording


_size = torch._C.StorageBase.nbytes
_precision = torch._C._get_fp32_precision_getter
_NATIVE_CALL, _NATIVE_RELEASE = 3_000, 500
"""What it takes to call an operator from Python where nothing of ours is in the way, launch apart; to free a tensor."""
_BATCHES, _CALLS, _PASSES = 6, 50, 4
_FOREVER = 1 << 62


class Current(threading.local):
    """The current device of the calling thread."""

    count = 1  # of all devices; the same in every thread
    device = 0

    def change(self, device: int) -> int:
        """Make `device` current and return the one before; a negative one changes nothing."""
        before = self.device
        if device >= 0:
            self.device = self._known(device)
        return before

    def index(self, device: torch.device | int | str | None) -> int:
        """The number that PyTorch means by `device`: none, or one without a number, is the current one."""
        number = device if device is None or isinstance(device, int) else torch.device(device).index
        return self.device if number is None or number < 0 else self._known(number)

    def _known(self, device: int) -> int:
        if device >= self.count:
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        return device


CURRENT = Current()


def _accelerator_error(text: str, code: int) -> Exception:
    """As PyTorch raises what CUDA returns."""
    error: Exception = torch.AcceleratorError(text)
    error.error_code = code  # type: ignore[attr-defined]
    return error


@cache
def _name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`: what costs are kept by."""
    return str(dtype).removeprefix("torch.")


Layout: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Of a tensor its shape, strides and type."""


class _DeviceMemory(weakref.ref["Tensor"]):
    """Memory of the device, given back when the host tensor behind it goes."""

    __slots__ = ("address", "block", "layout", "return_to_graph")
    address: int
    layout: Layout  # of that host tensor
    block: Block | None  # None while its storage is empty
    return_to_graph: Callable[[], None] | None


class Machine:
    """Everything that is virtual in this process."""

    clock: Clock
    device: Device
    memory: Memory
    costs: OperatorCosts
    places: Places
    rank: int | None = None
    """What the program's own process group calls this process; known once it has one."""
    alike = 1
    """So many ranks do the same as this one, which stands for all of them."""
    loops: RunLoops | None = None
    uncounted: UncountedWork | None = None
    """Of a modelled clock, what it leaves out."""
    compiled_eagerly = False
    """Whether the program asked for `torch.compile`, which runs as it is written here."""

    def __init__(self) -> None:
        self._memory: dict[int, _DeviceMemory] = {}  # all there is, by address
        self._shadowed: dict[int, _DeviceMemory] = {}  # by identity, where other memory has got the same address
        self.recording: Recording | None = None  # of the capture under way, where values are computed
        self.forward_streams = ForwardStreams()
        self.notes: list[str] | None = []  # what the report must say; None, as in tests: a failure is raised instead

    def start(self, device: Device, devices: int, rank: int, measured: bool) -> None:
        Current.count = devices
        self.device = device
        self._options = (device, rank, devices, measured)
        self._call_overhead = self._release_overhead = self._calls = 0
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """A process begins with an empty clock: a forked one has its own time, and no lock that its parent holds."""
        device, rank, devices, measured = self._options
        self._onlooker: Onlooker | None = None
        self.clock = Clock(device, rank, HostTime if measured else None)
        self.memory = Memory(self.clock, devices)
        self.pages = Pages(device.copies.mapped)
        self.costs = OperatorCosts(device, lambda: _precision("cuda", "matmul") == "tf32", self.notes)
        self.clock.raises = _accelerator_error
        if self.loops is not None:
            self.loops.end()
        self.loops = RunLoops(self.clock.first_thread.moment)
        self.places = Places(self.clock.place, self.loops.meet)
        self._busy_lines: dict[tuple[int, int], int] = {}  # of the places of two calls, the one in between
        self.recording = None

    def calibrate(self) -> None:
        """Learn what our own part of host time is, to leave it out: at a call of the dispatcher, when a tensor goes."""
        given = self._options
        if not given[-1]:
            self.uncounted = UncountedWork(self.clock.first_thread)
            self.uncounted.begin()
            return
        quick = replace(self.device, host=replace(self.device.host, operator=0, launch=0))
        self._options = quick, *given[1:]
        self._begin()  # on a host that costs nothing, what passes is what really passes
        one, bias = (torch.ones(size, device="cuda", requires_grad=True) for size in ((16, 16), (16,)))
        releases = []
        for _ in range(_BATCHES):
            batch = [torch.add(one, one) for _ in range(_CALLS)]
            begun = perf_counter_ns()
            batch.clear()
            releases.append((perf_counter_ns() - begun) // _CALLS)
        calls = round(median(self._time_between_operators(one, bias) for _ in range(_BATCHES)))
        self._release_overhead = max(0, min(releases) - _NATIVE_RELEASE)
        self._call_overhead = max(0, calls - _NATIVE_CALL)
        self._options = given
        self._begin()
        host = self.clock.first_thread
        assert isinstance(host.real, HostTime)
        self._onlooker = Onlooker(host, host.real, self.places.here)
        self._onlooker.begin()

    def _time_between_operators(self, one: Tensor, bias: Tensor) -> int:
        """In layers as a program has them: a short loop would find all of us cached."""
        before, calls = self.clock.now(), self._calls
        for _ in range(_PASSES):
            x = functional.layer_norm(one, (16,), bias, bias)
            x = one + functional.gelu(functional.linear(x, one, bias))
            x = functional.linear(x.view(4, 4, 16).transpose(0, 1), one)
            functional.softmax(x.reshape(4, 4, 16), -1).sum()
        return (self.clock.now() - before) // (self._calls - calls)

    # streams

    def stream(self, device: int, host: HostThread | None = None) -> int:
        """The current one of a device, for the calling thread."""
        host = host or self.clock.host()
        chosen = host.chosen_streams.get(device)
        if host.backward_pass is not None:
            chosen = host.backward_pass.stream(device, chosen)
        return self.clock.default_stream(device) if chosen is None else chosen

    def choose_stream(self, device: int, stream: int | None) -> int | None:
        """Make a stream the current one of a device (None: the default one); returns the one before."""
        host = self.clock.host()
        before = host.chosen_streams.pop(device, None)
        stream = None if stream == self.clock.default_stream(device) else stream
        if host.backward_pass is not None:
            stream, before = host.backward_pass.choose(device, stream, before)
        elif stream == NOT_CHOSEN:
            stream = None
        self.forward_streams.choose(device, stream)
        if stream is not None:
            host.chosen_streams[device] = stream
        return before

    # operators

    def pause(self) -> HostThread:
        """The dispatcher called us: on the way it spent time that a GPU's kernel would not have cost."""
        self._calls += 1
        host = self.clock.threads.get(get_ident()) or self.clock.host()
        host.pause(self._call_overhead)
        return host

    def pause_at(self) -> tuple[HostThread, int]:
        """The same, and the place of the call: see `place`."""
        self._calls += 1
        host = self.clock.threads.get(get_ident()) or self.clock.host()
        host.pause(self._call_overhead)
        place, onlooker = self.places.here(), self._onlooker
        if onlooker is not None and (onlooker.looks or host.unwritten_time > NOISE_LIMIT):
            self._catch_up(onlooker, host, place)
        return host, place

    def enter(self, kind: FrameKind, name: str) -> None:
        """Something of the program's own begins: see `Clock.enter`."""
        host = self.clock.pause()
        self.clock.enter(kind, name, self.place())
        host.resume()

    def place(self) -> int:
        """The place of the call, once what the program did on its way there is written down."""
        place = self.places.here()
        if self._onlooker is not None:
            self._catch_up(self._onlooker, self.clock.host(), place)
        return place

    def _catch_up(self, onlooker: Onlooker, host: HostThread, place: int) -> None:
        """Up to a call at `place`. A line that was found at work was so until the call: also where the program goes
        from the same call to the same one and no look came in between, as looks are a millisecond apart."""
        if not isinstance(host.real, HostTime) or not onlooker.watches_caller():
            return
        cost, looks = onlooker.take()
        host.unwritten_time -= cost
        stretch = host.place, place
        seen = [one for moment, one in looks if self.clock.attribute(one, host.real.at(moment))]
        if seen:
            self._busy_lines[stretch] = seen[-1]
        if stretch in self._busy_lines and (seen or host.unwritten_time > NOISE_LIMIT):
            self.clock.attribute(self._busy_lines[stretch], _FOREVER)

    def kernels(
        self, name: str, inputs: Iterable[Tensor], outputs: Iterable[Tensor], arguments: Mapping[str, Any] | None = None
    ) -> Sequence[tuple[str, int]]:
        """What a GPU would run for an operator. `arguments`: those that its cost depends on."""
        given, made = ([(one.shape, _name(one.dtype), one.stride()) for one in some] for some in (inputs, outputs))
        return self.costs.kernels(name, tuple(given), tuple(made), arguments)

    def launch(self, device: int, name: str, inputs: Any, outputs: Any, arguments: Mapping[str, Any]) -> None:
        """Launch it, within an operator that has begun."""
        self.clock.launch(self.stream(device), self.kernels(name, inputs, outputs, arguments))

    def copy(
        self, device: int, size: int, direction: Direction, *, pinned: bool, non_blocking: bool, fresh: int = 0
    ) -> None:
        """Between host and device. `fresh`: bytes of host memory that nobody has touched yet."""
        self.clock.copy(self.stream(device), direction, size, pinned, non_blocking, fresh)

    def look_at_clock(self) -> tuple[int, bool]:
        """The program reads its clock: the time of the calling thread, and whether the clock knows that thread.

        Of a thread that it does not know, which has nothing to do with the device, the time of the first one.
        """
        if not self.clock.knows_caller():
            return self.clock.first_thread.now, False
        host = self.clock.pause()
        moment = self.clock.read(self.place())
        host.resume()
        return moment, True

    def end(self) -> None:
        """The program is at its end: what it did last is a part of the run, and how Python is left is none."""
        self.look_at_clock()
        self.clock.pause()

    def peek(self, read: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        """What a function makes of a tensor as the host sees it: nothing is copied, and no time passes."""
        host = self.clock.pause()
        try:
            seen = getattr(tensor, "_local_tensor", tensor)  # of a distributed one, this rank's part
            return read(to_host(seen.data) if seen.is_cuda else seen)
        finally:
            host.resume()

    def made_here(self) -> Made:
        """A stream or an event is made: where, for the names that the program gives them."""
        host = self.clock.pause()
        try:
            return self.clock.order.make(self.places.here())
        finally:
            host.resume()

    # who uses which memory

    def use(self, read: Iterable[Any], written: Iterable[Any], stream: int, place: int) -> int:
        """A command is launched that reads and writes these tensors: of the device, or pinned ones. Its number."""
        number = self.clock.order.command(stream)
        for tensors, writes in ((read, False), (written, True)):
            for tensor in tensors_in(tensors):
                self.use_one(tensor, writes, stream, number, place)
        return number

    def use_one(
        self, tensor: Tensor, writes: bool, stream: int, number: int, place: int, is_partial: bool = False
    ) -> None:
        if tensor.layout is not torch.strided or not tensor.is_cuda:
            if is_pinned(tensor) and tensor.numel():
                memory = memory_at(tensor.untyped_storage().data_ptr())
                self.memory.accesses.use_pinned(tensor, memory, writes, stream, number, place)
            return
        begin = tensor.data_ptr()
        held, offset = self._memory.get(begin), 0
        if held is None:
            address = tensor.untyped_storage().data_ptr()
            held, offset = self._memory.get(address), begin - address
        if held is not None and held.block is not None and tensor.numel():
            accesses = self.memory.accesses
            accesses.use_block(held.block, tensor, offset, writes, stream, number, place, is_partial)

    # memory

    def needs_pinned(self, device: int, is_pinned: bool) -> None:
        """A capture takes no copy from or to memory of the host that may move."""
        if not is_pinned and self.captures(device):
            raise RuntimeError(
                "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. "
                "Please use tensor.pin_memory() or allocate the tensor with pin_memory=True."
            )

    def place_on(self, tensor: Tensor, device: int, stream: int | None = None) -> Tensor:
        """A new tensor of the device, over the host tensor's memory, or over a graph's while one is captured."""
        storage = tensor.untyped_storage()
        size = _size(storage)
        recording = None if self.recording is None else self.records(device)
        if recording is not None:
            # the graph holds the memory, and the program what it sees of it
            tensor = recording.keep(tensor).detach()
            storage = tensor.untyped_storage()
        seen = to_device(tensor, device)
        block = self._block(device, size, self.stream(device) if stream is None else stream)
        if block is not None:
            # the device's storage keeps the host tensor alive, and nothing else does: it goes when the storage goes
            memory = _DeviceMemory(tensor, self._release)
            memory.block, memory.address = block, storage.data_ptr()
            memory.layout = tensor.shape, tensor.stride(), tensor.dtype
            memory.return_to_graph = None if recording is None else partial(recording.arena.give_back, storage)
            before = self._memory.get(memory.address)
            if before is not None:
                self._shadowed[id(before)] = before
            self._memory[memory.address] = memory
        return seen

    def _block(self, device: int, size: int, stream: int) -> Block | None:
        try:
            return self.memory.allocate(device, size, stream)
        except OutOfMemory as error:
            raise torch.OutOfMemoryError(str(error)) from None

    def resize(self, storage: Any, size: int) -> None:
        """What is emptied gives its memory back, and takes other when it is to be filled again."""
        memory, device = self._memory.get(storage.data_ptr()), storage.device.index
        if memory is not None:
            self.memory.free(memory.block)
            memory.block = self._block(device, size, self.stream(device))

    def seen_by_host(self, tensor: Tensor, layout: Layout) -> Tensor:
        """The memory of a device's tensor as a host tensor that nobody may reshape: often it is the one behind it."""
        memory = self._memory.get(tensor.data_ptr())
        if memory is not None and memory.layout == layout:
            host = memory()
            if host is not None:
                return host
        return to_host(tensor)

    def raise_for_memory(self, error: RuntimeError, device: int) -> None:
        """Where the host had no memory for a device's tensor: the device may have none either."""
        size = re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", str(error))
        if size is None:
            return
        block = self._block(device, int(size[1]), self.stream(device))
        self.memory.free(block)
        raise MemoryError(
            f"keepbusy computes the values of {size[1]} bytes in this machine's memory, and there is not enough of it; "
            "a smaller program fits, or one that runs with --values none."
        ) from None

    def _release(self, memory: _DeviceMemory) -> None:
        if self._memory.get(memory.address) is memory:
            del self._memory[memory.address]
            if VALUES.kept:
                VALUES.kept.discard(memory.address)
        else:
            del self._shadowed[id(memory)]
        if memory.return_to_graph is not None:
            memory.return_to_graph()
        self.memory.free(memory.block)
        if self._release_overhead:
            self.clock.discount(self._release_overhead)

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        memory = self._memory.get(tensor.untyped_storage().data_ptr())
        if memory is not None:
            self.memory.record_stream(memory.block, stream)

    # CUDA graphs

    def captures(self, device: int) -> bool:
        """Whether what is launched on the device now is kept for a graph, and not run."""
        return self.clock.capturing(self.stream(device))

    def records(self, device: int) -> Recording | None:
        """What takes note of the device's operators, while its stream captures."""
        return self.recording if self.recording is not None and self.captures(device) else None

    def host_memory(self, tensor: Tensor) -> Any:
        """The host's storage behind a device tensor; None if another library made the tensor."""
        memory = self._memory.get(tensor.untyped_storage().data_ptr())
        host = None if memory is None else memory()
        return None if host is None else host.untyped_storage()

    def timeline(self, **facts: Any) -> Timeline:
        """The run so far, with its tree of loops where it used a device. `facts` join those that are known here."""
        whole = self.clock.timeline(**{**self.facts(), **facts})
        whole = whole.change(lanes=FoundRaces(self.clock, self.places.lines).named(whole.lanes))
        if self.loops is None or not whole.on_device.any():
            return whole
        lane, wires = self.clock.first_thread.lane, self.clock.wires
        return self.loops.told(whole, self.places.lines, lane, wires, self.clock.rows.announced)

    def races(self) -> tuple[DataRace, ...]:
        """Uses of memory that nothing orders, so far."""
        return FoundRaces(self.clock, self.places.lines).all(self.memory.accesses)

    def facts(self) -> dict[str, Any]:
        """As `RunFacts` has them."""
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
    """What happens within stands in the timeline by the name of a call, at the program's line that called."""

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
