"""What the program does on the host: tensors made there, annotations, the backward pass, compiling, loaders' workers.

On a clock that measures, operators on the host's own tensors take what they take here. On a modelled clock their time
follows from what they do with how many bytes or elements. Sums and products cost their bytes alone, Python between the
operators takes no time, and nor does what other threads and processes do.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from threading import get_ident, local, main_thread
from types import FrameType
from typing import Any

import torch
import torch.utils._device
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils.data import _utils, dataloader

from keepbusy.program import ENDED
from keepbusy.program.lines import OURS, call_at_program
from keepbusy.program.patches import Patches, admit_scripts, when_imported
from keepbusy.program.processes import KeptDescriptor, kept_pipe
from keepbusy.timeline.frame_roles import LOADER_WITH_WORKERS, OWN_STEP
from keepbusy.timeline.model import FrameKind
from keepbusy.virtual.clock.host_thread import BACKWARD_PASS
from keepbusy.virtual.clock.real_time import HostTime
from keepbusy.virtual.costs import figures
from keepbusy.virtual.costs.device import Device
from keepbusy.virtual.machine import CURRENT, MACHINE
from keepbusy.virtual.pytorch import OPERATORS, pinned_uses
from keepbusy.virtual.pytorch.randomness import refuse_generator
from keepbusy.virtual.pytorch.tensors import CARRIED_SIZE, VALUES, is_pinned, pin, tensors_in, to_host

_LOADER = "enumerate(DataLoader)#"


def patch(patches: Patches, measured: bool) -> None:
    admit_scripts(patches)
    torch.utils._device._device_constructors()  # it remembers the functions themselves: let it see them first
    for name in OPERATORS["factories"]:
        patches.wrap(torch, name, partial(_make, f"aten::{name}"))
    for name in OPERATORS["fills"]:
        patches.wrap(Tensor, name, partial(_fill, f"aten::{name}"))
    patches.wrap(Tensor, "pin_memory", _pin_memory)
    patches.wrap(Tensor, "is_pinned", lambda _native, tensor, device=None: is_pinned(tensor))
    for name in ("new", "new_tensor"):
        patches.wrap(Tensor, name, _make_on_its_device)
    patches.wrap(Tensor, "_reduce_ex_internal", _pickle)
    patches.wrap(Tensor, "record_stream", lambda _native, tensor, s: MACHINE.record_stream(tensor, s.lane))
    patches.wrap(torch.autograd.profiler.record_function, "__enter__", _enter_annotation)
    patches.wrap(torch.autograd.profiler.record_function, "__exit__", _leave_annotation)
    patches.replace(torch.nn.Module, "__call__", _calling)
    for module in (torch.autograd.graph, torch.autograd):
        patches.wrap(module, "_engine_run_backward", _run_backward)
    patches.wrap(torch, "_is_all_true", _as_it_should_be)
    patches.wrap(torch, "compile", _compile)
    patches.wrap(torch.nn.Module, "compile", _compile_module)
    ENDED.append(_mark_step)
    _patch_workers(patches, measured)


def _in_training_thread() -> bool:
    return get_ident() == main_thread().ident  # one that `threading` does not know would be taken in by asking for it


class HostOperator:
    """An operator of the host, in the timeline; not in threads that help the loader, which wait most of the time, nor
    where we compute."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        is_shown = _in_training_thread() and not MACHINE.clock.host().pauses
        self.name = name if is_shown else ""

    def __enter__(self) -> None:
        if self.name:
            MACHINE.enter(FrameKind.OPERATOR, self.name)

    def __exit__(self, *error: object) -> None:
        if self.name:
            MACHINE.clock.leave()


# What stands around functions of PyTorch's, which come first among the arguments.


def _make(name: str, native: Callable[..., Any], *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
    """Pins its result where that was asked for, and stands in the timeline by its name where it works on the host."""
    with HostOperator(name):
        made = _at_program(native, args)(*args, **kwargs)
    if kwargs.get("generator") is not None and not made.is_cuda:
        refuse_generator(kwargs["generator"], "cpu")
    return pin(made) if pin_memory else made


def _at_program(native: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """Where a tensor is made of another one PyTorch warns, of the line that called it."""
    warns = getattr(native, "__name__", "") == "tensor" and args and isinstance(args[0], Tensor)
    return partial(call_at_program, native) if warns else native


def _fill(name: str, native: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if tensor.is_cuda:
        return native(tensor, *args, **kwargs)
    if kwargs.get("generator") is not None:
        refuse_generator(kwargs["generator"], "cpu")
    with HostOperator(name):
        return native(tensor, *args, **kwargs)


def _make_on_its_device(native: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """C++ would enter the tensor's device, of which our guard knows nothing."""
    before = CURRENT.change(tensor.get_device())  # which changes nothing for one of the host
    try:
        return native(tensor, *args, **kwargs)
    finally:
        CURRENT.change(before)


def _pin_memory(_native: Callable[..., Any], tensor: Tensor, device: Any = None) -> Tensor:
    with HostOperator("aten::pin_memory"):
        if tensor.device.type != "cpu":
            raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
        return tensor if is_pinned(tensor) else pin(tensor.detach().clone(memory_format=torch.preserve_format))


def _pickle(native: Callable[..., Any], tensor: Tensor, *args: Any) -> Any:
    pinned_uses.note_pickling(tensor)
    return native(tensor, *args)


# Loaders, optimizers and the program itself annotate what they do; the clock marks its steps by these.


def _enter_annotation(native: Callable[..., Any], annotation: Any) -> Any:
    MACHINE.enter(FrameKind.ANNOTATION, annotation.name)
    if annotation.name.startswith(_LOADER):
        # input is late where the loop asks for it, whatever the loader does then
        MACHINE.clock.work(1, place=MACHINE.place())
    if annotation.name.startswith(LOADER_WITH_WORKERS):
        MACHINE.clock.await_batch()
    return native(annotation)


def _leave_annotation(native: Callable[..., Any], annotation: Any, *error: Any) -> Any:
    if annotation.name.startswith(LOADER_WITH_WORKERS):
        MACHINE.clock.take_batch(annotation.name)
    MACHINE.clock.leave()
    return native(annotation, *error)


_inside = local()
_called: dict[int, weakref.ref[torch.nn.Module]] = {}
"""The modules that were called since the last mark."""


def _begins_step(module: torch.nn.Module) -> bool:
    """Whether it is called again, or the first module. So the layers of a model that are called one by one make one
    step."""
    known = _called.get(id(module))
    is_first = not _called or (known is not None and known() is module)
    if is_first:
        _called.clear()
    _called[id(module)] = weakref.ref(module)
    return is_first


def _calling(native: Callable[..., Any]) -> Callable[..., Any]:
    """The outermost modules' forward passes mark the steps of a program without an optimizer. PyTorch's profiler looks
    for the module by the name `self`."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        MACHINE.clock.spend(MACHINE.device.host.module)
        if getattr(_inside, "module", False) or not _in_training_thread():
            return native(self, *args, **kwargs)
        _inside.module = True
        try:
            if not _begins_step(self):
                return native(self, *args, **kwargs)
            MACHINE.enter(FrameKind.ANNOTATION, f"Forward#{type(self).__name__}")
            try:
                return native(self, *args, **kwargs)
            finally:
                MACHINE.clock.leave()
        finally:
            _inside.module = False

    return call


def _mark_step() -> None:
    """`keepbusy.step()` marks a step, whatever else does."""
    MACHINE.enter(FrameKind.ANNOTATION, OWN_STEP)
    MACHINE.clock.leave()


def _run_backward(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In the calling thread: its order is then always the same, and the user's line is on the stack."""
    MACHINE.enter(FrameKind.ANNOTATION, BACKWARD_PASS)
    MACHINE.clock.spend(MACHINE.device.host.backward_pass)
    host = MACHINE.clock.host()
    outer, host.backward_pass = host.backward_pass, MACHINE.forward_streams.begin_backward(MACHINE.clock, host)
    MACHINE.memory.accesses.in_backward += 1
    try:
        with torch.autograd.set_multithreading_enabled(False):
            return native(*args, **kwargs)
    finally:
        MACHINE.memory.accesses.in_backward -= 1
        ended, host.backward_pass = host.backward_pass, outer
        if ended is not None:
            ended.end()
        MACHINE.clock.leave()


def _as_it_should_be(native: Callable[[Tensor], Tensor], checks: Tensor) -> Tensor:
    """What PyTorch asks before it refuses an argument, as its distributions do: without values it holds, for else no
    distribution could be made."""
    answer = native(checks)
    if not VALUES.known(answer):
        to_host(answer).fill_(True)
        VALUES.keep(answer)
    return answer


def _compile(_native: Callable[..., Any], model: Any = None, *_args: Any, **_options: Any) -> Any:
    """`torch.compile`: the program runs as it is written, and says so once a process, and in the report."""
    if not MACHINE.compiled_eagerly:
        MACHINE.compiled_eagerly = True
        sys.stderr.write("keepbusy: torch.compile runs eagerly on the virtual GPU; its timing is that of eager code.\n")
    return (lambda function: function) if model is None else model


def _compile_module(*given: Any, **options: Any) -> None:
    _compile(*given, **options)


# A loader's worker processes: each says how long it was at work on a batch, whatever it had to wait for.
#
# They run on while our clock stands still, so real waits for a batch say nothing. A worker writes how long it was at
# work on a batch into a pipe that all workers inherit. It began once it was asked and done with the batch before. If it
# writes nothing, because it was not forked or the pipe is full, the real wait counts. A modelled clock counts none of
# it, and says what it leaves out.


class Worker:
    """One worker, in nanoseconds of the program's clock. Batches bear the loader's numbers."""

    def __init__(self) -> None:
        self._asked: dict[int, int] = {}
        self._durations: dict[int, int] = {}
        self._idle_from = 0

    def ask(self, batch: int, now: int) -> None:
        self._asked[batch] = now

    def note_duration(self, batch: int, duration: int) -> None:
        """What it says itself."""
        self._durations[batch] = duration

    def done(self, batch: int) -> int | None:
        """When the next batch of its own is there; None where it did not say how long it took."""
        duration, asked = self._durations.pop(batch, None), self._asked.pop(batch, self._idle_from)
        if duration is None:
            return None
        self._idle_from = max(asked, self._idle_from) + duration
        return self._idle_from


_NEXT_BATCH = f"{LOADER_WITH_WORKERS}DataLoaderIter.__next__"
_DURATION = struct.Struct("qqq")
"""A process, a batch, and nanoseconds."""
_PIPE: list[KeptDescriptor] = []
_WORKERS: defaultdict[int, Worker] = defaultdict(Worker)
"""By process."""
_native_loop: Callable[..., None] = _utils.worker._worker_loop


def _patch_workers(patches: Patches, measured: bool) -> None:
    _PIPE[:] = kept_pipe() or ()
    for end in _PIPE:
        os.set_blocking(end.copy, False)
    _utils.worker._worker_loop = run_worker  # no wrapper: workers that are spawned find it by its name
    loader = dataloader._MultiProcessingDataLoaderIter
    patches.wrap(loader, "_process_data", _give if measured else _leave_out)
    if measured:
        patches.wrap(loader, "_try_put_index", _ask)


def _ask(native: Callable[..., Any], loader: Any) -> None:
    batch = loader._send_idx
    native(loader)
    if loader._send_idx > batch:
        _worker(loader, loader._task_info[batch][0]).ask(batch, MACHINE.clock.now())


def _give(native: Callable[..., Any], loader: Any, data: Any, number: int) -> Any:
    for process, batch, duration in _durations():
        _WORKERS[process].note_duration(batch, duration)
    done = _worker(loader, number).done(loader._rcvd_idx - 1) if loader._in_order else None
    MACHINE.clock.take_batch(_NEXT_BATCH, done)
    return native(loader, data, number)


def _leave_out(native: Callable[..., Any], loader: Any, data: Any, number: int) -> Any:
    if MACHINE.uncounted is not None:
        MACHINE.uncounted.add_batches([duration for _, _, duration in _durations()], loader._num_workers)
    return native(loader, data, number)


def _durations() -> Iterator[tuple[int, int, int]]:
    """What workers have said since the last time: a process, a batch, and how long it was at work on it."""
    reading = _PIPE[0].descriptor() if _PIPE else None
    with contextlib.suppress(BlockingIOError):
        while reading is not None and (rows := os.read(reading, 1024 * _DURATION.size)):
            yield from _DURATION.iter_unpack(rows)


def _worker(loader: Any, number: int) -> Worker:
    return _WORKERS[loader._workers[number].pid]


def run_worker(kind: Any, dataset: Any, asks: Any, gives: Any, *rest: Any) -> None:
    """What runs in a worker's process: PyTorch's own loop, between queues that look at the clock."""
    if _PIPE:
        asks = _Requests(asks)
        gives = _Results(gives, asks)
    _native_loop(kind, dataset, asks, gives, *rest)


class _Requests:
    """The queue from which a worker takes what it is asked for."""

    def __init__(self, queue: Any) -> None:
        self._queue, self.clock, self.taken = queue, HostTime(), 0

    def get(self, *args: Any, **kwargs: Any) -> Any:
        asked = self._queue.get(*args, **kwargs)
        self.taken = self.clock()
        return asked


class _Results:
    """The queue into which it puts its batches."""

    def __init__(self, queue: Any, asks: _Requests) -> None:
        self._queue, self._asks = queue, asks

    def put(self, given: tuple[Any, Any]) -> None:
        if isinstance(given[0], int):
            spent = self._asks.clock() - self._asks.taken
            writing = _PIPE[1].descriptor()
            with contextlib.suppress(BlockingIOError):
                if writing is not None:
                    os.write(writing, _DURATION.pack(os.getpid(), given[0], spent))
        self._queue.put(given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


# With a modelled clock: how long operators on the host's own tensors take, and sleeping.

_SHORTEST_ROW = 20_000
"""What is shorter has no row of its own. It joins the next one, and each time that so much has come together, it is
looked at where."""


def patch_modelled(patches: Patches) -> None:
    """In the thread that calls it, until the end."""
    HostOperatorCosts().__enter__()
    patches.wrap(time, "sleep", _sleep)
    when_imported(f"{_FSDP}._fsdp_state", lambda: _wrap_hooks(patches))


PYTHON = figures("python")
_FSDP = "torch.distributed.fsdp._fully_shard"


def _wrap_hooks(patches: Patches) -> None:
    state, group = (sys.modules[f"{_FSDP}.{name}"] for name in ("_fsdp_state", "_fsdp_param_group"))
    for name in ("_pre_forward", "_post_forward", "_pre_backward", "_root_post_backward_final_callback"):
        patches.wrap(state.FSDPState, name, _with_python)
    patches.wrap(group.FSDPParamGroup, "post_backward", _with_python)


def _with_python(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with PythonCalls():
        return native(*args, **kwargs)


class PythonCalls:
    """What is called in Python within takes time, beside the operators: of FSDP2 and DTensor that is milliseconds a
    block, of all else what an operator's dispatch has in it already."""

    def __enter__(self) -> None:
        self._outer = sys.getprofile()  # somebody else's, or one of these
        if self._outer is None:
            self._calls, self._host = 0, MACHINE.clock.host()
            sys.setprofile(self._count)

    def _count(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and not self._host.pauses and not frame.f_code.co_filename.startswith(OURS):
            self._calls += 1

    def __exit__(self, *error: object) -> None:
        if self._outer is None:
            sys.setprofile(None)
            MACHINE.clock.spend(self._calls * PYTHON.call)


def _sleep(native: Callable[..., Any], seconds: Any) -> None:
    native(seconds)
    if _in_training_thread():
        with HostOperator("sleep"):
            MACHINE.clock.work(round(seconds * 1e9))


class HostOperatorCosts(TorchFunctionMode):  # type: ignore[misc]  # PyTorch is not typed here
    """Lets every operator on host tensors take its time."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        given: Any = args[0] if args else (kwargs or {}).get("tensor")  # which `torch.nn.init` names
        # a large parameter that will not be read: drawing a billion numbers takes seconds, and their memory gigabytes
        unread = name in OPERATORS["initialise"] and not VALUES.real and type(given) is Parameter and not given.is_cuda
        first = args[0] if args else None
        if isinstance(first, list) and first:
            first = first[0]
        with PythonCalls() if hasattr(first, "_local_tensor") else nullcontext():  # of DTensors
            left_out = unread and given.nbytes > CARRIED_SIZE
            made = given if left_out else _at_program(func, args)(*args, **(kwargs or {}))
        pinned_uses.note(name, args, kwargs or {}, made)
        if not (isinstance(made, Tensor) and made.is_cuda) and not MACHINE.clock.host().pauses:
            _price(name, args, made)
        return made


def _price(name: str, args: tuple[Any, ...], made: Any) -> None:
    """What was made may be nothing new: then one argument was written into another. Sizes are tensors, too, while
    TorchScript traces."""
    taken, given = tensors_in(args), tensors_in(made if made is not None else args[1:])
    if name in ("__get__", "__set__", "backward") or torch.jit.is_tracing():
        return
    if not given or not all(
        tensor.device.type == "cpu" and tensor.layout is torch.strided and type(tensor) in (Tensor, Parameter)
        for tensor in (*taken, *given)
    ):
        return
    name = name.removeprefix("__").removesuffix("__")
    duration = time_of(MACHINE.device, name, taken if made is not None else given, given)
    if duration < _SHORTEST_ROW:
        host = MACHINE.clock.host()
        host.modelled_time += duration
        if host.modelled_time > _SHORTEST_ROW * (1 + host.sampled_places.total()):
            host.sampled_places[MACHINE.places.here()] += 1
    else:
        with HostOperator(f"aten::{name}"):
            MACHINE.clock.work(duration)


def time_of(device: Device, name: str, taken: list[Tensor], given: list[Tensor]) -> int:
    """Nanoseconds for an operator that made `given` from `taken`: a view, and memory that nobody fills, are free."""
    called, costs, tensors = device.host.view, device.host_tensors, (*taken, *given)
    address = given[0].untyped_storage().data_ptr()
    is_view = any(given[0] is not tensor and tensor.untyped_storage().data_ptr() == address for tensor in taken)
    if name.startswith("empty") or is_view:
        return called
    rates = {"shuffles": costs.shuffle, "sorts": costs.sort, "draws": costs.draw, "by_element": costs.each}
    for kind, each in rates.items():
        if name.startswith(OPERATORS[kind]):
            return called + round(max(tensor.numel() for tensor in tensors) * each)
    return called + round(sum(tensor.numel() * tensor.element_size() for tensor in tensors) / costs.streaming)
