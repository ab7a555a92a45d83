"""Where in the program a row of the timeline belongs, as exactly as the recording shows it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.timeline.frame_roles import INSTALLED, Owner, Role, source_line
from keepbusy.timeline.model import NONE, FrameKind, Ints, Kind, Mask, Timeline


@dataclass(frozen=True)
class Where:
    """A place in the user's program, as exactly as the recording shows it."""

    file: str = ""
    line: int = 0
    function: str = ""
    exact: bool = False  # if not, the line is where the function begins
    operator: str = ""  # what it called: aten::item, cudaStreamSynchronize
    around: str = ""  # without stacks: the annotation around it, or the operators before and after it
    library: str = ""  # the library's frame, if the call is within one

    @staticmethod
    def of(place: str) -> Where:
        """Reads `train.py:31`, as the run's tree names places. Other text becomes the file."""
        file, _, line = place.rpartition(":")
        return Where(file=file, line=int(line), exact=True) if line.isdecimal() else Where(file=place)

    @property
    def is_known(self) -> bool:
        """False for a bare call of CUDA, which is neither a line of the program nor in an annotation."""
        return bool(self.file) or self.around.startswith("in ")

    def __str__(self) -> str:
        if self.file:
            return f"{self.file}:{self.line}"
        return self.around or self.operator or "unknown place"


def named(fix: str, where: Sequence[Where]) -> str:
    """A fix with its first place, and how many more there are."""
    more = f" and {len(where) - 1} more" if len(where) > 1 else ""
    return f"{fix} at {where[0]}{more}" if where else fix


ROWS_NEARBY = 400
"""So many rows before and after a row are searched for its neighbours."""


def place_of(timeline: Timeline, row: int, frame: int = NONE) -> Where:
    """The user's innermost frame, with the library's frame; without stacks the operator and its surroundings.

    If `frame` is given, the place of that frame instead of the row's own.
    """
    chain = list(_frames_around(timeline, row) if frame == NONE else timeline.frames.around(frame))
    operator = _operator(timeline, row, chain) if frame == NONE else ""
    user, library = _user_frame(timeline, chain)
    if user is not None:
        return Where(*user, operator=operator, library=library)
    return Where(operator=operator, around=_surroundings(timeline, row, chain), library=library)


def _frames_around(timeline: Timeline, row: int) -> Iterator[int]:
    """From the inside out. On other threads the frames of the forward operator follow, or else those of the main thread
    at that time."""
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
    """The frames around the forward operator that this backward operator belongs to."""
    frames = timeline.frames
    if frames.sequence[frame] < 0:
        return []
    matches = (frames.sequence == frames.sequence[frame]) & (frames.lane == main) & (frames.start < frames.start[frame])
    return list(timeline.frames.around(int(np.flatnonzero(matches)[-1]))) if matches.any() else []


def _operator(timeline: Timeline, row: int, chain: list[int]) -> str:
    """The name of the operator that the program called, or of the call itself if it called none."""
    names, frame = timeline.names, _called(timeline, chain)
    if frame != NONE:
        return names[timeline.frames.name[frame]]
    return names[timeline.spans.name[row]] if timeline.spans.kind[row] != Kind.WORK else ""


def role_of_call(timeline: Timeline, row: int) -> int:
    """The role of the operator that the program called, or of the call itself if it called none."""
    frame = _called(timeline, list(_frames_around(timeline, row)))
    return int(timeline.spans.role[row] if frame == NONE else timeline.frames.role[frame])


def _called(timeline: Timeline, chain: list[int]) -> int:
    """The outermost operator of the innermost run of operators: what the program called."""
    frames, found = timeline.frames, NONE
    for frame in chain:
        if frames.kind[frame] == FrameKind.OPERATOR and not frames.role[frame] & Role.BACKWARD:
            found = frame
        elif found != NONE:
            break
    return found


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
    frame = next((other for other in around if other not in (own, NONE)), NONE)
    return timeline.names[timeline.frames.name[frame]] if frame != NONE else ""


def _outermost(timeline: Timeline, row: int) -> int:
    """The outermost operator or annotation around a row."""
    chain = [*timeline.frames.around(int(timeline.spans.frame[row]))]
    kind, python = timeline.frames.kind, int(FrameKind.PYTHON)
    named = (frame for frame in reversed(chain) if kind[frame] != python and not _counts_steps(timeline, frame))
    return next(named, NONE)


def _counts_steps(timeline: Timeline, frame: int) -> bool:
    """Whether it encloses a whole step and has the step's number in its name: that is no place of the program."""
    return bool(timeline.frames.role[frame] & Role.STEP)


def by_place(inputs: CauseInputs, rows: Ints, cause: str = "") -> dict[Where, Ints]:
    """Rows by place. Rows reached along the same path of calls share one, so only one of them is looked up.

    A cause has its own idea of the place: a late rank is placed where it leaves the path of the others, work that needs
    a value where that is read, and a wait of the backward pass for a mask where the mask is used.
    """
    spans, within = inputs.timeline.spans, np.full(len(rows), NONE)
    if cause in ("peer_late", "host_work"):
        within = (inputs.frame_of_one_rank if cause == "peer_late" else inputs.needs_read)[rows]
    shown = inputs.shown_at[rows]
    frame = np.where(within == NONE, spans.frame[shown], within)
    path = np.where(frame == NONE, spans.name[shown], inputs.path[np.maximum(frame, 0)] if len(inputs.path) else 0)
    _, first, which, count = np.unique(path, return_index=True, return_inverse=True, return_counts=True)
    groups = defaultdict[tuple[object, ...], list[Ints]](list)
    places: dict[tuple[object, ...], Where] = {}
    for index in np.lexsort((first, -count)).tolist():  # the most frequent first, then the earliest
        place = place_of(inputs.timeline, int(shown[first[index]]), int(within[first[index]]))
        # one line of the program is one place, whichever operators it calls
        key = (place.file, place.line, place.function) if place.file else (place.around or place.operator,)
        places.setdefault(key, place)
        groups[key].append(rows[which == index])
    return {places[key]: np.concatenate(parts) for key, parts in groups.items()}


def places_of_rows(timeline: Timeline) -> tuple[tuple[Where, ...], Ints, Ints]:
    """All places, and for each row the number of its place and the name of what was called there, or NONE."""
    frames, spans = timeline.frames, timeline.spans
    needed = np.zeros(len(frames) + 1, bool)
    up = np.unique(spans.frame)
    while len(up := up[up != NONE]):
        needed[up] = True
        up = np.unique(frames.parent[up])
    rows = np.flatnonzero(needed[:-1])
    operator = (frames.kind == FrameKind.OPERATOR) & (frames.role & Role.BACKWARD == 0)
    # which frames are lines or functions of the user's own; one more entry for no frame
    is_user_line = np.isin(frames.kind, (FrameKind.PYTHON, FrameKind.LINE)) & (frames.owner == Owner.USER)
    line = np.append(is_user_line, False)
    user, called = np.full(len(frames) + 1, NONE, np.int64), np.full(len(frames) + 1, NONE, np.int64)
    parents, names = frames.parent.tolist(), frames.name.tolist()
    for frame in rows.tolist():
        parent = parents[frame]
        user[frame] = frame if line[frame] else user[parent]
        # the outermost operator of the innermost run of operators is what the program called
        begins = operator[frame] and (parent == NONE or not operator[parent])
        called[frame] = names[frame] if begins else called[parent]
    user[rows] = _lines_of_forward(timeline, rows, user[rows], line)
    number: dict[Where, int] = {}
    of_frame = np.full(len(frames) + 1, NONE, np.int64)
    for frame in np.unique(user[user != NONE]).tolist():
        of_frame[frame] = number.setdefault(_place_of_frame(timeline, frame), len(number))
    place, call = of_frame[user[spans.frame]], called[spans.frame]
    place = _at_the_same_time(timeline, place, line, of_frame, number)
    return tuple(number), place, call


def _lines_of_forward(timeline: Timeline, rows: Ints, user_frames: Ints, line: Mask) -> Ints:
    """Adds the user's lines of frames in the backward pass: those of the forward operators that they belong to."""
    frames = timeline.frames
    numbered = np.flatnonzero(frames.sequence >= 0)
    mains = _main_lanes(timeline)
    forward = numbered[np.isin(frames.lane[numbered], list(mains.values()))]
    forward = forward[np.argsort(frames.sequence[forward], kind="stable")]
    # of several forward operators with a number, the last one
    forward_frames = dict(zip(frames.sequence[forward].tolist(), forward.tolist(), strict=True))
    lines = user_frames.copy()
    for index in np.flatnonzero(user_frames == NONE).tolist():
        numbers = (int(frames.sequence[enclosing]) for enclosing in frames.around(int(rows[index])))
        operator = next((forward_frames[number] for number in numbers if number in forward_frames), NONE)
        lines[index] = next((enclosing for enclosing in frames.around(operator) if line[enclosing]), NONE)
    return lines


def _main_lanes(timeline: Timeline) -> Mapping[int, int]:
    """For each rank, the lane on which its iterations begin."""
    marks = timeline.marks
    lanes = timeline.spans.lane[marks].tolist()
    return {timeline.lanes[lane].rank: lane for lane in reversed(lanes)}


def _at_the_same_time(timeline: Timeline, place: Ints, line: Mask, of_frame: Ints, number: dict[Where, int]) -> Ints:
    """Adds the places of other host threads' rows without a line: where the main thread was when they began."""
    spans, frames, places = timeline.spans, timeline.frames, place.copy()
    host = ~timeline.on_device & (place == NONE)
    for rank, main in _main_lanes(timeline).items():
        rows = np.flatnonzero(host & (timeline.rank_of_rows == rank) & (spans.lane != main))
        on_main = np.flatnonzero(line[:-1] & (frames.lane == main))
        on_main = on_main[np.argsort(frames.start[on_main], kind="stable")]
        if not len(rows) or not len(on_main):
            continue
        last = np.searchsorted(frames.start[on_main], spans.start[rows], side="right") - 1
        frame = np.where(last >= 0, on_main[np.maximum(last, 0)], NONE)
        for _ in range(64):  # from the innermost that began before, out to one that is still open
            closed = (frame != NONE) & ((frames.end[frame] <= spans.start[rows]) | ~line[frame])
            if not closed.any():
                break
            frame = np.where(closed, frames.parent[frame], frame)
        for open_frame in np.unique(frame[frame != NONE]).tolist():
            of_frame[open_frame] = number.setdefault(_place_of_frame(timeline, open_frame), len(number))
        places[rows] = of_frame[frame]
    return places


def _place_of_frame(timeline: Timeline, frame: int) -> Where:
    file, line, function = source_line(timeline.names[timeline.frames.name[frame]]) or ("", 0, "")
    return Where(file, line, function, exact=bool(timeline.frames.kind[frame] == FrameKind.LINE))
