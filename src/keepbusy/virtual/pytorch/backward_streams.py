"""On which stream the operators of a backward pass run: each on that of its forward operator.

PyTorch's engine asks the device guard for that, and ours knows of one stream only (see `cpp_hooks`). But every
operation of autograd's graph has a number, which counts up in the thread that runs the forward pass, so it is enough to
remember at which number another stream was chosen. As the engine does, a stream waits for the one that its inputs come
from, and the caller's stream waits, at the end, for all of them.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from typing import Any

import torch

_next_number = torch._C._autograd._get_sequence_nr
_current_node = torch._C._current_autograd_node
_UNNUMBERED = 1 << 63
"""What accumulates a gradient has no number of its own: it runs where the gradient was made."""
_MOST_CHOICES = 1 << 16

NOT_CHOSEN = -1
"""Stands for the stream before a hook chose one: the engine had chosen it."""


class _Choices(threading.local):
    """By device, which streams this thread chose, and from which number on; None for the default stream."""

    def __init__(self) -> None:
        self.numbers: dict[int, list[int]] = {}
        self.streams: dict[int, list[int | None]] = {}


class ForwardStreams:
    """Which streams the threads of this process chose."""

    def __init__(self) -> None:
        self.choices = _Choices()
        self._threads = set[int]()
        """Threads whose operations may run on another stream than the default one."""
        self.chosen_by_any_thread: defaultdict[int, set[int | None]] = defaultdict(set)

    def choose(self, device: int, stream: int | None) -> None:
        self.chosen_by_any_thread[device].add(stream)
        numbers = self.choices.numbers.setdefault(device, [0])
        streams = self.choices.streams.setdefault(device, [None])
        number = _next_number()
        if numbers[-1] == number:
            streams[-1] = stream
        elif streams[-1] != stream:
            numbers.append(number)
            streams.append(stream)
        if len(numbers) > _MOST_CHOICES:
            del numbers[1 : _MOST_CHOICES // 2], streams[1 : _MOST_CHOICES // 2]
        # a thread that only copied on its stream, as loaders do, has made no operation of autograd's
        if number or any(latest is not None for *_, latest in self.choices.streams.values()):
            self._threads.add(threading.get_ident())
        else:
            self._threads.discard(threading.get_ident())

    def begin_backward(self, clock: Any, host: Any) -> BackwardStreams | None:
        """None where all runs on one stream."""
        if not self._threads:
            return None
        callers = dict(host.chosen_streams)
        if host.backward_pass is not None:  # of a node whose own backward pass it is
            callers |= host.backward_pass.current
        return BackwardStreams(self, callers, clock)

    def is_of_several_threads(self) -> bool:
        """Whether operations of other threads may be in the graph: their numbers mean nothing in this thread."""
        return bool(self._threads - {threading.get_ident()})


class BackwardStreams:
    """One pass, from its caller's streams on."""

    def __init__(self, forward: ForwardStreams, callers: dict[int, int | None], clock: Any) -> None:
        self._forward, self._callers, self._clock = forward, callers, clock
        self.current: dict[int, int | None] = {}
        """The stream of the operation that runs now, by device."""
        self._used: defaultdict[int, set[int | None]] = defaultdict(set)
        self._before_hook: dict[int, int | None] = {}  # by device, where a hook has chosen a stream itself
        if forward.is_of_several_threads():
            self._order_all()

    def stream(self, device: int, chosen: int | None) -> int | None:
        """For the operator that runs now, where the thread has `chosen` a stream: a hook may have done so itself."""
        choices = self._forward.choices
        if device in self._before_hook or device not in choices.numbers:
            return chosen
        node = _current_node()
        number = _UNNUMBERED if node is None else node._sequence_nr()
        stream = before = self.current.get(device, self._callers.get(device))
        if number < _UNNUMBERED:
            stream = choices.streams[device][bisect_right(choices.numbers[device], number) - 1]
        if stream != before:
            self.current[device] = stream
            self._forward.choose(device, stream)  # also for operations that are made now, to go back again
            self._wait(device, stream, before)
            self._used[device].add(stream)
        return stream

    def choose(self, device: int, stream: int | None, chosen: int | None) -> tuple[int | None, int | None]:
        """A hook chooses a stream: which one is chosen from now on, and what to give back later."""
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
        """Take all streams to be ordered, which the clock leaves out: an order too much causes no false alarm."""
        order = self._clock.order
        for device, streams in self._forward.chosen_by_any_thread.items():
            caller = self._lane(device, self._callers.get(device))
            others = {self._lane(device, stream) for stream in streams} - {caller}
            for other in others:
                order.stream_waits(caller, order.at(other))
            for other in others:
                order.stream_waits(other, order.at(caller))

    def _lane(self, device: int, stream: int | None) -> int:
        return int(self._clock.default_stream(device) if stream is None else stream)
