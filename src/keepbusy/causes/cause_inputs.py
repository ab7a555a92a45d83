"""A run without its recorder, with what the causes ask of it looked up once."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from keepbusy.timeline.frame_roles import Owner, Role, called_alike
from keepbusy.timeline.model import (
    NONE,
    STAGED_BYTES,
    WORKERS,
    Direction,
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
HEAVY = 1_000_000
"""Host work that goes on this long without a launch is no launch overhead: a graph would not take it away."""
CALL_OF_ITS_OWN = 300_000
"""Nor is an operator or a function of the user's that launches nothing and takes this long, as none does for being
recorded alone."""
PRICE_OF_A_CALL = 100_000
"""What takes less is what any call costs: it makes nothing, and is no work between a read and a copy back."""


def by_workers(timeline: Timeline) -> Mask:
    """Batches that other processes prepare: no work of this program's own, and nothing was recorded of it."""
    return np.array([lane.name == WORKERS for lane in timeline.lanes], bool)[timeline.spans.lane]


class CauseInputs:
    """NONE stands where there is no such row."""

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
        # two more for NONE and EVERY_LANE
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
        the same iteration, as `envs.step(action.cpu())` does, or `kept = suppress(boxes)` of a function that reads; or
        NONE. The GPU is idle until that is done."""
        spans, frames = self.timeline.spans, self.timeline.frames
        result, exact = np.full(len(spans), NONE, np.int64), frames.kind == FrameKind.LINE
        after = next_kept(spans.lane, self.command != NONE)  # of each row the next one that launches something
        iteration = np.searchsorted(self.timeline.marks, np.arange(len(spans)), side="right")
        reads = self.is_sync & (spans.direction[self.copy_of_sync] == Direction.DEVICE_TO_HOST)
        back = (self.command != NONE) & (spans.direction[self.command] == Direction.HOST_TO_DEVICE)
        for read in np.flatnonzero(reads & back[after] & (iteration[after] == iteration)).tolist():
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
            of_lane = np.flatnonzero(frames.lane == lane)
            starts = spans.start[(spans.lane == lane) & (self.command != NONE)]
            begin, end = frames.start[of_lane], frames.end[of_lane]
            free[of_lane] = np.searchsorted(starts, begin) == np.searchsorted(starts, end)
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
        for at_depth in self.frames_by_depth:
            above = path[frames.parent[at_depth]]
            path[at_depth] = (above * 1_000_003 + names[frames.name[at_depth]] + 1) % ((1 << 61) - 1) % (1 << 40)
        return path[:-1]
