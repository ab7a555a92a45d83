"""The places to blame for a cause: its rows gathered by where they stand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from keepbusy.explain.causes.finding import Finding
from keepbusy.explain.diagnosis import Site, Where
from keepbusy.explain.ledger import Forecast
from keepbusy.explain.scene import Scene
from keepbusy.timeline.frame_roles import Owner, Role, source_line
from keepbusy.timeline.model import NONE, FrameKind, Ints, Kind, Timeline

# From a row to the place in the user's program, no more exactly than the recording knows it.


def where(timeline: Timeline, row: int, frame: int = NONE) -> Where:
    """The user's own frame, with the library's beside it; without stacks the operator and what stands around it.

    Of a row within `frame`, the place of that frame.
    """
    chain = list(_frames_around(timeline, row) if frame == NONE else _ancestors(timeline, frame))
    operator = _operator(timeline, row, chain) if frame == NONE else ""
    user, library = _user_frame(timeline, chain)
    if user is not None:
        return Where(*user, operator=operator, library=library)
    return Where(operator=operator, around=_surroundings(timeline, row, chain), library=library)


def _frames_around(timeline: Timeline, row: int) -> Iterator[int]:
    """From the inside out. On the backward thread it goes on where the forward part was called, else at the caller."""
    chain = list(_ancestors(timeline, int(timeline.spans.frame[row])))
    yield from chain
    lane = timeline.spans.lane[row]
    main = int(timeline.spans.lane[timeline.marks_of(timeline.lanes[lane].rank)[0]])
    if lane != main and len(timeline.frames):
        forward = next(filter(None, (_forward_of(timeline, frame, main) for frame in chain)), None)
        yield from forward or _open_at(timeline, main, int(timeline.spans.start[row]))


def _ancestors(timeline: Timeline, frame: int) -> Iterator[int]:
    while frame != NONE:
        yield frame
        frame = int(timeline.frames.parent[frame])


def _forward_of(timeline: Timeline, frame: int, main: int) -> list[int]:
    """The frames around the forward operator that left this backward one to be done."""
    frames = timeline.frames
    if frames.sequence[frame] < 0:
        return []
    mine = (frames.sequence == frames.sequence[frame]) & (frames.lane == main) & (frames.start < frames.start[frame])
    return list(_ancestors(timeline, int(np.flatnonzero(mine)[-1]))) if mine.any() else []


def _open_at(timeline: Timeline, lane: int, time: int) -> Iterator[int]:
    frames = timeline.frames
    is_open = (frames.lane == lane) & (frames.start <= time) & (frames.end > time)
    yield from np.flatnonzero(is_open)[::-1].tolist()


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
            library = f"{line[0]}:{line[1]} in {line[2]}"
    return None, library


def _surroundings(timeline: Timeline, row: int, chain: list[int]) -> str:
    """Without stacks: the annotation around the row, else the operators before and after it."""
    frames, names = timeline.frames, timeline.names
    for frame in chain:
        if frames.kind[frame] == FrameKind.ANNOTATION and not frames.role[frame] & Role.INTERNAL:
            return f"in {names[frames.name[frame]]}"
    before, after = (_neighbour(timeline, row, step) for step in (-1, 1))
    called = _operator(timeline, row, chain)
    if before and after and not called:
        return f"between {before} and {after}"
    known = [f"after {before}" if before else "", f"before {after}" if after else ""]
    return ", ".join(filter(None, [called, *known]))


def _neighbour(timeline: Timeline, row: int, direction: int) -> str:
    """The nearest other operator on the lane that launched something."""
    spans, frames, names = timeline.spans, timeline.frames, timeline.names
    own, lane = _outermost(timeline, row), spans.lane[row]
    other = row + direction
    for _ in range(400):
        if not 0 <= other < len(spans):
            break
        if spans.lane[other] == lane and spans.kind[other] == Kind.LAUNCH:
            frame = _outermost(timeline, other)
            if frame not in (own, NONE):
                return names[frames.name[frame]]
        other += direction
    return ""


def _outermost(timeline: Timeline, row: int) -> int:
    """The outermost operator or annotation around a row."""
    frames, frame, found = timeline.frames, int(timeline.spans.frame[row]), NONE
    while frame != NONE:
        found = frame if frames.kind[frame] != FrameKind.PYTHON else found
        frame = int(frames.parent[frame])
    return found


MOST_REPLAYED = 3
MOST_SHOWN = 8


def sites_of(scene: Scene, finding: Finding, forecast: Forecast, whole_gain: int) -> tuple[Site, ...]:
    """The costliest first. The wait of a place is what fixing it alone recovers."""
    groups = gathered(scene, finding.rows, apart=finding.cause == "peer_late")
    per_step = scene.steps * len(scene.timeline.ranks)
    held = {place: _held(scene, finding, rows) for place, rows in groups.items()}
    ordered = sorted(groups, key=lambda place: -held[place])[:MOST_SHOWN]
    gains = {place: whole_gain if len(ordered) == 1 else 0 for place in ordered}
    if len(ordered) > 1:
        for place in ordered[:MOST_REPLAYED]:
            gains[place] = forecast.gain(finding.only(groups[place]))
    ordered.sort(key=lambda place: (-gains[place], -held[place]))
    return tuple(Site(place, len(groups[place]) / per_step, gains[place]) for place in ordered)


def gathered(scene: Scene, rows: Ints, apart: bool = False) -> dict[Where, Ints]:
    """Rows by place. Rows reached along the same path of calls share one, so only one of them is looked up.

    `apart`: the place is where a rank goes a way of its own, if it does.
    """
    spans = scene.timeline.spans
    own = scene.apart[rows] if apart else np.full(len(rows), NONE)
    frame = np.where(own == NONE, spans.frame[rows], own)
    path = np.where(frame == NONE, spans.name[rows], scene.path[np.maximum(frame, 0)] if len(scene.path) else 0)
    _, first, which, count = np.unique(path, return_index=True, return_inverse=True, return_counts=True)
    groups: dict[str, list[Ints]] = defaultdict(list)
    places: dict[str, Where] = {}
    for index in np.argsort(-count, kind="stable").tolist():
        place = where(scene.timeline, int(rows[first[index]]), int(own[first[index]]))
        key = f"{place} {place.function}"  # one line of the program is one place, whichever operators it calls
        places.setdefault(key, place)
        groups[key].append(rows[which == index])
    return {places[key]: np.concatenate(parts) for key, parts in groups.items()}


def _held(scene: Scene, finding: Finding, rows: Ints) -> int:
    """How long the host was held there: a cheap measure, good enough to choose which places to replay."""
    spans = scene.timeline.spans
    mine = np.isin(finding.owner, rows)
    return int((spans.end[mine] - spans.start[mine]).sum())
