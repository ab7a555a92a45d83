"""On which stream the operators of a backward pass run: each on that of its forward operator.

PyTorch's engine asks the device guard for that, and ours knows of one stream only (see `cpp_hooks`). But every
operation of autograd's graph has a number, which counts up in the thread that runs the forward pass, so it is enough to
remember at which number another stream was chosen. As the engine does, a stream waits for the one that its inputs come
from, and the caller's stream waits, at the end, for all of them.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from typing import Any

import torch

_next_number = torch._C._autograd._get_sequence_nr
_current_node = torch._C._current_autograd_node
_UNNUMBERED = 1 << 63
"""What accumulates a gradient has no number of its own: it runs where the gradient was made."""
_MOST_CHOICES = 1 << 16


class ForwardStreams(threading.local):
    """Which stream of a device this thread had chosen, from which number on; None for the default stream."""

    def __init__(self) -> None:
        self._numbers: dict[int, list[int]] = {}
        self._streams: dict[int, list[int | None]] = {}

    def choose(self, device: int, stream: int | None) -> None:
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
        return BackwardStreams(self, host.chosen_streams, clock) if self._numbers else None

    def are_chosen(self, device: int) -> bool:
        return device in self._numbers

    def of(self, device: int, node: Any, otherwise: int | None) -> int | None:
        number = node._sequence_nr()
        if number >= _UNNUMBERED or device not in self._numbers:
            return otherwise
        return self._streams[device][bisect_right(self._numbers[device], number) - 1]


class BackwardStreams:
    """One pass, from its caller's streams on."""

    def __init__(self, forward: ForwardStreams, chosen: dict[int, int], clock: Any) -> None:
        self._forward, self._callers, self._clock = forward, dict(chosen), clock
        self._current: dict[int, int | None] = {}
        self._used: dict[int, set[int]] = {}

    def stream(self, device: int, chosen: int | None) -> int | None:
        """For the operator that runs now, where the thread has `chosen` a stream: a hook may have done so itself."""
        caller = self._callers.get(device)
        if chosen != caller or not self._forward.are_chosen(device):
            return chosen
        node = _current_node()
        before = self._current.get(device, caller)
        stream = before if node is None else self._forward.of(device, node, before)
        if stream != before:
            self._current[device] = stream
            self._wait(device, stream, before)
            self._used.setdefault(device, set()).add(self._number(device, stream))
        return stream

    def end(self) -> None:
        for device, streams in self._used.items():
            for stream in streams:
                self._wait(device, self._callers.get(device), stream)

    def _wait(self, device: int, stream: int | None, other: int | None) -> None:
        first, second = self._number(device, stream), self._number(device, other)
        if first != second:
            self._clock.wait(first, self._clock.record(second))

    def _number(self, device: int, stream: int | None) -> int:
        number: int = self._clock.default_stream(device) if stream is None else stream
        return number
