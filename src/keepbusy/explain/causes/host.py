"""Work of the host itself: tensors made there, Python between the steps, the launches, the driver's memory calls."""

from __future__ import annotations

import numpy as np

from keepbusy.explain.causes.finding import Draft, Finding
from keepbusy.explain.causes.inputs import loader_frame
from keepbusy.explain.rules import rule
from keepbusy.explain.scene import STAGED_BYTES, Scene
from keepbusy.timeline.frame_roles import Owner, Role
from keepbusy.timeline.model import NONE, Direction, FrameKind, Ints, Kind, Mask

HEAVY = 1_000_000
"""Host work that goes on this long without a launch is no launch overhead: a graph would not take it away."""
CALL_OF_ITS_OWN = 300_000
"""Nor is an operator or a function of the user's that launches nothing and takes this long."""
ROUND_TRIP = 100_000
"""Less than this between a read and a copy back is the overhead of the two."""
MAKES = 100_000
"""An operator that takes this long makes something worth making elsewhere."""


def find_made(scene: Scene) -> Finding:
    """Drawn or filled on the host, at most transformed elementwise, and sent to the device at once."""
    draft, spans = Draft("made_on_host", scene), scene.timeline.spans
    copies = np.flatnonzero(scene.is_copy & (spans.direction == Direction.HOST_TO_DEVICE) & (spans.size > STAGED_BYTES))
    for copy in copies[scene.launch[copies] != NONE].tolist():
        made = _making(scene, int(scene.launch[copy]))
        if len(made):
            launch, sync = int(scene.launch[copy]), int(scene.sync_of_copy[copy])
            leaves = np.array([*made, launch, copy, *([sync] if sync != NONE else [])], np.int64)
            draft.edit.drop[leaves] = True
            draft.blame(leaves, launch)
    return draft.finding()


def _making(scene: Scene, launch: int) -> Ints:
    """The rows before this launch in which its tensor was made; none if anything but making went on there."""
    spans, lane = scene.timeline.spans, scene.timeline.spans.lane[launch]
    rows: list[int] = []
    row, makes = int(scene.before[launch]), False
    while row != NONE and spans.kind[row] in (Kind.WORK, Kind.ALLOCATE) and spans.lane[row] == lane:
        role = _role_of_operator(scene, row)
        if spans.work[row] >= MAKES and not role & (Role.MAKES | Role.SHAPES):
            break
        makes |= bool(role & Role.MAKES) and bool(spans.work[row] >= MAKES)
        rows.append(row)
        row = int(scene.before[row])
    heavy = [one for one in rows if spans.work[one] >= MAKES]
    return np.array(heavy if makes else [], np.int64)


def _role_of_operator(scene: Scene, row: int) -> int:
    """Of the innermost operator around a row."""
    frames, frame = scene.timeline.frames, int(scene.timeline.spans.frame[row])
    while frame != NONE and frames.kind[frame] != FrameKind.OPERATOR:
        frame = int(frames.parent[frame])
    return int(frames.role[frame]) if frame != NONE else 0


def find_work(scene: Scene) -> Finding:
    """Python or CPU operators that keep the training thread from launching."""
    draft = Draft("host_work", scene)
    rows = np.flatnonzero(heavy(scene))
    draft.edit.drop[rows] = True
    draft.blame(rows, rows)
    return draft.finding()


def heavy(scene: Scene) -> Mask:
    """Work in its own right: anything long, and what the user's own calls do for a while without a launch."""
    spans = scene.timeline.spans
    work = (spans.kind == Kind.WORK) & ~scene.by_workers & (loader_frame(scene) == NONE)
    result = np.zeros(len(spans), bool)
    long = work & (spans.work >= HEAVY)
    if long.any() and rule("long_work"):
        result |= long
    call = _outermost_call(scene)
    lasting = np.append(scene.timeline.frames.end - scene.timeline.frames.start, 0)[call] >= CALL_OF_ITS_OWN
    calls = work & (call != NONE) & lasting
    if calls.any() and rule("own_calls"):
        result |= calls
    trip = work & _round_trip(scene)
    if trip.any() and rule("round_trip"):
        result |= trip
    return result


def _round_trip(scene: Scene) -> Mask:
    """Work on what was read, before it goes back: between a read and the copy of something else to the device."""
    spans = scene.timeline.spans
    result = np.zeros(len(spans), bool)
    back = np.flatnonzero(scene.is_copy & (spans.direction == Direction.HOST_TO_DEVICE) & (scene.launch != NONE))
    for launch in scene.launch[back].tolist():
        before = int(scene.last_launch[scene.before[launch]]) if scene.before[launch] != NONE else NONE
        if before != NONE and spans.direction[scene.command[before]] == Direction.DEVICE_TO_HOST:
            rows = np.arange(before + 1, launch)
            rows = rows[(spans.lane[rows] == spans.lane[launch]) & (spans.kind[rows] == Kind.WORK)]
            result[rows] = spans.work[rows].sum() >= ROUND_TRIP
    return result


def _outermost_call(scene: Scene) -> Ints:
    """Of each row, the outermost call around it that launches nothing and is no part of PyTorch's own Python."""
    timeline = scene.timeline
    framework = scene.frames_with(Role.OPTIMIZER | Role.BACKWARD | Role.MODULE)
    framework |= timeline.frames.owner == Owner.TORCH
    quiet = scene.launch_free & ~framework & (timeline.frames.kind != FrameKind.ANNOTATION)
    inside = scene.within(framework & ~scene.launch_free)
    within_step = scene.within(scene.frames_with(Role.OPTIMIZER))
    found = scene.outermost(quiet)
    is_operator = np.append(timeline.frames.kind, FrameKind.ANNOTATION)[found] == FrameKind.OPERATOR
    return np.where(within_step | (inside & ~is_operator), NONE, found)


def find_launches(scene: Scene) -> Finding:
    """Everything that a captured graph would not do again: launches, and the host work between them."""
    draft, spans = Draft("launch_bound", scene), scene.timeline.spans
    host = (spans.kind == Kind.LAUNCH) | (spans.kind == Kind.WORK)
    captured = host & ~heavy(scene) & ~scene.by_workers & (loader_frame(scene) == NONE)
    rows = np.flatnonzero(captured & ~scene.within(scene.frames_with(Role.OBJECTS)))  # no graph pickles
    draft.edit.work[rows] = 0
    draft.blame(rows, scene.last_launch[rows])
    # of a graph's launch there are many commands: those are captured already
    commands = np.flatnonzero(scene.launch != NONE)
    launches = scene.launch[commands]
    commands = commands[np.bincount(launches)[launches] == 1]
    draft.edit.capture[commands] = True
    draft.blame(commands, scene.launch[commands])
    return draft.finding()


def find_allocations(scene: Scene) -> Finding:
    """cudaMalloc and cudaFree in the steady state: memory that the caching allocator should have kept."""
    draft = Draft("allocator", scene)
    rows = np.flatnonzero(scene.timeline.spans.kind == Kind.ALLOCATE)
    draft.edit.drop[rows] = True
    draft.blame(rows, rows)
    return draft.finding()
