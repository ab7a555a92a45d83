"""The virtual machine of this process: its clock, its streams, its memory, as kernels and patches see them."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from threading import current_thread, main_thread
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from keepbusy.instrument.lines import Places
from keepbusy.timeline.model import Direction, FrameKind
from keepbusy.virtual.clock.engine import Clock, Host
from keepbusy.virtual.clock.host_time import HostTime
from keepbusy.virtual.clock.onlooker import Onlooker
from keepbusy.virtual.costs.device import Device
from keepbusy.virtual.costs.operator_costs import OperatorCosts
from keepbusy.virtual.current_device import ACCELERATOR_ERROR, CURRENT
from keepbusy.virtual.memory.allocator import Block, Memory, OutOfMemory
from keepbusy.virtual.memory.host_memory import Pages
from keepbusy.virtual.pytorch.tensors import to_device
from keepbusy.virtual.pytorch.values import VALUES

if TYPE_CHECKING:
    from keepbusy.virtual.pytorch.cuda_graphs import Recording


_size = torch._C.StorageBase.nbytes
_precision = torch._C._get_fp32_precision_getter
_NATIVE, _NATIVE_FAREWELL = 3_000, 500
"""What it takes to call an operator from Python where nothing of ours is in the way, launch apart; to free a tensor."""
_BATCHES, _CALLS, _PASSES = 6, 50, 4
_NOTHING: Mapping[str, Any] = {}


def _spent(does: Callable[[], object]) -> int:
    begun = perf_counter_ns()
    does()
    return perf_counter_ns() - begun


def _look(tensor: Tensor) -> tuple[torch.Size, str, tuple[int, ...]]:
    """What the cost of an operator depends on."""
    return tensor.shape, _DTYPES[tensor.dtype], tensor.stride()


class _Dtypes(dict[torch.dtype, str]):
    def __missing__(self, dtype: torch.dtype) -> str:
        return self.setdefault(dtype, str(dtype).removeprefix("torch."))


_DTYPES = _Dtypes()


def _accelerator_error(text: str, code: int) -> Exception:
    """As PyTorch raises what CUDA returns."""
    error = ACCELERATOR_ERROR(text)
    error.error_code = code
    return error


class _Streams(threading.local):
    """Of each device, the stream that this thread has chosen."""

    def __init__(self) -> None:
        self.chosen: dict[int, int] = {}


class _Held(weakref.ref["Tensor"]):
    """Memory of the device, given back when the tensor that holds it goes."""

    __slots__ = ("address", "block", "returns")
    address: int
    block: Block
    returns: Callable[[], None] | None  # gives memory of a graph back to it


class Machine:
    """Everything that is virtual in this process."""

    clock: Clock
    device: Device
    memory: Memory
    costs: OperatorCosts
    places: Places
    rank: int | None = None
    """What the program's own process group calls this process; known once it has one."""
    compiled_eagerly = False
    """Whether the program asked for `torch.compile`, which runs as it is written here."""

    def __init__(self) -> None:
        self._streams = _Streams()
        self._held: dict[int, _Held] = {}
        self._at: dict[int, _Held] = {}  # by address
        self.recording: Recording | None = None  # of the capture under way, where values are computed
        self.notes: list[str] | None = []  # what the report must say; None, as in tests: a failure is raised instead

    def start(self, device: Device, devices: int, rank: int, measured: bool) -> None:
        CURRENT.count = devices
        self.device = device
        self._options = (device, rank, devices, measured)
        self._overhead = self._farewell = self._calls = 0
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """A process begins with an empty clock: a forked one has its own time, and no lock that its parent holds."""
        device, rank, devices, measured = self._options
        self._time = HostTime() if measured else None
        self._onlooker: Onlooker | None = None
        self.clock = Clock(device, rank, devices, self._time)
        self.memory = Memory(self.clock, devices)
        self.pages = Pages(device.copies.mapped)
        self.costs = OperatorCosts(device, lambda: _precision("cuda", "matmul") == "tf32", self.notes)
        self.clock.raises = _accelerator_error
        self.places = Places(self.clock.place)
        self._streams = _Streams()
        self.recording = None

    def calibrate(self) -> None:
        """Learn what our own part of host time is, to leave it out."""
        given = self._options
        if not given[-1]:
            return
        quick = replace(self.device, host=replace(self.device.host, operator=0, launch=0))
        self._options = quick, *given[1:]
        self._begin()  # on a host that costs nothing, what passes is what really passes
        self._farewell, self._overhead = self._learned()
        self._options = given
        self._begin()
        self._onlooker = Onlooker(self.places.here)

    def _learned(self) -> tuple[int, int]:
        """What it costs that a tensor goes, and to be called by the dispatcher."""
        one, bias = (torch.ones(size, device="cuda", requires_grad=True) for size in ((16, 16), (16,)))
        held = [[torch.add(one, one) for _ in range(_CALLS)] for _ in range(_BATCHES)]
        farewell = min(_spent(batch.clear) for batch in held) // _CALLS - _NATIVE_FAREWELL
        overhead = round(median(self._gap(one, bias) for _ in range(_BATCHES))) - _NATIVE
        return max(0, farewell), max(0, overhead)

    def _gap(self, one: Tensor, bias: Tensor) -> int:
        """From one operator to the next, in layers as a program has them: a short loop would find all of us cached."""
        before, calls = self.clock.reached(), self._calls
        for _ in range(_PASSES):
            x = functional.layer_norm(one, (16,), bias, bias)
            x = one + functional.gelu(functional.linear(x, one, bias))
            x = functional.linear(x.view(4, 4, 16).transpose(0, 1), one)
            functional.softmax(x.reshape(4, 4, 16), -1).sum()
        return (self.clock.reached() - before) // (self._calls - calls)

    # streams

    def stream(self, device: int) -> int:
        chosen = self._streams.chosen.get(device)
        return self.clock.default_stream(device) if chosen is None else chosen

    def choose_stream(self, device: int, stream: int | None) -> int | None:
        """Make a stream the current one of a device (None: the default one); returns the one before."""
        before = self._streams.chosen.get(device)
        if stream is None:
            self._streams.chosen.pop(device, None)
        else:
            self._streams.chosen[device] = stream
        return before

    # operators

    def come(self) -> Host:
        """The dispatcher called us: on the way here it spent time that a GPU's kernel would not have cost."""
        self._calls += 1
        return self.clock.come(self._overhead)

    def begin(self, name: str) -> None:
        """An operator of the device begins, called from the user's innermost line on the stack."""
        host = self.come()
        self.clock.begin(name, self.here())
        self.clock.go(host)

    def enter(self, kind: FrameKind, name: str) -> None:
        """Something of the program's own begins: see `Clock.enter`."""
        host = self.clock.come()
        self.clock.enter(kind, name, self.here())
        self.clock.go(host)

    def here(self) -> int:
        """The place of the call, once what the program did on its way there is written down."""
        if self._onlooker is not None and self._onlooker.seen:
            self._catch_up(self._onlooker)
        return self.places.here()

    def _catch_up(self, onlooker: Onlooker) -> None:
        if current_thread() is main_thread() and self._time is not None:
            self.clock.host().passing.excuse(onlooker.cost())
            for moment, place in onlooker.take():
                self.clock.pass_by(place, self._time.at(moment))

    def end(self) -> None:
        self.clock.end()

    def kernels(
        self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], asked: Mapping[str, Any] = _NOTHING
    ) -> Sequence[tuple[str, int]]:
        """What a GPU would run for an operator. `asked`: the arguments that its cost depends on."""
        return self.costs.kernels(name, tuple(map(_look, inputs)), tuple(map(_look, outputs)), asked)

    def launch(
        self,
        device: int,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        asked: Mapping[str, Any] = _NOTHING,
    ) -> None:
        """Launch it, within an operator that has begun."""
        self.clock.launch_all(self.stream(device), self.kernels(name, inputs, outputs, asked))

    def copy(
        self, device: int, size: int, direction: Direction, *, pinned: bool, non_blocking: bool, fresh: int = 0
    ) -> None:
        """Between host and device. `fresh`: bytes of host memory that nobody has touched yet."""
        self.clock.copy(self.stream(device), direction, size, pinned, non_blocking, fresh)

    def wait_for_result(self, device: int, name: str) -> None:
        """The host must learn something that only the device knows: a small copy home, and a wait for it."""
        self.begin(name)
        try:
            self.copy(device, 8, Direction.DEVICE_TO_HOST, pinned=True, non_blocking=False)
        finally:
            self.end()

    # memory

    def needs_pinned(self, device: int, is_pinned: bool) -> None:
        """A capture takes no copy from or to memory of the host that may move."""
        if not is_pinned and self.clock.capturing(self.stream(device)):
            raise RuntimeError(
                "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. "
                "Please use tensor.pin_memory() or allocate the tensor with pin_memory=True."
            )

    def place_on(self, tensor: Tensor, device: int) -> Tensor:
        """A new tensor of the device, over the host tensor's memory, or over a graph's while one is captured."""
        size, recording = _size(tensor.untyped_storage()), self.records(device)
        if recording is not None:
            # the graph holds the memory, and the program what it sees of it
            tensor = recording.keep(tensor).detach()
        seen = to_device(tensor, device)
        try:
            block = self.memory.allocate(device, size, self.stream(device))
        except OutOfMemory as error:
            raise torch.OutOfMemoryError(str(error)) from None
        if block is not None:
            # the device's storage keeps the host tensor alive, and nothing else does: it goes when the storage goes
            held = _Held(tensor, self._release)
            held.block, held.address = block, tensor.untyped_storage().data_ptr()
            held.returns = None if recording is None else recording.returns(tensor)
            self._held[id(held)] = held
            self._at[held.address] = held
        return seen

    def _release(self, held: _Held) -> None:
        del self._held[id(held)]
        if self._at.get(held.address) is held:
            del self._at[held.address]
            VALUES.kept.discard(held.address)
        if held.returns is not None:
            held.returns()
        self.memory.free(held.block)
        self.clock.excuse(self._farewell)

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        held = self._at.get(tensor.untyped_storage().data_ptr())
        if held is not None:
            self.memory.record_stream(held.block, stream)

    # CUDA graphs

    def records(self, device: int) -> Recording | None:
        """What takes note of the device's operators, while its stream captures."""
        if self.recording is None or not self.clock.capturing(self.stream(device)):
            return None
        return self.recording

    def host_memory(self, tensor: Tensor) -> Any:
        """The host's storage behind a device tensor; None if another library made the tensor."""
        held = self._at.get(tensor.untyped_storage().data_ptr())
        host = None if held is None else held()
        return None if host is None else host.untyped_storage()

    def facts(self) -> dict[str, Any]:
        modelled = {} if self._options[-1] else {"modelled": True}
        sentences = [*dict.fromkeys(self.notes or ()), *([_EAGER] if self.compiled_eagerly else [])]
        notes = {"notes": sentences} if sentences else {}
        return {"torch": torch.__version__, "device": self.device.name, **modelled, **notes}


_EAGER = (
    "torch.compile ran eagerly here: compiled, this program launches fewer kernels and computes faster. "
    "What is said of kernel launches holds for the eager program only."
)
MACHINE = Machine()
