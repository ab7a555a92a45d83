"""The guaranteed order of commands: a vector clock for each stream and for the host, apart from modelled time.

Only order that a program may rely on counts: that of a stream, of events, and of what the host has waited for. Two
copies that share an engine, or a kernel that happens to end in time, are not ordered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

Reached: TypeAlias = Mapping[int, int]
"""By stream, the number of its last command that comes before."""
Origin: TypeAlias = tuple[int, int]
"""The place in the program where a stream or an event is made, and how many were made there before."""
_EVENTS_KEPT = 8


class Command(NamedTuple):
    """A command on a stream."""

    stream: int
    number: int  # among the commands of its stream, from 1 on
    place: int  # in the program


class StreamOrder:
    """All host threads count as one: what any of them has waited for comes before all that any launches later, so
    threads that order each other cause no false alarm."""

    def __init__(self) -> None:
        self._commands: defaultdict[int, int] = defaultdict(int)
        self._before_stream: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._before_host: dict[int, int] = {}
        self.before_host_waits: Callable[[Reached], None] | None = None  # called before the host waits
        self.stream_origins: dict[int, Origin] = {}  # where the program made a stream
        self._events: defaultdict[int, list[tuple[int, Origin]]] = defaultdict(list)
        self._origin_counts: defaultdict[int, int] = defaultdict(int)

    def command(self, stream: int, place: int) -> Command:
        """A command is launched now."""
        number = self._commands[stream] = self._commands[stream] + 1
        return Command(stream, number, place)

    def comes_before(self, command: Command, waiting_stream: int) -> bool:
        """Whether the command is done when the next one on `waiting_stream` begins."""
        stream, number, _ = command
        if stream == waiting_stream or self._before_host.get(stream, 0) >= number:
            return True
        return self._before_stream[waiting_stream].get(stream, 0) >= number

    def is_known_to_host(self, command: Command) -> bool:
        """Whether the host has waited for that command."""
        return self._before_host.get(command.stream, 0) >= command.number

    def reached(self, stream: int) -> Reached:
        """What an event recorded on the stream now comes after."""
        return {**self._before_stream[stream], stream: self._commands[stream]}

    def new_origin(self, place: int) -> Origin:
        """The origin of a stream or an event that is made at a place now."""
        self._origin_counts[place] += 1
        return place, self._origin_counts[place] - 1

    def note_event(self, stream: int, event: Origin) -> None:
        """An event is recorded on a stream now."""
        events = self._events[stream]
        events[:] = [noted for noted in events if noted[1] != event][1 - _EVENTS_KEPT :]
        events.append((self._commands[stream], event))

    def event_after(self, command: Command) -> Origin | None:
        """The last event recorded on the stream after the command, if any."""
        events = reversed(self._events[command.stream])
        return next((event for reached, event in events if reached >= command.number), None)

    def stream_waits(self, stream: int, reached: Reached) -> None:
        _join(self._before_stream[stream], reached)

    def host_waits(self, reached: Reached) -> None:
        if self.before_host_waits is not None:
            self.before_host_waits(reached)
        _join(self._before_host, reached)


def _join(latest: dict[int, int], reached: Reached) -> None:
    for stream, number in reached.items():
        if latest.get(stream, 0) < number:
            latest[stream] = number
