"""The lanes of a run, as they come: host threads, the queues of streams, and the rows that they write.

A host thread knows how much time passes on it while the program runs. Real time stands still from `pause` to
`resume`, while we compute values. What is left is the program's own, and a little of ours: a kernel in Python leaves
cold caches behind, so what PyTorch itself does then takes longer than it would. Three things keep that out.

- From one operator to the next it takes what dispatching costs the device's host; real time counts
  where it is more.
- A short stretch counts as the shortest of the last passes by that point: noise only ever lengthens.
- While PyTorch is at work by itself, in a backward pass or a step of an optimizer, its time is
  modelled. Only what is far too long for it is somebody else's: a hook that reads a file.

A stream is a queue of commands; while it captures, its commands go to a graph. The rows of all lanes make a `Timeline`.
What a row means is in `timeline/model.py`; here its launch stands in the row itself, because nearly every command has
one.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from struct import Struct
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from keepbusy.timeline.frame_roles import OWN_STEP, PROFILER_STEP, STEP_MARKS, described
from keepbusy.timeline.model import (
    NEVER,
    NONE,
    FrameKind,
    Frames,
    Ints,
    Kind,
    Lane,
    LinkKind,
    Links,
    MemoryUse,
    Spans,
    Timeline,
)  # fmt: skip
from keepbusy.timeline.run_facts import RunFacts
from keepbusy.virtual.clock.order import Reached

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

    What writes rows is called with the clock's lock held.
    """

    __slots__ = (
        "_looked_after", "_open_lines", "_outer", "_recent", "_resume_time", "_rows",
        "awaits_batch", "backward_pass", "border_time", "chosen_streams", "depth", "frame", "in_backward", "in_library",
        "innermost", "lane", "last", "looks", "marks", "modelled_time", "now", "pauses", "place", "real", "releases",
        "unwritten_time",
    )  # fmt: skip

    def __init__(
        self,
        rows: Rows,
        lane: int,
        now: int = 0,
        real: Callable[[], int] | None = None,
    ) -> None:
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
        self.looks = Counter[int]()  # where it went by, looked at now and then
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

    def forget_real_time(self) -> None:
        """What passed until now belongs to somebody else."""
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
            self.looks.clear()
            return modelled
        if not self.pauses:
            self.pause()
            self.resume()
        if self.in_library and self.unwritten_time <= HOOK_LIMIT:
            return 0
        return self._take_real_time(max(0, self.unwritten_time))

    def take_time_until(self, moment: int) -> int:
        """Of the real time since the thread went back to the program, what had passed at a moment of the clock."""
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

    def work_until_call(self) -> None:
        """The same, up to a call of the device; within an operator only modelled time counts."""
        if not self.depth:
            self.work(self.take_border_time())
        else:
            self.work_modelled_time()

    def work_modelled_time(self) -> None:
        self.work(self.modelled_time)
        self.modelled_time = 0
        self.looks.clear()

    def work_where_seen(self) -> None:
        """What went by in small pieces since the last row stands where most of it did, not at the call after it."""
        if self.looks and not self.depth:
            [(place, _)] = self.looks.most_common(1)
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


# Streams

Awaited: TypeAlias = Mapping[int, tuple[int, int]]
"""Of each lane that is waited for the latest such command, row and end. What comes before it in its lane ends first."""
_NOTHING: Mapping[int, tuple[int, int]] = MappingProxyType({})


class Moment(NamedTuple):
    """A point in the order of a stream, as an event records it."""

    time: int  # when the device passes it
    until: int  # when the last command before it ends
    awaited: Awaited = _NOTHING  # the commands that it waits for
    graph: Graph | None = None  # the capture that it belongs to
    reached: Mapping[int, int] = MappingProxyType({})  # how many of its commands come before
    order: Reached = MappingProxyType({})  # what comes before it, whatever the clock says


BEGINNING = Moment(NEVER, NEVER)
"""What an event holds that was never recorded: nobody waits for it."""


class StreamQueue:
    """An in-order queue of commands."""

    __slots__ = ("awaited", "device", "ends", "lane", "last", "launch", "place", "tail")

    def __init__(self, lane: int, device: int, limit: int) -> None:
        self.lane, self.device = lane, device
        self.tail = NEVER  # when its last command ends
        self.last = NONE  # that command's row
        self.awaited: dict[int, tuple[int, int]] = {}  # what its next command waits for: see `Awaited`
        self.ends = [NEVER] * limit  # of the last so many commands, as `timeline/replay.py` keeps them
        self.place = 0  # of the next one
        self.launch = NONE  # that came last with commands of its own

    def append(self, launch: int, row: int, end: int) -> None:
        """A command. All of one launch, a graph's, take one place in the queue."""
        self.tail, self.last = end, row
        if launch != self.launch:
            self.place, self.launch = (self.place + 1) % len(self.ends), launch
        self.ends[self.place - 1] = end

    def until(self) -> int:
        """When everything that stands in it now, or that it waits for, has ended."""
        return max([self.tail, *(end for _, end in self.awaited.values())]) if self.awaited else self.tail

    def pending(self) -> Awaited:
        """What must have ended by then."""
        if self.last == NONE:
            return dict(self.awaited)
        return {self.lane: (self.last, self.tail), **self.awaited}

    def wait_for(self, awaited: Awaited) -> None:
        """Its next command comes after these. Of each lane only the latest counts; its own are in order anyway."""
        for lane, command in awaited.items():
            if lane != self.lane and command > self.awaited.get(lane, (NONE, NEVER)):
                self.awaited[lane] = command


class SharedDevice:
    """A device on which kernels and collectives hold each other up: NCCL takes some of the multiprocessors, so that a
    product whose tiles fill all of them once needs a second round, and both read and write the same memory.

    A command is slowed where it begins beside one that was launched before. What was launched before has its time
    already; what that should have lost, the next command of its kind makes up for.
    """

    def __init__(self, slower: Callable[[str], float]) -> None:
        self._slower, self._of_collectives = slower, 1 - 1 / slower("nccl")
        self._collectives: deque[tuple[int, int]] = deque()
        self._kernels: deque[tuple[int, int, float]] = deque(maxlen=1024)  # as many as may stand in a queue
        self._kernels_owe = self._collectives_owe = 0.0

    def lasts(self, name: str, start: int, work: int) -> int:
        """How long a kernel takes that begins then, and takes `work` alone."""
        while self._collectives and self._collectives[0][1] <= start:
            self._collectives.popleft()
        slower, left, now = self._slower(name), float(work), float(start)
        if slower > 1.0:
            left, self._kernels_owe = left + self._kernels_owe, 0.0
        for begun, ended in self._collectives:
            if ended > now and left > begun - now:
                left -= max(0.0, begun - now)
                now = max(begun, now)
                beside = min(left * slower, ended - now)
                left, now = left - beside / slower, now + beside
                self._collectives_owe += beside * self._of_collectives
        end = round(now + left)
        self._kernels.append((start, end, slower))
        return end - start

    def owed(self) -> int:
        """How much later the next collective ends for what the ones before should have lost."""
        owed, self._collectives_owe = round(self._collectives_owe), 0.0
        return owed

    def hold(self, start: int, end: int) -> None:
        """A collective is on the wire so long. While it waits for a late rank it holds them, too, but what a late rank
        costs is told by replaying its wait, and kernels would stay as they are there."""
        for begun, ended, slower in reversed(self._kernels):
            if ended <= start:
                break
            beside = max(0, min(end, ended) - max(start, begun))
            self._kernels_owe += beside * (1 - 1 / slower)
            self._collectives_owe += beside * self._of_collectives
        self._collectives.append((start, end))


# What a stream captures

_numbers = count(1)


class Node(NamedTuple):
    """A command of a capture, to come at each replay."""

    stream: int  # on which it was captured
    kind: int
    name: str
    work: int
    size: int = 0
    group: int = NONE
    last_arrival: Callable[[int], int] | None = None  # of a collective: asks the other ranks, as in `Clock.collective`
    after: tuple[tuple[int, int], ...] = ()  # other streams, and how many of their commands come before


class Graph:
    """Commands in the order in which they were captured; at replay those of each stream run one after the other."""

    def __init__(self, origin: int = NONE, mode: str = "global", thread: int = 0) -> None:
        self.origin, self.mode, self.thread = origin, mode, thread
        self.nodes: list[Node] = []
        self.failed = False
        self.marks = [f"Graph#{next(_numbers)}"]
        """What each replay begins, if those are the run's steps: also what began while it was captured, as an
        optimizer's step. So turns count alike whether they are replayed or, with a last batch of another shape, not."""
        self._done = {origin: {origin: 0}}  # of each of its streams: how many commands of each come before its next one
        self._known: dict[int, dict[int, int]] = {}  # the same, before its last one

    def add(self, node: Node) -> None:
        """Its stream's next command."""
        stream = node.stream
        done, known = self._done[stream], self._known.get(stream, {})
        after = tuple((one, count) for one, count in done.items() if one != stream and count > known.get(one, 0))
        self.nodes.append(node._replace(after=after))
        self._known[stream] = dict(done)
        done[stream] += 1

    def reached(self, stream: int) -> dict[int, int]:
        """How many commands of each stream come before what the stream runs next."""
        return dict(self._done[stream])

    def join(self, stream: int, reached: Mapping[int, int]) -> None:
        """What the stream runs next comes after those, too."""
        done = self._done.setdefault(stream, {stream: 0})
        for other, commands in reached.items():
            done[other] = max(done.get(other, 0), commands)

    def streams(self) -> list[int]:
        """Those with commands, the first one's first."""
        return list(self._known)

    def open_branches(self) -> list[int]:
        """Streams whose last command nothing waits for in the stream of the first one."""
        main, *others = self._known
        return [one for one in others if self._known[main].get(one, 0) < self._done[one][one]]

    def forbids(self, thread: int) -> bool:
        """Whether unsafe calls of a thread break the capture, whatever stream they are for."""
        return self.mode == "global" or (self.mode == "thread_local" and self.thread == thread)

    @property
    def joined(self) -> bool:
        """Whether everything comes before what its first stream would run next."""
        at_origin = self._done[self.origin]
        return all(at_origin.get(stream, 0) == done[stream] for stream, done in self._done.items())


# Rows

MARKS = (*STEP_MARKS, "Forward#")
"""Begin the names of frames that begin the run's steps, the most trusted first."""
_COLUMNS = (
    "lane", "kind", "name", "frame", "start", "end", "work", "lag", "awaits", "group", "size", "direction", "pinned",
)  # fmt: skip
"""Of a row as the clock writes it; then its launch, and the lag after it."""
_FRAME_COLUMNS = ("lane", "kind", "name", "parent", "start")
_ORDINARY = dict.fromkeys(("frame", "awaits", "group", "pinned", "launch"), NONE)
"""Of columns that are not mentioned; of all others it is zero."""
_PACKED = 1 << 16
_LAUNCH = "cudaLaunchKernel"
_WORK, _OPERATOR = int(Kind.WORK), int(FrameKind.OPERATOR)


class Packed:
    """Rows of integers, many of them: bytes as they come, narrow columns of numpy as they grow.

    A clock writes a few rows for every operator. As tuples they would keep Python's garbage collector busy.
    """

    def __init__(self, width: int) -> None:
        self.count = 0
        self._row = Struct(f"{width}q")
        self._bytes, self._full = self._row.pack, _PACKED * self._row.size
        self._fresh = bytearray()
        self._blocks: list[list[npt.NDArray[np.signedinteger[Any]]]] = []

    def add(self, *row: int) -> int:
        """Its number."""
        fresh, number = self._fresh, self.count
        if len(fresh) >= self._full:
            self._blocks.append([_narrow(column) for column in self._unpacked()])
            fresh.clear()
        fresh += self._bytes(*row)
        self.count = number + 1
        return number

    def last(self) -> tuple[int, ...]:
        """The row that came last."""
        return self._row.unpack(self._fresh[-self._row.size :])

    def change_last(self, *row: int) -> None:
        self._fresh[-self._row.size :] = self._bytes(*row)

    def columns(self, first: int = 0) -> Ints:
        """The rows from `first` on, transposed."""
        fresh, past = self._unpacked(), first // _PACKED
        blocks: list[Any] = [*self._blocks[past:], fresh]
        whole = np.stack([np.concatenate([block[at] for block in blocks]) for at in range(len(fresh))])
        return whole[:, first - min(past, len(self._blocks)) * _PACKED :].astype(np.int64, copy=False)

    def _unpacked(self) -> Ints:
        return np.frombuffer(bytes(self._fresh), np.int64).reshape(-1, self._row.size // 8).T


def _narrow(column: Ints) -> npt.NDArray[np.signedinteger[Any]]:
    """In as few bytes a number as they need: a long run has millions of rows, and most columns are small."""
    low, high = int(column.min()), int(column.max())
    fits = (kind for kind in (np.int8, np.int16, np.int32) if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    return column.astype(next(fits, np.int64))


class Names(dict[str, int]):
    """A number for each text, in the order in which they come."""

    def __missing__(self, text: str) -> int:
        return self.setdefault(text, len(self))


class Rows:
    """Spans, links, frames and names, as they come."""

    def __init__(self, call: int = 0, gap: int = 0, latency: int = 0) -> None:
        """Of every launch of a kernel: what the call costs, the gap before a kernel that waits for another, and how
        late one starts that does not."""
        self.launch = call, gap, latency
        self.names = Names({"": 0, _LAUNCH: 1})
        self.lanes: list[Lane] = []
        self.lines: list[tuple[int, ...]] = [()]  # of each place the names of its lines, from the outside in
        self.mark_rows: dict[str, list[int]] = {mark: [] for mark in MARKS}
        self.spans = Packed(len(_COLUMNS) + 2)
        self._links = Packed(4)
        self.frames = Packed(len(_FRAME_COLUMNS))
        self.frame_ends = array("q")
        self._operators = Packed(12)
        self.memory = Packed(8)
        """Blocks that came or went: lane, device, time, address, bytes, reserved, bytes asked for, whether small."""
        self.add: Callable[..., int] = self.spans.add

    def lane(self, lane: Lane) -> int:
        self.lanes.append(lane)
        return len(self.lanes) - 1

    def lengthen(self, row: int, frame: int, duration: int) -> bool:
        """Let the work of a row go on, if it is the last of all and within that frame."""
        if row == NONE or row != self.spans.count - 1:
            return False
        lane, kind, name, within, start, end, work, *rest = self.spans.last()
        if kind != _WORK or within != frame:
            return False
        self.spans.change_last(lane, kind, name, within, start, end + duration, work + duration, *rest)
        return True

    def link(self, source: int, target: int, kind: LinkKind, lag: int = 0) -> None:
        self._links.add(source, target, kind, lag)

    def operator(
        self, lane: int, stream: int, name: int, kernel: int, parent: int, begin: int, work: int, returned: int,
        start: int, lasting: int,
    ) -> int:  # fmt: skip
        """The usual operator, in one row here: the host works up to it, and in its frame it launches one kernel.

        Returns the row of the launch; the kernel's is the next one.
        """
        spans, frames = self.spans, self.frames
        first, frame = spans.count, frames.count
        self._operators.add(first, frame, lane, stream, name, kernel, parent, begin, work, returned, start, lasting)
        frames.count = frame + 1
        self.frame_ends.append(returned)
        launch = first + 1 if work else first
        spans.count = launch + 2
        return launch

    def open(self, lane: int, kind: int, name: int, parent: int, start: int) -> int:
        """A frame; `close` it, or it lasts until the timeline is made."""
        self.frame_ends.append(NONE)
        return self.frames.add(lane, kind, name, parent, start)

    def close(self, frame: int, end: int) -> None:
        self.frame_ends[frame] = end

    def timeline(self, now: Mapping[int, int], facts: RunFacts) -> Timeline:
        """All so far. Frames still open end `now`, at the time of their lane."""
        columns, names = self.columns(), tuple(self.names)
        launch, latency = columns[-2], columns[-1]
        return Timeline(
            lanes=tuple(self.lanes),
            names=names,
            spans=described(Spans.of(columns.shape[1], **dict(zip(_COLUMNS, columns[:-2], strict=True))), names),
            links=self._all_links(launch, latency),
            frames=described(self._all_frames(now), names),
            # a mark stands at the next row of its thread; one at the very end has none yet
            marks=np.unique([row for row in self.steps() if row < self.spans.count]).astype(np.int64),
            memory=self._all_memory(),
            facts=facts,
        )

    @property
    def announced(self) -> bool:
        """Whether the program says itself where its steps end."""
        return any(len(self.mark_rows[mark]) > 1 for mark in (OWN_STEP, PROFILER_STEP))

    def steps(self) -> list[int]:
        """The rows that begin the run's steps.

        Of the first kind of mark that there is, unless it was only a warm-up: another kind came after
        it, at least as often. So are steps marked that a graph replays whole.
        """
        known = [rows for rows in self.mark_rows.values() if len(rows) > 1]
        for rows in known:
            if not any(other[0] > rows[-1] and len(other) >= len(rows) for other in known):
                return rows
        return []

    def columns(self) -> Ints:
        """The spans, transposed: those of the usual operators stand in the places that were left for them."""
        first, frame, lane, stream, _, kernel, parent, begin, work, returned, start, lasting = self._operators.columns()
        cost, gap, latency = self.launch
        works = work > 0
        launch = first + works
        columns = np.empty((len(_COLUMNS) + 2, self.spans.count), np.int64)
        _fill(
            columns, (*_COLUMNS, "launch", "latency"), self.spans.columns(),
            (first[works], {
                "lane": lane[works], "kind": _WORK, "frame": parent[works], "start": begin[works],
                "end": (begin + work)[works], "work": work[works],
            }),
            (launch, {
                "lane": lane, "kind": Kind.LAUNCH, "name": self.names[_LAUNCH], "frame": frame,
                "start": begin + work, "end": returned, "work": cost,
            }),
            (launch + 1, {
                "lane": stream, "kind": Kind.KERNEL, "name": kernel, "start": start, "end": start + lasting,
                "work": lasting, "lag": gap, "launch": launch, "latency": latency,
            }),
        )  # fmt: skip
        return columns

    def _all_memory(self) -> MemoryUse:
        lane, device, time, block, size, reserved, *_ = self.memory.columns()
        allocated = np.zeros(len(size), np.int64)
        for one in np.unique(device):
            allocated[device == one] = np.cumsum(size[device == one])
        held = {"lane": lane, "device": device, "time": time, "block": block, "size": size, "reserved": reserved}
        return MemoryUse.of(len(size), **held, allocated=allocated)

    def _all_links(self, launch: Ints, latency: Ints) -> Links:
        launched = np.flatnonzero(launch != NONE)
        source, target, kind, lag = self._links.columns()
        return Links.of(
            len(launched) + len(source),
            source=np.concatenate([launch[launched], source]),
            target=np.concatenate([launched, target]),
            kind=np.concatenate([np.full(len(launched), LinkKind.LAUNCH), kind]),
            lag=np.concatenate([latency[launched], lag]),
        )

    def _all_frames(self, now: Mapping[int, int]) -> Frames:
        _, frame, lane, _, name, _, parent, begin, work, *_ = self._operators.columns()
        columns = np.empty((len(_FRAME_COLUMNS), self.frames.count), np.int64)
        operators = {"lane": lane, "kind": _OPERATOR, "name": name, "parent": parent, "start": begin + work}
        _fill(columns, _FRAME_COLUMNS, self.frames.columns(), (frame, operators))
        end = np.array(self.frame_ends, np.int64)
        current = np.array([now.get(lane, 0) for lane in range(len(self.lanes))], np.int64)
        end = np.where(end == NONE, current[columns[0]], end)
        return Frames.of(len(end), **dict(zip(_FRAME_COLUMNS, columns, strict=True)), end=end)


def _fill(columns: Ints, names: Sequence[str], plain: Ints, *others: tuple[Ints, Mapping[str, Any]]) -> None:
    """Some rows by their places and what is known of them, and all the rest in the order in which they came."""
    free = np.ones(columns.shape[1], bool)
    for places, known in others:
        free[places] = False
        for column, name in zip(columns, names, strict=True):
            column[places] = known.get(name, _ORDINARY.get(name, 0))
    columns[:, free] = plain
