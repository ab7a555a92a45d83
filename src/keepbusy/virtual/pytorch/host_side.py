"""The program's work on the host: host tensors, annotations, the backward pass, compiling, loaders' workers.

On a measured clock operators on host tensors take the time that they take here. On a modelled clock their time follows
from their kind and the number of bytes or elements. Sums and products cost their bytes alone; Python between operators,
other threads and other processes take no time.
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
from pkgutil import resolve_name
from threading import get_ident, local, main_thread
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from keepbusy.program import ENDED
from keepbusy.program.lines import OURS, call_at_program
from keepbusy.program.patches import Patches, admit_scripts, when_imported
from keepbusy.program.processes import KeptDescriptor, kept_pipe
from keepbusy.timeline.frame_roles import LOADER_WITH_WORKERS, OWN_STEP
from keepbusy.timeline.model import FrameKind
from keepbusy.torch_names import hooks
from keepbusy.torch_names.dispatcher import device_constructors
from keepbusy.torch_names.distributed import FSDP_STATE, FSDP_STEPS, LOCAL_PART
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
    device_constructors()  # it remembers function objects: let it do so before they are wrapped
    for name in OPERATORS["factories"]:
        patches.wrap(torch, name, partial(_make, f"aten::{name}"))
    for name in OPERATORS["fills"]:
        patches.wrap(Tensor, name, partial(_fill, f"aten::{name}"))
    patches.wrap(Tensor, "pin_memory", _pin_memory)
    patches.wrap(Tensor, "is_pinned", lambda _native, tensor, device=None: is_pinned(tensor))
    for name in ("new", "new_tensor"):
        patches.wrap(Tensor, name, _make_on_its_device)
    patches.wrap(*hooks.PICKLE_TENSOR, _pickle)
    patches.wrap(Tensor, "record_stream", lambda _native, tensor, s: MACHINE.record_stream(tensor, s.lane))
    patches.wrap(torch.autograd.profiler.record_function, "__enter__", _enter_annotation)
    patches.wrap(torch.autograd.profiler.record_function, "__exit__", _leave_annotation)
    patches.replace(torch.nn.Module, "__call__", _calling)
    for run_backward in hooks.RUN_BACKWARD:
        patches.wrap(*run_backward, _run_backward)
    patches.wrap(*hooks.CHECK_OF_ARGUMENTS, _assume_check_passes)
    patches.wrap(torch, "compile", _compile)
    patches.wrap(torch.nn.Module, "compile", _compile_module)
    ENDED.append(_mark_step)
    _patch_workers(patches, measured)


def _in_training_thread() -> bool:
    return get_ident() == main_thread().ident  # `current_thread` would register a thread unknown to `threading`


class HostOperator:
    """Shows an operator of the host in the timeline, except in other threads, such as a loader's, and within our own
    computing."""

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


# Wrappers of PyTorch's functions; the wrapped function is their first argument.


def _make(name: str, native: Callable[..., Any], *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
    """Pin the result if that was asked for, and show the call in the timeline if it works on the host."""
    with HostOperator(name):
        tensor = _at_program(native, args)(*args, **kwargs)
    if kwargs.get("generator") is not None and not tensor.is_cuda:
        refuse_generator(kwargs["generator"], "cpu")
    return pin(tensor) if pin_memory else tensor


def _at_program(native: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """PyTorch warns when `torch.tensor` gets a tensor; let the warning name the program's line."""
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
    """Make the tensor's device current, which C++ would do by the device guard."""
    before = CURRENT.change(tensor.get_device())  # changes nothing for a host tensor
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


# Annotations by loaders, optimizers and the program itself, from which the clock knows the steps.


def _enter_annotation(native: Callable[..., Any], annotation: Any) -> Any:
    MACHINE.enter(FrameKind.ANNOTATION, annotation.name)
    if annotation.name.startswith(_LOADER):
        # late input is shown where the loop asks for a batch, whatever the loader does then
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
"""The modules called since the last mark."""


def _begins_step(module: torch.nn.Module) -> bool:
    """Whether it is called again, or the first module. So layers that are called one by one make a single step."""
    earlier = _called.get(id(module))
    is_first = not _called or (earlier is not None and earlier() is module)
    if is_first:
        _called.clear()
    _called[id(module)] = weakref.ref(module)
    return is_first


def _calling(native: Callable[..., Any]) -> Callable[..., Any]:
    """The outermost modules' forward passes mark the steps of a program without an optimizer. PyTorch's profiler finds
    the module by the name `self`."""

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
    """Mark a step at `keepbusy.step()`."""
    MACHINE.enter(FrameKind.ANNOTATION, OWN_STEP)
    MACHINE.clock.leave()


def _run_backward(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the backward pass in the calling thread, so that its order is fixed and the user's line is on the stack."""
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
        backward_pass, host.backward_pass = host.backward_pass, outer
        if backward_pass is not None:
            backward_pass.end()
        MACHINE.clock.leave()


def _assume_check_passes(native: Callable[[Tensor], Tensor], checks: Tensor) -> Tensor:
    """PyTorch's check of arguments, as in its distributions. Without values it passes, or no distribution could be
    made."""
    answer = native(checks)
    if not VALUES.readable(answer):
        to_host(answer).fill_(True)
        VALUES.keep(answer)
    return answer


def _compile(_native: Callable[..., Any], model: Any = None, *_args: Any, **_options: Any) -> Any:
    """`torch.compile` does nothing; that is said once a process, and in the report."""
    if not MACHINE.compiled_eagerly:
        MACHINE.compiled_eagerly = True
        sys.stderr.write("keepbusy: torch.compile runs eagerly on the virtual GPU; its timing is that of eager code.\n")
    return (lambda function: function) if model is None else model


def _compile_module(*args: Any, **options: Any) -> None:
    _compile(*args, **options)


# A loader's worker processes.
#
# They run on while our clock stands still, so the real wait for a batch means nothing. A worker writes how long it
# worked on a batch into a pipe that all workers inherit. Its work begins once the batch is requested and the one before
# is finished. If it writes nothing, because it was not forked or the pipe is full, the real wait counts. A modelled
# clock leaves the workers' time out, and reports it.


class Worker:
    """One worker, in nanoseconds of the program's clock. Batches have the loader's numbers."""

    def __init__(self) -> None:
        self._requested_at: dict[int, int] = {}
        self._durations: dict[int, int] = {}
        self._idle_from = 0

    def ask(self, batch: int, now: int) -> None:
        self._requested_at[batch] = now

    def note_duration(self, batch: int, duration: int) -> None:
        """The worker has reported its time for a batch."""
        self._durations[batch] = duration

    def ready_time(self, batch: int) -> int | None:
        """When the worker's next batch is ready; None if it did not report its time."""
        duration, requested_at = self._durations.pop(batch, None), self._requested_at.pop(batch, self._idle_from)
        if duration is None:
            return None
        self._idle_from = max(requested_at, self._idle_from) + duration
        return self._idle_from


_NEXT_BATCH = f"{LOADER_WITH_WORKERS}DataLoaderIter.__next__"
_DURATION = struct.Struct("qqq")
"""A process, a batch, and nanoseconds."""
_PIPE: list[KeptDescriptor] = []
_WORKERS: defaultdict[int, Worker] = defaultdict(Worker)
"""By process."""
_native_loop: Callable[..., None] = getattr(*hooks.WORKER_LOOP)


def _patch_workers(patches: Patches, measured: bool) -> None:
    _PIPE[:] = kept_pipe() or ()
    for end in _PIPE:
        os.set_blocking(end.copy, False)
    setattr(*hooks.WORKER_LOOP, run_worker)  # no wrapper: spawned workers find it by its name
    patches.wrap(*hooks.GIVE_BATCH, _deliver_batch if measured else _leave_out_batch)
    if measured:
        patches.wrap(*hooks.ASK_FOR_BATCH, _note_request)


def _note_request(native: Callable[..., Any], loader: Any) -> None:
    batch = hooks.batches_asked(loader)
    native(loader)
    if hooks.batches_asked(loader) > batch:
        _worker(loader, hooks.tasks_of(loader)[batch][0]).ask(batch, MACHINE.clock.now())


def _deliver_batch(native: Callable[..., Any], loader: Any, data: Any, number: int) -> Any:
    for process, batch, duration in _durations():
        _WORKERS[process].note_duration(batch, duration)
    ready = (
        _worker(loader, number).ready_time(hooks.batches_received(loader) - 1) if hooks.gives_in_order(loader) else None
    )
    MACHINE.clock.take_batch(_NEXT_BATCH, ready)
    return native(loader, data, number)


def _leave_out_batch(native: Callable[..., Any], loader: Any, batch: Any, number: int) -> Any:
    if MACHINE.uncounted is not None:
        MACHINE.uncounted.add_batches([duration for _, _, duration in _durations()], hooks.workers_of(loader))
    return native(loader, batch, number)


def _durations() -> Iterator[tuple[int, int, int]]:
    """Reports of workers since the last call: a process, a batch, and the time for it."""
    reading = _PIPE[0].descriptor() if _PIPE else None
    with contextlib.suppress(BlockingIOError):
        while reading is not None and (rows := os.read(reading, 1024 * _DURATION.size)):
            yield from _DURATION.iter_unpack(rows)


def _worker(loader: Any, number: int) -> Worker:
    return _WORKERS[hooks.processes_of(loader)[number].pid]


def run_worker(kind: Any, dataset: Any, requests: Any, results: Any, *rest: Any) -> None:
    """Run PyTorch's loop in a worker process, between queues that measure the time for each batch."""
    if _PIPE:
        requests = _Requests(requests)
        results = _Results(results, requests)
    _native_loop(kind, dataset, requests, results, *rest)


class _Requests:
    """The queue from which a worker takes requests."""

    def __init__(self, queue: Any) -> None:
        self._queue, self.clock, self.taken_at = queue, HostTime(), 0

    def get(self, *args: Any, **kwargs: Any) -> Any:
        request = self._queue.get(*args, **kwargs)
        self.taken_at = self.clock()
        return request


class _Results:
    """The queue into which a worker puts batches."""

    def __init__(self, queue: Any, requests: _Requests) -> None:
        self._queue, self._requests = queue, requests

    def put(self, result: tuple[Any, Any]) -> None:
        if isinstance(result[0], int):
            spent = self._requests.clock() - self._requests.taken_at
            writing = _PIPE[1].descriptor()
            with contextlib.suppress(BlockingIOError):
                if writing is not None:
                    os.write(writing, _DURATION.pack(os.getpid(), result[0], spent))
        self._queue.put(result)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


# The modelled clock: times of operators on host tensors, of Python calls and of sleeping.

_SHORTEST_ROW = 20_000
"""Nanoseconds. Shorter operators have no row of their own but join the next row. Each time that so much has come
together, the place is sampled."""


def patch_modelled(patches: Patches) -> None:
    """Model the host time of the calling thread, until the end."""
    HostOperatorCosts().__enter__()
    patches.wrap(time, "sleep", _sleep)
    when_imported(FSDP_STATE, lambda: _wrap_hooks(patches))


PYTHON = figures("python")


def _wrap_hooks(patches: Patches) -> None:
    for kind, name in FSDP_STEPS:
        patches.wrap(resolve_name(kind), name, _with_python)


def _with_python(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with PythonCalls():
        return native(*args, **kwargs)


class PythonCalls:
    """Adds time for each Python function called within. For FSDP2 and DTensor that is milliseconds a block; for other
    code the dispatch of operators includes it already."""

    def __enter__(self) -> None:
        self._outer = sys.getprofile()  # of another profiler, or of an outer `PythonCalls`
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
    """Adds modelled time for each operator on host tensors."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        target: Any = args[0] if args else kwargs.get("tensor")  # the name that `torch.nn.init` uses
        is_unread = not VALUES.real and type(target) is Parameter and not target.is_cuda
        first = args[0] if args else None
        if isinstance(first, list) and first:
            first = first[0]
        with PythonCalls() if hasattr(first, LOCAL_PART) else nullcontext():  # of DTensors
            if is_unread and name in OPERATORS["initialise"] and target.nbytes > CARRIED_SIZE:
                result = target  # drawing a billion numbers takes seconds, and their memory is gigabytes
            else:
                result = _at_program(func, args)(*args, **kwargs)
        pinned_uses.note_call(name, args, kwargs, result)
        if not (isinstance(result, Tensor) and result.is_cuda) and not MACHINE.clock.host().pauses:
            _price(name, args, result)
        return result


def _price(name: str, args: tuple[Any, ...], result: Any) -> None:
    """Add the time of an operator. Without a result one argument was written into another. While TorchScript traces,
    sizes are tensors, too."""
    if name in ("__get__", "__set__", "backward") or torch.jit.is_tracing():
        return
    inputs, outputs = tensors_in(args), tensors_in(result if result is not None else args[1:])
    if not outputs or not all(
        tensor.device.type == "cpu" and tensor.layout is torch.strided and type(tensor) in (Tensor, Parameter)
        for tensor in (*inputs, *outputs)
    ):
        return
    name = name.removeprefix("__").removesuffix("__")
    duration = time_of(MACHINE.device, name, inputs if result is not None else outputs, outputs)
    if duration < _SHORTEST_ROW:
        host = MACHINE.clock.host()
        host.modelled_time += duration
        if host.modelled_time > _SHORTEST_ROW * (1 + host.sampled_places.total()):
            host.sampled_places[MACHINE.places.current_place()] += 1
    else:
        with HostOperator(f"aten::{name}"):
            MACHINE.clock.work(duration)


def time_of(device: Device, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Nanoseconds for an operator that made `outputs` of `inputs`; views and empty memory cost only the call."""
    call_time, costs, tensors = device.host.view, device.host_tensors, (*inputs, *outputs)
    address = outputs[0].untyped_storage().data_ptr()
    is_view = any(outputs[0] is not tensor and tensor.untyped_storage().data_ptr() == address for tensor in inputs)
    if name.startswith("empty") or is_view:
        return call_time
    rates = {"shuffles": costs.shuffle, "sorts": costs.sort, "draws": costs.draw, "by_element": costs.each}
    for kind, rate in rates.items():
        if name.startswith(OPERATORS[kind]):
            return call_time + round(max(tensor.numel() for tensor in tensors) * rate)
    return call_time + round(sum(tensor.numel() * tensor.element_size() for tensor in tensors) / costs.streaming)
