"""A host thread: how much time passes on it while the program runs, which frames are open, and its rows.

Real time stands still from `pause` to `resume`, while we compute values. Our kernels in Python leave cold caches
behind, so PyTorch then takes longer than it would. Three rules keep that out.

- Between two operators real time counts only where it is longer than what a dispatch costs the device's host.
- A short stretch counts as the shortest of the last passes by that point: noise only ever lengthens.
- In a backward pass or an optimizer's step PyTorch's time is modelled, unless it is far too long: then a hook took it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from keepbusy.timeline.model import NONE, FrameKind, Kind, LinkKind
from keepbusy.virtual.clock.rows import Rows

if TYPE_CHECKING:
    from keepbusy.virtual.pytorch.backward_streams import BackwardStreams

NOISE_LIMIT = 500_000
"""Nanoseconds. A stretch that is longer counts whole."""
HOOK_LIMIT = 5_000_000
"""The same, while PyTorch is at work by itself."""
BACKWARD_PASS = "backward"
"""The annotation within which the autograd engine is at work."""
_LIBRARY_FRAMES = (BACKWARD_PASS, "Optimizer.")
"""Begin the names of frames within which PyTorch is at work by itself."""
_LONGEST = 1 << 62
_WORK, _LINE = int(Kind.WORK), int(FrameKind.LINE)


class HostThread:
    """A host thread of the timeline: how far it is, which frames are open on it, and the time that no row shows yet.

    `with` pauses it. What writes rows is called with the clock's lock held.
    """

    __slots__ = (
        "_looked_after", "_open_lines", "_outer", "_recent", "_resume_time", "_rows",
        "awaits_batch", "backward_pass", "border_time", "chosen_streams", "depth", "frame", "in_backward", "in_library",
        "innermost", "lane", "last", "marks", "modelled_time", "now", "pauses", "place", "real", "releases",
        "sampled_places", "unwritten_time",
    )  # fmt: skip

    def __init__(self, rows: Rows, lane: int, now: int = 0, real: Callable[[], int] | None = None) -> None:
        """`real`: nanoseconds of a steady clock, or None where host time is modelled."""
        self._rows, self.real = rows, real
        self.lane, self.now = lane, now
        self.last = NONE  # its last row
        self.releases: list[int] = []  # rows of other threads that its next row waits for
        self.marks: list[str] = []  # what its next row begins

        self.depth = 0  # of operators within operators
        self.frame = NONE  # the innermost open frame
        self.innermost = NONE  # the same, but for lines
        self.place = 0
        self._open_lines: tuple[int, ...] = ()  # the open frames of the place, within `innermost`
        self._outer: list[tuple[int, int, tuple[int, ...], bool, bool]] = []  # what to return to
        self.in_backward = False
        self.in_library = False  # whether PyTorch is at work by itself

        self._recent: dict[object, tuple[int, int]] = {}  # of each point, how long its last two passes took
        self.pauses = 0  # how many calls of ours the thread is in
        self._resume_time = real() if real is not None else 0  # when it went back to the program
        self.unwritten_time = 0  # real time of the program's that no row shows yet
        self.border_time = 0  # the same since the last operator, that a row shows already
        self.modelled_time = 0  # modelled time that no row shows yet
        self.sampled_places = Counter[int]()  # where modelled time went by, sampled now and then
        self.awaits_batch = False
        self.chosen_streams: dict[int, int] = {}  # of each device the one that this thread has chosen
        self.backward_pass: BackwardStreams | None = None  # that is under way
        self._looked_after = NONE  # the row at whose end the program last looked at its clock

    # time

    def pause(self, overhead: int = 0) -> None:
        """The program has called something of ours. Until `resume` real time does not count; nor does `overhead`."""
        if not self.pauses and self.real is not None:
            self.unwritten_time += self.real() - self._resume_time - overhead
        self.pauses += 1

    def resume(self) -> None:
        """Back to the program."""
        self.pauses -= 1
        if not self.pauses and self.real is not None:
            self._resume_time = self.real()

    def __enter__(self) -> Self:
        self.pause()
        return self

    def __exit__(self, *error: object) -> None:
        self.resume()

    def pause_length(self) -> int:
        """For how long real time has not counted."""
        return self.real() - self._resume_time if self.real is not None else 0

    def moment(self) -> int:
        """How far it is now, with what no row shows yet, if that is long enough to count whole."""
        written = self.now + self.modelled_time
        if self.real is None or self.pauses:
            return written
        unwritten = self.unwritten_time + self.real() - self._resume_time
        return written + unwritten if unwritten > NOISE_LIMIT else written

    def take_over(self, other: HostThread) -> None:
        """It goes on once `other` has done what it did so far. What passed here until now belongs to somebody else."""
        if other.last != NONE:
            self.releases.append(other.last)
        self.now = max(self.now, other.now)
        self._resume_time = self.real() if self.real is not None else 0

    def take_dispatch_time(self, point: object, least: int) -> int:
        """What to write down before an operator whose dispatch takes `least`; `point`: where the program is."""
        least += self.modelled_time - self.border_time
        if self.real is not None:
            real = self.unwritten_time
            if self.in_library:
                real = real if real > HOOK_LIMIT else 0
            elif real <= NOISE_LIMIT:
                earlier, last = self._recent.get(point, (_LONGEST, _LONGEST))
                self._recent[point] = last, real
                real = min(earlier, last, real)
            if real > least:
                least = real
        self.unwritten_time = self.border_time = self.modelled_time = 0
        return max(0, least)  # a border may have taken more than the dispatch does

    def take_border_time(self) -> int:
        """What to write down at a border of the program's own: real time, or all of the modelled one."""
        if self.real is None:
            modelled, self.modelled_time = self.modelled_time, 0
            self.sampled_places.clear()
            return modelled
        if not self.pauses:
            self.pause()
            self.resume()
        if self.in_library and self.unwritten_time <= HOOK_LIMIT:
            return 0
        return self._take_real_time(max(0, self.unwritten_time))

    def take_time_until(self, moment: int) -> int:
        """How much real time had passed at a moment of the clock, since the thread went back to the program."""
        passed = min(moment - self._resume_time, self.unwritten_time)
        if self.pauses == 0 or self.in_library or passed <= 0:
            return 0
        self._resume_time += passed
        return self._take_real_time(passed)

    def _take_real_time(self, duration: int) -> int:
        self.unwritten_time -= duration
        self.border_time += duration
        return duration

    # rows

    def add(self, kind: int, name: str, end: int, work: int, awaits: int = NONE) -> int:
        """A row from now to its end; returns its number."""
        rows, frame, now = self._rows, self.frame, self.now
        row = rows.add(self.lane, kind, rows.names[name], frame, now, end, work, 0, awaits, NONE, 0, 0, NONE, NONE, 0)
        self.now, self.last = end, row
        if self.releases:
            for source in self.releases:
                rows.link(source, row, LinkKind.HANDOFF)
            self.releases.clear()
        if self.marks:
            for mark in self.marks:
                rows.mark_rows.setdefault(mark, []).append(row)
            self.marks.clear()
        return row

    def work(self, duration: int, name: str = "") -> None:
        if duration > 0:
            self.add(_WORK, name, self.now + duration, duration)

    def work_until_border(self) -> None:
        """What the program did since it was last seen, up to a border of its own; nothing within an operator."""
        if not self.depth:
            self.work(self.take_border_time())

    def work_until_look(self) -> None:
        """The same, up to a look at the program's clock. Looks that follow each other lengthen one row."""
        duration, row = self.take_border_time(), self.last
        if duration > 0 and self._looked_after == row and self._rows.lengthen(row, self.frame, duration):
            self.now += duration
        else:
            self.work(duration)
            self._looked_after = self.last
        self.border_time = 0  # the next operator is dispatched after the look

    def work_modelled_time(self) -> None:
        self.work(self.modelled_time)
        self.modelled_time = 0
        self.sampled_places.clear()

    def work_where_seen(self) -> None:
        """What went by in small pieces since the last row stands where most of it did, not at the call after it."""
        if self.sampled_places and not self.depth:
            [(place, _)] = self.sampled_places.most_common(1)
            self.go_to(place)
            self.work_modelled_time()

    # frames

    def open(self, kind: int, name: str) -> None:
        self._outer.append((self.innermost, self.place, self._open_lines, self.in_backward, self.in_library))
        self.innermost = self.frame = self._rows.open(self.lane, kind, self._rows.names[name], self.frame, self.now)
        self.place, self._open_lines = 0, ()
        self.in_backward |= name == BACKWARD_PASS
        self.in_library |= name.startswith(_LIBRARY_FRAMES)

    def close(self) -> None:
        """Close the innermost frame, and the lines within it; where none is open, nothing."""
        if not self._outer:
            return
        for frame in (*self._open_lines, self.innermost):
            self._rows.close(frame, self.now)
        in_library = self.in_library
        self.innermost, self.place, self._open_lines, self.in_backward, self.in_library = self._outer.pop()
        if in_library and not self.in_library:
            self.unwritten_time = 0  # PyTorch's own, while it was at work by itself
        self.frame = self._open_lines[-1] if self._open_lines else self.innermost

    def go_to(self, place: int) -> None:
        """Leave the lines that the place is not within, and enter its own."""
        if place == self.place:
            return
        lines = self._rows.lines
        old, new = lines[self.place], lines[place]
        same = 0
        while same < min(len(old), len(new)) and old[same] == new[same]:
            same += 1
        for line in self._open_lines[same:]:
            self._rows.close(line, self.now)
        opened = self._open_lines[:same]
        for name in new[same:]:
            parent = opened[-1] if opened else self.innermost
            opened = (*opened, self._rows.open(self.lane, _LINE, name, parent, self.now))
        self._open_lines, self.place = opened, place
        self.frame = opened[-1] if opened else self.innermost
