"""Several ranks: who comes late to the collectives, and collectives that could have travelled during the compute.

Ranks that run one program do the same work between two collectives (or launches). What one of them spends there
beyond the others in every step is lateness.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from keepbusy.explain.edit import Draft, Edit, Finding, Floats, SideLane
from keepbusy.explain.scene import STAGED_BYTES, Scene
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import NONE, Ints, Kind, Mask, Timeline

LATE_BY = 1_000_000
"""A host is late in a stretch if it spends this much longer there than its peers."""
WHOLE_PASS = Role.BACKWARD | Role.GRADIENTS
"""What is around the calls that are made of gradients, and no part of them."""
UNEQUAL_TIMES = 1.1
"""Device work is unequal where a rank has so many times as much of it as its peers."""


def find_exposed(scene: Scene) -> Finding:
    """Gradients that travel after every micro-batch travel once; whatever else travels does so during the compute.

    What comes through the memory of hosts holds Python up, and would not from GPU to GPU.
    """
    draft, spans = Draft("exposed_collective", scene.timeline), scene.timeline.spans
    travels = (spans.kind == Kind.COLLECTIVE) & (spans.size > STAGED_BYTES) & ~_is_paired(scene) & ~is_message(scene)
    early, all_of_them = _sent_early(scene, travels)
    for launch, rows in early.items():
        draft.edit.drop[rows] = True
        draft.culprit[rows] = launch
    rows = np.flatnonzero(travels & ~all_of_them)
    draft.edit.lane[rows] = SideLane.WIRE
    draft.culprit[rows] = np.where(scene.launch[rows] == NONE, rows, scene.launch[rows])
    rows = np.flatnonzero((spans.kind == Kind.WORK) & scene.within(Role.THROUGH_HOST))
    draft.edit.drop[rows] = True
    draft.culprit[rows] = rows
    return draft.finding()


def _sent_early(scene: Scene, travels: Mask) -> tuple[dict[int, Ints], Mask]:
    """Of each collective of gradients that more gradients are added to before the optimizer uses them: its launch, and
    what leaves if they travel with the last ones. And which collectives are of such gradients, the last ones included.
    """
    timeline, early = scene.timeline, dict[int, Ints]()
    of_gradients = np.zeros(len(timeline), bool)
    for passes in accumulated(scene):
        collectives = np.concatenate([one.gradients_of(scene, travels) for one in passes])
        if not len(passes[-1].gradients_of(scene, travels)):
            continue
        of_gradients[collectives] = True
        for one in passes[:-1]:
            rows = one.gradients_of(scene, travels)
            leaves = [one.call_of(scene, row) for row in rows.tolist()]
            leaves[:1] = [np.concatenate([first, one.scaled(scene)]) for first in leaves[:1]]
            early |= dict(zip(scene.launch[rows].tolist(), leaves, strict=True))
    return early, of_gradients


@dataclass(frozen=True)
class BackwardPass:
    """The rows of one backward pass, and of what follows until the next one or the optimizer."""

    first: int
    last: int
    end: int
    main: int  # the lane of the thread that called it
    later: frozenset[int] = frozenset()  # paths of what launches after the last pass, before the optimizer does

    def gradients_of(self, scene: Scene, travels: Mask) -> Ints:
        """Its collectives: those that PyTorch launches as gradients are done, and those of the program afterwards. What
        FSDP gathers then are parameters, which each pass needs."""
        launch, rank = scene.launch, scene.timeline.rank_of_rows
        rows = np.flatnonzero(travels & (launch >= self.first) & (launch < self.end))
        rows = rows[rank[rows] == scene.timeline.lanes[self.main].rank]
        after = launch[rows] > self.last
        frame = scene.timeline.spans.frame[launch[rows]]
        known = (
            np.isin(scene.path[frame], list(self.later)) & (frame != NONE) & ~scene.within(Role.SHARDS)[launch[rows]]
        )
        return rows[np.where(after, known, scene.hands_over_gradients[launch[rows]])]

    def scaled(self, scene: Scene) -> Ints:
        """What PyTorch launches beside its collectives: into their buckets, and for the mean over the ranks."""
        rows = np.arange(self.first, self.last + 1)
        mine = scene.timeline.rank_of_rows[rows] == scene.timeline.lanes[self.main].rank
        fills_buckets = scene.within(Role.GRADIENTS) & scene.within(Role.SCALES | Role.MOVES)
        inside = rows[mine & fills_buckets[rows]]
        return np.concatenate([inside, np.flatnonzero(np.isin(scene.launch, inside))])

    def call_of(self, scene: Scene, row: int) -> Ints:
        """The rows that leave with a collective: all that is called for it, within the pass or after it."""
        launch, spans, frames = int(scene.launch[row]), scene.timeline.spans, scene.timeline.frames
        begins = int(spans.end[self.last]) if launch > self.last else 0
        frame, call = int(spans.frame[launch]), NONE
        while frame != NONE and frames.start[frame] >= begins and not frames.role[frame] & WHOLE_PASS:
            frame, call = int(frames.parent[frame]), frame
        if call == NONE:
            return np.array([launch, row], np.int64)
        rows = np.arange(self.first, self.end)
        rows = rows[(spans.lane[rows] == frames.lane[call]) & (spans.frame[rows] != NONE)]
        of_row = spans.frame[rows]
        inside = rows[(frames.start[of_row] >= frames.start[call]) & (frames.end[of_row] <= frames.end[call])]
        commands = np.flatnonzero(np.isin(scene.launch, inside))
        return np.concatenate([inside, commands])


def accumulated(scene: Scene) -> Iterator[list[BackwardPass]]:
    """Backward passes in a row, whose gradients the optimizer uses together; two or more.

    Of a rank that takes no step itself, but is sent the new weights, nobody knows which ones these are.
    """
    timeline, rank = scene.timeline, scene.timeline.rank_of_rows
    optimizer = scene.within(Role.OPTIMIZER)
    backward = scene.within(Role.BACKWARD)
    launches = (scene.command != NONE) | optimizer
    for one in np.unique(rank[optimizer]).tolist():
        rows = np.flatnonzero(launches & (rank == one))
        main = int(timeline.spans.lane[timeline.marks_of(one)[0]])
        kind = np.where(optimizer[rows], 2, np.where(backward[rows], 1, 0))
        changes = np.flatnonzero(np.diff(kind, prepend=-1))
        group: list[BackwardPass] = []
        for place, begin in enumerate(changes.tolist()):
            end = changes[place + 1] if place + 1 < len(changes) else len(rows)
            if kind[begin] == 1:
                group.append(BackwardPass(int(rows[begin]), int(rows[end - 1]), int(rows[end - 1]) + 1, main))
            elif group and kind[begin] == 0:
                group[-1] = replace(group[-1], end=int(rows[end - 1]) + 1)
            elif group:
                yield from _whole(scene, group)
                group = []
        yield from _whole(scene, group)


def _whole(scene: Scene, group: Sequence[BackwardPass]) -> Iterator[list[BackwardPass]]:
    if len(group) > 1:
        rows = np.arange(group[-1].last + 1, group[-1].end)
        frame = scene.timeline.spans.frame[rows[(scene.command[rows] != NONE)]]
        later = frozenset(scene.path[frame[frame != NONE]].tolist())
        yield [replace(one, later=later) for one in group]


def without_messages(scene: Scene) -> Edit:
    """No fix, but a measure: what stages of a pipeline would spend if no message had to be waited for."""
    edit = Edit.nothing(scene.timeline)
    edit.lane[is_message(scene)] = SideLane.WIRE
    return edit


def is_message(scene: Scene) -> Mask:
    """Which commands go from one rank to one other: sent or received alone, or as a micro-batch comes and goes."""
    alone, of_a_piece = (np.append(scene.within(role), False) for role in (Role.MESSAGE, Role.PIECE))
    known = alone[scene.launch] | (of_a_piece[scene.launch] & _is_paired(scene))
    return (scene.timeline.spans.kind == Kind.COLLECTIVE) & known


def _is_paired(scene: Scene) -> Mask:
    """Which rows are of NCCL's kernel that sends and receives; all-to-all is made of it, too."""
    return np.array(["SendRecv" in name for name in scene.timeline.names], bool)[scene.timeline.spans.name]


class Pipeline(NamedTuple):
    """The micro-batches of a step, as the first stage sends them: how many there are, how many at once under way."""

    pieces: int
    together: int

    @staticmethod
    def of(scene: Scene) -> Pipeline | None:
        """None where ranks exchange messages, and none of them begins its steps with waiting for one.

        Which way those of PyTorch's own schedules go is not told: half of them forward, all of these first.
        """
        role, rank = np.append(scene.timeline.frames.role, 0)[scene.timeline.spans.frame], scene.timeline.rank_of_rows
        rows = scene.launch[is_message(scene)]
        sent = np.where(role[rows] & Role.RECEIVES, -1, 1)
        of_rank = [sent[rank[rows] == one] for one in scene.timeline.ranks]
        if scene.frames_with(Role.PIECE).any():
            pieces = max(1, min(map(len, of_rank)) // scene.steps // 2)
            return Pipeline(pieces, pieces)
        first = next((one for one in of_rank if len(one) and one[0] > 0), None)
        if first is None or not any(len(one) and one[0] < 0 for one in of_rank):
            return None
        return Pipeline(max(1, round((first > 0).sum() / scene.steps)), int(np.cumsum(first).max()))

    @property
    def pieces_after(self) -> int:
        """By the remedy: as many as there are, where they only have to follow each other; else twice as many."""
        return self.pieces if self.together == 1 < self.pieces else 2 * max(self.pieces, 2)

    @property
    def stays(self) -> float:
        """The share of the wait that is left: what the stages wait while the pipeline fills and drains."""
        return self.together / self.pieces_after


def find_late(scene: Scene) -> Finding:
    """What a rank does beyond its peers in every step, on its host or on its device."""
    draft = Draft("peer_late", scene.timeline)
    if len(scene.timeline.ranks) > 1:
        if stretches := host_stretches(scene):
            _cut_to_peers(scene, draft, stretches)
        _share_device_work(scene, draft)
    return draft.finding()


@dataclass(frozen=True, eq=False)
class Stretches:
    """For each rank, place in the step and step: the time that its host spent."""

    of_row: Ints  # index into the flattened table, or NONE where the row does not count
    of_sync: Ints  # of each sync the stretch it stands in, NONE of other rows
    spent: Floats  # rank, place, step

    @property
    def usual(self) -> Floats:
        """Of each rank and place, the median step."""
        return np.median(self.spent, axis=2)

    @property
    def peers(self) -> Floats:
        """Of each rank and place, what its peers spend there."""
        usual = self.usual
        return np.stack([np.median(np.delete(usual, rank, axis=0), axis=0) for rank in range(len(usual))])

    @property
    def late(self) -> Mask:
        """Which ranks are late at which place."""
        return self.usual - self.peers > LATE_BY


class _Borders(NamedTuple):
    rows: Mask
    per_step: int


def host_stretches(scene: Scene) -> Stretches | None:
    """None where nothing shows that the ranks run the same program."""
    timeline = scene.timeline
    borders = _borders(scene)
    if borders is None:
        return None
    spans, steps, per_step = timeline.spans, scene.steps, borders.per_step
    counted = (spans.meeting == NONE) & (spans.kind != Kind.SYNC) & ~timeline.on_device & ~scene.by_workers
    of_row, of_sync = np.full(len(timeline), NONE, np.int64), np.full(len(timeline), NONE, np.int64)
    for index, rank in enumerate(timeline.ranks):
        mine = timeline.rank_of_rows == rank
        passed = np.cumsum(borders.rows[mine])  # what follows the last border of a step belongs to the next one's first
        step, place = np.divmod(np.minimum(passed, per_step * steps - 1), per_step)
        stretch = (index * per_step + place) * steps + step
        of_row[mine] = np.where(counted[mine], stretch, NONE)
        of_sync[mine] = np.where(spans.kind[mine] == Kind.SYNC, stretch, NONE)
    known = of_row != NONE
    spent = np.bincount(of_row[known], spans.work[known], len(timeline.ranks) * per_step * steps).astype(np.float64)
    return Stretches(of_row, of_sync, spent.reshape(len(timeline.ranks), per_step, steps))


def _borders(scene: Scene) -> _Borders | None:
    """The finest borders of which every rank passes equally many in every step.

    Launches, else collectives; and where ranks do not even meet equally often, whole steps, as long as all ranks
    meet somewhere in the run (stages of a pipeline, which rightly differ, exchange messages two by two).
    """
    timeline = scene.timeline
    meets = timeline.spans.meeting != NONE
    for rows in (scene.command != NONE, meets):
        if per_step := _per_step(timeline, rows):
            return _Borders(rows, per_step)
    if (timeline.meetings.present == len(timeline.ranks)).any():
        return _Borders(np.isin(np.arange(len(timeline)), timeline.marks), 1)
    return None


def _per_step(timeline: Timeline, border: Mask) -> int:
    """How many borders each rank passes in each step, if all of them pass equally many; else 0."""
    before = np.zeros(len(timeline) + 1, np.int64)
    counts = set()
    for rank in timeline.ranks:
        np.cumsum(border & (timeline.rank_of_rows == rank), out=before[1:])
        marks = np.append(timeline.marks_of(rank), len(timeline))
        counts |= set(np.diff(before[marks]).tolist())
    return counts.pop() if len(counts) == 1 else 0


def _cut_to_peers(scene: Scene, draft: Draft, stretches: Stretches) -> None:
    work, (ranks, places, steps) = scene.timeline.spans.work, stretches.spent.shape
    excess = stretches.usual - stretches.peers
    for rank, place in np.argwhere(stretches.late).tolist():
        for step in range(steps):
            at = (rank * places + place) * steps + step
            # the excess leaves the longest rows first: one long row is what a person would call late
            rows = np.flatnonzero(stretches.of_row == at)
            rows = rows[np.argsort(-work[rows], kind="stable")]
            longer = np.cumsum(work[rows]) - work[rows]
            taken = np.minimum(work[rows], np.maximum(excess[rank, place] - longer, 0)).astype(np.int64)
            cut = taken > 0
            draft.edit.work[rows[cut]] = (work[rows] - taken)[cut]
            draft.culprit[rows[cut]] = rows[cut]
            # syncs that only the late rank makes go with what it does there
            syncs = np.flatnonzero(stretches.of_sync == at)
            everywhere = [(stretches.of_sync == (one * places + place) * steps + step).sum() for one in range(ranks)]
            if len(syncs) > np.median(everywhere):
                draft.edit.drop_wait[syncs] = True
                draft.edit.work[syncs] = 0
                draft.culprit[syncs] = syncs


def _share_device_work(scene: Scene, draft: Draft) -> None:
    """Device work that is unequal is shared out, stretch by stretch: nobody has less to do altogether."""
    spent, stretch = device_work(scene)
    mean = spent.sum(axis=1) / scene.steps
    peers = np.array([np.median(np.delete(mean, rank)) for rank in range(len(mean))])
    late = mean > UNEQUAL_TIMES * peers
    if not late.any():
        return
    rows = np.flatnonzero(stretch != NONE)
    fair = spent.mean(axis=0, keepdims=True) / np.maximum(spent, 1.0)
    draft.edit.scale[rows] = fair.ravel()[stretch[rows]]
    is_late = late[stretch[rows] // spent.shape[1]]
    culprit = np.where(scene.launch[rows] == NONE, rows, scene.launch[rows])
    draft.culprit[rows[is_late]] = culprit[is_late]
    draft.culprit[rows[~is_late]] = int(culprit[is_late][0])  # they change along with the late one's


def device_work(scene: Scene) -> tuple[Floats, Ints]:
    """For each rank, and each stretch between collectives (or step), what its device has to do, collectives aside.

    And of each row its index in that table, NONE where it does not count.
    """
    timeline = scene.timeline
    spans, ranks, rank = timeline.spans, timeline.ranks, timeline.rank_of_rows
    meets = spans.meeting != NONE
    border = meets if _per_step(timeline, meets) else np.isin(np.arange(len(timeline)), timeline.marks)
    width = max(int(np.count_nonzero(border & (rank == one))) for one in ranks) + 1
    stretch = np.full(len(timeline), NONE, np.int64)
    for index, one in enumerate(ranks):
        place = np.cumsum(border & (rank == one))
        mine = timeline.on_device & (spans.kind != Kind.COLLECTIVE) & (rank == one)
        stretch[mine] = index * width + place[mine]
    known = stretch != NONE
    spent = np.bincount(stretch[known], spans.work[known], len(ranks) * width).astype(np.float64)
    return spent.reshape(len(ranks), width), stretch
