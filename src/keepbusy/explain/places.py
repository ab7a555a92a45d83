"""Places in the user's program, no more exactly than the recording knows them: of a row, of a cause, of a late rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from keepbusy.explain.diagnosis import LateRank, Where
from keepbusy.explain.edit import Finding
from keepbusy.explain.scene import Scene
from keepbusy.timeline.frame_roles import INSTALLED, OWN_STEP, PROFILER_STEP, Owner, Role, source_line
from keepbusy.timeline.model import NONE, FrameKind, Ints, Kind, Timeline

ROWS_NEARBY = 400
"""So many rows before and after one what stands beside it is looked for."""


def where(timeline: Timeline, row: int, frame: int = NONE) -> Where:
    """The user's own frame, with the library's beside it; without stacks the operator and what stands around it.

    Of a row within `frame`, the place of that frame.
    """
    chain = list(_frames_around(timeline, row) if frame == NONE else timeline.frames.around(frame))
    operator = _operator(timeline, row, chain) if frame == NONE else ""
    user, library = _user_frame(timeline, chain)
    if user is not None:
        return Where(*user, operator=operator, library=library)
    return Where(operator=operator, around=_surroundings(timeline, row, chain), library=library)


def _frames_around(timeline: Timeline, row: int) -> Iterator[int]:
    """From the inside out. On the backward thread it goes on where the forward part was called, else at the caller."""
    chain = list(timeline.frames.around(int(timeline.spans.frame[row])))
    yield from chain
    lane = timeline.spans.lane[row]
    main = int(timeline.spans.lane[timeline.marks_of(timeline.lanes[lane].rank)[0]])
    if lane != main and len(timeline.frames):
        forward = next(filter(None, (_forward_of(timeline, frame, main) for frame in chain)), None)
        frames, time = timeline.frames, timeline.spans.start[row]
        is_open = (frames.lane == main) & (frames.start <= time) & (frames.end > time)
        yield from forward or np.flatnonzero(is_open)[::-1].tolist()


def _forward_of(timeline: Timeline, frame: int, main: int) -> list[int]:
    """The frames around the forward operator that left this backward one to be done."""
    frames = timeline.frames
    if frames.sequence[frame] < 0:
        return []
    mine = (frames.sequence == frames.sequence[frame]) & (frames.lane == main) & (frames.start < frames.start[frame])
    return list(timeline.frames.around(int(np.flatnonzero(mine)[-1]))) if mine.any() else []


def _operator(timeline: Timeline, row: int, chain: list[int]) -> str:
    """The outermost operator of the innermost run of operators: what the program called."""
    frames, names = timeline.frames, timeline.names
    found = ""
    for frame in chain:
        if frames.kind[frame] == FrameKind.OPERATOR and not frames.role[frame] & Role.BACKWARD:
            found = names[frames.name[frame]]
        elif found:
            break
    return found or (names[timeline.spans.name[row]] if timeline.spans.kind[row] != Kind.WORK else "")


def _user_frame(timeline: Timeline, chain: list[int]) -> tuple[tuple[str, int, str, bool] | None, str]:
    frames, names, library = timeline.frames, timeline.names, ""
    for frame in chain:
        if frames.kind[frame] not in (FrameKind.PYTHON, FrameKind.LINE):
            continue
        line = source_line(names[frames.name[frame]])
        if line and frames.owner[frame] == Owner.USER:
            return (*line, bool(frames.kind[frame] == FrameKind.LINE)), library
        if line and not library:
            library = f"{line[0].removeprefix(INSTALLED)}:{line[1]} in {line[2]}"
    return None, library


def _surroundings(timeline: Timeline, row: int, chain: list[int]) -> str:
    """Without stacks: the annotation around the row, else the operators before and after it."""
    frames, names = timeline.frames, timeline.names
    for frame in chain:
        annotates = frames.kind[frame] == FrameKind.ANNOTATION and not _counts_steps(timeline, frame)
        if annotates and not frames.role[frame] & Role.INTERNAL:
            return f"in {names[frames.name[frame]]}"
    before, after = (_neighbour(timeline, row, step) for step in (-1, 1))
    called = _operator(timeline, row, chain)
    if before and after and not called:
        return f"between {before} and {after}"
    known = [f"after {before}" if before else "", f"before {after}" if after else ""]
    return ", ".join(filter(None, [called, *known]))


def _neighbour(timeline: Timeline, row: int, direction: int) -> str:
    """The nearest other operator on the lane that launched something."""
    spans, own = timeline.spans, _outermost(timeline, row)
    first = max(0, row - ROWS_NEARBY) if direction < 0 else row + 1
    near = slice(first, row if direction < 0 else first + ROWS_NEARBY)
    launches = np.flatnonzero((spans.lane[near] == spans.lane[row]) & (spans.kind[near] == Kind.LAUNCH)) + first
    around = (_outermost(timeline, other) for other in launches[::direction].tolist())
    frame = next((one for one in around if one not in (own, NONE)), NONE)
    return timeline.names[timeline.frames.name[frame]] if frame != NONE else ""


def _outermost(timeline: Timeline, row: int) -> int:
    """The outermost operator or annotation around a row."""
    chain = [*timeline.frames.around(int(timeline.spans.frame[row]))]
    kind, python = timeline.frames.kind, int(FrameKind.PYTHON)
    named = (frame for frame in reversed(chain) if kind[frame] != python and not _counts_steps(timeline, frame))
    return next(named, NONE)


def _counts_steps(timeline: Timeline, frame: int) -> bool:
    """It is around all of a step, with the step's number in its name: no place of the program."""
    return timeline.names[timeline.frames.name[frame]].startswith((OWN_STEP, PROFILER_STEP))


def by_place(scene: Scene, rows: Ints, cause: str = "") -> dict[Where, Ints]:
    """Rows by place. Rows reached along the same path of calls share one, so only one of them is looked up.

    What makes a rank late is where it leaves the path of the others, if it does; work that needs a value is where that
    is read.
    """
    spans, within = scene.timeline.spans, np.full(len(rows), NONE)
    if cause in ("peer_late", "host_work"):
        within = (scene.frame_of_one_rank if cause == "peer_late" else scene.needs_read)[rows]
    frame = np.where(within == NONE, spans.frame[rows], within)
    path = np.where(frame == NONE, spans.name[rows], scene.path[np.maximum(frame, 0)] if len(scene.path) else 0)
    _, first, which, count = np.unique(path, return_index=True, return_inverse=True, return_counts=True)
    groups = defaultdict[tuple[object, ...], list[Ints]](list)
    places: dict[tuple[object, ...], Where] = {}
    for index in np.argsort(-count, kind="stable").tolist():
        place = where(scene.timeline, int(rows[first[index]]), int(within[first[index]]))
        # one line of the program is one place, whichever operators it calls
        key = (place.file, place.line, place.function) if place.file else (place.around or place.operator,)
        places.setdefault(key, place)
        groups[key].append(rows[which == index])
    return {places[key]: np.concatenate(parts) for key, parts in groups.items()}


WORTH_NAMING = 0.2
"""Ranks that are late by less than this share of the latest one are not worth a line."""


def late_ranks(scene: Scene, finding: Finding) -> tuple[LateRank, ...]:
    """Which ranks come late, by how much, and what they do meanwhile; the latest first."""
    excess = np.where(finding.culprit >= 0, finding.edit.saves(scene.timeline.spans.work), 0)
    rank = scene.timeline.rank_of_rows
    late = np.unique(rank[finding.rows]).tolist()
    found = [_late(scene, finding, one, np.where(rank == one, excess, 0)) for one in late]
    latest = max(one.late for one in found)
    return tuple(sorted((one for one in found if one.late >= WORTH_NAMING * latest), key=lambda one: -one.late))


def _late(scene: Scene, finding: Finding, rank: int, excess: Ints) -> LateRank:
    """The place that loses most, were its rank like the others."""
    rows = np.flatnonzero(excess)
    on_device = scene.timeline.on_device[rows]
    computing = excess[rows[on_device]].sum() > excess[rows[~on_device]].sum()
    rows = rows[on_device == computing]
    hosts = finding.culprit[rows]
    of_host = np.bincount(hosts, excess[rows], len(excess))
    places = by_place(scene, np.unique(hosts), "peer_late")
    worst = max(places, key=lambda place: of_host[places[place]].sum())
    ranks, late = len(scene.timeline.ranks), excess[rows].sum() / scene.steps
    if computing:  # it would keep its share of what it does beyond the others
        return LateRank(rank, int(late * ranks / (ranks - 1)), "computing", worst)
    return LateRank(rank, int(late), "host_work", worst)
