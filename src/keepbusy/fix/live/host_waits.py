"""What Python would wait for and need not: copies to the device, and calls that a loop could do without.

A copy that blocks makes Python wait for all that the stream has to do, and then for the bus. Here the values are taken
down at the call, so that the program may do with its tensor what it likes afterwards: small ones by the driver, others
into pinned memory, from which large ones travel on a stream of their own, beside the computation.

What could tell the difference, and what is done about it:
- the program changes its tensor after the call: it was copied at the call, or the call waits for its bytes to be gone;
- another stream uses the tensor without waiting, as it may after a copy that blocks: at the first sight of a stream of
  the program's own everything is waited for once, and from then on all copies are the plain ones;
- pinned memory may still be written by the device: once the program brings anything home without waiting, its pinned
  tensors are copied the plain way;
- memory of a tensor that goes is not given out before its last reader is done: it is marked as the stream's.

Small tensors that one expression moves (`loop_turns`) travel as one, and each gets memory of its own on the device.

The calls change no value, and hold the GPU up: to give its memory back, to look at every object for garbage, to wait
until it has caught up where nobody could tell the difference.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.cuda._utils import _get_device_index
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._device import _device_constructors

from keepbusy.fix.live.switch import FixSwitch, is_ours, ours, replaced_by_program
from keepbusy.fix.syntax.loop_turns import moved_singly
from keepbusy.instrument import lines
from keepbusy.instrument.patches import Function, Patches, admit_lazy_parameters, left_alone

_SMALL = 1 << 16
"""Bytes up to which the driver takes the values along with the call, as CUDA documents."""
_LARGE = 1 << 20
"""Bytes from which the bus takes longer than a stream of its own costs."""
_IN_FLIGHT = 4
"""Large copies that may be under way at once; who is further ahead waits for the oldest."""
_NUMBERS = {int, float, bool}
_CONTAINERS: tuple[type, ...] = (list, tuple, type({}.values()))
_DIFFERENT = "a copy came out different"
Destination: TypeAlias = tuple[torch.device | None, torch.dtype | None, bool, torch.memory_format | None]
"""Where a tensor is to go, as what, whether Python need not wait, and in which layout."""
_SCARCE_MEMORY = 0.1
"""Of the device's memory: with less than this free, what the program gives back is given back."""
_WHOLE = 50
"""So many collections look at new objects only; then one looks at all of them."""
_CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")


class DeferredCopies:
    """`Tensor.to`, `.cuda`, `.copy_` and `torch.tensor(..., device=...)`, from the host to a device."""

    def __init__(self) -> None:
        self.switch = FixSwitch("copies", "copies to the GPU that Python does not wait for")
        self._side: dict[int, Any] = {}
        self._default: dict[int, Any] = {}
        self._flying: deque[Any] = deque()
        self._pinned: list[StorageWeakRef] = []
        self._pinned_room = 64
        self.own_streams = False
        self.brings_home = False
        """Whether the program has copies to the host that it does not wait for."""

    def reads_pinned(self) -> int:
        """How much there is of the program's pinned memory that it may change while the device still reads it."""
        self._pinned = [one for one in self._pinned if not one.expired()]
        return len(self._pinned)

    def patch(self, patches: Patches) -> None:
        patches.replace(Tensor, "to", lambda plain: self._moving(plain, torch._C._nn._parse_to))
        patches.replace(Tensor, "cuda", lambda plain: self._moving(plain, _parse_cuda))
        patches.replace(Tensor, "copy_", self._copy_)
        admit_lazy_parameters(patches)
        _device_constructors()  # which keeps functions by identity, and is to keep PyTorch's own
        patches.replace(torch, "tensor", self._tensor)
        patches.replace(torch, "_foreach_copy_", self._bringing_home)
        patches.replace(torch.cuda.StreamContext, "__enter__", self._entering)
        patches.replace(torch.cuda, "set_stream", self._setting)

    # what the program calls

    def _moving(self, plain: Function, where: Callable[..., Destination]) -> Function:
        @left_alone
        def move(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            sent = None
            may_wait = not tensor.is_cuda or kwargs or any(one is True for one in args)
            if may_wait and not is_ours():
                with suppress(TypeError, RuntimeError):  # what is wrong with it PyTorch says itself
                    sent = self._moved(tensor, partial(plain, tensor, *args, **kwargs), *where(*args, **kwargs))
            return plain(tensor, *args, **kwargs) if sent is None else sent

        return move

    def _moved(self, tensor: Tensor, plain: Callable[[], Tensor], *destination: Any) -> Tensor | None:
        device, dtype, non_blocking, layout = destination
        if tensor.is_cuda:
            self.brings_home |= non_blocking and device is not None and device.type == "cpu"
            return None
        self._note_pinned(tensor, non_blocking)
        is_move = device is not None and device.type == "cuda" and layout is None
        if not is_move or not self.switch.on:
            return None
        sent = self._send(tensor, device, dtype or tensor.dtype, non_blocking)
        return None if sent is None else self.switch.checked_against(sent, plain, _DIFFERENT)

    def _copy_(self, plain: Function) -> Function:
        @left_alone
        def copy_(target: Tensor, other: Any, non_blocking: bool = False) -> Any:
            if is_ours() or not isinstance(other, Tensor):
                return plain(target, other, non_blocking)
            self._note_pinned(other, non_blocking)
            if other.is_cuda and not target.is_cuda and non_blocking:
                self.brings_home = True
            fits = (
                self.switch.on and target.is_cuda and not non_blocking and _may_be_sent(other) and not other.is_pinned()
            )
            if not fits or target.requires_grad or type(target) is not Tensor:
                return plain(target, other, non_blocking)
            staged = torch.empty(other.shape, dtype=target.dtype, device="cpu", pin_memory=True)
            plain(staged, other)
            self.switch.count()
            return plain(target, staged, True)

        return copy_

    def _tensor(self, plain: Function) -> Function:
        @left_alone
        def tensor(data: Any, *args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            if isinstance(data, Tensor):  # which PyTorch warns of
                return lines.call_at_program(plain, data, *args, **kwargs)
            if is_ours() or not self.switch.on or device is None or not isinstance(data, list | tuple | int | float):
                return plain(data, *args, **kwargs)
            with suppress(RuntimeError, TypeError):
                device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
                if device.type == "cuda" and not _holds_tensor(data) and not kwargs.get("pin_memory"):
                    wants = kwargs.pop("requires_grad", False)
                    made = plain(data, *args, **{**kwargs, "device": "cpu"})
                    sent = self._send(made, device, made.dtype, False)
                    return (made.to(device) if sent is None else sent).requires_grad_(wants)
            return plain(data, *args, **kwargs)

        return tensor

    def _bringing_home(self, plain: Function) -> Function:
        def foreach_copy_(targets: Any, sources: Any, non_blocking: bool = False) -> Any:
            if non_blocking:
                self.brings_home = True
            return plain(targets, sources, non_blocking)

        return foreach_copy_

    def _note_pinned(self, tensor: Tensor, non_blocking: Any) -> None:
        if non_blocking and not tensor.is_cuda and tensor.is_pinned():
            self._pinned.append(StorageWeakRef(tensor.untyped_storage()))
            if len(self._pinned) > self._pinned_room:
                self._pinned_room = 64 + 2 * self.reads_pinned()

    # what one expression moves

    def moved(self, move: Callable[[Any], Any], held: Any, is_named: bool) -> Any:
        """In place of `[move(one) for one in held]`, or of `{name: move(one) for name, one in held.items()}`."""
        if (
            torch.compiler.is_compiling()
            or not self.switch.on
            or is_ours()
            or type(held) not in ((dict,) if is_named else _CONTAINERS)
        ):
            return moved_singly(move, held, is_named)
        tensors, sent = tuple(held.values() if is_named else held), None
        if len(tensors) > 1 and all(map(_may_join, tensors)) and _may_be_sent(tensors[0]):
            with suppress(TypeError, RuntimeError):
                asked = AskedMove()
                move(asked)
                sent = self._joined(tensors, *asked.destination)
        if sent is None:
            return moved_singly(move, held, is_named)
        self.switch.count(sys._getframe(1), len(sent))
        made = self.switch.checked_against(sent, lambda: tuple(map(move, tensors)), _DIFFERENT)
        return dict(zip(held, made, strict=True)) if is_named else [*made]

    def _joined(self, tensors: tuple[Tensor, ...], *destination: Any) -> tuple[Tensor, ...] | None:
        """None where one of them has to go by itself."""
        device, dtype, non_blocking, layout = destination
        if device is None or device.type != "cuda" or dtype is not None or layout is not None:
            return None
        if (non_blocking or self.brings_home) and any(one.is_pinned() for one in tensors):
            return None  # it may change before it has gone
        device = _numbered(device)
        sent: dict[int, Tensor] = {}
        with ours():
            for kind in {one.dtype for one in tensors}:
                mine = {at: one for at, one in enumerate(tensors) if one.dtype is kind}
                sent |= zip(mine, self._sent_as_one([*mine.values()], device), strict=True)
        return tuple(sent[at] for at, _ in enumerate(tensors))

    def _sent_as_one(self, tensors: list[Tensor], device: torch.device) -> list[Tensor]:
        """All are of one type."""
        sizes = [one.numel() for one in tensors]
        staged = torch.empty(sum(sizes), dtype=tensors[0].dtype, device="cpu", pin_memory=True)
        torch.cat([one.reshape(-1) for one in tensors], out=staged)
        large = staged.nbytes >= _LARGE
        packed = self._beside(staged, device, False) if large else staged.to(device, non_blocking=True)
        own = [torch.empty_like(one, device=device) for one in tensors]
        parts = zip(packed.split(sizes), own, strict=True)
        torch._foreach_copy_(own, [part.view(one.shape) for part, one in parts])
        return own

    # streams of the program's own

    def _entering(self, plain: Function) -> Function:
        def enter(context: Any) -> Any:
            self._see(getattr(context, "stream", None))
            return plain(context)

        return enter

    def _setting(self, plain: Function) -> Function:
        def set_stream(stream: Any) -> Any:
            self._see(stream)
            return plain(stream)

        return set_stream

    def _see(self, stream: Any) -> None:
        if is_ours() or self.own_streams or stream is None:
            return
        if stream != torch.cuda.default_stream(stream.device):
            self.own_streams = True
            self.switch.stop("the program has streams of its own, which might not wait for them")
            torch.cuda.synchronize()

    # the copy itself

    def _send(self, tensor: Tensor, device: torch.device, dtype: torch.dtype, non_blocking: bool) -> Tensor | None:
        """None where the plain copy is as good, or the only safe one."""
        if not _may_be_sent(tensor):
            return None
        device, pinned, is_short = _numbered(device), tensor.is_pinned(), tensor.nbytes < _LARGE
        if pinned and (self.brings_home or dtype != tensor.dtype or (non_blocking and is_short)):
            return None
        with ours():
            if is_short and self._is_idle(device.index):
                return None  # it would wait for nothing, and is done sooner
            sent = self._sent(tensor, device, dtype, pinned, pinned and not non_blocking)
        self.switch.count()
        return sent

    def _sent(self, tensor: Tensor, device: torch.device, dtype: torch.dtype, pinned: bool, wait: bool) -> Tensor:
        """Small ones the driver takes along from ordinary memory; what is large travels beside the computation."""
        if tensor.numel() * dtype.itemsize <= _SMALL:
            source = tensor if dtype == tensor.dtype and not pinned else tensor.to(dtype, copy=True)
            return source.to(device, non_blocking=True)
        source = tensor if pinned else _staged(tensor, dtype)
        if source.nbytes < _LARGE and not pinned:
            return source.to(device, non_blocking=True)
        return self._beside(source, device, wait)

    def _current(self, device: int) -> Any:
        """The default stream, for the program has no others. It is looked up once, which takes 28 µs."""
        if device not in self._default:
            self._default[device] = torch.cuda.default_stream(device)
        return self._default[device]

    def _is_idle(self, device: int) -> bool:
        """Whether the GPU has done all that it was given."""
        return bool(self._current(device).query())

    def _beside(self, source: Tensor, device: torch.device, wait: bool) -> Tensor:
        """On a stream of its own; the current one waits for it, on the device."""
        side, current = self._side.get(device.index), self._current(device.index)
        if side is None:
            side = self._side[device.index] = torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            sent = torch.empty_like(source, device=device)
            sent.copy_(source, non_blocking=True)
            copied = side.record_event()
        current.wait_event(copied)
        sent.record_stream(current)
        self._flying.append(copied)
        if len(self._flying) > _IN_FLIGHT:
            self._flying.popleft().synchronize()
        if wait:  # the program may change its own pinned memory from here on
            copied.synchronize()
        return sent


def _numbered(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


class AskedMove:
    """Stands in for a tensor, to learn where an expression would move it."""

    destination: Destination = (None, None, False, None)

    def to(self, *args: Any, **kwargs: Any) -> None:
        self.destination = torch._C._nn._parse_to(*args, **kwargs)

    def cuda(self, *args: Any, **kwargs: Any) -> None:
        self.destination = _parse_cuda(*args, **kwargs)


def _may_join(tensor: Any) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and 0 < tensor.nbytes <= _LARGE
        and not (tensor.requires_grad or tensor.is_complex() or tensor.is_neg())
        and tensor.is_contiguous()
        and not tensor.is_inference()
    )


def _parse_cuda(device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Destination:
    """The arguments of `Tensor.cuda`, as PyTorch parses those of `Tensor.to`."""
    chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    return chosen, None, non_blocking, memory_format


def _may_be_sent(tensor: Tensor) -> bool:
    """Whether it is nothing but values of the host, and nobody looks on."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_neg()
        and not tensor.is_conj()
        and not is_watched()
        and not replaced_by_program(("to", "cuda", "copy_"))
    )


def is_watched() -> bool:
    """Whether somebody looks at what PyTorch is asked to do."""
    return bool(
        torch.compiler.is_compiling()
        or torch.cuda.is_current_stream_capturing()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _staged(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The values as they are now, in pinned memory; cast on the host, as the plain copy does."""
    staged = torch.empty_like(tensor, dtype=dtype, pin_memory=True)
    staged.copy_(tensor)
    return staged


def _holds_tensor(data: Any) -> bool:
    """Lists of numbers are most of what comes here, so their types are asked for at once."""
    if isinstance(data, Tensor):
        return True
    if not isinstance(data, list | tuple):
        return False
    kinds = set(map(type, data))
    return not kinds <= _NUMBERS and any(map(_holds_tensor, data))


class KeptCache:
    """`torch.cuda.empty_cache()` in a loop: the driver takes the memory, and a moment later is asked for it again."""

    def __init__(self, turn: Callable[[], int]) -> None:
        self.switch = FixSwitch("cache", "calls of empty_cache() in the loop, which the GPU would wait for")
        self._turn = turn

    def patch(self, patches: Patches) -> None:
        patches.replace(torch.cuda, "empty_cache", self._empty_cache)
        patches.replace(torch.cuda.memory, "empty_cache", self._empty_cache)

    def _empty_cache(self, plain: Function) -> Function:
        def empty_cache() -> None:
            if self.switch.on and self._turn() > 0 and not is_ours() and not _is_scarce():
                self.switch.count()
            else:
                plain()

        return empty_cache


def _is_scarce() -> bool:
    free, total = torch.cuda.mem_get_info()
    return bool(free < _SCARCE_MEMORY * total)


class QuickCollection:
    """`gc.collect()` in a loop looks at every object of the program, nearly all of which were there the time before.

    Those are frozen, as Python calls it. Where a call is not made in each turn, as after a training whose model is to
    go, and where the collector comes by itself, it looks at all.
    """

    def __init__(self, turn: Callable[[], int]) -> None:
        self.switch = FixSwitch("garbage", "collections of garbage that look at new objects only")
        self._turn = turn
        self._called: dict[tuple[CodeType, int], int] = {}
        """In which turn each call was made last."""
        self._frozen = self._is_quick = False
        self._frozen_before, self._quick = gc.get_freeze_count(), 0

    def patch(self, patches: Patches) -> None:
        patches.replace(gc, "collect", self._collect)
        gc.callbacks.append(self._comes)
        patches.later(lambda: gc.callbacks.remove(self._comes))

    def _collect(self, plain: Function) -> Function:
        def collect(*generation: Any, **named: Any) -> int:
            frame, turn = sys._getframe(1), self._turn()
            if not self.switch.on or not turn or generation or named or is_ours():
                return int(plain(*generation, **named))
            call = frame.f_code, frame.f_lasti
            before, self._called[call] = self._called.get(call, turn), turn
            if not 0 < turn - before <= 1:
                return int(plain())
            if not self._frozen or self._quick == _WHOLE:
                found, self._quick = int(plain()), 0
                self._freeze()
                return found
            self.switch.count()
            self._is_quick, self._quick = True, self._quick + 1
            try:
                return int(plain())
            finally:
                self._is_quick = False

        return collect

    def _freeze(self) -> None:
        """Not where the program does so itself: it would be thawed with the rest."""
        if gc.get_freeze_count() <= self._frozen_before:
            gc.freeze()
            self._frozen = True

    def _comes(self, phase: str, about: dict[str, int]) -> None:
        """The collector does, for all objects unless it is told otherwise."""
        if self._frozen and not self._is_quick and phase == "start" and about["generation"] == 2:
            gc.unfreeze()
            self._frozen = False


class SkippedWaits:
    """`torch.cuda.synchronize()` and its kin in a loop, put off until somebody could tell the difference.

    That is who reads a clock, asks an event whether it has passed, or asks another event for a time. Where the program
    has copies home that it does not wait for, pinned memory that it may change after a copy, streams of its own or
    other processes, each call waits as it stands.
    """

    def __init__(self, copies: DeferredCopies, turn: Callable[[], int]) -> None:
        self.switch = FixSwitch("syncs", "waits for the GPU, put off until somebody reads a clock or an event")
        self._copies, self._turn = copies, turn
        self._owed: set[int] = set()  # devices

    def patch(self, patches: Patches) -> None:
        patches.replace(torch.cuda, "synchronize", self._putting_off)
        for kind in (torch.cuda.Event, torch.cuda.Stream):
            patches.replace(kind, "synchronize", self._putting_off)
            patches.replace(kind, "query", self._paying)
        patches.replace(torch.cuda.Event, "elapsed_time", self._paying_for_time)
        for name in _CLOCKS:
            patches.replace(time, name, self._clock)
        patches.later(self._pay)

    def _putting_off(self, plain: Function) -> Function:
        def synchronize(*args: Any, **kwargs: Any) -> None:
            if is_ours() or not self.switch.on or not self._turn() or not self._may():
                plain(*args, **kwargs)
                return
            self.switch.count()
            given = [one for one in (*args, *kwargs.values()) if isinstance(one, int | str | torch.device)]
            self._owed.add(_get_device_index(given[0] if given else None, optional=True))

        return synchronize

    def _may(self) -> bool:
        copies = self._copies
        return not (
            copies.brings_home
            or copies.own_streams
            or copies.reads_pinned()
            or torch.cuda.is_current_stream_capturing()
            or (torch.distributed.is_available() and torch.distributed.is_initialized())
        )

    def _pay(self, asking: FrameType | None = None) -> None:
        """Unless it is we who ask: a recording's marks look at their events all the time."""
        if self._owed and not is_ours() and not (asking and lines.is_ours(asking.f_code.co_filename)):
            for device in self._owed:
                with torch.cuda.device(device):
                    torch._C._cuda_synchronize()
            self._owed.clear()

    def _paying(self, plain: Function) -> Function:
        def query(*args: Any) -> bool:
            self._pay(sys._getframe(1))
            return bool(plain(*args))

        return query

    def _paying_for_time(self, plain: Function) -> Function:
        def elapsed_time(start: Any, end: Any) -> float:
            self._pay(sys._getframe(1))
            return float(plain(start, end))

        return elapsed_time

    def _clock(self, plain: Function) -> Function:
        def clock() -> Any:
            if self._owed and lines.kind_of(sys._getframe(1).f_code.co_filename) == lines.USER:
                self._pay()
            return plain()

        return clock
