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
"""What was chosen before within a backward pass, where the engine had chosen."""
_BY_ANY_THREAD: defaultdict[int, set[int | None]] = defaultdict(set)
"""Of each device the streams that were ever chosen."""
_THREADS = set[int]()
"""That have chosen one."""


class ForwardStreams(threading.local):
    """Which stream of a device this thread had chosen, from which number on; None for the default stream."""

    def __init__(self) -> None:
        self._numbers: dict[int, list[int]] = {}
        self._streams: dict[int, list[int | None]] = {}

    def choose(self, device: int, stream: int | None) -> None:
        _THREADS.add(threading.get_ident())
        _BY_ANY_THREAD[device].add(stream)
        numbers, streams = self._numbers.setdefault(device, [0]), self._streams.setdefault(device, [None])
        number = _next_number()
        if numbers[-1] == number:
            streams[-1] = stream
        elif streams[-1] != stream:
            numbers.append(number)
            streams.append(stream)
        if len(numbers) > _MOST_CHOICES:
            del numbers[1 : _MOST_CHOICES // 2], streams[1 : _MOST_CHOICES // 2]

    def begin_backward(self, clock: Any, host: Any) -> BackwardStreams | None:
        """None where no stream was ever chosen: all runs on one."""
        if not _THREADS:
            return None
        callers = dict(host.chosen_streams)
        if host.backward_pass is not None:  # of a node whose own backward pass it is
            callers |= host.backward_pass.current
        return BackwardStreams(self, callers, clock)

    def is_chosen(self, device: int) -> bool:
        return device in self._numbers

    def of(self, device: int, node: Any, otherwise: int | None) -> int | None:
        number = node._sequence_nr()
        if number >= _UNNUMBERED:
            return otherwise
        return self._streams[device][bisect_right(self._numbers[device], number) - 1]


class BackwardStreams:
    """One pass, from its caller's streams on."""

    def __init__(self, forward: ForwardStreams, callers: dict[int, int | None], clock: Any) -> None:
        self._forward, self._callers, self._clock = forward, callers, clock
        self.current: dict[int, int | None] = {}
        """The stream of the operation that runs now, by device."""
        self._used: dict[int, set[int | None]] = {}
        self._own: dict[int, int | None] = {}  # where a hook has chosen one itself, what stood there before
        if _THREADS - {threading.get_ident()}:  # the numbers of other threads' operations say nothing here
            self._wait_for_all()

    def stream(self, device: int, chosen: int | None) -> int | None:
        """For the operator that runs now, where the thread has `chosen` a stream: a hook may have done so itself."""
        if device in self._own or not self._forward.is_chosen(device):
            return chosen
        node = _current_node()
        before = self.current.get(device, self._callers.get(device))
        stream = before if node is None else self._forward.of(device, node, before)
        if stream != before:
            self.current[device] = stream
            self._forward.choose(device, stream)  # also for operations that are made now, to go back again
            self._wait(device, stream, before)
            self._used.setdefault(device, set()).add(stream)
        return stream

    def choose(self, device: int, stream: int | None, chosen: int | None) -> tuple[int | None, int | None]:
        """A hook chooses a stream: what stands there from now on, and what to give back later."""
        if stream == NOT_CHOSEN:
            return self._own.pop(device, None), None
        if device in self._own:
            return stream, chosen
        self._own[device] = chosen
        return stream, NOT_CHOSEN

    def end(self) -> None:
        for device, streams in self._used.items():
            for stream in streams:
                self._wait(device, self._callers.get(device), stream)
            self._forward.choose(device, self._callers.get(device))
        if _THREADS - {threading.get_ident()}:
            self._wait_for_all()

    def _wait(self, device: int, stream: int | None, other: int | None) -> None:
        first, second = self._number(device, stream), self._number(device, other)
        if first != second:
            self._clock.wait(first, self._clock.record(second))

    def _wait_for_all(self) -> None:
        """Take them to be ordered, which the clock leaves out: an order too much causes no false alarm."""
        order = self._clock.order
        for device, streams in _BY_ANY_THREAD.items():
            caller = self._number(device, self._callers.get(device))
            others = {self._number(device, stream) for stream in streams} - {caller}
            for other in others:
                order.stream_waits(caller, order.at(other))
            for other in others:
                order.stream_waits(other, order.at(caller))

    def _number(self, device: int, stream: int | None) -> int:
        number: int = self._clock.default_stream(device) if stream is None else stream
        return number
