"""Rounds: within one turn a loop does the same to one small thing after another, a launch for each.

Where no round needs what another one computed, one call does all of them. Of an optimizer's parameters, of tables and
of what only travels that is certain; of others only who wrote them knows. Layers of a network, which do need each
other, multiply matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from keepbusy.explain.causes.host import USUAL_BANDWIDTH
from keepbusy.explain.causes.peers import is_message
from keepbusy.explain.edit import Draft, Finding
from keepbusy.explain.scene import Scene
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import NONE, FrameKind, Frames, Ints, Kind, Mask

FEWEST_ROUNDS = 8
"""Of less nobody makes one call."""


class CallRounds(NamedTuple):
    """What one call does over and over, along a few paths, each as often as there are rounds, or so many times."""

    times: int
    first: Ints  # the host's rows of the first round
    others: Ints
    between: Ints  # rows of the call itself

    def sends(self, scene: Scene) -> bool:
        """Whether nothing is done in it but to let values travel, and to scale or move them."""
        launches = self.first[scene.command[self.first] != NONE]
        travels = scene.timeline.spans.kind[scene.command[launches]] == Kind.COLLECTIVE
        beside = scene.within(Role.SCALES | Role.MOVES)[launches]
        return bool(travels.any() and (travels | beside).all())


class _Frames(NamedTuple):
    call: int
    times: int
    first: Ints
    others: Ints


def as_one(scene: Scene, rounds: Sequence[CallRounds], stays: float) -> Finding:
    """All rounds in one call: of what the GPU does in all but the first, this share stays.

    What travels together takes the time of its bytes, and what a collective takes besides only once; at worst, where
    all else stays, no less than it took.
    """
    draft, spans = Draft("launch_bound", scene.timeline), scene.timeline.spans
    travels = spans.kind == Kind.COLLECTIVE
    rate = _fastest_link(scene)
    for one in rounds:
        leaves = np.union1d(one.others, one.between)
        commands, leaving = _commands(scene, one.first), _commands(scene, leaves)
        draft.edit.drop[leaves] = draft.edit.drop[leaving] = True
        computes, more = commands[~travels[commands]], leaving[~travels[leaving]]
        draft.edit.scale[computes] = 1.0 + stays * spans.work[more].sum() / max(1, spans.work[computes].sum())
        sent = commands[travels[commands]]
        if len(sent):
            all_sent = np.concatenate([sent, leaving[travels[leaving]]])
            took = np.maximum(spans.work[all_sent], 0)
            together = len(sent) * took.min() + spans.size[all_sent].sum() / rate
            together = took.sum() if stays == 1.0 else min(together, took.sum())
            draft.edit.scale[sent] = together / max(1, took[: len(sent)].sum())
        launch = one.first[scene.command[one.first] != NONE][0]
        draft.culprit[np.concatenate([leaves, leaving, commands])] = int(launch)
    return draft.finding()


def _fastest_link(scene: Scene) -> float:
    """Bytes a nanosecond, as any collective has shown them to travel; small ones show little but their own price."""
    spans = scene.timeline.spans
    rows = np.flatnonzero((spans.kind == Kind.COLLECTIVE) & (spans.work > 0))
    return max(USUAL_BANDWIDTH, float((spans.size[rows] / spans.work[rows]).max(initial=0.0)))


def _commands(scene: Scene, rows: Ints) -> Ints:
    launched = np.append(np.zeros(len(scene.timeline), bool), False)
    launched[rows] = True
    return np.flatnonzero(launched[scene.launch])


def rounds_of(scene: Scene) -> list[CallRounds]:
    """The outermost ones of each call."""
    found = list(_frames_of_rounds(scene))
    first, others = _rows_in(scene, [one.first for one in found]), _rows_in(scene, [one.others for one in found])
    outer = list(dict.fromkeys(one.call for one in found))  # a call may go on for several turns
    around = dict(zip(outer, _rows_in(scene, [np.array([call]) for call in outer]), strict=True))
    launches = scene.command != NONE
    rounds = []
    for one, begins, goes_on in zip(found, first, others, strict=True):
        inside = around[one.call]
        inside = inside[(inside > begins[-1]) & (inside < goes_on[-1])]
        rounds.append(CallRounds(one.times, begins, goes_on, inside[~launches[inside]]))
    return rounds


def _rows_in(scene: Scene, of_frames: Sequence[Ints]) -> list[Ints]:
    """Of each of these groups of frames, none of which stands in another, the rows of the host, at any depth."""
    which = np.full(len(scene.timeline.frames) + 1, NONE, np.int64)
    for index, frames in enumerate(of_frames):
        which[frames] = index
    of_row = which[scene.outermost(which[:-1] != NONE)]
    return _grouped(of_row, len(of_frames))


def _grouped(which: Ints, count: int) -> list[Ints]:
    """Where each of these numbers stands; NONE is left out."""
    order = np.argsort(which, kind="stable")
    return np.split(order, np.searchsorted(which[order], np.arange(count + 1)))[1:-1]


def _frames_of_rounds(scene: Scene) -> Iterator[_Frames]:
    frames, launching = scene.timeline.frames, _launching(scene)
    written = np.append(np.isin(frames.kind, (FrameKind.PYTHON, FrameKind.LINE)), False)  # no operator's own loop
    known = np.flatnonzero((launching > 0) & written[frames.parent] & ~_dependent(scene))
    taken = np.zeros(len(frames), bool)
    for mine in _together(scene, known):
        call = int(frames.parent[mine[0]])
        if len(mine) >= FEWEST_ROUNDS and not any(taken[one] for one in frames.around(call)):
            found = _of_call(scene, call, mine, launching)
            if found is not None:
                taken[mine] = True
                yield found


def _together(scene: Scene, known: Ints) -> list[Ints]:
    """These frames by the call and the turn that they stand in, the call first that began first. Where ranks meet in a
    call, what is multiplied between two of its frames parts them: as in a network that is laid out over ranks, the
    second needs what the first one brought."""
    frames, timeline = scene.timeline.frames, scene.timeline
    rank = timeline.rank_of_lanes[frames.lane]
    products, starts = np.flatnonzero(scene.frames_with(Role.LAYER)), timeline.spans.start
    turn, before = np.zeros(len(frames), np.int64), np.zeros(len(frames), np.int64)
    for one in timeline.ranks:
        turn[rank == one] = np.searchsorted(np.sort(starts[timeline.marks_of(one)]), frames.start[rank == one], "right")
    for one in np.unique(frames.lane[products]).tolist():
        begun = np.sort(frames.start[products[frames.lane[products] == one]])
        before[frames.lane == one] = np.searchsorted(begun, frames.start[frames.lane == one])
    meets = np.zeros(len(frames) + 1, bool)
    meets[frames.parent[known[_in_which_ranks_meet(scene)[known]]]] = True
    call = frames.parent[known]
    where = np.stack([frames.start[call], call, turn[known], np.where(meets[call], before[known], 0)])
    places, which = np.unique(where, axis=1, return_inverse=True)
    return [known[mine] for mine in _grouped(which.ravel(), places.shape[1])]


def _of_call(scene: Scene, call: int, mine: Ints, launching: Ints) -> _Frames | None:
    """The number of rounds is the one that explains most of what is launched there."""
    _, which, entered = np.unique(scene.path[mine], return_inverse=True, return_counts=True)
    often = [count for count in sorted(set(entered.tolist())) if count >= FEWEST_ROUNDS]
    if not often:
        return None
    weight = np.bincount(which, launching[mine])
    times = max(often, key=lambda one: (weight[entered % one == 0].sum(), one))
    order = np.concatenate([np.arange(count) for count in entered])[np.argsort(np.argsort(which, kind="stable"))]
    whole = entered[which] % times == 0
    begins = whole & (order < entered[which] // times)
    return _Frames(call, times, mine[begins], mine[whole & ~begins])


def _launching(scene: Scene) -> Ints:
    """Of each frame, how many commands are launched within it, at any depth."""
    frames = scene.timeline.frames
    count = np.zeros(len(frames) + 1, np.int64)
    for frame in _outwards(frames, scene.timeline.spans.frame[scene.command != NONE]):
        np.add.at(count, frame, 1)
    return count[:-1]


def _outwards(frames: Frames, frame: Ints) -> Iterator[Ints]:
    """These frames, then the ones around each, as long as any has one."""
    parent = np.append(frames.parent, NONE)
    while (frame != NONE).any():
        yield frame
        frame = parent[frame]


def _dependent(scene: Scene) -> Mask:
    """Frames in backward passes, and those within which matrices are multiplied, or what comes is needed at once:
    messages, and parameters that FSDP gathers."""
    frames, launch = scene.timeline.frames, scene.launch
    inner = [np.flatnonzero(scene.frames_with(Role.LAYER))]
    if scene.among_ranks:
        needed = is_message(scene) | np.append(scene.within(Role.SHARDS), False)[launch]
        needed &= (scene.timeline.spans.kind == Kind.COLLECTIVE) & (launch != NONE)
        inner.append(scene.timeline.spans.frame[launch[needed]])
    backward = np.append(scene.frames_with(Role.BACKWARD), False)
    for mine in scene.frames_by_depth:
        backward[mine] |= backward[frames.parent[mine]]
    return _around(frames, np.concatenate(inner)) | backward[:-1]


def _in_which_ranks_meet(scene: Scene) -> Mask:
    launch = scene.launch[scene.timeline.spans.kind == Kind.COLLECTIVE]
    return _around(scene.timeline.frames, scene.timeline.spans.frame[launch[launch != NONE]])


def _around(frames: Frames, inner: Ints) -> Mask:
    """These frames, and those around them."""
    result = np.zeros(len(frames) + 1, bool)
    for frame in _outwards(frames, inner):
        result[frame] = True
    return result[:-1]
