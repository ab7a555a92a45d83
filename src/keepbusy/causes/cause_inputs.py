"""A run without its recorder, with what several causes need to know about it computed once."""

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
"""More than eight reads at one place, with at most six launches between two of them, are a loop over small values. With
more launches the program uses what it has read to go on."""
HEAVY = 1_000_000
"""Host work of this duration without a launch is no launch overhead: a graph would not remove it."""
CALL_OF_ITS_OWN = 300_000
"""Nor is an operator or a user's function of this duration that launches nothing. Recording alone takes less."""
PRICE_OF_A_CALL = 100_000
"""Any call may take this long: shorter work creates no tensor, and does not count between a read and a copy back."""


def by_workers(timeline: Timeline) -> Mask:
    """Which rows are batches that other processes prepare. Nothing was recorded of that work itself."""
    return np.array([lane.name == WORKERS for lane in timeline.lanes], bool)[timeline.spans.lane]


class CauseInputs:
    """Facts about the rows of a timeline. NONE means that there is no such row."""

    def __init__(self, timeline: Timeline, workers: int = USUAL_WORKERS) -> None:
        spans, links = timeline.spans, timeline.launches
        self.timeline, self.workers = timeline, workers
        self.steps = len(timeline.marks_of(timeline.ranks[0]))
        self.before, nowhere = previous_on_lane(spans.lane), np.full(len(timeline), NONE, np.int64)
        # the launch of each command, and the first command of each launch
        self.launch, self.command = nowhere.copy(), nowhere.copy()
        self.launch[links.target] = links.source
        self.command[links.source[::-1]] = links.target[::-1]
        self.last_launch = self._last_launch()
        # two more entries for NONE and EVERY_LANE
        of_workers = np.array([lane.name == WORKERS for lane in timeline.lanes] + [False, False], bool)
        self.by_workers, self.is_loader_wait = of_workers[spans.lane], of_workers[spans.awaits]
        launching = np.zeros(len(timeline.names), bool)
        launching[spans.name[spans.kind == Kind.LAUNCH]] = True
        self.is_queue_wait = (spans.kind == Kind.SYNC) & (spans.awaits == NONE) & launching[spans.name]
        # calls that wait for the device; a launch that found its queue full is none
        self.is_sync = (spans.kind == Kind.SYNC) & ~self.is_queue_wait & ~self.is_loader_wait
        self.is_copy = spans.kind == Kind.COPY
        # for each sync the copy that it makes blocking, and the reverse
        self.copy_of_sync, self.sync_of_copy = self._copy_of_sync(), nowhere
        syncs = np.flatnonzero(self.copy_of_sync != NONE)
        self.sync_of_copy[self.copy_of_sync[syncs][::-1]] = syncs[::-1]
        self.launch_free, self.frames_by_depth = self._launch_free(), self._frames_by_depth()
        self.path = self._path()
        self._within: dict[Role, Mask] = {}

    def _last_launch(self) -> Ints:
        """For each host row, the last launch at or before it on its lane that enqueued a command, or NONE."""
        spans = self.timeline.spans
        result = np.full(len(self.timeline), NONE, np.int64)
        for lane, info in enumerate(self.timeline.lanes):
            if info.device is None:
                rows = np.flatnonzero(spans.lane == lane)
                result[rows] = np.maximum.accumulate(np.where(self.command[rows] != NONE, rows, NONE))
        return result

    def _copy_of_sync(self) -> Ints:
        copy = self.command[np.maximum(self.last_launch, 0)]
        follows_copy = self.is_sync & (self.last_launch != NONE) & (copy != NONE) & self.is_copy[np.maximum(copy, 0)]
        return np.where(follows_copy, copy, NONE)

    def frames_with(self, role: Role) -> Mask:
        """Which frames have one of these roles."""
        return self.timeline.frames.role & role != 0

    def within(self, role: Role) -> Mask:
        """Which rows are within frames that have one of these roles, at any depth."""
        if role not in self._within:
            self._within[role] = self.outermost(self.frames_with(role)) != NONE
        return self._within[role]

    def outermost(self, frames: Mask) -> Ints:
        """For each row, the outermost of these frames that encloses it, or NONE."""
        parent, best = self.timeline.frames.parent, np.append(np.where(frames, np.arange(len(frames)), NONE), NONE)
        for inner in self.frames_by_depth[1:]:  # `best`: for each frame, the outermost of these that it is or is within
            above = best[parent[inner]]
            best[inner] = np.where(above != NONE, above, best[inner])
        return best[self.timeline.spans.frame]

    @cached_property
    def shown_at(self) -> Ints:
        """For each row, the row at which reports show it: itself, mostly. A wait of a backward pass for a mask is shown
        where the forward pass of that step used the mask: backward waits pair with forward rows in reverse order."""
        timeline, result = self.timeline, np.arange(len(self.timeline))
        waits = np.flatnonzero(self.is_sync & self.within(Role.CHOOSES))
        in_backward = self.within(Role.BACKWARD)[waits]
        for rank in timeline.ranks:
            of_rank = timeline.rank_of_rows[waits] == rank
            step = np.searchsorted(timeline.marks_of(rank), waits, side="right")
            for number in np.unique(step[of_rank & in_backward]).tolist():
                of_step = of_rank & (step == number)
                backward = waits[of_step & in_backward]
                forward = waits[of_step & ~in_backward & (waits < backward[0])]
                if len(forward):
                    share = np.arange(len(backward)) / len(backward)
                    result[backward] = forward[::-1][(share * len(forward)).astype(np.int64)]
        return result

    @cached_property
    def among_ranks(self) -> bool:
        """Whether there are several ranks, or one that sends to others that were not recorded."""
        sends = (self.timeline.spans.kind == Kind.COLLECTIVE).any() or self.frames_with(Role.THROUGH_HOST).any()
        return len(self.timeline.ranks) > 1 or bool(sends)

    @cached_property
    def loader_frame(self) -> Ints:
        """For each row, the outermost frame around it in which a loader prepares a batch or takes one, or NONE."""
        return self.outermost(self.frames_with(Role.LOADER))

    @cached_property
    def waits_for_large_copy(self) -> Mask:
        """Which syncs wait for a copy to the GPU, or for a large one from it."""
        spans, copy = self.timeline.spans, self.copy_of_sync
        inbound = spans.direction[copy] == Direction.HOST_TO_DEVICE
        return (copy != NONE) & (inbound | (spans.size[copy] > STAGED_BYTES))

    @cached_property
    def is_heavy(self) -> Mask:
        """Which rows are work in its own right: anything long, the user's own calls that launch nothing, and work
        between a read of a value and its copy back."""
        spans, frames = self.timeline.spans, self.timeline.frames
        work = (spans.kind == Kind.WORK) & ~self.by_workers & (self.loader_frame == NONE)
        call = self._outermost_call()
        # in sampled steps a call may begin in a step whose next one is missing, so its rows are summed
        duration = np.bincount(call + 1, spans.end - spans.start, len(frames) + 1)
        lasting = duration[call + 1] >= CALL_OF_ITS_OWN
        lasting &= (self.caller != Owner.TORCH) | (self._operator != NONE)  # clearing gradients, setting a mode
        long = (spans.work >= HEAVY) & ~self._belongs_to_launches()
        return work & (long | ((call != NONE) & lasting) | self._round_trip())

    @cached_property
    def _operator(self) -> Ints:
        """For each row, the outermost operator around it, or NONE."""
        return self.outermost(self.timeline.frames.kind == FrameKind.OPERATOR)

    def _belongs_to_launches(self) -> Mask:
        """PyTorch's own work between the launches of a backward pass or an optimizer: a graph removes it, however long
        it takes. Choosing a kernel and work on the host alone do not count."""
        frame, launches = self.timeline.spans.frame, ~self.launch_free & ~self.frames_with(Role.LAYER)
        framework = self.within(Role.BACKWARD | Role.OPTIMIZER) & (self.caller == Owner.TORCH)
        return framework & np.append(launches, False)[frame]

    def _outermost_call(self) -> Ints:
        """For each row, the outermost call around it that launches nothing and is not PyTorch's own Python."""
        frames = self.timeline.frames
        framework = self.frames_with(Role.OPTIMIZER | Role.BACKWARD | Role.MODULE) | (frames.owner == Owner.TORCH)
        quiet = self.launch_free & ~framework & (frames.kind != FrameKind.ANNOTATION)
        inside = self.outermost(framework & ~self.launch_free) != NONE
        calls = self.outermost(quiet)
        is_operator = np.append(frames.kind, FrameKind.ANNOTATION)[calls] == FrameKind.OPERATOR
        return np.where(self.within(Role.OPTIMIZER) | (inside & ~is_operator), NONE, calls)

    def _round_trip(self) -> Mask:
        """Work on a value that was read: between the read and the next copy to the device, unless a loader has given
        what is copied."""
        spans = self.timeline.spans
        result = np.zeros(len(spans), bool)
        back = np.flatnonzero(self.is_copy & (spans.direction == Direction.HOST_TO_DEVICE) & (self.launch != NONE))
        for launch in self.launch[back].tolist():
            before = int(self.last_launch[self.before[launch]]) if self.before[launch] != NONE else NONE
            if before != NONE and spans.direction[self.command[before]] == Direction.DEVICE_TO_HOST:
                rows = np.arange(before + 1, launch)
                rows = rows[spans.lane[rows] == spans.lane[launch]]
                if (self.loader_frame[rows] != NONE).any():
                    continue
                rows = rows[spans.kind[rows] == Kind.WORK]
                result[rows] = spans.work[rows].sum() >= PRICE_OF_A_CALL
        return result

    @cached_property
    def is_message(self) -> Mask:
        """Which commands go from one rank to one other: sent or received alone, or together with a micro-batch."""
        alone, of_a_piece = (np.append(self.within(role), False) for role in (Role.MESSAGE, Role.PIECE))
        one_to_one = alone[self.launch] | (of_a_piece[self.launch] & self.is_paired)
        return (self.timeline.spans.kind == Kind.COLLECTIVE) & one_to_one

    @cached_property
    def is_paired(self) -> Mask:
        """Which rows are NCCL's kernel that sends and receives. All-to-all uses it, too."""
        return self.timeline.spans.role & Role.PAIRED != 0

    @cached_property
    def frame_of_one_rank(self) -> Ints:
        """For each row, the outermost frame around it that no other rank enters along the same path, or NONE."""
        ranks = self.timeline.rank_of_lanes[self.timeline.frames.lane]
        _, which = np.unique(self.path, return_inverse=True)
        first, last = (np.full(which.max(initial=0) + 1, ranks.max(initial=0) * sign) for sign in (1, 0))
        np.minimum.at(first, which, ranks)
        np.maximum.at(last, which, ranks)
        return self.outermost(first[which] == last[which])

    @cached_property
    def needs_read(self) -> Ints:
        """For each row, the statement around it that first reads a value and then computes what goes back to the device
        in the same iteration, as `envs.step(action.cpu())` does, or a call of a function that reads; or NONE. The GPU
        is idle until that is done."""
        spans, frames = self.timeline.spans, self.timeline.frames
        result, exact = np.full(len(spans), NONE, np.int64), frames.kind == FrameKind.LINE
        after = next_kept(spans.lane, self.command != NONE)  # for each row, the next one that launches something
        iteration = np.searchsorted(self.timeline.marks, np.arange(len(spans)), side="right")
        reads = self.is_sync & (spans.direction[self.copy_of_sync] == Direction.DEVICE_TO_HOST)
        back = (self.command != NONE) & (spans.direction[self.command] == Direction.HOST_TO_DEVICE)
        for read in np.flatnonzero(reads & back[after] & (iteration[after] == iteration)).tolist():
            lines = [frame for frame in frames.around(int(spans.frame[read])) if exact[frame]]
            # the outermost statement that has ended when the copy begins, else the one that reads and copies
            ended = [frame for frame in lines if frames.end[frame] <= spans.start[after[read]]]
            for statement in [*ended[-1:], *lines[:1]][:1]:
                rows = np.arange(read + 1, after[read])
                inside = (spans.lane[rows] == spans.lane[read]) & (spans.start[rows] < frames.end[statement])
                result[rows[inside]] = statement
        return result

    @cached_property
    def hands_over_gradients(self) -> Mask:
        """Which rows run as gradients become ready. If only the whole pass was recorded, as with DDP: all that call no
        Python."""
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
        """For each row, the innermost Python frame around it, or NONE."""
        return self.innermost(np.isin(self.timeline.frames.kind, (FrameKind.LINE, FrameKind.PYTHON)))

    def innermost(self, frames: Mask) -> Ints:
        """For each row, the innermost of these frames around it, or NONE."""
        frame, parent = self.timeline.spans.frame.astype(np.int64), np.append(self.timeline.frames.parent, NONE)
        matches = np.append(frames, True)
        while not matches[frame].all():
            frame = np.where(matches[frame], frame, parent[frame])
        return frame

    @cached_property
    def library_role(self) -> Ints:
        """For each row, the role of the library's line around it, 0 if the program's own line is further in."""
        frames = self.timeline.frames
        line = self.innermost(frames.owner != Owner.UNKNOWN)
        return np.append(np.where(frames.owner == Owner.USER, 0, frames.role), 0)[line]

    @cached_property
    def caller(self) -> Ints:
        """For each row, whose line calls the operator: an `Owner`."""
        frames = self.timeline.frames
        line = self.innermost((frames.owner != Owner.UNKNOWN) & (frames.role & Role.WRAPS == 0))
        return np.append(frames.owner, Owner.UNKNOWN)[line]

    @cached_property
    def is_given_back(self) -> Mask:
        """Which calls free memory because the program asked for it, by `empty_cache`, and no operator did."""
        operators = self.timeline.frames.kind == FrameKind.OPERATOR
        requested = self.outermost(operators & ~self.frames_with(Role.GIVES_BACK)) != NONE
        return (self.timeline.spans.role & Role.GIVES_BACK != 0) & ~requested

    @cached_property
    def reads_in_a_row(self) -> list[Ints]:
        """The host's rows from the first to the last read of a loop that reads values one by one, with hardly a launch
        between them."""
        spans, frame = self.timeline.spans, self.outermost(self.frames_with(Role.READS))
        scalar = np.append(self.frames_with(Role.READS_SCALAR), False)[frame]
        reads = np.flatnonzero(self.is_sync & ~self.waits_for_large_copy & scalar)
        launched = np.concatenate([[0], np.cumsum(self.command != NONE)])
        # one read in each of many short steps is no loop within a step
        step = np.searchsorted(self.timeline.marks, reads, side="right")
        alike = np.stack([spans.lane[reads], step, self.path[frame[reads]]])
        order = np.lexsort((reads, *alike))
        reads, alike = reads[order], alike[:, order]
        goes_on = (np.diff(launched[reads]) <= LAUNCHES_BETWEEN) & (np.diff(alike) == 0).all(axis=0)
        chains = [chain for chain in np.split(reads, np.flatnonzero(~goes_on) + 1) if len(chain) > IN_A_ROW]
        sections = list[tuple[int, int, int]]()
        for lane, first, last in sorted((int(spans.lane[chain[0]]), int(chain[0]), int(chain[-1])) for chain in chains):
            # another value that the same loop reads
            if sections and sections[-1][0] == lane and first < sections[-1][2]:
                sections[-1] = lane, sections[-1][1], max(sections[-1][2], last)
            else:
                sections.append((lane, first, last))
        return [np.flatnonzero(spans.lane[first : last + 1] == lane) + first for lane, first, last in sections]

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
        """The frames that are in no other, those directly within them, and so on."""
        ancestor = np.append(self.timeline.frames.parent, NONE).astype(np.int64)
        depth = (ancestor != NONE).astype(np.int64)
        while (ancestor != NONE).any():  # twice as far up each time
            depth += depth[ancestor]
            ancestor = ancestor[ancestor]
        depth = depth[:-1]
        return np.split(np.argsort(depth, kind="stable"), np.cumsum(np.bincount(depth)))[:-1] if len(depth) else []

    def _path(self) -> Ints:
        """For each frame, a number that frames entered along the same path of calls share."""
        frames = self.timeline.frames
        names = called_alike(self.timeline.names)
        path = np.zeros(len(frames) + 1, np.int64)  # the last entry is for frames that are in no other
        for at_depth in self.frames_by_depth:
            above = path[frames.parent[at_depth]]
            path[at_depth] = (above * 1_000_003 + names[frames.name[at_depth]] + 1) % ((1 << 61) - 1) % (1 << 40)
        return path[:-1]
