"""Streams of a backward pass: each operator runs on the stream of its forward operator.

PyTorch's engine asks the device guard for the stream, but our guard knows only one (see `cpp_hooks`). Operations of
autograd's graph are numbered in the order in which a thread makes them, so it is enough to remember at which number
another stream was chosen. As in the engine, a stream waits for the stream of its inputs, and the caller's stream waits
for all of them at the end.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from typing import Any

from keepbusy.torch_names.dispatcher import current_node, next_sequence_number

_UNNUMBERED = 1 << 63
"""The number of nodes that accumulate a gradient; they run on the stream that made the gradient."""
_MOST_CHOICES = 1 << 16

NOT_CHOSEN = -1
"""In place of the stream before a hook chose one, which was the engine's choice."""


class _Choices(threading.local):
    """By device, the streams that this thread chose, and from which number on; None for the default stream."""

    def __init__(self) -> None:
        self.numbers: dict[int, list[int]] = {}
        self.streams: dict[int, list[int | None]] = {}


class ForwardStreams:
    """The streams that the threads of this process chose."""

    def __init__(self) -> None:
        self.choices = _Choices()
        self._threads = set[int]()
        """Threads whose operations may run on another stream than the default one."""
        self.chosen_by_any_thread: defaultdict[int, set[int | None]] = defaultdict(set)

    def choose(self, device: int, stream: int | None) -> None:
        self.chosen_by_any_thread[device].add(stream)
        numbers = self.choices.numbers.setdefault(device, [0])
        streams = self.choices.streams.setdefault(device, [None])
        number = next_sequence_number()
        if numbers[-1] == number:
            streams[-1] = stream
        elif streams[-1] != stream:
            numbers.append(number)
            streams.append(stream)
        if len(numbers) > _MOST_CHOICES:
            del numbers[1 : _MOST_CHOICES // 2], streams[1 : _MOST_CHOICES // 2]
        # a thread that only copies on its stream, as loaders do, makes no operations of autograd
        if number or any(latest is not None for *_, latest in self.choices.streams.values()):
            self._threads.add(threading.get_ident())
        else:
            self._threads.discard(threading.get_ident())

    def begin_backward(self, clock: Any, host: Any) -> BackwardStreams | None:
        """The streams of a new pass; None if all operations run on one stream."""
        if not self._threads:
            return None
        callers = dict(host.chosen_streams)
        if host.backward_pass is not None:  # a backward pass within a node of another one
            callers |= host.backward_pass.current
        return BackwardStreams(self, callers, clock)

    def is_of_several_threads(self) -> bool:
        """Whether the graph may have operations of other threads, whose numbers mean nothing in this thread."""
        return bool(self._threads - {threading.get_ident()})


class BackwardStreams:
    """The streams of one backward pass."""

    def __init__(self, forward: ForwardStreams, callers: dict[int, int | None], clock: Any) -> None:
        self._forward, self._callers, self._clock = forward, callers, clock
        self.current: dict[int, int | None] = {}
        """By device, the stream of the current operation."""
        self._used: defaultdict[int, set[int | None]] = defaultdict(set)
        self._before_hook: dict[int, int | None] = {}  # by device, if a hook has chosen a stream
        if forward.is_of_several_threads():
            self._order_all()

    def stream(self, device: int, chosen: int | None) -> int | None:
        """The stream of the current operator. `chosen`: the thread's own choice, which counts if a hook made it."""
        choices = self._forward.choices
        if device in self._before_hook or device not in choices.numbers:
            return chosen
        node = current_node()
        number = _UNNUMBERED if node is None else node._sequence_nr()
        stream = before = self.current.get(device, self._callers.get(device))
        if number < _UNNUMBERED:
            stream = choices.streams[device][bisect_right(choices.numbers[device], number) - 1]
        if stream != before:
            self.current[device] = stream
            self._forward.choose(device, stream)  # also for operations made now, of a second backward pass
            self._wait(device, stream, before)
            self._used[device].add(stream)
        return stream

    def choose(self, device: int, stream: int | None, chosen: int | None) -> tuple[int | None, int | None]:
        """A hook chooses a stream. Returns the choice from now on, and what to restore later."""
        if stream == NOT_CHOSEN:
            return self._before_hook.pop(device, None), None
        if device in self._before_hook:
            return stream, chosen
        self._before_hook[device] = chosen
        return stream, NOT_CHOSEN

    def end(self) -> None:
        for device, streams in self._used.items():
            for stream in streams:
                self._wait(device, self._callers.get(device), stream)
            self._forward.choose(device, self._callers.get(device))
        if self._forward.is_of_several_threads():
            self._order_all()

    def _wait(self, device: int, stream: int | None, other: int | None) -> None:
        first, second = self._lane(device, stream), self._lane(device, other)
        if first != second:
            self._clock.wait(first, self._clock.record(second))

    def _order_all(self) -> None:
        """Treat all streams as ordered, apart from the clock: order that does not exist causes no false alarm."""
        order = self._clock.order
        for device, streams in self._forward.chosen_by_any_thread.items():
            caller = self._lane(device, self._callers.get(device))
            others = {self._lane(device, stream) for stream in streams} - {caller}
            for other in others:
                order.stream_waits(caller, order.reached(other))
            for other in others:
                order.stream_waits(other, order.reached(caller))

    def _lane(self, device: int, stream: int | None) -> int:
        return int(self._clock.default_stream(device) if stream is None else stream)
