"""Very many ranks: each is reduced as it is read, who is late is found among all, and a few are kept whole.

What a rank would take by itself, had it never to wait for a peer, is told by a replay of its own trace. A step of all
of them takes what its slowest rank takes; so what a late one costs the others is known without its peers' traces.
"""

from __future__ import annotations

import re
from collections import Counter
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
"""Ranks that are kept whole: the stragglers first, then who is like most."""
KEPT_STRAGGLERS = 4
LATE_SHARE = 0.03
"""Of a step: a rank that takes so much longer than half of its kind is late, and a host half of whose ranks do."""
_OF_HANDLER = re.compile(r"(.+)_\d+\.\d+\.pt\.trace\.json")
"""As `torch.profiler.tensorboard_trace_handler` names its files: host, process and time."""


def chosen(
    paths: Sequence[str], on_progress: Callable[[str, float], Any], each: EachOf | None = None
) -> tuple[list[str], Cluster, tuple[str, ...]]:
    """Which files to read whole, what all of them told, and what the reader should know of those that did not."""
    answers = dict((each or each_of)(list(paths), digest, on_progress))
    in_order = [answers[index] for index in range(len(paths))]
    digests = [one for one in in_order if not isinstance(one, BadInput)]
    faults = [one for one in in_order if isinstance(one, BadInput)]
    if not digests:
        raise faults[0]
    ranks = ranks_of([one.file for one in digests])
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    digests, ranks = [digests[index] for index in order], [ranks[index] for index in order]
    world = max(len(ranks), digests[0].file.world or 0)
    times = tuple(_times(digests, ranks))
    step, typical = (int(np.median(of)) for of in ([one.step for one in digests], [one.own for one in times]))
    late = tuple(_stragglers(times, step))
    cluster = Cluster(times, step, typical, late, world)
    kept = set(_kept(times, late))
    whole = [one.file.path for one, rank in zip(digests, ranks, strict=True) if rank in kept]
    return whole, cluster, tuple(_notes(faults, len(ranks), world))


def _notes(faults: Sequence[BadInput], given: int, world: int) -> Iterator[str]:
    if given < world:
        yield (
            f"Of the run's {world:,} ranks {given:,} are here: another one that is late shows in what these wait, "
            "not by name."
        )
    if faults:
        yield f"{len(faults)} of the files could not be read and are left out; the first: {faults[0]}"


def _times(digests: Sequence[RankDigest], ranks: Sequence[int]) -> Iterator[RankTimes]:
    """Of each rank what it does by itself, and how it meets the others."""
    kinds = {kind: index for index, kind in enumerate(dict.fromkeys(one.kind for one in digests))}
    collectives = [
        one.collectives.change(lanes=tuple(lane._replace(rank=rank) for lane in one.collectives.lanes))
        for one, rank in zip(digests, ranks, strict=True)
    ]
    together = join_ranks(collectives)
    spans, rank = together.spans, together.rank_of_rows
    parts = np.flatnonzero(spans.meeting != NONE)
    waits = (last_arrival(together) - spans.start)[parts]
    behind = spans.start[parts] - _median_of(spans.meeting[parts], spans.start[parts])
    place = np.searchsorted(np.array(ranks), rank[parts])
    count = np.maximum(1, np.bincount(place, minlength=len(ranks)))
    waited, late, last = (np.bincount(place, one, len(ranks)) for one in (waits, behind, waits == 0))
    for index, (one, number) in enumerate(zip(digests, ranks, strict=True)):
        devices = len(one.file.devices)
        yield RankTimes(
            rank=number,
            host=one.host or (f"host {number // devices}" if devices > 1 else ""),
            own=one.own,
            computing=one.computing,
            waits=int(waited[index] / count[index] * sum(often for _, _, often in one.kind)),
            behind=int(late[index] / count[index]),
            last=round(float(last[index] / count[index]), 3),
            kind=kinds[one.kind],
        )


def _median_of(meeting: npt.NDArray[Any], start: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Of each part, when half of its meeting's parts had come."""
    order = np.lexsort((start, meeting))
    begin = np.flatnonzero(np.diff(meeting[order], prepend=NONE))
    count = np.diff(np.append(begin, len(order)))
    middle = start[order[begin + count // 2]] if len(order) else start
    of_part = np.empty(len(order), np.int64)
    of_part[order] = np.repeat(middle, count)
    return of_part


def _stragglers(times: Sequence[RankTimes], step: int) -> Iterator[Straggler]:
    """Whom fixing first gains most: the latest first."""
    own, computing = (np.array(of, np.float64) for of in zip(*((one.own, one.computing) for one in times), strict=True))
    late, slower = (_beyond_its_kind(times, of) for of in (own, computing))
    groups = sorted(_groups(times, late, LATE_SHARE * float(np.median(own))), key=lambda rows: -np.median(late[rows]))
    left = np.ones(len(times), bool)
    for rows in groups:
        left[rows] = False
        saved = own.max() - own[left].max(initial=0) if left.any() else 0.0
        yield Straggler(
            host=times[rows[0]].host,
            ranks=tuple(times[row].rank for row in rows),
            late=int(np.median(late[rows])),
            computing=bool(2 * np.median(slower[rows]) > np.median(late[rows])),
            left=max(0, step - int(saved)),
        )


def _beyond_its_kind(times: Sequence[RankTimes], of: Floats) -> Floats:
    """How much more each rank takes than half of those that do the same."""
    kind, beyond = np.array([one.kind for one in times]), np.empty(len(times))
    for one in np.unique(kind).tolist():
        beyond[kind == one] = of[kind == one] - np.median(of[kind == one])
    return beyond


def _groups(times: Sequence[RankTimes], late: Floats, least: float) -> Iterator[list[int]]:
    """Hosts that are late beside other hosts, and ranks that are beside all, or beside those of their late host."""
    hosts: dict[str, list[int]] = {}
    for row, one in enumerate(times):
        hosts.setdefault(one.host or f"rank {one.rank}", []).append(row)
    of_hosts = {host: float(np.median(late[rows])) for host, rows in hosts.items() if len(rows) > 1}
    for host, rows in hosts.items():
        usual = max(0.0, of_hosts.get(host, 0.0))
        usual = usual if usual > least else 0.0
        alone = [row for row in rows if late[row] > usual + least]
        yield from ([row] for row in alone)
        if usual:
            yield [row for row in rows if row not in alone]


def _kept(times: Sequence[RankTimes], late: Sequence[Straggler]) -> list[int]:
    """Of each straggler its slowest rank, of each kind who is most like the others, then more of the largest kind."""
    of = {one.rank: one for one in times}
    first = [max(one.ranks, key=lambda rank: of[rank].own) for one in late[:KEPT_STRAGGLERS]]
    blamed = {rank for one in late for rank in one.ranks}
    usual = [one for one in times if one.rank not in blamed] or list(times)
    own = {
        kind: float(np.median([one.own for one in usual if one.kind == kind])) for kind in {one.kind for one in usual}
    }
    usual.sort(key=lambda one: abs(one.own - own[one.kind]))
    kinds = [one.kind for one in usual]
    of_kind = {one.kind: one.rank for one in reversed(usual)}
    often = sorted(of_kind, key=lambda kind: -kinds.count(kind))
    largest = [one for one in usual if one.kind == often[0]]
    of_host = {one.host: one.rank for one in reversed(largest)}  # from different hosts, as far as there are any
    fillers = [one.rank for one in largest if of_host[one.host] == one.rank] + [one.rank for one in largest]
    return list(dict.fromkeys([*first, *(of_kind[kind] for kind in often), *fillers]))[:KEPT]


@dataclass(frozen=True, eq=False)
class RankDigest:
    """What is kept of one rank's trace when the trace itself is not. Times are nanoseconds a step."""

    file: Trace  # without its events but the first and the last: who it is
    collectives: Timeline  # without anything else
    host: str  # "" where nothing tells
    step: int  # as recorded
    own: int  # had it never to wait for a peer
    computing: int
    kind: tuple[tuple[str, int, int], ...]  # of each collective its kernel, its bytes, and how often a step


def digest(path: str) -> RankDigest:
    """Read a rank's trace, and keep what tells it from the others."""
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
    """Each trace lists the ranks of all groups: of a thousand ranks that would be a million."""
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
        names=tuple(timeline.names[one] for one in names.tolist()),
        spans=kept.change(frame=np.full(len(rows), -1)),
        links=Links.of(0),
        frames=Frames.of(0),
        marks=np.zeros(0, np.int64),
        memory=MemoryUse.of(0),
    )
