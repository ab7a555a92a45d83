"""What of a step CUDA graphs can hold: the longest runs of statements between which nothing has to stay on the host.

A graph is captured around statements of one function. What a statement calls is captured with it, unless something in
there has to stay: then the statements of the called function are looked at, and so on.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from keepbusy.causes.cause import FindingBuilder
from keepbusy.causes.cause_inputs import IN_A_ROW, CauseInputs
from keepbusy.causes.places import Where, by_place, named
from keepbusy.fixes.definition import CapturedLines, Fix, PlacedCause
from keepbusy.fixes.source.name_flow import own_nodes
from keepbusy.timeline.frame_roles import Role, source_line
from keepbusy.timeline.model import NONE, Direction, Frames, Ints, Kind, Mask

FEWEST_LAUNCHES = 8
"""To launch a graph takes as long as to launch one or two kernels, and what it needs is copied to it first."""
_NO_DRAWS = {
    *("seed", "default_rng", "RandomState", "Random", "SystemRandom", "Generator"),
    *("getstate", "setstate", "get_state", "set_state"),
}
"""Of the functions of `random` and `numpy.random`."""
MOST_GRAPHS = 4
"""At one place: each has its memory."""
COMPARED_FIRST = 3


def compared_replays(replays: int) -> int:
    """How many of so many the runtime compares with the step as it is written: the first, and then each whose number is
    a power of two."""
    return min(replays, COMPARED_FIRST) + max(0, replays.bit_length() - 2)


class Capture(NamedTuple):
    """What graphs hold of all steps."""

    rows: Mask
    """The host's rows that become launches of graphs, and their commands; not the first launch of each graph."""
    waits: Mask
    """The host's rows within that wait: these have to go first."""
    stays: Mask
    """The host's rows for which a graph ends: what they do cannot be captured."""
    share: float
    """Of all launches."""
    lines: tuple[CapturedLines, ...]
    """The functions whose statements are captured, first the one that launches most."""
    first: str = ""
    """What has to be done elsewhere before: `create_on_gpu at train.py:31`."""


@lru_cache(maxsize=1)
def capture_of(inputs: CauseInputs, fixes: Sequence[Fix]) -> Capture:
    """What graphs can hold, once all waits are gone that a fix removes. Statements that are captured can be parted from
    a wait that stands beside them, but not from one within what they call."""
    waits = np.flatnonzero(inputs.is_sync & ~inputs.waits_for_large_copy & ~_of_constants(inputs))
    goes, nothing = np.zeros(len(inputs.timeline), bool), FindingBuilder("host_sync", inputs.timeline).finding()
    by_hand, elsewhere, edits = dict[tuple[str, str], list[Ints]](), list[str](), list[tuple[str, Where]]()
    masked = list[Where]()
    for where, rows in by_place(inputs, waits).items():
        fix = PlacedCause(inputs, nothing, where, rows, fixes).remedy().fix
        comes_often = len(rows) >= IN_A_ROW * inputs.steps
        goes[rows] = fix.removes_wait and not (comes_often and fix.is_not_for_loops)
        if fix.name == "create_on_gpu":
            elsewhere.append(named(fix.name, [where]))
        is_to_write = goes[rows].any() and not fix.is_gone_in_graph
        if is_to_write and fix.leaves_statement:
            masked.append(where)
        elif is_to_write:
            by_hand.setdefault((where.file, where.function), []).append(rows)
            edits += [(edit_name, where) for edit_name in fix.served_by[:1] if not fix.is_asked_for]
    beside = np.zeros(len(inputs.timeline), bool)
    beside[[row for groups in by_hand.values() for rows in groups for row in rows]] = True
    capture = captured(inputs, goes, beside, edits, masked)
    capture = capture._replace(first=next(iter(elsewhere), ""))
    within = by_hand.keys() - {(lines.file, lines.function) for lines in capture.lines}
    if not within or not capture.lines:
        return capture
    for place in within:
        for rows in by_hand[place]:
            goes[rows] = beside[rows] = False
    return captured(inputs, goes, beside, edits, masked)._replace(first=capture.first)


def captured(
    inputs: CauseInputs,
    goes: Mask,
    by_hand: Mask,
    edits: Sequence[tuple[str, Where]] = (),
    masked: Sequence[Where] = (),
) -> Capture:
    """`goes`: waits that a fix can take away; `by_hand`: those of them that wait where they are until that is made, by
    these edits of the source as far as keepbusy makes it. `masked`: where constant masks choose. Where keepbusy can
    capture anything, only what it can counts."""
    spans, timeline = inputs.timeline.spans, inputs.timeline
    reads = np.zeros(len(spans), bool)  # copies that go with the waits
    reads[inputs.last_launch[goes & (inputs.copy_of_sync != NONE)]] = True
    stays, launches = _stays(inputs, goes, reads), np.flatnonzero((inputs.command != NONE) & ~reads)
    fed = _fed(inputs, stays, goes)
    changing = _changes_the_host(inputs)
    parted = (frames_around(timeline.frames, spans.frame[stays]) & ~fed) | _holds_steps(inputs) | changing
    prepared = _prepared(inputs, stays, goes)
    stays_there = stays
    stays = stays & ~prepared
    run = _numbers(inputs, stays, parted)
    held_launches = _alike(inputs, launches, run[launches])
    held_launches = held_launches[~np.isin(run[held_launches], _without_forward(inputs, stays, launches, run))]
    around = _parted_by(inputs, stays_there | by_hand) | _holds_steps(inputs) | changing
    where = inputs.outermost(~around | fed)
    held_launches = held_launches[_in_statements(inputs, held_launches, where[held_launches])]
    lines = _lines(inputs, where[held_launches], around, fed, masked)
    reached = _reached(inputs, held_launches, lines, edits)
    stays[held_launches[~reached]] = True
    parted |= frames_around(timeline.frames, spans.frame[held_launches[~reached]])
    held_launches, run = held_launches[reached], _numbers(inputs, stays, parted)
    first, last = (np.full(int(run.max(initial=0)) + 1, NONE, np.int64) for _ in range(2))
    first[run[held_launches][::-1]], last[run[held_launches]] = held_launches[::-1], held_launches
    rows = np.arange(len(spans))
    inside = (rows > first[run]) & (rows <= last[run]) & (first[run] != NONE)
    statement = inputs.outermost(~parted)
    inside |= np.isin(statement, statement[held_launches][statement[held_launches] != NONE]) & (spans.kind == Kind.WORK)
    inside &= ~timeline.on_device & ~stays & ~prepared
    launched = np.append(inside, False)[inputs.launch] & (inputs.launch != NONE)
    return Capture(
        inside | launched,
        inside & inputs.is_sync & ~_of_constants(inputs),
        stays,
        len(held_launches) / max(1, len(launches)),
        lines,
    )


def _in_statements(inputs: CauseInputs, launches: Ints, statement: Ints) -> Mask:
    """Which of these launches stand in a statement that can be captured: not those of a backward pass that waits."""
    frames, names = inputs.timeline.frames, inputs.timeline.names
    is_line = np.append(np.array([source_line(name) is not None for name in names], bool)[frames.name], False)
    return is_line[statement] | ~inputs.within(Role.BACKWARD)[launches] | (not inputs.timeline.facts.logged)


def _reached(
    inputs: CauseInputs, launches: Ints, lines: Sequence[CapturedLines], edits: Sequence[tuple[str, Where]]
) -> Mask:
    """Which of these launches keepbusy can write into graphs; where it can none, those that somebody else could, and
    all of them where the sources are not here."""
    files = sources_at(inputs, {function_lines.file for function_lines in lines})
    if not files:
        return np.ones(len(launches), bool)
    from keepbusy.fixes.source.captured_lines import refused_lines
    from keepbusy.fixes.source.rewriting import reached_lines

    loop = Where.of(inputs.timeline.facts.loop)
    reached, refused = set[tuple[str, int]](), set[tuple[str, int]]()
    for file, source in files.items():
        of_file = [(edit_name, [place.line]) for edit_name, place in edits if place.file == file]
        captured = [function_lines for function_lines in lines if function_lines.file == file]
        reached |= {
            (file, line) for line in reached_lines(source, of_file, captured, [loop.line] * (loop.file == file))
        }
        refused |= {(file, line) for function_lines in captured for line in refused_lines(source, function_lines)}
    places_of_names = [source_line(name) for name in inputs.timeline.names]

    def stand_at(places: set[tuple[str, int]]) -> Mask:
        return _stand_at(inputs, launches, [place is not None and place[:2] in places for place in places_of_names])

    elsewhere = ~_stand_at(inputs, launches, [place is not None and place[0] in files for place in places_of_names])
    result = stand_at(reached) | elsewhere
    return result if result.any() else ~stand_at(refused)


def _stand_at(inputs: CauseInputs, launches: Ints, names: Sequence[bool]) -> Mask:
    """Which of these launches stand in a frame whose name counts. `names`: for each name whether it does."""
    frames, result = inputs.timeline.frames, np.zeros(len(launches), bool)
    parent, counts = np.append(frames.parent, NONE), np.append(np.array(names, bool)[frames.name], False)
    frame = inputs.timeline.spans.frame[launches]
    while (frame != NONE).any():
        result |= counts[frame]
        frame = parent[frame]
    return result


def sources_at(inputs: CauseInputs, names: Collection[str]) -> dict[str, str]:
    """The texts of these files, as far as they are where the run was begun."""
    folder, sources = inputs.timeline.facts.folder, dict[str, str]()
    if folder and find_spec("libcst") is not None:
        for name in names:
            with suppress(OSError, UnicodeDecodeError):
                sources[name] = (Path(folder) / name).read_bytes().decode()
    return sources


def _holds_steps(inputs: CauseInputs) -> Mask:
    """Frames in which several steps begin: a graph holds one at most."""
    timeline, frames = inputs.timeline, inputs.timeline.frames
    result = np.zeros(len(frames), bool)
    for rank in timeline.ranks:
        marks = timeline.spans.start[timeline.marks_of(rank)]
        begun = np.searchsorted(marks, frames.start, side="right")
        result |= (timeline.rank_of_lanes[frames.lane] == rank) & (np.searchsorted(marks, frames.end) > begun + 1)
    return result


def _changes_the_host(inputs: CauseInputs) -> Mask:
    """Frames that call a function in which random numbers of the CPU are drawn or an optimizer's settings are set: a
    replay would not do it anew. That is seen in the sources alone. Within a frame of PyTorch's the lines around it may
    stand once more."""
    frames, names = inputs.timeline.frames, inputs.timeline.names
    places = [source_line(name) for name in names]
    sources = sources_at(inputs, {place[0] for place in places if place})
    changing = {file: host_change_lines(source) for file, source in sources.items()}
    changes = np.array([changing.get(place[0], {}).get(place[1], 0) if place else 0 for place in places] or [0])
    found = np.flatnonzero(changes[frames.name])
    for around in islice(outwards(frames, found), 1, None):
        found = np.where(np.append(frames.name, NONE)[around] == frames.name[found], NONE, found)
    found = found[found != NONE]
    parted = np.concatenate([frames.parent[found], found[changes[frames.name[found]] == _AT_THE_CHANGE]])
    result = np.zeros(len(frames), bool)
    for frame in outwards(frames, parted[parted != NONE]):
        result[frame] = True
    return result


_AT_THE_CHANGE = 2


def host_change_lines(source: str) -> dict[int, int]:
    """Lines of functions that draw random numbers of Python or NumPy or set an optimizer's settings, themselves or in a
    function of the file that they call: 1, and `_AT_THE_CHANGE` where they do."""
    try:
        functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError):
        return {}
    changing, names, known = dict[int, int](), set[str](), -1
    while len(names) > known:  # whoever calls these does as well
        known = len(names)
        for function in functions:
            own = [part for part in own_nodes(function) if isinstance(part, ast.stmt | ast.expr)]
            groups = {name for part in own if isinstance(part, ast.For) for name in _names_of_groups(part)}
            changes = [part.lineno for part in own if _draws_or_calls(part, names) or _sets_group(part, groups)]
            if changes:
                names.add(function.name)
                changing |= {part.lineno: 1 for part in own} | dict.fromkeys(changes, _AT_THE_CHANGE)
    return changing


def _draws_or_calls(part: ast.AST, changing: Collection[str]) -> bool:
    """Whether it calls what changes. `changing`: functions of the file that do."""
    if not isinstance(part, ast.Call):
        return False
    module, _, name = ast.unparse(part.func).rpartition(".")
    if module in ("random", "np.random", "numpy.random"):
        return name not in _NO_DRAWS
    return module in ("", "self") and name in changing


def _names_of_groups(loop: ast.For) -> list[str]:
    """Of `for group in optimizer.param_groups`, `group`."""
    if not any(isinstance(part, ast.Attribute) and part.attr == "param_groups" for part in ast.walk(loop.iter)):
        return []
    return [part.id for part in ast.walk(loop.target) if isinstance(part, ast.Name)]


def _sets_group(part: ast.AST, groups: Collection[str]) -> bool:
    """Whether it is `group["lr"] = rate` or `optimizer.param_groups[0]["lr"] = rate`."""
    match part:
        case (
            ast.Assign(targets=[ast.Subscript(value=group, slice=ast.Constant(value=str()))])
            | ast.AugAssign(target=ast.Subscript(value=group, slice=ast.Constant(value=str())))
        ):
            return ast.unparse(group) in groups or ".param_groups[" in ast.unparse(group)
    return False


def _parted_by(inputs: CauseInputs, stays: Mask) -> Mask:
    """Frames in which something stays. In a log, what came before a call of the driver has that call's frames: before
    the first one in a frame, and in pieces of it without any, it may as well be of the statement before."""
    spans, frames = inputs.timeline.spans, inputs.timeline.frames
    if not inputs.timeline.facts.logged:
        return frames_around(frames, spans.frame[stays])
    rows, calls = np.flatnonzero(stays), np.flatnonzero(~inputs.timeline.on_device & (spans.kind != Kind.WORK))
    first, result = np.full(len(frames) + 1, len(spans)), np.zeros(len(frames) + 1, bool)
    for frame in outwards(frames, spans.frame[calls]):
        np.minimum.at(first, frame, calls)
    calling = np.unique(frames.name[first[:-1] < len(spans)])  # others never call the driver: what they do is their own
    alone = np.append(~np.isin(frames.name, calling), False)
    for frame in outwards(frames, spans.frame[rows]):
        result[frame[(spans.kind[rows] != Kind.WORK) | (rows > first[frame]) | alone[frame]]] = True
    return result[:-1]


def _lines(
    inputs: CauseInputs, captured: Ints, parted: Mask, fed: Mask, masked: Sequence[Where]
) -> tuple[CapturedLines, ...]:
    """`captured`: for each launch the frame of its statement. `parted`: frames in which something stays; `fed`: those
    that only copy before they compute. Something has to stay at a line in most of the steps that reach it: else it is
    a short pause of the host."""
    frames, names = inputs.timeline.frames, inputs.timeline.names
    launching = defaultdict[tuple[str, str], Counter[int]](Counter)
    staying, feeding = (defaultdict[tuple[str, str], list[int]](list) for _ in range(2))
    for frame, count in zip(*np.unique(captured[captured != NONE], return_counts=True), strict=True):
        if place := source_line(names[frames.name[frame]]):
            file, line, function = place
            launching[file, function][line] += int(count)
    marks = inputs.timeline.spans.start[inputs.timeline.marks_of(inputs.timeline.ranks[0])]
    step = np.searchsorted(marks, frames.start, side="right")
    kinds = (
        {*zip(frames.name[chosen], step[chosen], strict=True)}
        for chosen in (np.arange(len(frames)), parted, parted & fed)
    )
    steps_reached, steps_stayed, steps_fed = (Counter(int(name) for name, _ in pairs) for pairs in kinds)
    for name, count in steps_stayed.items():
        if (place := source_line(names[name])) and 2 * count > steps_reached[name]:
            file, line, function = place
            staying[file, function].append(line)
            feeding[file, function] += [line] * (2 * steps_fed[name] > count)
    return tuple(
        CapturedLines(
            *named_function,
            tuple((line, -(-count // inputs.steps)) for line, count in sorted(lines.items())),
            tuple(sorted(staying[named_function])),
            tuple(sorted(feeding[named_function])),
            tuple(sorted(place.line for place in masked if (place.file, place.function) == named_function)),
        )
        for named_function, lines in sorted(launching.items(), key=lambda item: -item[1].total())
    )


def _stays(inputs: CauseInputs, goes: Mask, reads: Mask) -> Mask:
    """Waits, work of the program's own, batches that are taken, and copies between the GPU and the host."""
    spans = inputs.timeline.spans
    crosses = inputs.is_copy & np.isin(spans.direction, (Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST))
    copies = np.append(crosses, False)[inputs.command] & (inputs.command != NONE)
    must_stay = (inputs.is_sync & ~goes) | (copies & ~reads) | (inputs.loader_frame != NONE) | inputs.is_heavy
    must_stay = (must_stay | inputs.within(Role.OBJECTS)) & ~_of_constants(inputs)
    return must_stay & ~inputs.timeline.on_device & ~inputs.by_workers


@lru_cache(maxsize=1)
def _of_constants(inputs: CauseInputs) -> Mask:
    """The host's rows that copy to the GPU what a function makes of numbers alone, or read it: a graph holds the copy,
    and what is read is known. A backward pass does so with what its forward pass has saved."""
    from keepbusy.fixes.source.constants import constants_at

    spans, result = inputs.timeline.spans, np.zeros(len(inputs.timeline), bool)
    copied = np.where(inputs.command != NONE, inputs.command, 0)
    is_copy = (inputs.command != NONE) & inputs.is_copy[copied] & ~inputs.timeline.on_device
    brings = is_copy & (spans.direction[copied] == Direction.HOST_TO_DEVICE)
    reads = is_copy & (spans.direction[copied] == Direction.DEVICE_TO_HOST)
    places = by_place(inputs, np.flatnonzero(brings | reads))
    sources = sources_at(inputs, {where.file for where in places})
    known = {(file, line): found for file, text in sources.items() for line, found in constants_at(text).items()}
    for where, rows in places.items():
        if found := known.get((where.file, where.line)):
            sizes = {*spans.size[copied[rows[brings[rows]]]].tolist()}
            result[rows[brings[rows] & (len(sizes) <= found.constant) | reads[rows] & (not found.other)]] = True
    backward = inputs.within(Role.BACKWARD)
    result |= brings & backward & np.isin(spans.size[copied], spans.size[copied[result & brings]])
    result |= reads & backward & (result & reads).any()
    waits = np.flatnonzero(inputs.is_sync & (inputs.copy_of_sync != NONE))
    result[waits] = result[inputs.last_launch[waits]]
    return result


def _computes(inputs: CauseInputs, goes: Mask) -> Mask:
    """The host's rows that launch anything but copies to the GPU, or wait for anything but such a copy."""
    spans = inputs.timeline.spans
    copied = np.where(inputs.copy_of_sync != NONE, inputs.copy_of_sync, inputs.command)
    brings = (copied != NONE) & inputs.is_copy[copied] & (spans.direction[copied] == Direction.HOST_TO_DEVICE)
    return ((inputs.command != NONE) | (inputs.is_sync & ~goes)) & ~brings


def _fed(inputs: CauseInputs, stays: Mask, goes: Mask) -> Mask:
    """Frames that copy to the GPU what they compute with, before they compute anything: `model(x.cuda())`. The copy can
    be made in front of them."""
    spans, frames = inputs.timeline.spans, inputs.timeline.frames
    rows, computing = np.flatnonzero(stays), np.flatnonzero(_computes(inputs, goes))
    last, first = np.full(len(frames) + 1, NONE), np.full(len(frames) + 1, len(spans))
    for frame in outwards(frames, spans.frame[rows]):
        np.maximum.at(last, frame, rows)
    for frame in outwards(frames, spans.frame[computing]):
        np.minimum.at(first, frame, computing)
    at_copies = np.unique(_line_names(inputs, np.flatnonzero(stays & (inputs.command != NONE))))
    is_else = stays & (spans.kind == Kind.WORK)
    is_else[is_else] = ~np.isin(_line_names(inputs, np.flatnonzero(is_else)), at_copies)  # else it is the copy's own
    return ((last < first) & (first < len(spans)) & (last != NONE))[:-1] & ~frames_around(frames, spans.frame[is_else])


def _line_names(inputs: CauseInputs, rows: Ints) -> Ints:
    """Of each row the name of the innermost line of a source around it."""
    frames, names = inputs.timeline.frames, inputs.timeline.names
    is_line = np.array([source_line(name) is not None for name in names], bool)[frames.name]
    innermost = inputs.innermost(is_line)[rows]
    return np.where(innermost == NONE, NONE, np.append(frames.name, NONE)[innermost])


def _prepared(inputs: CauseInputs, stays: Mask, goes: Mask) -> Mask:
    """Between a forward pass and its backward pass, the host's rows of statements that compute nothing on the GPU and
    read nothing of it, as those that take the next batch: they depend on nothing that the step computes, so they can
    move out of its way."""
    spans, frames, computes = inputs.timeline.spans, inputs.timeline.frames, _computes(inputs, goes)
    free = ~frames_around(frames, spans.frame[computes]) & frames_around(frames, spans.frame[stays])
    rows = np.flatnonzero((inputs.outermost(free) != NONE) & ~inputs.timeline.on_device & (inputs.loader_frame == NONE))
    others = np.flatnonzero(computes)
    back = np.append(np.zeros(1, bool), inputs.within(Role.BACKWARD)[others])
    often, place, few = np.cumsum(back), np.searchsorted(others, rows), FEWEST_LAUNCHES
    begins = often[np.minimum(place + few, len(others))] > often[place]  # the first gradient is made before it
    result = np.zeros(len(spans), bool)
    result[rows[begins & ~back[place]]] = True
    return result


def _numbers(inputs: CauseInputs, stays: Mask, parted: Mask) -> Ints:
    """Of each row, a number that rows of one run share: of one lane, step and call, with nothing between that stays.
    `parted`: calls in which something stays."""
    spans = inputs.timeline.spans
    where = np.stack([spans.lane, _steps(inputs, stays), inputs.innermost(parted), np.cumsum(stays)])
    return np.unique(where, axis=1, return_inverse=True)[1].reshape(-1)


def _steps(inputs: CauseInputs, stays: Mask) -> Ints:
    """Of each row its step, from where something stays: what marks steps, as an optimizer does, may stand in the middle
    of what a graph holds."""
    timeline = inputs.timeline
    marks = timeline.marks_of(timeline.ranks[0])
    rows = np.flatnonzero(stays & (timeline.rank_of_rows == timeline.ranks[0]))
    following = np.append(rows, len(stays))[np.searchsorted(rows, marks)]
    begins = np.where(following < np.append(marks[1:], len(stays)), following, marks)
    return np.searchsorted(begins, np.arange(len(stays)), side="right")


def _alike(inputs: CauseInputs, launches: Ints, run: Ints) -> Ints:
    """Those of these launches that stand in one of the few runs that most steps launch at their place: a growing cache
    would need a graph for each of its sizes."""
    timeline, spans = inputs.timeline, inputs.timeline.spans
    # a graph launches the same kernels on as much data each time; on a virtual GPU as much takes as long, exactly
    amount = spans.work if timeline.facts.virtual else spans.blocks
    commands = inputs.command[launches]
    launched = np.stack([spans.name[commands], spans.size[commands], amount[commands]])
    order = np.argsort(run, kind="stable")
    runs = np.split(order, np.flatnonzero(np.diff(run[order])) + 1)
    runs = [members for members in runs if len(members) >= FEWEST_LAUNCHES]
    keys = [(_path(inputs, int(launches[members[0]])), launched[:, members].tobytes()) for members in runs]
    runs_at, often = Counter(place for place, _ in keys), Counter(keys)
    usual = defaultdict[int, list[tuple[int, bytes]]](list)
    for key, count in often.most_common():
        place, _ = key
        if len(usual[place]) < MOST_GRAPHS and (count > 1 or runs_at[place] == 1):
            usual[place].append(key)
    captured_keys = set[tuple[int, bytes]]()
    for place, few in usual.items():
        if 2 * sum(often[key] for key in few) >= runs_at[place]:
            captured_keys |= {*few}
    held = [launches[members] for members, key in zip(runs, keys, strict=True) if key in captured_keys]
    return np.sort(np.concatenate(held)) if held else np.zeros(0, np.int64)


def _without_forward(inputs: CauseInputs, stays: Mask, launches: Ints, run: Ints) -> Ints:
    """Runs of backward passes most of whose forward pass stands in other runs, and runs that are mostly that: a graph
    holds both. What else a run launches may need no gradients."""
    backward, optimizer = (inputs.within(role)[launches] for role in (Role.BACKWARD, Role.OPTIMIZER))
    step = np.searchsorted(inputs.timeline.marks_of(inputs.timeline.ranks[0]), launches, side="right")
    kind = np.where(optimizer, 2, np.where(backward, 1, 0)) + 3 * step
    edges = [*(np.flatnonzero(np.diff(kind)) + 1).tolist(), len(launches)]
    before, cut, piece = 0, list[Ints](), np.cumsum(stays)[launches]
    number, lane = run[launches], inputs.timeline.spans.lane[launches]
    counts = np.bincount(number)
    for begin, end in pairwise([0, *edges]) if len(launches) else ():
        if kind[begin] % 3 == 1:
            # no more of what came before than it launches itself: the rest may be another pass, without gradients
            forward = np.arange(max(before, 2 * begin - end), begin)
            forward = forward[step[forward] == step[begin]]
            together = (number[forward] == number[begin]) | (lane[forward] != lane[begin])
            if 2 * (together & (piece[forward] == piece[begin])).sum() < len(forward):
                mostly = (
                    counts[number[forward]] <= 2 * np.bincount(number[forward], minlength=len(counts))[number[forward]]
                )
                cut.append(number[[*forward[mostly], begin]])
        if kind[begin] % 3:
            before = end
    return np.unique(np.concatenate(cut)) if cut else np.zeros(0, np.int64)


def _path(inputs: CauseInputs, row: int) -> int:
    frame = int(inputs.timeline.spans.frame[row])
    return NONE if frame == NONE else int(inputs.path[frame])


def outwards(frames: Frames, frame: Ints) -> Iterator[Ints]:
    """These frames, then the ones around each, as long as any has one."""
    parent = np.append(frames.parent, NONE)
    while (frame != NONE).any():
        yield frame
        frame = parent[frame]


def frames_around(frames: Frames, inner: Ints) -> Mask:
    """These frames, and those around them."""
    result = np.zeros(len(frames) + 1, bool)
    for frame in outwards(frames, inner):
        result[frame] = True
    return result[:-1]
