"""Causes: who looks for each of them in a scene, and writes down the edit that fixes it everywhere.

Of a rank's host: reads and copies that stop it, input, tensors made there, other work, launches and calls for memory.
A value is read later, or never; copies go beside the compute, also those that stand in line. Of several ranks: who
comes late to the collectives, and collectives that could have travelled during the compute. Ranks that run one program
do the same work between two collectives (or launches); what one of them spends there beyond the others in every step
is lateness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from keepbusy.explain.diagnosis import Edit, SideLane, Where
from keepbusy.explain.plain import Stretches, borders_per_step, host_stretches
from keepbusy.timeline.frame_roles import Owner, Role, called_alike
from keepbusy.timeline.model import (
    NONE,
    STAGED_BYTES,
    WORKERS,
    Direction,
    Floats,
    FrameKind,
    Ints,
    Kind,
    Mask,
    Timeline,
    next_kept,
    previous_on_lane,
)
from keepbusy.timeline.run_facts import USUAL_WORKERS

IN_A_ROW, LAUNCHES_BETWEEN = 8, 6
"""So many reads of one place, with no more launches between them, are a loop over small values. With more between them
the program goes on with its work by what it has read."""
USUAL_BANDWIDTH = 24.0
"""Bytes a nanosecond, from pinned memory over a link that nobody has named: PCIe 4."""
SETUP = 2_000
HEAVY = 1_000_000
"""Host work that goes on this long without a launch is no launch overhead: a graph would not take it away."""
CALL_OF_ITS_OWN = 300_000
"""Nor is an operator or a function of the user's that launches nothing and takes this long, as none does for being
recorded alone."""
PRICE_OF_A_CALL = 100_000
"""What takes less is what any call costs: it makes nothing, and is no work between a read and a copy back."""
TIMES_AS_MANY = 4
"""Nobody knows how many workers a loader has; the prediction is for so many times as many."""
UNEQUAL_TIMES = 1.1
"""Device work is unequal where a rank has so many times as much of it as its peers."""
_WHOLE_PASS = Role.BACKWARD | Role.GRADIENTS
"""What is around the calls that are made of gradients, and no part of them."""


@dataclass(frozen=True, eq=False)
class Finding:
    """A cause as it was found."""

    cause: str
    edit: Edit
    culprit: Ints  # of each row that the edit touches, the row to blame; NONE elsewhere
    rows: Ints  # the rows to blame
    count: int  # how often it was met
    places: Mapping[Where, Ints] = field(default_factory=dict)
    """The rows to blame, by where they stand in the program; the place first that holds up longest."""
    _parts: dict[bytes, Edit] = field(default_factory=dict, repr=False)

    def only(self, rows: Ints) -> Edit:
        """The edit of these culprits alone. One object for the same rows, so that each is replayed once."""
        key = rows.tobytes()
        if key not in self._parts:
            self._parts[key] = self.edit.only(np.isin(self.culprit, rows))
        return self._parts[key]


class Draft:
    """An edit being written down."""

    def __init__(self, cause: str, timeline: Timeline) -> None:
        self.cause, self.edit = cause, Edit.nothing(timeline)
        self.culprit = np.full(len(timeline), NONE, np.int64)
        self.count: int | None = None  # where it is not the number of rows to blame

    def finding(self) -> Finding:
        culprit = np.where(self.edit.touched, self.culprit, NONE)
        rows = np.unique(culprit[culprit != NONE])
        return Finding(self.cause, self.edit, culprit, rows, len(rows) if self.count is None else self.count)


def findings(scene: Scene) -> dict[str, Finding]:
    """Only causes that were seen at all."""
    finders = FINDERS if scene.among_ranks else OF_ONE_HOST
    drafts = {cause: Draft(cause, scene.timeline) for cause in finders}
    for cause, find in finders.items():
        find(scene, drafts[cause])
    # what makes a tensor on the host, or waits for a message there, is told once, under its own name
    for other in ("made_on_host", "exposed_collective"):
        if other in drafts:
            drafts["host_work"].edit.drop[drafts[other].edit.drop] = False
    found = {cause: draft.finding() for cause, draft in drafts.items()}
    return {cause: finding for cause, finding in found.items() if len(finding.rows)}


class Scene:
    """The plain run, with what the finders ask of it looked up once. NONE stands where there is no such row."""

    def __init__(self, timeline: Timeline, workers: int = USUAL_WORKERS) -> None:
        spans, links = timeline.spans, timeline.launches
        self.timeline, self.workers = timeline, workers
        self.steps = len(timeline.marks_of(timeline.ranks[0]))
        self.before, nowhere = previous_on_lane(spans.lane), np.full(len(timeline), NONE, np.int64)
        # of each command its launch, and of each launch its first command
        self.launch, self.command = nowhere.copy(), nowhere.copy()
        self.launch[links.target] = links.source
        self.command[links.source[::-1]] = links.target[::-1]
        self.last_launch = self._last_launch()
        # batches that other processes prepare are no work of this program's own; two more for NONE and EVERY_LANE
        of_workers = np.array([lane.name == WORKERS for lane in timeline.lanes] + [False, False], bool)
        self.by_workers, self.is_loader_wait = of_workers[spans.lane], of_workers[spans.awaits]
        launching = np.zeros(len(timeline.names), bool)
        launching[spans.name[spans.kind == Kind.LAUNCH]] = True
        self.is_queue_wait = (spans.kind == Kind.SYNC) & (spans.awaits == NONE) & launching[spans.name]
        # acts of the program that wait for the device; a launch that found its queue full is none
        self.is_sync = (spans.kind == Kind.SYNC) & ~self.is_queue_wait & ~self.is_loader_wait
        self.is_copy = spans.kind == Kind.COPY
        # of each sync the copy that it makes blocking, and the other way round
        self.copy_of_sync, self.sync_of_copy = self._copy_of_sync(), nowhere
        syncs = np.flatnonzero(self.copy_of_sync != NONE)
        self.sync_of_copy[self.copy_of_sync[syncs][::-1]] = syncs[::-1]
        self.launch_free, self.frames_by_depth = self._launch_free(), self._frames_by_depth()
        self.path = self._path()
        self._within: dict[Role, Mask] = {}

    def _last_launch(self) -> Ints:
        """Of each host row, the last launch at or before it on its lane that enqueued a command, or NONE."""
        spans = self.timeline.spans
        result = np.full(len(self.timeline), NONE, np.int64)
        for lane, about in enumerate(self.timeline.lanes):
            if about.device is None:
                rows = np.flatnonzero(spans.lane == lane)
                result[rows] = np.maximum.accumulate(np.where(self.command[rows] != NONE, rows, NONE))
        return result

    def _copy_of_sync(self) -> Ints:
        copy = self.command[np.maximum(self.last_launch, 0)]
        known = self.is_sync & (self.last_launch != NONE) & (copy != NONE)
        known &= self.is_copy[np.maximum(copy, 0)]
        return np.where(known, copy, NONE)

    def frames_with(self, role: Role) -> Mask:
        """Which frames do one of these things."""
        return self.timeline.frames.role & role != 0

    def within(self, role: Role) -> Mask:
        """Which rows stand in frames that do one of these things, at any depth."""
        if role not in self._within:
            self._within[role] = self.outermost(self.frames_with(role)) != NONE
        return self._within[role]

    def outermost(self, frames: Mask) -> Ints:
        """Of each row, the outermost of these frames that encloses it, or NONE."""
        parent, best = self.timeline.frames.parent, np.append(np.where(frames, np.arange(len(frames)), NONE), NONE)
        for inner in self.frames_by_depth[1:]:  # of each frame, the outermost of these that it is or stands in
            above = best[parent[inner]]
            best[inner] = np.where(above != NONE, above, best[inner])
        return best[self.timeline.spans.frame]

    @cached_property
    def shown_at(self) -> Ints:
        """Of each row, itself. A wait of a backward pass for what a mask chooses is shown where the forward pass of the
        same step used the mask: backward waits pair with forward rows in reverse order."""
        timeline, result = self.timeline, np.arange(len(self.timeline))
        waits = np.flatnonzero(self.is_sync & self.within(Role.CHOOSES))
        in_backward = self.within(Role.BACKWARD)[waits]
        for rank in timeline.ranks:
            of_rank = timeline.rank_of_rows[waits] == rank
            step = np.searchsorted(timeline.marks_of(rank), waits, side="right")
            for number in np.unique(step[of_rank & in_backward]).tolist():
                here = of_rank & (step == number)
                backward = waits[here & in_backward]
                forward = waits[here & ~in_backward & (waits < backward[0])]
                if len(forward):
                    share = np.arange(len(backward)) / len(backward)
                    result[backward] = forward[::-1][(share * len(forward)).astype(np.int64)]
        return result

    @cached_property
    def among_ranks(self) -> bool:
        """Whether ranks meet here, or send to others that were not recorded."""
        sends = (self.timeline.spans.kind == Kind.COLLECTIVE).any() or self.frames_with(Role.THROUGH_HOST).any()
        return len(self.timeline.ranks) > 1 or bool(sends)

    @cached_property
    def loader_frame(self) -> Ints:
        """Of each row, the outermost frame around it in which a loader prepares a batch or takes one, or NONE."""
        return self.outermost(self.frames_with(Role.LOADER))

    @cached_property
    def waits_for_large_copy(self) -> Mask:
        """Which syncs wait for a batch on its way in, or for much data on its way out."""
        spans, copy = self.timeline.spans, self.copy_of_sync
        inbound = spans.direction[copy] == Direction.HOST_TO_DEVICE
        return (copy != NONE) & (inbound | (spans.size[copy] > STAGED_BYTES))

    @cached_property
    def is_heavy(self) -> Mask:
        """Work in its own right: anything long, the user's own calls that launch nothing, and what is done to a value
        that was read before it goes back."""
        spans, frames = self.timeline.spans, self.timeline.frames
        work = (spans.kind == Kind.WORK) & ~self.by_workers & (self.loader_frame == NONE)
        call = self._outermost_call()
        # of sampled steps a call may begin at the end of one whose next step is not there
        took = np.bincount(call + 1, spans.end - spans.start, len(frames) + 1)
        lasting = took[call + 1] >= CALL_OF_ITS_OWN
        lasting &= (self.caller != Owner.TORCH) | (self._operator != NONE)  # clearing gradients, setting a mode
        long = (spans.work >= HEAVY) & ~self._belongs_to_launches()
        return work & (long | ((call != NONE) & lasting) | self._round_trip())

    @cached_property
    def _operator(self) -> Ints:
        """Of each row, the outermost operator around it, or NONE."""
        return self.outermost(self.timeline.frames.kind == FrameKind.OPERATOR)

    def _belongs_to_launches(self) -> Mask:
        """What PyTorch itself does in a backward pass or an optimizer, between launches there: a graph takes it away,
        however long it takes. Not where it looks for a kernel, or works on the host alone."""
        frame, launches = self.timeline.spans.frame, ~self.launch_free & ~self.frames_with(Role.LAYER)
        framework = self.within(Role.BACKWARD | Role.OPTIMIZER) & (self.caller == Owner.TORCH)
        return framework & np.append(launches, False)[frame]

    def _outermost_call(self) -> Ints:
        """Of each row, the outermost call around it that launches nothing and is no part of PyTorch's own Python."""
        frames = self.timeline.frames
        framework = self.frames_with(Role.OPTIMIZER | Role.BACKWARD | Role.MODULE) | (frames.owner == Owner.TORCH)
        quiet = self.launch_free & ~framework & (frames.kind != FrameKind.ANNOTATION)
        inside = self.outermost(framework & ~self.launch_free) != NONE
        found = self.outermost(quiet)
        is_operator = np.append(frames.kind, FrameKind.ANNOTATION)[found] == FrameKind.OPERATOR
        return np.where(self.within(Role.OPTIMIZER) | (inside & ~is_operator), NONE, found)

    def _round_trip(self) -> Mask:
        """Work on what was read, before it goes back: between a read and the copy of something else to the device."""
        spans = self.timeline.spans
        result = np.zeros(len(spans), bool)
        back = np.flatnonzero(self.is_copy & (spans.direction == Direction.HOST_TO_DEVICE) & (self.launch != NONE))
        for launch in self.launch[back].tolist():
            before = int(self.last_launch[self.before[launch]]) if self.before[launch] != NONE else NONE
            if before != NONE and spans.direction[self.command[before]] == Direction.DEVICE_TO_HOST:
                rows = np.arange(before + 1, launch)
                rows = rows[(spans.lane[rows] == spans.lane[launch]) & (spans.kind[rows] == Kind.WORK)]
                result[rows] = spans.work[rows].sum() >= PRICE_OF_A_CALL
        return result

    @cached_property
    def is_message(self) -> Mask:
        """Which commands go from one rank to one other: sent or received alone, or as a micro-batch comes and goes."""
        alone, of_a_piece = (np.append(self.within(role), False) for role in (Role.MESSAGE, Role.PIECE))
        known = alone[self.launch] | (of_a_piece[self.launch] & self.is_paired)
        return (self.timeline.spans.kind == Kind.COLLECTIVE) & known

    @cached_property
    def is_paired(self) -> Mask:
        """Which rows are of NCCL's kernel that sends and receives; all-to-all is made of it, too."""
        return self.timeline.spans.role & Role.PAIRED != 0

    @cached_property
    def frame_of_one_rank(self) -> Ints:
        """Of each row, the outermost frame around it that no other rank enters along the same path, or NONE."""
        ranks = self.timeline.rank_of_lanes[self.timeline.frames.lane]
        _, which = np.unique(self.path, return_inverse=True)
        first, last = (np.full(which.max(initial=0) + 1, ranks.max(initial=0) * sign) for sign in (1, 0))
        np.minimum.at(first, which, ranks)
        np.maximum.at(last, which, ranks)
        return self.outermost(first[which] == last[which])

    @cached_property
    def needs_read(self) -> Ints:
        """Of each row the statement around it that read a value first, and makes of it what goes back to the device in
        the same turn, as `envs.step(action.cpu())` does, or `kept = suppress(boxes)` of a function that reads; or NONE.
        The GPU has nothing to do until that is done."""
        spans, frames = self.timeline.spans, self.timeline.frames
        result, exact = np.full(len(spans), NONE, np.int64), frames.kind == FrameKind.LINE
        after = next_kept(spans.lane, self.command != NONE)  # of each row the next one that launches something
        turn = np.searchsorted(self.timeline.marks, np.arange(len(spans)), side="right")
        reads = self.is_sync & (spans.direction[self.copy_of_sync] == Direction.DEVICE_TO_HOST)
        back = (self.command != NONE) & (spans.direction[self.command] == Direction.HOST_TO_DEVICE)
        for read in np.flatnonzero(reads & back[after] & (turn[after] == turn)).tolist():
            lines = [one for one in frames.around(int(spans.frame[read])) if exact[one]]
            # the outermost statement that is over when the copy begins; else the one that reads and copies
            over = [one for one in lines if frames.end[one] <= spans.start[after[read]]]
            for statement in [*over[-1:], *lines[:1]][:1]:
                rows = np.arange(read + 1, after[read])
                inside = (spans.lane[rows] == spans.lane[read]) & (spans.start[rows] < frames.end[statement])
                result[rows[inside]] = statement
        return result

    @cached_property
    def hands_over_gradients(self) -> Mask:
        """Which rows stand where gradients are done; of a whole pass all that no Python is called for, as by DDP."""
        frames = self.timeline.frames
        result = self.within(Role.GRADIENTS)
        whole_pass = self.frames_with(Role.BACKWARD) & (frames.kind == FrameKind.ANNOTATION)
        around = self.outermost(whole_pass)
        inner = self.innermost_line
        called = np.where(around == NONE, NONE, np.append(frames.parent, NONE)[around])
        name = np.append(frames.name, NONE)
        return result | ((around != NONE) & (name[inner] == name[called]))

    @cached_property
    def innermost_line(self) -> Ints:
        """Of each row, the innermost Python frame around it, or NONE."""
        return self.innermost(np.isin(self.timeline.frames.kind, (FrameKind.LINE, FrameKind.PYTHON)))

    def innermost(self, frames: Mask) -> Ints:
        """Of each row, the innermost of these frames around it, or NONE."""
        frame, parent = self.timeline.spans.frame.astype(np.int64), np.append(self.timeline.frames.parent, NONE)
        found = np.append(frames, True)
        while not found[frame].all():
            frame = np.where(found[frame], frame, parent[frame])
        return frame

    @cached_property
    def library_role(self) -> Ints:
        """Of each row, what the library's line does that is around it before any line of the program's own."""
        frames = self.timeline.frames
        line = self.innermost(frames.owner != Owner.UNKNOWN)
        return np.append(np.where(frames.owner == Owner.USER, 0, frames.role), 0)[line]

    @cached_property
    def caller(self) -> Ints:
        """Of each row, whose line calls the operator: an `Owner`."""
        frames = self.timeline.frames
        line = self.innermost((frames.owner != Owner.UNKNOWN) & (frames.role & Role.WRAPS == 0))
        return np.append(frames.owner, Owner.UNKNOWN)[line]

    @cached_property
    def is_given_back(self) -> Mask:
        """Which calls give memory back that no operator asked for: the program did, by `empty_cache`."""
        operators = self.timeline.frames.kind == FrameKind.OPERATOR
        asked = self.outermost(operators & ~self.frames_with(Role.GIVES_BACK)) != NONE
        return (self.timeline.spans.role & Role.GIVES_BACK != 0) & ~asked

    @cached_property
    def reads_in_a_row(self) -> list[Ints]:
        """The host's rows from the first to the last of values that a loop reads one by one, some in each of its rounds
        and with hardly a launch between them."""
        spans, frame = self.timeline.spans, self.outermost(self.frames_with(Role.READS))
        scalar = np.append(self.frames_with(Role.READS_SCALAR), False)[frame]
        reads = np.flatnonzero(self.is_sync & ~self.waits_for_large_copy & scalar)
        launched = np.concatenate([[0], np.cumsum(self.command != NONE)])
        # a read in each of many short steps is none of a loop within a step
        step = np.searchsorted(self.timeline.marks, reads, side="right")
        alike = np.stack([spans.lane[reads], step, self.path[frame[reads]]])
        order = np.lexsort((reads, *alike))
        reads, alike = reads[order], alike[:, order]
        goes_on = (np.diff(launched[reads]) <= LAUNCHES_BETWEEN) & (np.diff(alike) == 0).all(axis=0)
        chains = [one for one in np.split(reads, np.flatnonzero(~goes_on) + 1) if len(one) > IN_A_ROW]
        found = list[tuple[int, int, int]]()
        for lane, first, last in sorted((int(spans.lane[one[0]]), int(one[0]), int(one[-1])) for one in chains):
            if found and found[-1][0] == lane and first < found[-1][2]:  # another value of the same rounds
                found[-1] = lane, found[-1][1], max(found[-1][2], last)
            else:
                found.append((lane, first, last))
        return [np.flatnonzero(spans.lane[first : last + 1] == lane) + first for lane, first, last in found]

    def _launch_free(self) -> Mask:
        """Which frames launch nothing."""
        spans, frames = self.timeline.spans, self.timeline.frames
        free = np.ones(len(frames), bool)
        for lane in np.unique(frames.lane).tolist():
            mine = np.flatnonzero(frames.lane == lane)
            starts = spans.start[(spans.lane == lane) & (self.command != NONE)]
            free[mine] = np.searchsorted(starts, frames.start[mine]) == np.searchsorted(starts, frames.end[mine])
        return free

    def _frames_by_depth(self) -> list[Ints]:
        """The frames that stand in no other, those directly within them, and so on."""
        up = np.append(self.timeline.frames.parent, NONE).astype(np.int64)
        depth = (up != NONE).astype(np.int64)
        while (up != NONE).any():  # twice as far up each time
            depth += depth[up]
            up = up[up]
        depth = depth[:-1]
        return np.split(np.argsort(depth, kind="stable"), np.cumsum(np.bincount(depth)))[:-1] if len(depth) else []

    def _path(self) -> Ints:
        """Of each frame, a number that frames entered along the same path of calls share."""
        frames = self.timeline.frames
        names = called_alike(self.timeline.names)
        path = np.zeros(len(frames) + 1, np.int64)  # the last place is for frames that stand in none
        for mine in self.frames_by_depth:
            above = path[frames.parent[mine]]
            path[mine] = (above * 1_000_003 + names[frames.name[mine]] + 1) % ((1 << 61) - 1) % (1 << 40)
        return path[:-1]


def _find_reads(scene: Scene, draft: Draft) -> None:
    syncs = np.flatnonzero(scene.is_sync & ~scene.waits_for_large_copy)
    frame = scene.outermost(scene.frames_with(Role.READS))
    draft.edit.drop_wait[syncs] = True
    draft.edit.work[syncs] = 0
    draft.culprit[syncs] = syncs
    inside = np.flatnonzero((frame != NONE) & ~scene.timeline.on_device)
    culprit = _sync_of_frame(frame, syncs)[frame[inside]]
    inside, culprit = inside[culprit != NONE], culprit[culprit != NONE]
    draft.edit.work[inside] = 0
    draft.culprit[inside] = culprit
    _send_no_objects(scene, draft, syncs)
    _read_together(scene, draft)
    draft.count = len(syncs)


def _send_no_objects(scene: Scene, draft: Draft, syncs: Ints) -> None:
    """Objects travel as their length and their bytes, each copied, sent and read: all of it leaves with the call. In a
    run whose lines are known each line of the call is a frame, and the frame around tells that they are of one call."""
    frames, call = scene.timeline.frames, scene.outermost(scene.frames_with(Role.OBJECTS))
    is_line = (call != NONE) & (np.append(frames.kind, FrameKind.PYTHON)[call] == FrameKind.LINE)
    around = np.append(frames.parent, NONE)[call]
    call = np.where(is_line & (around != NONE), around, call)
    inside = np.flatnonzero(call != NONE)
    first = _sync_of_frame(call, syncs)[call[inside]]
    inside, first = inside[first != NONE], first[first != NONE]
    draft.edit.drop[inside] = True
    draft.culprit[inside] = first
    commands = np.flatnonzero((scene.launch != NONE) & draft.edit.drop[scene.launch])
    draft.edit.drop[commands] = True
    draft.culprit[commands] = draft.culprit[scene.launch[commands]]


def _read_together(scene: Scene, draft: Draft) -> None:
    """Who reads the values of a loop together computes them together, as one operation did before."""
    for rows in scene.reads_in_a_row:
        draft.edit.work[rows[1:-1]] = 0
        draft.culprit[rows[1:-1]] = rows[0]
        draft.culprit[np.isin(draft.culprit, rows)] = rows[0]


def _sync_of_frame(frame: Ints, syncs: Ints) -> Ints:
    """Of each frame, the first sync within it, or NONE. One more entry, so that NONE itself finds NONE."""
    result = np.full(int(frame.max(initial=0)) + 2, NONE, np.int64)
    within = syncs[frame[syncs] != NONE]
    result[frame[within][::-1]] = within[::-1]
    return result


def _find_blocking(scene: Scene, draft: Draft) -> None:
    spans = scene.timeline.spans
    # all that come in, and large ones that go out: a small one is a read
    inbound = spans.direction == Direction.HOST_TO_DEVICE
    outbound = (spans.direction == Direction.DEVICE_TO_HOST) & (spans.size > STAGED_BYTES)
    copies = np.flatnonzero(scene.is_copy & (scene.sync_of_copy != NONE) & (inbound | outbound))
    draft.edit.lane[copies] = np.where(inbound[copies], SideLane.FETCH, SideLane.RETURN)
    if len(copies):
        bandwidth = scene.timeline.facts.pinned_bandwidth or USUAL_BANDWIDTH
        pinned = (spans.size[copies] / bandwidth + SETUP).astype(np.int64)
        draft.edit.work[copies] = np.minimum(spans.work[copies], pinned)
    draft.culprit[copies] = scene.sync_of_copy[copies]
    syncs = np.flatnonzero(np.isin(scene.copy_of_sync, copies))  # the call itself may wait, and a sync after it
    draft.edit.drop_wait[syncs] = True
    draft.edit.work[syncs] = 0
    draft.culprit[syncs] = scene.sync_of_copy[scene.copy_of_sync[syncs]]


def _find_in_line(scene: Scene, draft: Draft) -> None:
    """Asynchronous, and yet the compute waits for it: on its own stream, or on one that it waits for at once."""
    spans = scene.timeline.spans
    inbound, outbound = (spans.direction == way for way in (Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST))
    alone = scene.is_copy & (scene.sync_of_copy == NONE) & (scene.launch != NONE) & (spans.size > STAGED_BYTES)
    copies = np.flatnonzero(alone & (inbound | outbound))
    draft.edit.lane[copies] = np.where(inbound[copies], SideLane.FETCH, SideLane.RETURN)
    draft.culprit[copies] = scene.launch[copies]


def _find_input(scene: Scene, draft: Draft) -> None:
    """The loader prepares its batch in the training process, or its workers are too few."""
    spans = scene.timeline.spans
    batches = np.flatnonzero(scene.by_workers)
    draft.edit.work[batches] = spans.work[batches] // TIMES_AS_MANY
    waits = np.flatnonzero(scene.is_loader_wait)  # a batch of the workers is waited for by the loop's next wait
    draft.culprit[batches] = (
        waits[np.minimum(np.searchsorted(waits, batches), len(waits) - 1)] if len(waits) else batches
    )
    frame = scene.loader_frame
    rows = np.flatnonzero((frame != NONE) & (spans.kind == Kind.WORK))
    # a loader that has workers only takes what they prepared
    takes = np.append(scene.frames_with(Role.LOADER_WORKERS), False)[frame[rows]]
    rows = rows[~takes]
    _, first, which = np.unique(frame[rows], return_index=True, return_inverse=True)
    first_of_frame = rows[first][which] if len(rows) else rows
    stays = rows == first_of_frame
    draft.edit.lane[rows[~stays]] = SideLane.WORKERS
    draft.edit.work[rows] = spans.work[rows] // scene.workers
    draft.culprit[rows] = first_of_frame


def _find_made(scene: Scene, draft: Draft) -> None:
    """Drawn or filled on the host, at most transformed elementwise, and sent to the device at once."""
    spans = scene.timeline.spans
    copies = np.flatnonzero(scene.is_copy & (spans.direction == Direction.HOST_TO_DEVICE) & (spans.size > STAGED_BYTES))
    for copy in copies[scene.launch[copies] != NONE].tolist():
        made = _making(scene, int(scene.launch[copy]))
        if len(made):
            launch, sync = int(scene.launch[copy]), int(scene.sync_of_copy[copy])
            leaves = np.array([*made, launch, copy, *([sync] if sync != NONE else [])], np.int64)
            draft.edit.drop[leaves] = True
            draft.culprit[leaves] = launch


def _making(scene: Scene, launch: int) -> Ints:
    """The rows before this launch in which its tensor was made; none if anything but making went on there. What Python
    itself does at the line of the launch comes with any call."""
    spans, frames, lane = scene.timeline.spans, scene.timeline.frames, scene.timeline.spans.lane[launch]

    def called(row: int) -> tuple[int, int]:
        """What the innermost operator does, and the name of the line; NONE where there is none."""
        around = [*frames.around(int(spans.frame[row]))]
        role = next((int(frames.role[one]) for one in around if frames.kind[one] == FrameKind.OPERATOR), NONE)
        return role, next((int(frames.name[one]) for one in around if frames.kind[one] != FrameKind.OPERATOR), NONE)

    _, line = called(launch)
    rows: list[int] = []
    row, makes = int(scene.before[launch]), False
    while row != NONE and spans.kind[row] in (Kind.WORK, Kind.ALLOCATE) and spans.lane[row] == lane:
        role, at = called(row)
        if spans.work[row] >= PRICE_OF_A_CALL and (role != NONE or at != line or line == NONE):
            if role == NONE or not role & (Role.MAKES | Role.SHAPES):
                break
            makes |= bool(role & Role.MAKES)
            rows.append(row)
        row = int(scene.before[row])
    return np.array(rows if makes else [], np.int64)


def _find_launches(scene: Scene, draft: Draft) -> None:
    """Everything that a captured graph would not do again: launches, and the host work between them."""
    spans = scene.timeline.spans
    host = (spans.kind == Kind.LAUNCH) | (spans.kind == Kind.WORK)
    captured = host & ~scene.is_heavy & ~scene.by_workers & (scene.loader_frame == NONE)
    rows = np.flatnonzero(captured & ~scene.within(Role.OBJECTS))  # no graph pickles
    draft.edit.work[rows] = 0
    draft.culprit[rows] = scene.last_launch[rows]
    # of a graph's launch there are many commands: those are captured already
    commands = np.flatnonzero(scene.launch != NONE)
    launches = scene.launch[commands]
    commands = commands[np.bincount(launches)[launches] == 1]
    draft.edit.capture[commands] = True
    draft.culprit[commands] = scene.launch[commands]


def _find_allocations(scene: Scene, draft: Draft) -> None:
    """cudaMalloc and cudaFree in the steady state: memory that the caching allocator should have kept."""
    rank = scene.timeline.rank_of_rows
    rows = np.flatnonzero(scene.timeline.spans.kind == Kind.ALLOCATE)
    draft.edit.drop[rows] = True
    draft.culprit[rows], draft.count = rows, len(rows)
    for one in scene.timeline.ranks:  # what the program itself gives back it has to ask for again
        mine, back = rows[rank[rows] == one], rows[(rank[rows] == one) & scene.is_given_back[rows]]
        if len(back):
            draft.culprit[mine] = back[np.maximum(np.searchsorted(back, mine, side="right") - 1, 0)]


def _find_work(scene: Scene, draft: Draft) -> None:
    """Python or CPU operators that keep the training thread from launching."""
    rows = np.flatnonzero(scene.is_heavy)
    draft.edit.drop[rows] = True
    draft.culprit[rows] = rows


def _find_exposed(scene: Scene, draft: Draft) -> None:
    """Gradients that travel after every micro-batch travel once; whatever else travels does so during the compute.

    What comes through the memory of hosts holds Python up, and would not from GPU to GPU.
    """
    spans = scene.timeline.spans
    travels = (spans.kind == Kind.COLLECTIVE) & (spans.size > STAGED_BYTES) & ~scene.is_paired & ~scene.is_message
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


def _sent_early(scene: Scene, travels: Mask) -> tuple[dict[int, Ints], Mask]:
    """Of each collective of gradients that more gradients are added to before the optimizer uses them: its launch, and
    what leaves if they travel with the last ones. And which collectives are of such gradients, the last ones included.
    """
    timeline, early = scene.timeline, dict[int, Ints]()
    of_gradients = np.zeros(len(timeline), bool)
    for passes in _accumulated(scene):
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
        while frame != NONE and frames.start[frame] >= begins and not frames.role[frame] & _WHOLE_PASS:
            frame, call = int(frames.parent[frame]), frame
        if call == NONE:
            return np.array([launch, row], np.int64)
        rows = np.arange(self.first, self.end)
        rows = rows[(spans.lane[rows] == frames.lane[call]) & (spans.frame[rows] != NONE)]
        of_row = spans.frame[rows]
        inside = rows[(frames.start[of_row] >= frames.start[call]) & (frames.end[of_row] <= frames.end[call])]
        commands = np.flatnonzero(np.isin(scene.launch, inside))
        return np.concatenate([inside, commands])


def _accumulated(scene: Scene) -> Iterator[list[BackwardPass]]:
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
    edit.lane[scene.is_message] = SideLane.WIRE
    return edit


def _find_late(scene: Scene, draft: Draft) -> None:
    """What a rank does beyond its peers in every step, on its host or on its device."""
    if len(scene.timeline.ranks) > 1:
        if stretches := host_stretches(scene.timeline):
            _cut_to_peers(scene, draft, stretches)
        _share_device_work(scene, draft)


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
    spent, stretch = _device_work(scene)
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


def _device_work(scene: Scene) -> tuple[Floats, Ints]:
    """For each rank, and each stretch between collectives (or step), what its device has to do, collectives aside.

    And of each row its index in that table, NONE where it does not count.
    """
    timeline = scene.timeline
    spans, ranks, rank = timeline.spans, timeline.ranks, timeline.rank_of_rows
    meets = spans.meeting != NONE
    border = meets if borders_per_step(timeline, meets) else np.isin(np.arange(len(timeline)), timeline.marks)
    width = max(int(np.count_nonzero(border & (rank == one))) for one in ranks) + 1
    stretch = np.full(len(timeline), NONE, np.int64)
    for index, one in enumerate(ranks):
        place = np.cumsum(border & (rank == one))
        mine = timeline.on_device & (spans.kind != Kind.COLLECTIVE) & (rank == one)
        stretch[mine] = index * width + place[mine]
    known = stretch != NONE
    spent = np.bincount(stretch[known], spans.work[known], len(ranks) * width).astype(np.float64)
    return spent.reshape(len(ranks), width), stretch


OF_ONE_HOST: dict[str, Callable[[Scene, Draft], None]] = {
    "host_sync": _find_reads,
    "blocking_copy": _find_blocking,
    "copy_not_overlapped": _find_in_line,
    "input_late": _find_input,
    "made_on_host": _find_made,
    "launch_bound": _find_launches,
    "allocator": _find_allocations,
    "host_work": _find_work,
}
FINDERS = OF_ONE_HOST | {"peer_late": _find_late, "exposed_collective": _find_exposed}
