"""What comes before what on the devices, whatever the clock says: a vector clock for each stream, and one for the host.

Only what a program may rely on counts: the order of a stream, events, and what the host has waited for. That two
copies share an engine, or that a kernel happened to be done in time, is no order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

Reached: TypeAlias = Mapping[int, int]
"""By stream, the number of its last command that comes before."""
Made: TypeAlias = tuple[int, int]
"""The place in the program where something is made, and how many were made there before it."""
_EVENTS_KEPT = 8


class Command(NamedTuple):
    """What a stream was given to do."""

    stream: int
    number: int  # of all its commands, from 1 on
    place: int  # in the program


class StreamOrder:
    """All host threads count as one, so what any of them has waited for comes before all that any of them launches
    later: threads that order each other cause no false alarm."""

    def __init__(self) -> None:
        self._commands: defaultdict[int, int] = defaultdict(int)
        self._before_stream: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._before_host: dict[int, int] = {}
        self.before_host_waits: Callable[[Reached], None] | None = None  # called with what the host is about to know
        self.made: dict[int, Made] = {}  # where the program made a stream
        self._events: defaultdict[int, list[tuple[int, Made]]] = defaultdict(list)
        self._made_at: defaultdict[int, int] = defaultdict(int)

    def command(self, stream: int, place: int) -> Command:
        """A command is launched now."""
        number = self._commands[stream] = self._commands[stream] + 1
        return Command(stream, number, place)

    def comes_before(self, command: Command, next_on: int) -> bool:
        """Whether that command is done when the next one on `next_on` begins."""
        stream, number, _ = command
        if stream == next_on or self._before_host.get(stream, 0) >= number:
            return True
        return self._before_stream[next_on].get(stream, 0) >= number

    def is_known_to_host(self, command: Command) -> bool:
        """Whether the host has waited for that command."""
        return self._before_host.get(command.stream, 0) >= command.number

    def at(self, stream: int) -> Reached:
        """What an event that is recorded now stands for."""
        return {**self._before_stream[stream], stream: self._commands[stream]}

    def make(self, place: int) -> Made:
        """A stream or an event is made at a place."""
        self._made_at[place] += 1
        return place, self._made_at[place] - 1

    def note_event(self, stream: int, event: Made) -> None:
        """It is recorded on a stream now."""
        events = self._events[stream]
        events[:] = [known for known in events if known[1] != event][1 - _EVENTS_KEPT :]
        events.append((self._commands[stream], event))

    def event_after(self, command: Command) -> Made | None:
        """An event that was recorded behind that command, the last one if there are several."""
        events = reversed(self._events[command.stream])
        return next((event for reached, event in events if reached >= command.number), None)

    def stream_waits(self, stream: int, reached: Reached) -> None:
        _join(self._before_stream[stream], reached)

    def host_waits(self, reached: Reached) -> None:
        if self.before_host_waits is not None:
            self.before_host_waits(reached)
        _join(self._before_host, reached)


def _join(known: dict[int, int], reached: Reached) -> None:
    for stream, number in reached.items():
        if known.get(stream, 0) < number:
            known[stream] = number
