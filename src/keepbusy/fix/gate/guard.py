"""`keepbusy.guard`: a piece of code that may wait for the GPU so often, and not more.

with keepbusy.guard(syncs=0, blocking_copies=0):
    train_step(batch)

@keepbusy.guard(allow=["metrics.py: read once an epoch"])
def validate(model, loader): ...

PyTorch itself says where Python waits, on a real GPU and on a virtual one alike:
`torch.cuda.set_sync_debug_mode("warn")` warns at every copy that blocks, every read of a value and every
`Stream.synchronize`, in the thread that waits. It does not see `torch.cuda.synchronize`, events, or copies from
pageable memory that were asked not to block; those are counted where the program calls them. The calls that usually
wait are timed besides, so that a wait has a price.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from linecache import getline
from types import FrameType
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from keepbusy.fix.gate import BLOCKING_COPY, SYNC, AllowList, several
from keepbusy.program.lines import HIDDEN, OUTSIDE, USER, kind_of, shown
from keepbusy.program.patches import Function, Patches, admit_lazy_parameters, left_alone
from keepbusy.timeline.figures import duration
from keepbusy.timeline.model import STAGED_BYTES
from keepbusy.torch_names.cpython import SHOW_WARNING, ForeignThread
from keepbusy.torch_names.dispatcher import device_constructors
from keepbusy.torch_names.hooks import RUN_BACKWARD

F = TypeVar("F", bound=Callable[..., Any])
_SHOWN = 12
"""Places that a message names, the costliest first."""
_WIDTH = 90
"""Letters of a line that are shown."""
_TEXTS = ("called a synchronizing CUDA operation", "Synchronization debug mode is a prototype")
_PATTERN = "|".join(_TEXTS)


class TooManyWaits(AssertionError):  # noqa: N818 -- what was found
    """A guarded piece of code waited for the GPU more often than it may. `waits` are all that counted."""

    def __init__(self, message: str, waits: Sequence[Wait]) -> None:
        super().__init__(message)
        self.waits = tuple(waits)


def guard(syncs: int | None = 0, blocking_copies: int | None = 0, allow: Sequence[str] = ()) -> GuardedBlock:
    """Raise `TooManyWaits` at the end of a block, or of each call of a function, that waited for the GPU too often.

    `syncs`: how often Python may wait for a value or for the device; `blocking_copies`: how often for data on its way
    in, or for more than 64 KB on their way out. None: as often as it likes. `allow` names places that do not count,
    each with its reason: "train.py:42: read once an epoch", "metrics.py: ...", "log_metrics(): ...".

    Each thread is guarded by itself, with the backward passes that it starts. An error raised inside passes as it is.
    Without a GPU, real or virtual, nothing waits and nothing is counted.
    """
    return GuardedBlock(syncs, blocking_copies, allow)


class GuardedBlock:
    """A context manager, and a decorator. `waits` holds what was counted so far, `allowed` what was not, and why."""

    def __init__(self, syncs: int | None, blocking_copies: int | None, allow: Sequence[str]) -> None:
        self._limits = {SYNC: syncs, BLOCKING_COPY: blocking_copies}
        self._allow, self._given = AllowList(allow), tuple(allow)
        self.waits: list[Wait] = []
        self.allowed: list[tuple[Wait, str]] = []

    def __enter__(self) -> Self:
        self.waits, self.allowed = [], []
        self._leave = WATCH.listen(self._count)
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._leave()
        if error is None:
            self._judge()

    def __call__(self, function: F) -> F:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with GuardedBlock(self._limits[SYNC], self._limits[BLOCKING_COPY], self._given):  # calls may overlap
                return function(*args, **kwargs)

        return guarded  # type: ignore[return-value]

    def _count(self, wait: Wait) -> None:
        reason = self._allow.reason(wait.stack)
        if reason:
            self.allowed.append((wait, reason))
        else:
            self.waits.append(wait)

    def _judge(self) -> None:
        waits_of_kind = {kind: [wait for wait in self.waits if wait.kind == kind] for kind in self._limits}
        over = [kind for kind, limit in self._limits.items() if limit is not None and len(waits_of_kind[kind]) > limit]
        if over:
            waits = [wait for kind in over for wait in waits_of_kind[kind]]
            many = " and ".join(
                f"{several(len(waits_of_kind[kind]), kind)} where {self._limits[kind] or 'none'} may be"
                for kind in over
            )
            raise TooManyWaits(f"{many}; {_cost(waits)}\n{places_text(waits)}", waits)


def places_text(waits: Sequence[Wait]) -> str:
    """The places of these waits, a paragraph each, the costliest first."""
    places: dict[tuple[Any, ...], list[Wait]] = {}
    for wait in waits:
        places.setdefault((wait.stack[:1], wait.kind), []).append(wait)
    ordered = sorted(places.values(), key=lambda group: -sum(wait.duration or 0 for wait in group))
    more = [f"and {len(ordered) - _SHOWN} more places"] if len(ordered) > _SHOWN else []
    return "\n".join([*(_paragraph(group) for group in ordered[:_SHOWN]), *more])


def _paragraph(group: list[Wait]) -> str:
    first = group[0]
    calls = ", ".join(sorted({wait.call for wait in group if wait.call}))
    text = first.text if len(first.text) <= _WIDTH else f"{first.text[: _WIDTH - 1]}…"
    lines = [f"  {first.stack[0] if first.stack else 'somewhere in C++'}: {text}".rstrip(": ")]
    lines.append(f"    {several(len(group), first.kind)}{f' ({calls})' if calls else ''}; {_cost(group)}")
    lines += [f"    called from {line}" for line in first.stack[1:]]
    return "\n".join(lines)


def _cost(waits: Sequence[Wait]) -> str:
    durations = [wait.duration for wait in waits if wait.duration is not None]
    if not durations:
        return "how long Python waited was not measured"
    least = "at least " if len(durations) < len(waits) else ""
    return f"Python waited {least}{duration(sum(durations))}"


class StackLine(NamedTuple):
    """A line of a program, as a stack shows it."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass
class Wait:
    """One call that waited for the device."""

    kind: str  # SYNC or BLOCKING_COPY
    call: str  # what the program called: Tensor.item
    text: str  # the innermost line of the user's, as it is written
    stack: tuple[StackLine, ...]  # the user's lines, the innermost first
    duration: int | None = None  # nanoseconds; None of a call that nobody timed


@dataclass
class _CallUnderWay:
    """A call under way that may wait."""

    name: str
    crossing: _Crossing | None
    began: int
    waits: list[Wait] = field(default_factory=list)


class _Crossing(NamedTuple):
    """A copy between host and device."""

    inbound: bool
    size: int

    @property
    def kind(self) -> str:
        """As in the causes of idle time: a small copy to the host is a read."""
        return BLOCKING_COPY if self.inbound or self.size > STAGED_BYTES else SYNC


class _ThreadWaits(threading.local):
    """What one thread is doing, and who wants to know where it waits."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Wait], object]] = []
        self.calls: list[_CallUnderWay] = []


_THREAD = _ThreadWaits()


class WaitWatch:
    """One for the process: it is set up while anybody listens."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._listening = 0
        self._lock = threading.Lock()
        self._backward: list[list[Callable[[Wait], object]]] = []
        self._mode = 0
        self.clock: Callable[[], int] = lambda: time.perf_counter_ns()  # noqa: PLW0108 -- a virtual GPU replaces it

    def listen(self, listener: Callable[[Wait], object]) -> Callable[[], None]:
        """Call `listener` with each wait of this thread, and of the backward passes that it starts, until the returned
        function is called."""
        with self._lock:
            if not self._listening and torch.cuda.is_available():
                self._set_up()
            self._listening += 1
        listeners = _THREAD.listeners
        listeners.append(listener)

        def leave() -> None:
            listeners.remove(listener)
            with self._lock:
                self._listening -= 1
                if not self._listening:
                    self._patches.undo()

        return leave

    def _set_up(self) -> None:
        device_constructors()  # which keeps functions by identity, and is to keep PyTorch's own
        self._mode = torch.cuda.get_sync_debug_mode()
        self._hear_warnings()
        torch.cuda.set_sync_debug_mode("warn")
        self._patches.later(lambda: torch.cuda.set_sync_debug_mode(self._mode))
        for owner, name in _timed():
            self._patches.replace(owner, name, self._timing(f"{owner.__name__}.{name}".removeprefix("torch.")))
        admit_lazy_parameters(self._patches)
        for owner, name in _unseen():
            self._patches.replace(owner, name, self._counting(f"{owner.__name__}.{name}".removeprefix("torch.")))
        for run_backward in RUN_BACKWARD:
            self._patches.replace(*run_backward, self._listening_to_backward)

    def _hear_warnings(self) -> None:
        """Keep our filter first, whatever the program filters, records or silences."""
        add = warnings.filterwarnings

        def keep_first() -> None:
            if not warnings.filters or not _is_ours(warnings.filters[0]):
                _forget_filter()
                add("always", _PATTERN)

        def filtering(function: Function) -> Function:
            def filtered(*args: Any, **kwargs: Any) -> Any:
                result = function(*args, **kwargs)
                keep_first()
                return result

            return filtered

        keep_first()
        for name in ("simplefilter", "filterwarnings", "resetwarnings"):
            self._patches.replace(warnings, name, filtering)
        self._patches.replace(*SHOW_WARNING, self._showing)
        self._patches.later(_forget_filter)

    def _showing(self, show: Function) -> Function:
        def shown_or_heard(message: Any) -> None:
            if self._mode or not str(message.message).startswith(_TEXTS):  # with a mode, the program wants them itself
                show(message)
            if str(message.message).startswith(_TEXTS[0]):
                self._heard()

        return shown_or_heard

    def _heard(self) -> None:
        """PyTorch says that this thread has waited. A thread of autograd's waits for who went backward."""
        calls = _THREAD.calls
        call = calls[-1] if calls else None
        kind = call.crossing.kind if call and call.crossing else SYNC
        self._report(kind, call)

    def _report(self, kind: str, call: _CallUnderWay | None) -> None:
        listeners = _THREAD.listeners
        if not listeners and isinstance(threading.current_thread(), ForeignThread) and self._backward:
            listeners = self._backward[-1]
        if listeners:
            stack = _stack_of(sys._getframe(2))
            text = stack[0][1] if stack else ""
            wait = Wait(kind, call.name if call else "", text, tuple(line for line, _ in stack))
            if call:
                call.waits.append(wait)
            for listener in tuple(listeners):
                listener(wait)

    def _timing(self, name: str) -> Callable[[Function], Function]:
        """A call that PyTorch warns of, if it waits."""
        crosses = _CROSSINGS.get(name.rpartition(".")[2])

        def made(function: Function) -> Function:
            @left_alone
            def timed(*args: Any, **kwargs: Any) -> Any:
                calls = _THREAD.calls
                # under a mode of the program's or the virtual GPU's PyTorch comes back to the method by its name
                if not _THREAD.listeners or (calls and calls[-1].name == name):
                    return function(*args, **kwargs)
                crossing = crosses(args, kwargs) if crosses else None
                call = _CallUnderWay(name, crossing, self.clock())
                calls.append(call)
                try:
                    result = function(*args, **kwargs)
                finally:
                    calls.pop()
                    self._price(call)
                if crossing and not call.waits and _blocks_unseen(crossing, args, result):
                    call.name += ", non_blocking from memory that is not pinned"
                    self._report(crossing.kind, call)
                    self._price(call)
                return result

            return timed

        return made

    def _counting(self, name: str) -> Callable[[Function], Function]:
        """A call that always waits, and that PyTorch does not warn of."""

        def made(function: Function) -> Function:
            @left_alone
            def counted(*args: Any, **kwargs: Any) -> Any:
                if _reuses_memory(sys._getframe(1)) and args and args[0].query():
                    return function(*args, **kwargs)
                call = _CallUnderWay(name, None, self.clock())
                try:
                    return function(*args, **kwargs)
                finally:
                    self._report(SYNC, call)
                    self._price(call)

            return counted

        return made

    def _price(self, call: _CallUnderWay) -> None:
        for wait in call.waits:
            wait.duration = (self.clock() - call.began) // len(call.waits)

    def _listening_to_backward(self, function: Function) -> Function:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if not _THREAD.listeners:
                return function(*args, **kwargs)
            self._backward.append(_THREAD.listeners)
            try:
                return function(*args, **kwargs)
            finally:
                self._backward.remove(_THREAD.listeners)

        return backward


def _is_ours(entry: Any) -> bool:
    """Whether a filter of warnings is the one that lets us hear them."""
    return getattr(entry[1], "pattern", None) == _PATTERN


def _forget_filter() -> None:
    warnings.filters[:] = [entry for entry in warnings.filters if not _is_ours(entry)]  # type: ignore[index]


def _stack_of(frame: FrameType | None) -> list[tuple[StackLine, str]]:
    """The user's lines from the inside out, each with its text; where there is none, the innermost library's."""
    own, library = list[tuple[StackLine, str]](), list[tuple[StackLine, str]]()
    while frame is not None:
        file = frame.f_code.co_filename
        kind = kind_of(file)
        if kind == OUTSIDE:
            break
        if kind != HIDDEN:
            line = StackLine(shown(file), frame.f_lineno, frame.f_code.co_name)
            (own if kind == USER else library).append((line, getline(file, frame.f_lineno, frame.f_globals).strip()))
        frame = frame.f_back
    return own or library[:1]


def _reuses_memory(frame: FrameType) -> bool:
    """Our own runtime asks for events that have passed before it uses memory again, which holds nobody up."""
    return frame.f_globals.get("__name__", "").startswith("keepbusy.runtime.")


# Which calls are timed, and what they copy.


def _timed() -> Iterator[tuple[Any, str]]:
    for name in (
        *("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__getitem__", "__setitem__"),
        *("nonzero", "masked_select", "equal", "unique", "repeat_interleave", "bincount"),
        *_CROSSINGS,
    ):
        yield Tensor, name
    for name in ("tensor", "as_tensor", "asarray", "nonzero", "masked_select", "unique", "repeat_interleave", "equal"):
        yield torch, name
    yield torch.cuda.Stream, "synchronize"


def _unseen() -> Iterator[tuple[Any, str]]:
    yield torch.cuda, "synchronize"
    yield torch.cuda.Event, "synchronize"
    yield torch.accelerator, "synchronize"


def _of_tensor(args: Any, _: Any) -> _Crossing | None:
    """`x.to(...)` and its kin: from where the tensor is to the other side."""
    return _Crossing(not args[0].is_cuda, args[0].nbytes)


def _of_copy(args: Any, kwargs: Any) -> _Crossing | None:
    target, source = args[0], args[1] if len(args) > 1 else kwargs.get("src")
    if not isinstance(source, Tensor) or target.is_cuda == source.is_cuda:
        return None
    return _Crossing(target.is_cuda, target.nbytes)


def _of_data(_args: Any, _kwargs: Any) -> _Crossing | None:
    return _Crossing(inbound=True, size=0)


_CROSSINGS: dict[str, Callable[[Any, Any], _Crossing | None]] = {
    "to": _of_tensor,
    "cuda": _of_tensor,
    "cpu": _of_tensor,
    "tolist": _of_tensor,
    "numpy": _of_tensor,
    "type": _of_tensor,
    "copy_": _of_copy,
    "new_tensor": _of_data,
    "tensor": _of_data,
    "as_tensor": _of_data,
    "asarray": _of_data,
}


def _blocks_unseen(crossing: _Crossing, args: Any, result: Any) -> bool:
    """Asked not to block, a large copy from or to pageable memory does, and PyTorch does not say so."""
    if crossing.size <= STAGED_BYTES:
        return False
    sides = [side for side in (*args[:2], result) if isinstance(side, Tensor)]
    host = [side for side in sides if not side.is_cuda]
    return 0 < len(host) < len(sides) and not host[0].is_pinned()


WATCH = WaitWatch()
