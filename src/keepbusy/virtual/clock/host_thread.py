"""A host thread: the time that passes on it while the program runs, its open frames, and its rows.

Real time does not count from `pause` to `resume`, while we compute values. Our kernels in Python leave cold caches
behind, which makes PyTorch slower afterwards. Three rules keep that out.

- Between two operators real time counts only if it is longer than the cost of a dispatch on the device's host.
- A short time counts as the shortest of the last passes by the same point, since noise only lengthens it.
- In a backward pass or an optimizer's step PyTorch's time is modelled, unless it is so long that a hook took it.
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
"""Nanoseconds. A longer time between operators counts whole."""
HOOK_LIMIT = 5_000_000
"""The same for a backward pass and an optimizer's step."""
BACKWARD_PASS = "backward"
"""The annotation around the autograd engine's work."""
_LIBRARY_FRAMES = (BACKWARD_PASS, "Optimizer.")
"""Prefixes of the names of frames in which PyTorch works by itself."""
_LONGEST = 1 << 62
_WORK, _LINE = int(Kind.WORK), int(FrameKind.LINE)


class HostThread:
    """A host thread of the timeline: its time, its open frames, and the time that no row shows yet.

    `with` pauses it. Methods that write rows are called with the clock's lock held.
    """

    __slots__ = (
        "_clock_read_row", "_open_lines", "_outer", "_recent", "_resume_time", "_rows",
        "awaits_batch", "backward_pass", "border_time", "chosen_streams", "depth", "frame", "in_backward", "in_library",
        "innermost", "lane", "last", "marks", "modelled_time", "now", "pauses", "place", "real", "releases",
        "sampled_places", "unwritten_time",
    )  # fmt: skip

    def __init__(self, rows: Rows, lane: int, now: int = 0, real: Callable[[], int] | None = None) -> None:
        """`real`: a steady clock in nanoseconds, or None for modelled host time."""
        self._rows, self.real = rows, real
        self.lane, self.now = lane, now
        self.last = NONE  # its last row
        self.releases: list[int] = []  # rows of other threads that release its next row
        self.marks: list[str] = []  # marks of steps that begin at its next row

        self.depth = 0  # how many operators are open
        self.frame = NONE  # the innermost open frame
        self.innermost = NONE  # the innermost open frame that is no line
        self.place = 0
        self._open_lines: tuple[int, ...] = ()  # frames of the place's lines, within `innermost`
        self._outer: list[tuple[int, int, tuple[int, ...], bool, bool]] = []  # the state outside each open frame
        self.in_backward = False
        self.in_library = False  # whether PyTorch works by itself

        self._recent: dict[object, tuple[int, int]] = {}  # the durations of the last two passes by each point
        self.pauses = 0  # how many `pause` calls are open
        self._resume_time = real() if real is not None else 0  # when it last returned to the program
        self.unwritten_time = 0  # the program's real time that no row shows yet
        self.border_time = 0  # real time since the last operator that a row shows already
        self.modelled_time = 0  # modelled time that no row shows yet
        self.sampled_places = Counter[int]()  # where modelled time passed, sampled
        self.awaits_batch = False
        self.chosen_streams: dict[int, int] = {}  # the stream that this thread has chosen, by device
        self.backward_pass: BackwardStreams | None = None  # of the current backward pass
        self._clock_read_row = NONE  # the last row when the program last read its clock

    # time

    def pause(self, overhead: int = 0) -> None:
        """The program has called us. Until `resume` real time does not count; neither does `overhead`."""
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
        """How long the present pause is."""
        return self.real() - self._resume_time if self.real is not None else 0

    def moment(self) -> int:
        """Its time now, with real time that no row shows yet if that is long enough to count whole."""
        written = self.now + self.modelled_time
        if self.real is None or self.pauses:
            return written
        unwritten = self.unwritten_time + self.real() - self._resume_time
        return written + unwritten if unwritten > NOISE_LIMIT else written

    def take_over(self, other: HostThread) -> None:
        """Continue after what `other` has done so far. Real time of this thread up to now does not count."""
        if other.last != NONE:
            self.releases.append(other.last)
        self.now = max(self.now, other.now)
        self._resume_time = self.real() if self.real is not None else 0

    def take_dispatch_time(self, point: object, least: int) -> int:
        """The work to write down before an operator whose dispatch takes `least`. `point`: the place in the program."""
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
        return max(0, least)  # a border may show more than the dispatch takes

    def take_border_time(self) -> int:
        """The work to write down at the start or end of a frame: real time, or all modelled time."""
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
        """Take the real time between the thread's return to the program and a moment of the real clock."""
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
        """Add a row from now to `end`; returns its number."""
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
        """Write down the program's work up to the start or end of a frame; nothing within an operator."""
        if not self.depth:
            self.work(self.take_border_time())

    def work_until_clock_read(self) -> None:
        """Write down the work up to a reading of the program's clock. Readings in a row extend the same row."""
        duration, row = self.take_border_time(), self.last
        if duration > 0 and self._clock_read_row == row and self._rows.lengthen(row, self.frame, duration):
            self.now += duration
        else:
            self.work(duration)
            self._clock_read_row = self.last
        self.border_time = 0  # the next operator is dispatched after the reading

    def work_modelled_time(self) -> None:
        self.work(self.modelled_time)
        self.modelled_time = 0
        self.sampled_places.clear()

    def work_where_seen(self) -> None:
        """Write down modelled time since the last row at the place where most of it passed."""
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
        """Close the innermost frame, if any, and the lines within it."""
        if not self._outer:
            return
        for frame in (*self._open_lines, self.innermost):
            self._rows.close(frame, self.now)
        in_library = self.in_library
        self.innermost, self.place, self._open_lines, self.in_backward, self.in_library = self._outer.pop()
        if in_library and not self.in_library:
            self.unwritten_time = 0  # real time of PyTorch itself, which is modelled
        self.frame = self._open_lines[-1] if self._open_lines else self.innermost

    def go_to(self, place: int) -> None:
        """Close the lines that do not enclose the place, and open its own."""
        if place == self.place:
            return
        lines = self._rows.lines
        old, new = lines[self.place], lines[place]
        common = 0
        while common < min(len(old), len(new)) and old[common] == new[common]:
            common += 1
        for line in self._open_lines[common:]:
            self._rows.close(line, self.now)
        opened = self._open_lines[:common]
        for name in new[common:]:
            parent = opened[-1] if opened else self.innermost
            opened = (*opened, self._rows.open(self.lane, _LINE, name, parent, self.now))
        self._open_lines, self.place = opened, place
        self.frame = opened[-1] if opened else self.innermost
