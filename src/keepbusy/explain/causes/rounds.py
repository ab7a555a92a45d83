"""Rounds: within one turn a loop does the same to one small thing after another, a launch for each.

Where no round needs what another one computed, one call does all of them. Of an optimizer's parameters and of tables
that is certain; of others only who wrote them knows. Layers of a network, which do need each other, multiply matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

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


class _Frames(NamedTuple):
    call: int
    times: int
    first: Ints
    others: Ints


def as_one(scene: Scene, rounds: Sequence[CallRounds], stays: float) -> Finding:
    """All rounds in one call: of what the GPU does in all but the first, this share stays."""
    draft, spans = Draft("launch_bound", scene.timeline), scene.timeline.spans
    for one in rounds:
        leaves = np.union1d(one.others, one.between)
        commands, leaving = _commands(scene, one.first), _commands(scene, leaves)
        done = spans.work[leaving].sum() / max(1, spans.work[commands].sum())
        draft.edit.drop[leaves] = draft.edit.drop[leaving] = True
        draft.edit.scale[commands] = 1.0 + stays * done
        launch = one.first[scene.command[one.first] != NONE][0]
        draft.culprit[np.concatenate([leaves, leaving, commands])] = int(launch)
    return draft.finding()


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
    calls, which = np.unique(np.stack([frames.parent[known], _turn(scene, known)]), axis=1, return_inverse=True)
    groups, taken = _grouped(which.ravel(), calls.shape[1]), np.zeros(len(frames), bool)
    for index in np.argsort(frames.start[calls[0]], kind="stable").tolist():
        call, mine = int(calls[0, index]), known[groups[index]]
        if len(mine) >= FEWEST_ROUNDS and not any(taken[one] for one in frames.around(call)):
            found = _of_call(scene, call, mine, launching)
            if found is not None:
                taken[mine] = True
                yield found


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
    """Frames of backward passes, and those within which matrices are multiplied or ranks meet."""
    frames = scene.timeline.frames
    result = np.zeros(len(frames) + 1, bool)
    meets = scene.launch[scene.timeline.spans.kind == Kind.COLLECTIVE]
    layers = np.flatnonzero(scene.frames_with(Role.LAYER))
    for frame in _outwards(frames, np.concatenate([layers, scene.timeline.spans.frame[meets[meets != NONE]]])):
        result[frame] = True
    return result[:-1] | scene.frames_with(Role.BACKWARD)


def _turn(scene: Scene, frames: Ints) -> Ints:
    """In which turn each of these frames begins."""
    timeline, about = scene.timeline, scene.timeline.frames
    begun = np.sort(timeline.spans.start[timeline.marks_of(timeline.ranks[0])])
    return np.searchsorted(begun, about.start[frames], side="right")
