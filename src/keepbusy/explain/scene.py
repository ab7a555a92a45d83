"""What the finders of causes look at: the timeline of whole steps, and who belongs to whom in it."""

from __future__ import annotations

import re
from functools import cached_property

import numpy as np

from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import (
    NONE,
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

STAGED_BYTES = 65_536
"""Copies up to this size are staged by the driver and cost about a launch (64 KB, as CUDA documents)."""


_ADDRESS = re.compile(r" object at 0x[0-9a-f]+|_\d+$")
"""What differs in a frame's name from call to call: the address of an object, the number of a module."""


class Scene:
    """The plain run, with what the finders ask of it looked up once. NONE stands where there is no such row."""

    def __init__(self, timeline: Timeline, workers: int = 8) -> None:
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
        return self.outermost(self.frames_with(role)) != NONE

    def outermost(self, frames: Mask) -> Ints:
        """Of each row, the outermost of these frames that encloses it, or NONE."""
        parent, best = self.timeline.frames.parent, np.append(np.where(frames, np.arange(len(frames)), NONE), NONE)
        for inner in self.frames_by_depth[1:]:  # of each frame, the outermost of these that it is or stands in
            above = best[parent[inner]]
            best[inner] = np.where(above != NONE, above, best[inner])
        return best[self.timeline.spans.frame]

    @cached_property
    def among_ranks(self) -> bool:
        """Whether ranks meet here, or send to others that were not recorded."""
        sends = (self.timeline.spans.kind == Kind.COLLECTIVE).any() or self.frames_with(Role.THROUGH_HOST).any()
        return len(self.timeline.ranks) > 1 or bool(sends)

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
        the same turn, as `envs.step(action.cpu())` does; or NONE. The GPU has nothing to do until that is done."""
        spans, frames, marks = self.timeline.spans, self.timeline.frames, self.timeline.marks
        line = self.innermost_line
        exact = np.append(frames.kind == FrameKind.LINE, False)[line]
        reads = np.flatnonzero(self.is_sync & exact & (spans.direction[self.copy_of_sync] == Direction.DEVICE_TO_HOST))
        first = np.full(len(frames) + 1, len(spans), np.int64)
        np.minimum.at(first, line[reads], reads)
        around = self.outermost(first[:-1] < len(spans))
        back = (self.command != NONE) & (spans.direction[self.command] == Direction.HOST_TO_DEVICE)
        after = next_kept(spans.lane, self.command != NONE)
        same_turn = np.searchsorted(marks, after, side="right") == np.searchsorted(
            marks, np.arange(len(spans)), "right"
        )
        return np.where((first[around] < np.arange(len(spans))) & back[after] & same_turn, around, NONE)

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
        frames, frame = self.timeline.frames, self.timeline.spans.frame.astype(np.int64)
        python = np.append((frames.kind == FrameKind.LINE) | (frames.kind == FrameKind.PYTHON), True)
        parent = np.append(frames.parent, NONE)
        while not python[frame].all():
            frame = np.where(python[frame], frame, parent[frame])
        return frame

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
        canonical: dict[str, int] = {}
        names = np.array(
            [canonical.setdefault(_ADDRESS.sub("", name), len(canonical)) for name in self.timeline.names], np.int64
        )
        path = np.zeros(len(frames) + 1, np.int64)  # the last place is for frames that stand in none
        for mine in self.frames_by_depth:
            above = path[frames.parent[mine]]
            path[mine] = (above * 1_000_003 + names[frames.name[mine]] + 1) % ((1 << 61) - 1) % (1 << 40)
        return path[:-1]
