"""Loops that, within one step, do the same to one small thing after another, a launch for each.

Where no repetition needs what another one computed, one call does all of them. That is certain for an optimizer's
parameters, for tables and for what only travels; for others only the author knows. Layers of a network, which do need
each other, multiply matrices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from keepbusy.causes.cause import Finding, FindingBuilder, places_of
from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.causes.copies import USUAL_BANDWIDTH
from keepbusy.fixes.among_ranks import SendTogether, ShardBlocks
from keepbusy.fixes.capture import frames_around, outwards
from keepbusy.fixes.cpu_work import writes_checkpoint
from keepbusy.fixes.definition import Candidate, Remedy
from keepbusy.fixes.launching import DoAtOnce, FuseOptimizer, OneTable
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import NONE, FrameKind, Ints, Kind, Mask

MERGED_WORK = 0.5
"""The share of the GPU's work that stays where many calls become one: the middle of the range from none to all, since
nobody knows how full each of them keeps the GPU."""
FEWEST_REPETITIONS = 8
"""Nobody makes one call of fewer."""


def repeated_calls_at_once(inputs: CauseInputs) -> Iterator[Candidate]:
    """What a loop does to one small thing after another, as one call. All tables are one change. A checkpoint is
    written tensor by tensor, whoever writes it."""
    calls = repeated_calls(inputs)
    expected, *bounds = (as_one(inputs, calls, stays) for stays in (MERGED_WORK, 0.0, 1.0))
    of_places = places_of(inputs, expected).items()
    places = {place: rows for place, rows in of_places if not writes_checkpoint(inputs, rows)}
    calls_at = {place: [call for call in calls if np.isin(call.first, rows).any()] for place, rows in places.items()}
    remedies = {place: _remedy_of(inputs, calls_at[place]) for place in places}
    of_tables = [place for place in places if remedies[place].fix.name == "one_table"]
    for group in filter(None, [of_tables, *([place] for place in places if place not in of_tables)]):
        rows = np.concatenate([places[place] for place in group])
        edit, limits = expected.only(rows), tuple(bound.only(rows) for bound in bounds)
        remedy = remedies[group[0]]
        reason = _launches_in(inputs, [call for place in group for call in calls_at[place]])
        if remedy.fix.name == "do_at_once":
            # only the author knows whether the iterations need each other, so all of the GPU's work is expected to stay
            edit = limits[1]
            reason += " Where a round needs what the one before it computed, torch.compile is what is left."
        cause = "exposed_collective" if remedy.fix.name == "send_together" else "launch_bound"
        yield Candidate(remedy, tuple(group), (cause,), edit, bounds=limits, reason=reason)


_SHARDS_OF = re.compile(r"FSDP::.*?(?:\(| for )((?:.+\.)?\d+)\.([^)]+)\)?$")
"""What FSDP does for one of its groups of parameters: the block, of those that a model has several of, and the part."""


def shards_of_blocks(inputs: CauseInputs) -> Iterator[Candidate]:
    """FSDP over each layer of a block, as one group for the whole block: what is done for the first of its layers is
    done once for all of them, and what travels, travels together."""
    groups = list(_layers_of_blocks(inputs))
    if not groups:
        return
    expected, *bounds = (as_one(inputs, groups, stays) for stays in (MERGED_WORK, 0.0, 1.0))
    places = places_of(inputs, expected)
    per_step = inputs.steps * len(inputs.timeline.ranks)
    reason = f"{sum(group.times for group in groups) / per_step:,.0f} groups of parameters are gathered for "
    reason += f"{len(groups) / per_step:,.0f} blocks."
    limits = tuple(bound.edit for bound in bounds)
    yield Candidate(
        ShardBlocks().says(),
        tuple(places),
        ("launch_bound",),
        expected.edit,
        bounds=limits,
        reason=reason,
    )


def _layers_of_blocks(inputs: CauseInputs) -> Iterator[RepeatedCall]:
    """Of each block in each step, whose layers are groups of their own: the host's rows for each."""
    timeline = inputs.timeline
    matches = [_SHARDS_OF.match(name) for name in timeline.names]
    number = {part: place for place, part in enumerate(dict.fromkeys(match.groups() for match in matches if match))}
    if not number:
        return
    of_name = np.array([NONE if match is None else number[match.groups()] for match in matches], np.int64)
    part_of_frame = of_name[timeline.frames.name].tolist()
    for frame, parent in enumerate(timeline.frames.parent.tolist()):  # parents stand before what they hold
        if part_of_frame[frame] == NONE != parent:
            part_of_frame[frame] = part_of_frame[parent]
    of_row = np.array([*part_of_frame, NONE], np.int64)[timeline.spans.frame]
    part = np.where(timeline.on_device, NONE, of_row)
    blocks = list(dict.fromkeys(block for block, _ in number))
    block_of_part = np.array([blocks.index(block) for block, _ in number], np.int64)
    for rank in timeline.ranks:
        rows = np.flatnonzero((part != NONE) & (timeline.rank_of_rows == rank))
        step = np.searchsorted(timeline.marks_of(rank), rows, side="right")
        step_and_block = step * len(blocks) + block_of_part[part[rows]]
        for key in np.unique(step_and_block).tolist():
            rows_of_block = rows[step_and_block == key]
            layers, earliest = np.unique(part[rows_of_block], return_index=True)
            is_first = part[rows_of_block] == layers[np.argmin(earliest)]
            first, others = rows_of_block[is_first], rows_of_block[~is_first]
            if len(layers) > 1 and (inputs.command[first] != NONE).any():
                yield RepeatedCall(len(layers), first, others, np.zeros(0, np.int64))


def _remedy_of(inputs: CauseInputs, calls: Sequence[RepeatedCall]) -> Remedy:
    if any(inputs.within(Role.TABLE)[call.first].any() for call in calls):
        return OneTable().says()
    if all(call.sends(inputs) for call in calls):
        return SendTogether().says()
    updates = all((inputs.library_role[call.first] & Role.UPDATES != 0).any() for call in calls)
    return FuseOptimizer().says(FuseOptimizer.of_rounds) if updates else DoAtOnce().says()


def _launches_in(inputs: CauseInputs, calls: Sequence[RepeatedCall]) -> str:
    launches = sum((inputs.command[[*call.first, *call.others]] != NONE).sum() for call in calls)
    of_all, of_a_rank = (inputs.command != NONE).sum(), inputs.steps * len(inputs.timeline.ranks)
    return (
        f"{launches / of_a_rank:,.0f} of the {of_all / of_a_rank:,.0f} launches per iteration are there, in "
        f"{max(call.times for call in calls)} equal rounds."
    )


class RepeatedCall(NamedTuple):
    """What one call does over and over, along a few paths, each of them a multiple of `times`."""

    times: int
    first: Ints  # the host's rows of the first round
    others: Ints
    between: Ints  # rows of the call itself

    def sends(self, inputs: CauseInputs) -> bool:
        """Whether nothing is done in it but to let values travel, and to scale or move them."""
        launches = self.first[inputs.command[self.first] != NONE]
        travels = inputs.timeline.spans.kind[inputs.command[launches]] == Kind.COLLECTIVE
        beside = inputs.within(Role.SCALES | Role.MOVES)[launches]
        return bool(travels.any() and (travels | beside).all())


def as_one(inputs: CauseInputs, calls: Sequence[RepeatedCall], stays: float) -> Finding:
    """All repetitions in one call: of what the GPU does in all but the first, the share `stays` is left.

    What travels together takes the time of its bytes, and what a collective takes besides only once; at worst, where
    all else stays, no less than it took.
    """
    builder, spans = FindingBuilder("launch_bound", inputs.timeline), inputs.timeline.spans
    travels = spans.kind == Kind.COLLECTIVE
    rate = _fastest_link(inputs)
    for call in calls:
        leaves = np.union1d(call.others, call.between)
        commands, leaving = _commands(inputs, call.first), _commands(inputs, leaves)
        builder.edit.drop[leaves] = builder.edit.drop[leaving] = True
        computes, more = commands[~travels[commands]], leaving[~travels[leaving]]
        builder.edit.scale[computes] = 1.0 + stays * spans.work[more].sum() / max(1, spans.work[computes].sum())
        sent = commands[travels[commands]]
        if len(sent):
            all_sent = np.concatenate([sent, leaving[travels[leaving]]])
            took = np.maximum(spans.work[all_sent], 0)
            together = len(sent) * took.min() + spans.size[all_sent].sum() / rate
            together = took.sum() if stays == 1.0 else min(together, took.sum())
            builder.edit.scale[sent] = together / max(1, took[: len(sent)].sum())
        launch = call.first[inputs.command[call.first] != NONE][0]
        builder.culprit[np.concatenate([leaves, leaving, commands])] = int(launch)
    return builder.finding()


def _fastest_link(inputs: CauseInputs) -> float:
    """Bytes a nanosecond, as any collective has shown them to travel; small ones show little but their own price."""
    spans = inputs.timeline.spans
    rows = np.flatnonzero((spans.kind == Kind.COLLECTIVE) & (spans.work > 0))
    return max(USUAL_BANDWIDTH, float((spans.size[rows] / spans.work[rows]).max(initial=0.0)))


def _commands(inputs: CauseInputs, rows: Ints) -> Ints:
    launched = np.append(np.zeros(len(inputs.timeline), bool), False)
    launched[rows] = True
    return np.flatnonzero(launched[inputs.launch])


def repeated_calls(inputs: CauseInputs) -> list[RepeatedCall]:
    """The outermost repetitions of each call."""
    groups = list(_repeated_frames(inputs))
    first = _rows_in(inputs, [group.first for group in groups])
    others = _rows_in(inputs, [group.others for group in groups])
    outer = list(dict.fromkeys(group.call for group in groups))  # a call may go on for several iterations
    rows_of_call = dict(zip(outer, _rows_in(inputs, [np.array([call]) for call in outer]), strict=True))
    launches = inputs.command != NONE
    calls = []
    for group, first_rows, other_rows in zip(groups, first, others, strict=True):
        inside = rows_of_call[group.call]
        inside = inside[(inside > first_rows[-1]) & (inside < other_rows[-1])]
        calls.append(RepeatedCall(group.times, first_rows, other_rows, inside[~launches[inside]]))
    return _with_backward(inputs, calls)


_BACKWARD_OF = re.compile(r"(\w+?)Backward\d*$")
"""The backward pass of an operator, as PyTorch calls it: of `aten::index`, IndexBackward0."""


def _with_backward(inputs: CauseInputs, repeated: Sequence[RepeatedCall]) -> list[RepeatedCall]:
    """Each call with its backward pass: in the same step, one of its operators has as many backward calls as there are
    repetitions. The backward pass goes through these one after the other, so all rows from the first to the last of
    these calls belong to it."""
    timeline, frames, spans = inputs.timeline, inputs.timeline.frames, inputs.timeline.spans
    forward_names = [name.removeprefix("aten::").replace("_", "") for name in timeline.names]
    matches = [_BACKWARD_OF.fullmatch(name) for name in timeline.names]
    backward_names = ["" if match is None else match[1].lower() for match in matches]
    backward_calls = np.flatnonzero(np.array([*map(bool, backward_names)], bool)[frames.name])
    extended = list[RepeatedCall]()
    for call in repeated:
        last_row, rank = int(np.append(call.first, call.others).max()), int(timeline.rank_of_rows[call.first[0]])
        marks = timeline.marks_of(rank)
        next_mark = np.searchsorted(marks, last_row, side="right")
        step_end = spans.start[marks[next_mark]] if next_mark < len(marks) else spans.end.max()
        innermost = np.unique(spans.frame[call.first])
        operators = {
            forward_names[frames.name[frame]]
            for start in innermost[innermost != NONE].tolist()
            for frame in frames.around(start)
        }
        later = (frames.start[backward_calls] >= spans.end[last_row]) & (frames.end[backward_calls] <= step_end)
        later &= timeline.rank_of_lanes[frames.lane[backward_calls]] == rank
        in_step = backward_calls[later]
        by_name = (in_step[frames.name[in_step] == name] for name in np.unique(frames.name[in_step]).tolist())
        as_often = (calls for calls in by_name if len(calls) == call.times)
        calls = next((calls for calls in as_often if backward_names[frames.name[calls[0]]] in operators), None)
        if calls is None:
            extended.append(call)
            continue
        starts, end = np.sort(frames.start[calls]), frames.end[calls].max()
        rows = np.flatnonzero((spans.lane == frames.lane[calls[0]]) & ~timeline.on_device)
        rows = rows[(spans.start[rows] >= starts[0]) & (spans.end[rows] <= end)]
        is_first = spans.start[rows] < starts[1]
        first, others = np.append(call.first, rows[is_first]), np.append(call.others, rows[~is_first])
        extended.append(RepeatedCall(call.times, first, others, call.between))
    return extended


def _rows_in(inputs: CauseInputs, of_frames: Sequence[Ints]) -> list[Ints]:
    """For each of these groups of frames, none of which stands in another, the host's rows in it at any depth."""
    which = np.full(len(inputs.timeline.frames) + 1, NONE, np.int64)
    for index, frames in enumerate(of_frames):
        which[frames] = index
    of_row = which[inputs.outermost(which[:-1] != NONE)]
    return _grouped(of_row, len(of_frames))


def _grouped(which: Ints, count: int) -> list[Ints]:
    """Where each of these numbers stands; NONE is left out."""
    order = np.argsort(which, kind="stable")
    return np.split(order, np.searchsorted(which[order], np.arange(count + 1)))[1:-1]


class _RepeatedFrames(NamedTuple):
    call: int
    times: int
    first: Ints
    others: Ints


def _repeated_frames(inputs: CauseInputs) -> Iterator[_RepeatedFrames]:
    frames, launching = inputs.timeline.frames, _launching(inputs)
    written = np.append(np.isin(frames.kind, (FrameKind.PYTHON, FrameKind.LINE)), False)  # no operator's own loop
    candidates = np.flatnonzero((launching > 0) & written[frames.parent] & ~_dependent(inputs))
    is_repeated = np.zeros(len(frames), bool)
    for siblings in _together(inputs, candidates):
        call = int(frames.parent[siblings[0]])
        if len(siblings) >= FEWEST_REPETITIONS and not any(is_repeated[outer] for outer in frames.around(call)):
            frames_of_call = _of_call(inputs, call, siblings, launching)
            if frames_of_call is not None:
                is_repeated[siblings] = True
                yield frames_of_call


def _together(inputs: CauseInputs, candidates: Ints) -> list[Ints]:
    """These frames by call and iteration, the earliest call first. Where a matrix is multiplied between two operators,
    lines or calls in which ranks meet, they are parted: as in the layers of a network, laid out over ranks or called by
    one line, the second needs the result of the first."""
    frames, timeline = inputs.timeline.frames, inputs.timeline
    rank_of_frame = timeline.rank_of_lanes[frames.lane]
    products, starts = np.flatnonzero(inputs.frames_with(Role.LAYER)), timeline.spans.start
    iteration, before = np.zeros(len(frames), np.int64), np.zeros(len(frames), np.int64)
    for rank in timeline.ranks:
        of_rank = rank_of_frame == rank
        marks = np.sort(starts[timeline.marks_of(rank)])
        iteration[of_rank] = np.searchsorted(marks, frames.start[of_rank], "right")
    for lane in np.unique(frames.lane[products]).tolist():
        of_lane = frames.lane == lane
        begun = np.sort(frames.start[products[frames.lane[products] == lane]])
        before[of_lane] = np.searchsorted(begun, frames.start[of_lane])
    meets = np.zeros(len(frames) + 1, bool)
    meets[frames.parent[candidates[_in_which_ranks_meet(inputs)[candidates]]]] = True
    call = frames.parent[candidates]
    is_parted = meets[call] | np.isin(frames.kind[candidates], (FrameKind.OPERATOR, FrameKind.LINE))
    where = np.stack([frames.start[call], call, iteration[candidates], np.where(is_parted, before[candidates], 0)])
    places, which = np.unique(where, axis=1, return_inverse=True)
    return [candidates[siblings] for siblings in _grouped(which.ravel(), places.shape[1])]


def _of_call(inputs: CauseInputs, call: int, siblings: Ints, launching: Ints) -> _RepeatedFrames | None:
    """The number of repetitions is the one that explains most of what is launched there."""
    _, which, entered = np.unique(inputs.path[siblings], return_inverse=True, return_counts=True)
    often = [count for count in sorted(set(entered.tolist())) if count >= FEWEST_REPETITIONS]
    if not often:
        return None
    weight = np.bincount(which, launching[siblings])
    times = max(often, key=lambda count: (weight[entered % count == 0].sum(), count))
    order = np.concatenate([np.arange(count) for count in entered])[np.argsort(np.argsort(which, kind="stable"))]
    is_multiple = entered[which] % times == 0
    begins = is_multiple & (order < entered[which] // times)
    return _RepeatedFrames(call, times, siblings[begins], siblings[is_multiple & ~begins])


def _launching(inputs: CauseInputs) -> Ints:
    """How many commands are launched within each frame, at any depth."""
    frames = inputs.timeline.frames
    count = np.zeros(len(frames) + 1, np.int64)
    for frame in outwards(frames, inputs.timeline.spans.frame[inputs.command != NONE]):
        np.add.at(count, frame, 1)
    return count[:-1]


def _dependent(inputs: CauseInputs) -> Mask:
    """Frames in backward passes, and those within which matrices are multiplied, or what comes is needed at once:
    messages, and parameters that FSDP gathers."""
    frames, launch = inputs.timeline.frames, inputs.launch
    inner = [np.flatnonzero(inputs.frames_with(Role.LAYER))]
    if inputs.among_ranks:
        needed = inputs.is_message | np.append(inputs.within(Role.SHARDS), False)[launch]
        needed &= (inputs.timeline.spans.kind == Kind.COLLECTIVE) & (launch != NONE)
        inner.append(inputs.timeline.spans.frame[launch[needed]])
    backward = np.append(inputs.frames_with(Role.BACKWARD), False)
    for at_depth in inputs.frames_by_depth:
        backward[at_depth] |= backward[frames.parent[at_depth]]
    return frames_around(frames, np.concatenate(inner)) | backward[:-1]


def _in_which_ranks_meet(inputs: CauseInputs) -> Mask:
    launch = inputs.launch[inputs.timeline.spans.kind == Kind.COLLECTIVE]
    return frames_around(inputs.timeline.frames, inputs.timeline.spans.frame[launch[launch != NONE]])
