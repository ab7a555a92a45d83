"""The timeline: spans on lanes, and links that say which span released which.

Two asymmetries hold everywhere:

- Untraced time on a *host* lane may be real work, so a producer covers it with `WORK` spans;
  on a *device* lane it is idleness, and stays a gap.
- Durations of work are facts, durations of waits are consequences. `work` is the duration of a span
  that nothing holds up; `start` and `end` are where a replay (or the recording) puts it.

Rows are in *issue order*: a row comes after everything that releases it. A host span is
followed by the commands it launched, and a rank's rows pause at a collective until its peers
have arrived there too. So a replay is one pass from top to bottom.

`settle` derives the facts from recorded times: the `work` of each span, and the `lag` after each of its releases. The
measured lag belongs to the last release. After any other release the span would have begun with a typical lag, so the
others keep no more than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from keepbusy.timeline import run_facts
from keepbusy.timeline.run_facts import RunFacts

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
NONE = run_facts.NONE
"""No row, no lane, no frame: an index that points to nothing."""
UNRECORDED = "not recorded"
"""The name of host work within which nothing was recorded."""
WORKERS = "loader workers"
"""The name of a host lane for the processes that prepare input."""
LONGEST_HANDOVER = 300_000
"""Nanoseconds. Taking a ready batch from them costs less than this."""
EVERY_LANE = -2
"""`awaits` of a sync that waits for all lanes of its rank's device."""
STAGED_BYTES = 65_536
"""Copies up to this size are staged by the driver and cost about a launch (64 KB, as CUDA documents)."""
LARGEST_RANK = 1 << 30
_LONGEST_RUN = 1 << 52
"""Nanoseconds, 52 days: no recording holds more, all its lanes together."""
_LARGEST_MEMORY = 1 << 50
"""Bytes that no device has."""
_ONE_VALUE = (0,)
"""The strides of a column that stores one number for all rows."""


class Kind(IntEnum):
    """What a span is. Host kinds come first, device kinds (commands) from `KERNEL` on."""

    WORK = 0
    LAUNCH = 1
    SYNC = 2
    ALLOCATE = 3
    RECORDING = 4  # host time that the recorder reports as its own
    KERNEL = 8
    COPY = 9
    FILL = 10
    COLLECTIVE = 11


class LinkKind(IntEnum):
    """How a source releases its target."""

    LAUNCH = 0  # a command may start once its launch has begun
    ORDER = 1  # a command may start once another lane's command has ended
    HANDOFF = 2  # a host thread goes on once another has ended its part


class FrameKind(IntEnum):
    """What encloses host spans: an operator, a Python function, an annotation, an exact line."""

    OPERATOR = 0
    PYTHON = 1
    ANNOTATION = 2
    LINE = 3


class Direction(IntEnum):
    """Which way a copy moves its bytes."""

    UNKNOWN = 0
    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3
    HOST_TO_HOST = 4


class Lane(NamedTuple):
    """One in-order sequence. A lane with no device is a host thread."""

    rank: int
    device: int | None
    number: int
    name: str = ""


class Table:
    """Columns of equal length, instead of an object per span.

    Subclasses are frozen dataclasses whose fields are numpy arrays.
    """

    def __post_init__(self) -> None:
        for entry in fields(self):  # type: ignore[arg-type]
            column = np.asarray(getattr(self, entry.name), dtype=entry.metadata["dtype"])
            if column.strides != _ONE_VALUE:
                column = np.ascontiguousarray(column)
            if column.flags.writeable:
                column = column.view()
                column.flags.writeable = False
            object.__setattr__(self, entry.name, column)

    def __setstate__(self, columns: dict[str, npt.NDArray[Any]]) -> None:
        """From a pickle, where columns are writable again."""
        self.__dict__.update(columns)
        self.__post_init__()

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))  # type: ignore[arg-type]

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]

    def take(self, rows: npt.NDArray[Any] | slice) -> Self:
        """The rows with these numbers, or those that a mask selects."""
        if isinstance(rows, np.ndarray) and rows.dtype == np.bool_:
            rows = np.flatnonzero(rows)
        return type(self)(**{name: column[rows] for name, column in self.columns().items()})

    def change(self, **columns: npt.NDArray[Any]) -> Self:
        return replace(self, **columns)  # type: ignore[type-var]

    def numbering(self) -> list[tuple[str, str, int]]:
        """Columns that hold row numbers: the name, the table whose rows they are, and the value for none."""
        metadata = [(entry.name, entry.metadata) for entry in fields(self)]  # type: ignore[arg-type]
        return [(name, meta["indexes"], meta["fill"]) for name, meta in metadata if meta["indexes"]]

    def renumbered(self, **new: Ints) -> Self:
        """With the new numbers of these tables' rows. Numbers below 0 stay."""
        columns = {name: (getattr(self, name), new[table]) for name, table, _ in self.numbering() if table in new}
        return self.change(
            **{name: np.where(old < 0, old, np.append(number, NONE)[old]) for name, (old, number) in columns.items()}
        )

    @classmethod
    def concatenate(cls, parts: list[Self]) -> Self:
        names = [entry.name for entry in fields(cls)]  # type: ignore[arg-type]
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    @classmethod
    def of(cls, length: int, **columns: npt.ArrayLike) -> Self:
        """A table of `length` rows. Columns that are not passed hold their default, stored once."""
        filled = {}
        for entry in fields(cls):  # type: ignore[arg-type]
            value = np.asarray(columns.pop(entry.name, entry.metadata["fill"]), dtype=entry.metadata["dtype"])
            filled[entry.name] = np.broadcast_to(value, length) if value.ndim == 0 else value
        if columns:
            raise TypeError(f"{cls.__name__} has no column {', '.join(columns)}")
        return cls(**filled)


def column(dtype: type, fill: int = 0, indexes: str = "") -> Any:
    """A column of a `Table`: its type, its default, and the table of which it holds row numbers."""
    return field(metadata={"dtype": dtype, "fill": fill, "indexes": indexes})


@dataclass(frozen=True, eq=False)
class Spans(Table):
    """What occupies the lanes, in issue order. Times are nanoseconds, half-open."""

    lane: Ints = column(np.int32, indexes="lanes")
    kind: Ints = column(np.int8)
    name: Ints = column(np.int32, indexes="names")
    frame: Ints = column(np.int32, NONE, indexes="frames")
    start: Ints = column(np.int64)
    end: Ints = column(np.int64)
    work: Ints = column(np.int64)  # its own time, without waiting; for a collective, the wire time
    lag: Ints = column(np.int64)  # after the span before it on its lane
    awaits: Ints = column(np.int32, NONE, indexes="lanes")  # for a sync: the lane, or EVERY_LANE
    meeting: Ints = column(np.int32, NONE, indexes="meetings")  # for a collective: which one
    group: Ints = column(np.int32, NONE)  # for a collective: a number for its group of ranks
    size: Ints = column(np.int64)  # bytes
    blocks: Ints = column(np.int32)  # thread blocks of a kernel's launch; 0 if unknown
    direction: Ints = column(np.int8)
    pinned: Ints = column(np.int8, NONE)  # 1, 0, or NONE if unknown
    recording: Ints = column(np.int64)  # an estimate of what recording it cost the host
    role: Ints = column(np.int64)  # flags of frame_roles.Role, from its own name


@dataclass(frozen=True, eq=False)
class Links(Table):
    """Which span released which. A link from a later row means that row in the pass before."""

    source: Ints = column(np.int32, indexes="spans")
    target: Ints = column(np.int32, indexes="spans")
    kind: Ints = column(np.int8)
    lag: Ints = column(np.int64)


@dataclass(frozen=True, eq=False)
class Frames(Table):
    """What encloses host spans: nested, parents first."""

    lane: Ints = column(np.int32, indexes="lanes")
    kind: Ints = column(np.int8)
    name: Ints = column(np.int32, indexes="names")
    parent: Ints = column(np.int32, NONE, indexes="frames")
    start: Ints = column(np.int64)
    end: Ints = column(np.int64)
    sequence: Ints = column(np.int64, NONE)  # for an operator: a number that its forward and backward part share
    owner: Ints = column(np.int8)  # a frame_roles.Owner
    role: Ints = column(np.int64)  # flags of frame_roles.Role

    def around(self, frame: int) -> Iterator[int]:
        """This frame and those that enclose it, from the inside out."""
        while frame != NONE:
            yield frame
            frame = int(self.parent[frame])


@dataclass(frozen=True, eq=False)
class Meetings(Table):
    """A row per collective across ranks. The spans that are its parts point here."""

    name: Ints = column(np.int32, indexes="names")
    size: Ints = column(np.int64)
    members: Ints = column(np.int32)  # how many ranks take part
    present: Ints = column(np.int32)  # how many of these have their part in this timeline


@dataclass(frozen=True, eq=False)
class MemoryUse(Table):
    """The use of a device's memory: a row for each block that was allocated or freed, in order of time."""

    lane: Ints = column(np.int32, indexes="lanes")  # the host thread's
    device: Ints = column(np.int32)
    time: Ints = column(np.int64)
    block: Ints = column(np.int64)  # its address
    size: Ints = column(np.int64)  # bytes, negative if they are freed
    allocated: Ints = column(np.int64)  # by tensors, from then on
    reserved: Ints = column(np.int64)  # by PyTorch, from the driver


class Span(NamedTuple):
    """One row, for reading."""

    row: int
    lane: Lane
    kind: Kind
    name: str
    start: int
    end: int
    work: int


@dataclass(frozen=True, eq=False)
class Timeline:
    """A run: what each lane did, what released what, and where its steps begin."""

    lanes: tuple[Lane, ...]
    names: tuple[str, ...]
    spans: Spans
    links: Links = field(default_factory=lambda: Links.of(0))
    frames: Frames = field(default_factory=lambda: Frames.of(0))
    meetings: Meetings = field(default_factory=lambda: Meetings.of(0))
    marks: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """Rows of host spans at which each rank's steps begin. The last one ends the last step."""
    memory: MemoryUse = field(default_factory=lambda: MemoryUse.of(0))
    facts: RunFacts = RunFacts()
    further: tuple[Timeline, ...] = ()
    """Other recorded windows of the same run, each a timeline of its own, whose facts have the reason."""

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, row: int) -> Span:
        spans = self.spans
        lane, kind, name = self.lanes[spans.lane[row]], Kind(int(spans.kind[row])), self.names[spans.name[row]]
        return Span(int(row), lane, kind, name, int(spans.start[row]), int(spans.end[row]), int(spans.work[row]))

    def _repr_html_(self) -> str | None:
        import keepbusy  # here, since keepbusy imports this room

        return keepbusy.in_a_notebook(self)

    @property
    def ranks(self) -> list[int]:
        return sorted({lane.rank for lane in self.lanes})

    @property
    def on_device(self) -> Mask:
        """Which rows are commands."""
        return self.spans.kind >= Kind.KERNEL

    @property
    def has_operators(self) -> bool:
        """Whether any operator of PyTorch was called, on the host or on the device."""
        return bool((self.frames.kind == FrameKind.OPERATOR).any())

    @property
    def launches(self) -> Links:
        """From each launch to its commands."""
        return self.links.take(self.links.kind == LinkKind.LAUNCH)

    @property
    def rank_of_lanes(self) -> Ints:
        return np.array([lane.rank for lane in self.lanes], np.int64)

    @property
    def rank_of_rows(self) -> Ints:
        return self.rank_of_lanes[self.spans.lane]

    def rows_of(self, lane: int) -> Ints:
        return np.flatnonzero(self.spans.lane == lane)

    def marks_of(self, rank: int) -> Ints:
        return self.marks[self.rank_of_lanes[self.spans.lane[self.marks]] == rank]

    def change(self, **parts: Any) -> Timeline:
        return replace(self, **parts)

    def marked(self, marks_of_ranks: Iterable[Ints]) -> Timeline:
        """With these marks of each rank in place of those that it has."""
        return replace(self, marks=np.sort(np.concatenate(list(marks_of_ranks))))

    def change_facts(self, **facts: Any) -> Timeline:
        return replace(self, facts=replace(self.facts, **facts))

    def change_spans(self, **columns: npt.NDArray[Any]) -> Timeline:
        return replace(self, spans=self.spans.change(**columns))

    def keep(self, kept: Mask) -> Timeline:
        """Without the other rows. The row before them on their lane releases what they released."""
        if kept.all():
            return self
        new = np.cumsum(kept) - 1
        heir = _last_kept_before(self.spans.lane, kept)
        source, target = heir[self.links.source], self.links.target
        launched = (self.links.kind == LinkKind.LAUNCH) & ~kept[self.links.source]
        alive = kept[target] & (source != NONE) & ~launched
        links = self.links.take(alive).change(source=new[source[alive]], target=new[target[alive]])
        marks = new[next_kept(self.spans.lane, kept)[self.marks]] if len(self.marks) else self.marks
        return replace(self, spans=self.spans.take(kept), links=links, marks=marks)

    def keep_frames(self, kept: Mask) -> Timeline:
        """Without the other frames, none of which may enclose one that is kept."""
        new, frames = np.where(kept, np.cumsum(kept) - 1, NONE), self.frames.take(kept)
        return self.change(spans=self.spans.renumbered(frames=new), frames=frames.renumbered(frames=new))


def check_times(timeline: Timeline) -> None:
    """Raises ValueError for times that no run has. Sums of others fit into 64 bits, however often they are replayed."""
    spans, frames, memory = timeline.spans, timeline.frames, timeline.memory
    if not len(spans):
        return
    first = int(spans.start[0])
    for times in (spans.start, spans.end, frames.start, frames.end, memory.time):
        if np.abs(times.astype(np.float64) - first).max(initial=0) > _LONGEST_RUN:
            raise ValueError("times further apart than those of any run")
    if (spans.end < spans.start).any() or (frames.end < frames.start).any():
        raise ValueError("something that ends before it begins")
    spent = (spans.work, spans.lag, spans.recording, timeline.links.lag)
    if sum(float(np.abs(times.astype(np.float64)).sum()) for times in spent) > _LONGEST_RUN:
        raise ValueError("more time than any run takes")
    if (spans.recording < 0).any():
        raise ValueError("a recorder that costs less time than none")
    if (spans.size < 0).any() or float(spans.size.sum(dtype=np.float64)) > _LONGEST_RUN:
        raise ValueError("more bytes than any run moves")
    memory_columns = (memory.size, memory.allocated, memory.reserved)
    if max(float(np.abs(sizes.astype(np.float64)).max(initial=0)) for sizes in memory_columns) > _LARGEST_MEMORY:
        raise ValueError("more memory than any device has")


def next_kept(lane: Ints, kept: Mask) -> Ints:
    """For each row: itself if it is kept, else the next kept row on its lane, else the last kept one."""
    after = _last_kept_before(lane[::-1], kept[::-1])[::-1]
    after = np.where(after == NONE, NONE, len(lane) - 1 - after)
    return np.where(after == NONE, _last_kept_before(lane, kept), after)


def _last_kept_before(lane: Ints, kept: Mask) -> Ints:
    """For each row: itself if it is kept, else the last kept row before it on its lane, else NONE."""
    order = np.argsort(lane, kind="stable")
    place = np.where(kept[order], np.arange(len(order)), NONE)
    first = np.concatenate([[True], lane[order][1:] != lane[order][:-1]]) if len(order) else np.zeros(0, bool)
    begin = np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
    last = np.maximum.accumulate(place)
    heir = np.full(len(order), NONE, np.int64)
    heir[order] = np.where(last >= begin, order[np.maximum(last, 0)], NONE)
    return heir


def previous_on_lane(lane: Ints) -> Ints:
    """For each row, the row before it on its lane, or NONE."""
    order = np.argsort(lane, kind="stable")
    before = np.full(len(lane), NONE, np.int64)
    same = lane[order][1:] == lane[order][:-1]
    before[order[1:][same]] = order[:-1][same]
    return before


# `settle`: the facts that recorded times show

PENDING_LIMIT = 1022
"""Commands that may be pending on a stream before a launch blocks: the most ever seen on an H200."""
NEVER = -(1 << 62)
CONTINUED = -2
"""Marks a command that takes no place of its own in the queue. Launches hold their lane there."""
TYPICAL_GAP, TYPICAL_LATENCY = 1_000, 6_000
"""From a command to the next one that was ready, and from a launch to its command, if too few were measured."""
MEASURED_LAGS = 50
EARLY_RETURN = 30_000
"""A blocking call may return before its command ends: a pageable copy by up to 10 µs, measured, and clocks drift."""
Queue: TypeAlias = tuple[Ints, Ints, Ints]
"""A stream's commands, its launches, and the index in the queue of the first command of each launch."""


def settle(timeline: Timeline) -> Timeline:
    """The same timeline with `work` and every `lag` derived from its measured times."""
    if not len(timeline):
        return timeline
    queues = list(_queues(timeline))
    timeline = _lags(_with_room(timeline, queues))
    awaits, awaited = _awaited(timeline)
    spans, span = timeline.spans, timeline.spans.end - timeline.spans.start
    work = np.where(awaited > spans.start, spans.end - awaited, span)
    timeline = timeline.change_spans(awaits=awaits)
    work = np.where(spans.kind == Kind.LAUNCH, _without_back_pressure(timeline, span, queues), work)
    work = np.where(spans.meeting != NONE, spans.end - last_arrival(timeline), work)
    return timeline.change_spans(work=work)


def _lags(timeline: Timeline) -> Timeline:
    spans, links = timeline.spans, timeline.links
    before = previous_on_lane(spans.lane)
    on_lane = np.where(before == NONE, -NEVER, spans.start - spans.end[before])
    to_start = links.kind == LinkKind.LAUNCH
    released = np.where(to_start, spans.start[links.source], spans.end[links.source])
    on_link = spans.start[links.target] - released
    to_sync = spans.kind[links.target] == Kind.SYNC  # such a link releases the end of its target, not the start
    bound = on_lane.copy()
    np.minimum.at(bound, links.target[~to_sync], on_link[~to_sync])
    gap, latency = typical_lags(timeline)
    usual = np.where(timeline.on_device, gap, 0)
    lag = np.where((on_lane == bound) & (before != NONE), on_lane, np.minimum(on_lane, usual))
    link_usual = np.where(to_start, latency, np.where(links.kind == LinkKind.ORDER, gap, 0))
    link_lag = np.where(on_link == bound[links.target], on_link, np.minimum(on_link, link_usual))
    link_lag = np.where(to_sync, 0, link_lag)
    lag = np.where(before == NONE, usual, lag)
    return timeline.change_spans(lag=lag).change(links=links.change(lag=link_lag))


def typical_lags(timeline: Timeline) -> tuple[int, int]:
    """The typical gap between two commands that were ready, and from a launch to its command on an idle stream."""
    spans, launches = timeline.spans, timeline.launches
    launch, command = launches.source, launches.target
    before = previous_on_lane(spans.lane)[command]
    tail = np.where(before == NONE, NEVER, spans.end[before])
    latency = (spans.start[command] - spans.start[launch])[tail < spans.start[launch]]
    ready = (before != NONE) & (spans.start[command] - spans.end[launch] > 30_000)
    gap = (spans.start[command] - tail)[ready]
    gap = gap[gap < 20_000]
    return (
        int(np.median(gap)) if len(gap) >= MEASURED_LAGS else TYPICAL_GAP,
        int(np.median(latency)) if len(latency) >= MEASURED_LAGS else TYPICAL_LATENCY,
    )


def _awaited(timeline: Timeline) -> tuple[Ints, Ints]:
    """For each sync, the lane that it awaits, and when that had caught up. A sync that returned earlier awaits none."""
    spans = timeline.spans
    awaited = np.full(len(timeline), NEVER, np.int64)
    syncs = np.flatnonzero(spans.awaits != NONE)
    rank = timeline.rank_of_rows[syncs]
    for index, lane in enumerate(timeline.lanes):
        is_any_lane = (spans.awaits[syncs] == EVERY_LANE) & (rank == lane.rank) & (lane.device is not None)
        syncs_of_lane = syncs[(spans.awaits[syncs] == index) | is_any_lane]
        if not len(syncs_of_lane):
            continue
        rows = timeline.rows_of(index)
        place = np.searchsorted(rows, syncs_of_lane) - 1
        tail = np.where(place >= 0, spans.end[rows[np.maximum(place, 0)]], NEVER) if len(rows) else NEVER
        awaited[syncs_of_lane] = np.maximum(awaited[syncs_of_lane], tail)
    # a sync may also wait for one command, by an event
    events = timeline.links.take(spans.kind[timeline.links.target] == Kind.SYNC)
    np.maximum.at(awaited, events.target, spans.end[events.source] + events.lag)
    wrong = awaited > spans.end + EARLY_RETURN
    return np.where(wrong, NONE, spans.awaits), np.where(wrong, NEVER, awaited)


def _with_room(timeline: Timeline, queues: list[Queue]) -> Timeline:
    """Raises the limit of the queues to the most commands that were pending when a launch returned. It differs by
    device."""
    limit = timeline.facts.pending_limit or PENDING_LIMIT
    if timeline.facts.logged and timeline.facts.pending_limit:
        return timeline  # a log's times are rebuilt; its limit comes from launches that had to wait
    ends, seen = timeline.spans.end, limit
    for commands, launch, place in queues:
        ended = np.searchsorted(np.maximum.accumulate(ends[commands]), ends[launch], side="right")
        seen = max(seen, int((place - ended).max()) + 1)
    return timeline if seen == limit else timeline.change_facts(pending_limit=seen)


def _without_back_pressure(timeline: Timeline, span: Ints, queues: list[Queue]) -> Ints:
    """Work without the time in which launches found their stream's queue full and waited for its oldest command."""
    spans, work = timeline.spans, span.copy()
    limit = timeline.facts.pending_limit or PENDING_LIMIT
    for commands, launch, place in queues:
        free = np.where(place >= limit, spans.end[commands[np.maximum(place - limit, 0)]], NEVER)
        blocked = (free > spans.start[launch]) & (free <= spans.end[launch])
        work[launch[blocked]] = (spans.end[launch] - free)[blocked]
    return work


def _queues(timeline: Timeline) -> Iterator[Queue]:
    launched, queued = launched_lane(timeline), ~continues_launch(timeline)
    links = timeline.launches
    for lane in np.unique(launched[launched != NONE]).tolist():
        rows = timeline.rows_of(lane)
        ends = np.flatnonzero(np.append(queued[rows][1:], True))  # for a graph, its last command
        commands, slot = rows[ends], np.cumsum(queued[rows]) - 1
        of_lane = links.take((timeline.spans.lane[links.target] == lane) & (launched[links.source] == lane))
        launch, first = np.unique(of_lane.source, return_index=True)
        yield commands, launch, slot[np.searchsorted(rows, of_lane.target[first])]


def last_arrival(timeline: Timeline) -> Ints:
    """For each part of a collective, when the last of all its parts began; for other rows, their own start."""
    spans = timeline.spans
    parts = np.flatnonzero(spans.meeting != NONE)
    last = np.full(len(timeline.meetings), NEVER, np.int64)
    np.maximum.at(last, spans.meeting[parts], spans.start[parts])
    arrival = spans.start.copy()
    arrival[parts] = last[spans.meeting[parts]]
    return arrival


def launched_lane(timeline: Timeline) -> Ints:
    """For each launch, the lane of its first command; NONE for every other row."""
    links = timeline.launches
    lane = np.full(len(timeline), NONE, np.int64)
    lane[links.source[::-1]] = timeline.spans.lane[links.target[::-1]]
    return lane


def continues_launch(timeline: Timeline) -> Mask:
    """Commands whose launch also launched the one before: a graph takes one place in its stream's queue."""
    links, count = timeline.launches, len(timeline)
    launch = np.full(count + 1, NONE, np.int64)  # the last entry is for rows with none before
    launch[links.target] = links.source
    return (launch[:count] != NONE) & (launch[:count] == launch[previous_on_lane(timeline.spans.lane)])
