"""Numbers that the loop is not to wait for: of the device, read when somebody looks; of the CPU, drawn beforehand.

**Late numbers** are what rewritten lines call. `total += loss.item()` becomes
`total = late.add(total, lambda v0: v0.item(), (loss,), ())`, and each place that reads `total` becomes `late(total)`.
The formula is worked out later, of copies on the host: a value is the one at the call, and sums are made in the
program's own order, the same to the last bit. Single numbers come home many at once; what is larger travels beside the
computation and is unpacked in a thread of its own.

**Draws ahead** are random numbers of the CPU. A loop draws the same shapes in the same order, turn after turn. Once
that is seen, a thread of ours draws the next ones with a generator of its own, which begins where the program's stands.
When the program asks, its generator is looked at: if it stands where ours began, it is set to where ours ended, and the
numbers are those that it would have drawn. If it stands elsewhere, ours are thrown away, and it draws as ever.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Lock, RLock
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from keepbusy.fix.live.switch import FixSwitch, is_ours, makes_on_host, ours, replaced_by_program, same_bits
from keepbusy.instrument.patches import Function, Patches, left_alone
from keepbusy.instrument.processes import UnseenThread
from keepbusy.runtime.readback import Reading, readback

_PAGE = 256
"""Numbers that come home at once. Of more that are on their way Python's garbage collection has much to look at."""
_ROOM_UNASKED = 1 << 20
"""Bytes that are put aside on the device without asking whether it has room."""
_CARRIED = 4
"""Larger values that may be on their way; who is further ahead waits for the oldest."""
_DEPTH = 32
"""Values that are made of one another, as in `mean = 0.9 * mean + 0.1 * loss.item()`: then one is worked out."""
_DRAWING = ("rand", "randn", "randint", "randperm", "normal")
_SHORTEST_DRAW = 200_000
"""Nanoseconds that a draw must take: a shorter one is over before a thread has heard of it."""
_REPEATED = 3
"""So often an order is seen before anything is drawn ahead, and so many draws are then made both ways and compared."""
_STOCK, _SLOW_STOCK = 16, 2
"""Draws that nobody has asked for yet, and those of them that take long."""
_CONTEXT = 4
"""Draws that say what comes next."""
_ORDERS = 1000
"""So many pairs of draws are remembered."""
_VAIN_DRAWS = 16
"""Draws in a row that came to nothing: then the program draws in no order that can be foreseen."""
_AT_THE_END = 5
"""Seconds that the program's end waits for what is under way."""

Home: TypeAlias = Callable[[], Any]
"""Gives something of the device on the host, as it was when it was put aside. Waits if it must."""


class ValuePage:
    """Single numbers of one type. They come home as one: once the page is full, or once one of them is looked at."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        self._home: tuple[Tensor, ...] = ()
        self._reading: Reading | None = None
        self._lock = RLock()
        self._closed = False

    def put(self, value: Tensor) -> Home | None:
        """None where it is closed by now."""
        with self._lock:
            if self._closed:
                return None
            self._values.append(value)
            place, shape = len(self._values) - 1, value.shape
            if len(self._values) == _PAGE:
                self._send()
            return PlacedNumber(self, place, shape)

    def _send(self) -> None:
        self._closed = True
        with torch.no_grad(), ours():
            self._reading = readback(torch.stack([one.reshape(()) if one.ndim else one for one in self._values]))

    def read(self, place: int) -> Tensor:
        with self._lock:
            if not self._closed:
                self._send()
            if self._reading is not None:
                self._home, self._reading, self._values = self._reading.tensor.unbind(), None, []
            return self._home[place]


class PlacedNumber:
    """One of a page."""

    __slots__ = ("_page", "_place", "_shape")

    def __init__(self, page: ValuePage, place: int, shape: torch.Size) -> None:
        self._page, self._place, self._shape = page, place, shape

    def __call__(self) -> Tensor:
        number = self._page.read(self._place)
        return number.reshape(self._shape) if self._shape else number


def _sent(value: Tensor) -> Home:
    """A larger tensor, on its way at once."""
    with ours():
        reading = readback(value)

    def home() -> Tensor:
        """In memory of its own, as `.cpu()` gives it: the pinned memory is for what is still on its way."""
        came = reading.tensor
        with torch.inference_mode(came.is_inference()):
            return came.clone() if came.is_pinned() else came

    return home


def _kept(value: Tensor) -> Home:
    """A larger tensor that stays on the device: the name that it belongs to may never be looked at."""
    copied = value.detach().clone()

    def home() -> Tensor:
        with torch.inference_mode(copied.is_inference()):
            return copied.cpu()

    return home


def _timed(event: Any) -> Home:
    """An event, which is asked for a time once it has passed."""

    def home() -> Any:
        event.synchronize()
        return event

    return home


class LateValue:
    """What is worked out when somebody asks for it, and once."""

    __slots__ = ("_depth", "_formula", "_homes", "_lock", "_number", "_others")

    def __init__(
        self, formula: Callable[..., Any], homes: tuple[Home, ...], others: tuple[Any, ...], depth: int
    ) -> None:
        self._formula: Callable[..., Any] | None = formula
        self._homes, self._others = homes, others
        self._number, self._lock, self._depth = None, Lock(), depth

    @property
    def depth(self) -> int:
        """So many are worked out with it."""
        return self._depth if self._formula is not None else 0

    def settle(self) -> Any:
        with ours():
            return self.worked_out()

    def worked_out(self) -> Any:
        with self._lock:
            if self._formula is not None:
                others = [one.settle() if isinstance(one, _UNSETTLED) else one for one in self._others]
                self._number = self._formula(*[home() for home in self._homes], *others)
                self._formula, self._homes, self._others = None, (), ()
            return self._number


class LateSum:
    """A number, and what is yet to be added to it."""

    __slots__ = ("number", "pending")

    def __init__(self, number: Any) -> None:
        self.number = number
        self.pending: deque[LateValue] = deque()

    def settle(self, leaving: int = 0) -> Any:
        with ours():
            while len(self.pending) > leaving:
                self.number += self.pending.popleft().worked_out()
        return self.number


_UNSETTLED, _SUMS = (LateSum, LateValue), (LateSum, int, float)


class LateNumbers:
    """The names that rewritten lines use; it is `__keepbusy_late__` there."""

    def __init__(self, passed: Callable[[FrameType], None], has_streams: Callable[[], bool]) -> None:
        """`passed` is told of each line that is put off, or could be.

        `has_streams`: whether the program has streams of its own. Then to read a number, which waits, may be what
        keeps one stream from overtaking another.
        """
        self._passed, self._has_streams = passed, has_streams
        self.switch = FixSwitch("late_numbers", "values that are only summed or kept, read when somebody looks")
        self._pages: dict[tuple[torch.device, torch.dtype], ValuePage] = {}
        self._seen: set[Any] = set()
        self._carriage = Background()
        self._on_their_way: deque[LateValue] = deque()
        self._timed: deque[tuple[tuple[Any, ...], LateValue]] = deque()
        self._lock = Lock()

    def patch(self, patches: Patches) -> None:
        patches.later(self._carriage.stop)
        patches.replace(torch.cuda.Event, "record", self._recording)

    # what rewritten lines call

    def add(self, total: Any, formula: Callable[..., Any], values: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
        """`total += formula(...)`."""
        late = self._late(formula, values, others, _sent) if isinstance(total, _SUMS) else None
        if late is None:
            before = self(total)
            before += formula(*values, *map(self, others))
            return before
        total = total if isinstance(total, LateSum) else LateSum(total)
        total.pending.append(late)
        if len(total.pending) > 2 * _PAGE:  # those of the page before have long been home
            total.settle(leaving=_PAGE)
        return total

    def add_at(
        self, held: Any, place: Any, formula: Callable[..., Any], values: tuple[Any, ...], others: tuple[Any, ...]
    ) -> None:
        """`held[place] += formula(...)`, where nobody else can look into `held`."""
        held[place] = self.add(held[place], formula, values, others)

    def keep(self, formula: Callable[..., Any], values: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
        """`name = formula(...)`."""
        late = self._late(formula, values, others, _kept)
        return formula(*values, *map(self, others)) if late is None else late

    def bring(self, formula: Callable[..., Any], values: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
        """One of many values that are kept."""
        late = self._late(formula, values, others, _sent)
        if late is None:
            return formula(*values, *map(self, others))
        if any(isinstance(one, Tensor) and not _is_single(one) for one in values):
            self._carriage.call(late.settle)
            self._on_their_way.append(late)
            if len(self._on_their_way) > _CARRIED:
                self._on_their_way.popleft().settle()
        return late

    def append(self, held: Any, formula: Callable[..., Any], values: tuple[Any, ...], others: tuple[Any, ...]) -> None:
        """`held.append(formula(...))`, where nobody else can look into `held`."""
        held.append(self.bring(formula, values, others))

    def __call__(self, name: Any) -> Any:
        """What a name holds, for whoever reads it."""
        if isinstance(name, _UNSETTLED):
            return name.settle()
        if type(name) is list or type(name) is dict:
            places: Any = enumerate(name) if isinstance(name, list) else name.items()
            for place, one in places:
                if isinstance(one, _UNSETTLED):
                    name[place] = one.settle()
        return name

    # how values are put aside

    def _late(
        self,
        formula: Callable[..., Any],
        values: tuple[Any, ...],
        others: tuple[Any, ...],
        large: Callable[[Tensor], Home],
    ) -> LateValue | None:
        """None: it is to be worked out now. So is each kind of value for the first time, which shows its errors."""
        if torch.compiler.is_compiling():
            return None
        timed = bool(values) and type(values[0]) is torch.cuda.Event
        if timed:
            self._passed(sys._getframe(2))
        depth = 1 + max([0, *(one.depth for one in others if isinstance(one, LateValue))]) if others else 1
        if not self._may_wait(values, others, depth):
            return None
        if own := replaced_by_program(formula.__code__.co_names):
            self.switch.stop(f"the program has a {own}() of tensors of its own, which is to see each call")
            return None
        kind = (id(formula.__code__), *map(_kind_of, values), *map(type, others))
        with self._lock:
            now = None if kind in self._seen else (formula(*values, *map(self, others)),)
            homes = tuple(self._aside(one, large) for one in values)
            late = LateValue(formula, homes, others, depth)
        if values:
            self.switch.count(sys._getframe(2))
        if values and now is None and not timed:  # else it was read, which is a pass of its own
            self._passed(sys._getframe(2))
        if now is not None:
            self._seen.add(kind)
            self.switch.checked += 1
            if not same_bits(late.settle(), now[0]):
                self.switch.stop("a number came out different")
            return LateValue(lambda: now[0], (), (), 0)
        if timed:
            self._timed.append((values, late))
            self._settle_timed(waiting=False)
        return late

    def _may_wait(self, values: tuple[Any, ...], others: tuple[Any, ...], depth: int) -> bool:
        if not self.switch.on or depth > _DEPTH or not (values or depth > 1) or not _in_order() or self._has_streams():
            return False
        return all(map(_can_wait, values)) and all(isinstance(one, _NUMBERS) for one in others)

    def _aside(self, value: Any, large: Callable[[Tensor], Home]) -> Home:
        if not isinstance(value, Tensor):
            return _timed(value)
        if not _is_single(value):
            return large(value.detach())
        bare = value.detach() if value.requires_grad else value
        value = bare.clone()  # also where nobody else seems to know it: a graph's next replay writes there
        page = self._pages.get((value.device, value.dtype))
        number = page.put(value) if page is not None else None
        if number is None:
            page = self._pages[value.device, value.dtype] = ValuePage()
            number = page.put(value)
        assert number is not None
        return number

    def _recording(self, plain: Function) -> Function:
        """An event that is recorded again says another time from then on."""

        def record(event: Any, *args: Any, **kwargs: Any) -> Any:
            if any(one is event for events, _ in self._timed for one in events):
                self._settle_timed(waiting=True)
            return plain(event, *args, **kwargs)

        return record

    def _settle_timed(self, waiting: bool) -> None:
        while self._timed:
            with ours():
                if not waiting and not all(one.query() for one in self._timed[0][0]):
                    return
            self._timed.popleft()[1].settle()


_NUMBERS = (int, float, complex, str, type(None), LateValue)
"""What nobody can change."""


def _can_wait(value: Any) -> bool:
    """Whether it is a value of a device that its default stream makes."""
    if type(value) is torch.cuda.Event:
        return True
    return (
        type(value) is Tensor
        and value.is_cuda
        and value.layout is torch.strided
        and not (value.is_conj() or value.is_neg())
        and (_is_single(value) or (value.is_contiguous() and not (value.requires_grad and torch.is_grad_enabled())))
        and (value.nbytes < _ROOM_UNASKED or value.nbytes < torch.cuda.mem_get_info(value.device)[0] // 4)
    )


def _kind_of(value: Any) -> tuple[Any, ...]:
    """What says whether a formula can be worked out of it."""
    if not isinstance(value, Tensor):
        return (type(value),)
    return value.dtype, value.ndim, min(value.numel(), 2), value.requires_grad


def _in_order() -> bool:
    """Whether the current stream is the default one; to ask for the streams themselves takes 50 µs."""
    device = torch._C._cuda_getDevice()
    return bool(torch._C._cuda_getCurrentStream(device) == torch._C._cuda_getDefaultStream(device))


def _is_single(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


class Draw(NamedTuple):
    """What is asked for: the function's name, its arguments, and the settings that it depends on."""

    name: str
    given: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    dtype: torch.dtype
    inference: bool

    def run(self, plain: Function, generator: torch.Generator | None = None) -> Tensor:
        more = {} if generator is None else {"generator": generator}
        with torch.inference_mode(self.inference):
            return plain(*self.given, **dict(self.options), **more)


Context: TypeAlias = tuple[Draw, ...]
"""The last draws, the latest last."""


class Chain:
    """Draws in the order in which they are expected, each beginning where the one before it ended."""

    def __init__(self, state: Tensor, thread: Background) -> None:
        self.state = state
        """Where the program's generator is to stand when it asks for the next of them."""
        self.draws: deque[tuple[Draw, Future[tuple[Tensor, Tensor]]]] = deque()
        self._generator, self._thread, self._dropped = torch.Generator(), thread, False
        self._generator.set_state(state)

    def add(self, draw: Draw, plain: Function) -> None:
        def run() -> tuple[Tensor, Tensor]:
            if self._dropped or torch.get_default_dtype() is not draw.dtype:
                raise LookupError
            return draw.run(plain, self._generator), self._generator.get_state()

        self.draws.append((draw, self._thread.call(run)))

    def take(self, draw: Draw) -> tuple[Tensor, Tensor] | None:
        """The numbers, and where the generator stands after them; None, for good, if the program does otherwise."""
        with suppress(Exception):  # what is wrong with it PyTorch says of the program's own draw
            expected, result = self.draws.popleft()
            if expected == draw and torch.equal(self.state, torch.get_rng_state()):
                numbers, self.state = result.result()
                return numbers, self.state
        self.draws.clear()
        self._dropped = True
        return None


class DrawsAhead:
    """`torch.randn(...)` and its kin on the CPU, with PyTorch's own generator."""

    def __init__(self) -> None:
        self.switch = FixSwitch("draws", "draws of random numbers on the CPU made while the program did something else")
        self._plain: dict[str, Function] = {}
        self._thread = Background()
        self._follows: dict[Context, Draw] = {}
        self._seen: Counter[tuple[Context, Draw]] = Counter()
        self._slow: set[Draw] = set()
        self._last: Context = ()
        self._chain: Chain | None = None
        self._vain = 0

    def patch(self, patches: Patches) -> None:
        patches.later(self._thread.stop)
        os.register_at_fork(after_in_child=lambda: self.switch.stop("a child draws for itself"))
        for name in _DRAWING:
            self._plain[name] = getattr(torch, name)
            patches.replace(torch, name, partial(self._drawing, name))

    def _drawing(self, name: str, plain: Function) -> Function:
        @left_alone
        def drawing(*given: Any, **options: Any) -> Any:
            if is_ours() or not self.switch.on:
                return plain(*given, **options)
            draw = _draw_of(name, given, options)
            if draw is None:
                return plain(*given, **options)
            numbers = self._take(draw)
            if numbers is None:
                began = time.perf_counter_ns()
                numbers = plain(*given, **options)
                if time.perf_counter_ns() - began > _SHORTEST_DRAW:
                    self._slow.add(draw)
            self._learn(draw)
            return numbers

        return drawing

    def _take(self, draw: Draw) -> Tensor | None:
        """What was drawn ahead, if it is what the program would draw now."""
        if self._chain is None or not self._chain.draws:
            return None
        taken = self._chain.take(draw)
        if taken is None:
            self._chain, self._vain = None, self._vain + 1
            if self._vain > _VAIN_DRAWS:
                self.switch.stop("the program draws in no order that can be foreseen")
            return None
        numbers, after = taken
        self._vain = 0
        self.switch.count()
        if self.switch.checked < _REPEATED:
            self.switch.checked += 1
            plain = draw.run(self._plain[draw.name])
            if not same_bits(plain, numbers) or not torch.equal(after, torch.get_rng_state()):
                self.switch.stop("numbers came out different")
                self._chain = None
            return plain
        torch.set_rng_state(after)
        return numbers

    def _learn(self, draw: Draw) -> None:
        """And go ahead with the draws that are expected after this one."""
        if len(self._seen) > _ORDERS:
            self.switch.stop("the program draws in no order that can be foreseen")
        self._seen[self._last, draw] += 1
        self._follows[self._last] = draw
        self._last = (*self._last, draw)[-_CONTEXT:]
        asked = [one for one, _ in self._chain.draws] if self._chain is not None else []
        if sum(one in self._slow for one in asked) >= _SLOW_STOCK:
            return
        coming = self._coming((*self._last, *asked)[-_CONTEXT:])
        if coming and not asked:
            self._chain = Chain(torch.get_rng_state(), self._thread)
        for one in coming:
            assert self._chain is not None
            self._chain.add(one, self._plain[one.name])

    def _coming(self, last: Context) -> list[Draw]:
        """What is expected, as far as the next draw that is worth it; nothing if none is."""
        coming: list[Draw] = []
        while len(coming) < _STOCK and self._seen[last, self._follows.get(last)] >= _REPEATED:  # type: ignore[index]
            coming.append(self._follows[last])
            if coming[-1] in self._slow:
                return coming
            last = (*last, coming[-1])[-_CONTEXT:]
        return []


def _draw_of(name: str, given: tuple[Any, ...], options: dict[str, Any]) -> Draw | None:
    """None where it is not the CPU's own generator, or more than its arguments say what is drawn."""
    device = options.get("device")
    on_host = makes_on_host() if device is None else torch.device(device).type == "cpu"
    special = options.get("generator") is not None or options.get("out") is not None
    if special or not on_host or torch._C._len_torch_dispatch_stack() or torch.compiler.is_compiling():
        return None
    flat = tuple(tuple(one) if isinstance(one, list) else one for one in given)
    if any(isinstance(one, Tensor) for one in (*flat, *options.values())):
        return None
    dtype, inference = torch.get_default_dtype(), torch.is_inference_mode_enabled()
    draw = Draw(name, flat, tuple(sorted(options.items())), dtype, inference)
    try:
        hash(draw)
    except TypeError:
        return None
    return draw


class Background:
    """A thread for work that the program is not to wait for: calls, one after the other.

    It begins with the first call and ends with the program. A child that is forked has none: its calls are made at
    once.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread: UnseenThread | None = None
        self._process = 0

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        promised: Future[Any] = Future()
        if self._thread is None:
            self._process = os.getpid()
            self._thread = UnseenThread(self._work)
            atexit.register(self.stop)
        if self._process == os.getpid():
            self._queue.put((work, promised))
        else:
            _do(work, promised)
        return promised

    def stop(self) -> None:
        if self._thread is not None and self._process == os.getpid():
            self._queue.put(None)
            self._thread.join(_AT_THE_END)
            self._thread = None

    def _work(self) -> None:
        while (given := self._queue.get()) is not None:
            _do(*given)


def _do(work: Callable[[], Any], promised: Future[Any]) -> None:
    try:
        promised.set_result(work())
    except BaseException as error:  # told to whoever asks for the result
        promised.set_exception(error)
