"""Very many ranks: each is reduced as it is read, late ones are found among all, and a few are kept whole.

A replay of a rank's own trace shows what it would take if it never waited for a peer. A step of all ranks takes as long
as the slowest one, so what a late rank costs the others is known without its peers' traces.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from keepbusy.timeline.files import BadInput
from keepbusy.timeline.model import NONE, Frames, Kind, Links, MemoryUse, Timeline, last_arrival
from keepbusy.timeline.ranks import join_ranks
from keepbusy.timeline.replay import pace
from keepbusy.timeline.run_facts import Cluster, RankTimes, Straggler
from keepbusy.timeline.steps import sample, whole_steps
from keepbusy.traces.rank_timeline import timeline_of
from keepbusy.traces.trace_file import DeviceEvents, EachOf, Trace, each_of, ranks_of, read_trace

Floats = npt.NDArray[np.float64]
KEPT = 8
"""Ranks that are kept whole: the stragglers first, then the most typical."""
KEPT_STRAGGLERS = 4
LATE_SHARE = 0.03
"""A rank is late if it takes this share of a step longer than half of its kind; a host is if half of its ranks do."""
_OF_HANDLER = re.compile(r"(.+)_\d+\.\d+\.pt\.trace\.json")
"""The names of `torch.profiler.tensorboard_trace_handler`: host, process and time."""


def chosen(
    paths: Sequence[str], on_progress: Callable[[str, float], Any], each: EachOf | None = None
) -> tuple[list[str], Cluster, tuple[str, ...]]:
    """The files to read whole, the figures of all ranks, and notes on missing and faulty files."""
    answers = dict((each or each_of)(list(paths), digest, on_progress))
    in_order = [answers[index] for index in range(len(paths))]
    digests = [answer for answer in in_order if not isinstance(answer, BadInput)]
    faults = [answer for answer in in_order if isinstance(answer, BadInput)]
    if not digests:
        raise faults[0]
    ranks = ranks_of([entry.file for entry in digests])
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    digests, ranks = [digests[index] for index in order], [ranks[index] for index in order]
    world = max(len(ranks), digests[0].file.world or 0)
    times = tuple(_times(digests, ranks))
    step = int(np.median([entry.step for entry in digests]))
    typical = int(np.median([entry.own for entry in times]))
    late = tuple(_stragglers(times, step))
    cluster = Cluster(times, step, typical, late, world)
    kept = set(_kept(times, late))
    whole_paths = [entry.file.path for entry, rank in zip(digests, ranks, strict=True) if rank in kept]
    return whole_paths, cluster, tuple(_notes(faults, len(ranks), world))


def _notes(faults: Sequence[BadInput], count: int, world: int) -> Iterator[str]:
    if count < world:
        yield (
            f"Of the run's {world:,} ranks {count:,} are here: another one that is late shows in what these wait, "
            "not by name."
        )
    if faults:
        yield f"{len(faults)} of the files could not be read and are left out; the first: {faults[0]}"


def _times(digests: Sequence[RankDigest], ranks: Sequence[int]) -> Iterator[RankTimes]:
    """For each rank, its own times and its delays at collectives."""
    kinds = {kind: index for index, kind in enumerate(dict.fromkeys(entry.kind for entry in digests))}
    collectives = [
        entry.collectives.change(lanes=tuple(lane._replace(rank=rank) for lane in entry.collectives.lanes))
        for entry, rank in zip(digests, ranks, strict=True)
    ]
    together = join_ranks(collectives)
    spans, rank = together.spans, together.rank_of_rows
    parts = np.flatnonzero(spans.meeting != NONE)
    waits = (last_arrival(together) - spans.start)[parts]
    behind = spans.start[parts] - _median_of(spans.meeting[parts], spans.start[parts])
    place = np.searchsorted(np.array(ranks), rank[parts])
    count = np.maximum(1, np.bincount(place, minlength=len(ranks)))
    waited, late, last = (np.bincount(place, values, len(ranks)) for values in (waits, behind, waits == 0))
    for index, (entry, number) in enumerate(zip(digests, ranks, strict=True)):
        devices = len(entry.file.devices)
        yield RankTimes(
            rank=number,
            host=entry.host or (f"host {number // devices}" if devices > 1 else ""),
            own=entry.own,
            computing=entry.computing,
            waits=int(waited[index] / count[index] * sum(often for _, _, often in entry.kind)),
            behind=int(late[index] / count[index]),
            last=round(float(last[index] / count[index]), 3),
            kind=kinds[entry.kind],
        )


def _median_of(meeting: npt.NDArray[Any], start: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """For each part of a collective, when half of its parts had begun."""
    order = np.lexsort((start, meeting))
    begin = np.flatnonzero(np.diff(meeting[order], prepend=NONE))
    count = np.diff(np.append(begin, len(order)))
    middle = start[order[begin + count // 2]] if len(order) else start
    of_part = np.empty(len(order), np.int64)
    of_part[order] = np.repeat(middle, count)
    return of_part


def _stragglers(times: Sequence[RankTimes], step: int) -> Iterator[Straggler]:
    """Late ranks and hosts, the latest first: fixing that one saves most."""
    own = np.array([entry.own for entry in times], np.float64)
    computing = np.array([entry.computing for entry in times], np.float64)
    late, slower = _beyond_its_kind(times, own), _beyond_its_kind(times, computing)
    groups = sorted(_groups(times, late, LATE_SHARE * float(np.median(own))), key=lambda rows: -np.median(late[rows]))
    others = np.ones(len(times), bool)
    for rows in groups:
        others[rows] = False
        saved = own.max() - own[others].max(initial=0) if others.any() else 0.0
        yield Straggler(
            host=times[rows[0]].host,
            ranks=tuple(times[row].rank for row in rows),
            late=int(np.median(late[rows])),
            computing=bool(2 * np.median(slower[rows]) > np.median(late[rows])),
            left=max(0, step - int(saved)),
        )


def _beyond_its_kind(times: Sequence[RankTimes], values: Floats) -> Floats:
    """How much longer each rank takes than half of those that do the same."""
    kind, beyond = np.array([entry.kind for entry in times]), np.empty(len(times))
    for number in np.unique(kind).tolist():
        beyond[kind == number] = values[kind == number] - np.median(values[kind == number])
    return beyond


def _groups(times: Sequence[RankTimes], late: Floats, least: float) -> Iterator[list[int]]:
    """Hosts that are late as a whole, and ranks that are later than all others, or than those of their late host."""
    hosts: dict[str, list[int]] = {}
    for row, entry in enumerate(times):
        hosts.setdefault(entry.host or f"rank {entry.rank}", []).append(row)
    of_hosts = {host: float(np.median(late[rows])) for host, rows in hosts.items() if len(rows) > 1}
    for host, rows in hosts.items():
        usual = max(0.0, of_hosts.get(host, 0.0))
        usual = usual if usual > least else 0.0
        alone = [row for row in rows if late[row] > usual + least]
        yield from ([row] for row in alone)
        if usual:
            yield [row for row in rows if row not in alone]


def _kept(times: Sequence[RankTimes], late: Sequence[Straggler]) -> list[int]:
    """The slowest rank of each straggler, the most typical rank of each kind, then more of the most frequent kind, from
    different hosts first."""
    times_of = {entry.rank: entry for entry in times}
    first = [max(straggler.ranks, key=lambda rank: times_of[rank].own) for straggler in late[:KEPT_STRAGGLERS]]
    late_ranks = {rank for straggler in late for rank in straggler.ranks}
    usual = [entry for entry in times if entry.rank not in late_ranks] or list(times)
    own_times = defaultdict[int, list[int]](list)
    for entry in usual:
        own_times[entry.kind].append(entry.own)
    median_of_kind = {kind: float(np.median(own)) for kind, own in own_times.items()}
    usual.sort(key=lambda entry: abs(entry.own - median_of_kind[entry.kind]))
    rank_of_kind = {entry.kind: entry.rank for entry in reversed(usual)}
    often = sorted(rank_of_kind, key=lambda kind: -len(own_times[kind]))
    largest = [entry for entry in usual if entry.kind == often[0]]
    rank_of_host = {entry.host: entry.rank for entry in reversed(largest)}
    other_hosts = [entry.rank for entry in largest if rank_of_host[entry.host] == entry.rank]
    of_kinds = [rank_of_kind[kind] for kind in often]
    return list(dict.fromkeys([*first, *of_kinds, *other_hosts, *(entry.rank for entry in largest)]))[:KEPT]


@dataclass(frozen=True, eq=False)
class RankDigest:
    """What is kept of one rank's trace when the trace itself is not. Times are nanoseconds a step."""

    file: Trace  # with only its first and last event
    collectives: Timeline  # without anything else
    host: str  # "" if unknown
    step: int  # as recorded
    own: int  # the step if it never waited for a peer
    computing: int
    kind: tuple[tuple[str, int, int], ...]  # for each collective its kernel, its bytes, and how often per step


def digest(path: str) -> RankDigest:
    """Reads a rank's trace, and keeps the figures that are compared among ranks."""
    file = read_trace(path)
    timeline = timeline_of(file, ranks_of([file])[0])
    whole = sample(whole_steps(timeline))
    spans, steps = whole.spans, len(whole.marks_of(whole.ranks[0]))
    meets = spans.kind == Kind.COLLECTIVE
    alone = whole.change_spans(work=np.where(meets, 0, spans.work))
    computes = whole.on_device & ~meets
    named_by_torch = _OF_HANDLER.match(Path(path).name)
    often = Counter(zip(spans.name[meets].tolist(), spans.size[meets].tolist(), strict=True))
    return RankDigest(
        file=_outline(file),
        collectives=_collectives(timeline),
        host=named_by_torch[1] if named_by_torch else "",
        step=round(pace(whole)),
        own=round(pace(alone)),
        computing=int(spans.work[computes].sum()) // steps,
        kind=tuple(sorted((whole.names[name], size, round(count / steps)) for (name, size), count in often.items())),
    )


def _outline(file: Trace) -> Trace:
    """The trace without tables. Each trace lists the ranks of all groups: a thousand traces would have a million."""
    extent = [int(file.events.start.argmin()), int(file.events.end.argmax())]
    events, of_device = file.events.take(np.array(extent)), DeviceEvents.of(0)
    file = replace(file, events=events, device_events=of_device, names=(), threads=(), collectives=())
    return replace(file, memory=MemoryUse.of(0))


def _collectives(timeline: Timeline) -> Timeline:
    spans, lanes = timeline.spans, timeline.lanes
    rows = np.flatnonzero(spans.kind == Kind.COLLECTIVE)
    names, name = np.unique(spans.name[rows], return_inverse=True)
    lane_of = np.unique(spans.lane[rows])
    kept = spans.take(rows).change(name=name, lane=np.searchsorted(lane_of, spans.lane[rows]))
    return timeline.change(
        lanes=tuple(lanes[lane] for lane in lane_of.tolist()) or lanes[:1],
        names=tuple(timeline.names[index] for index in names.tolist()),
        spans=kept.change(frame=np.full(len(rows), -1)),
        links=Links.of(0),
        frames=Frames.of(0),
        marks=np.zeros(0, np.int64),
        memory=MemoryUse.of(0),
    )
