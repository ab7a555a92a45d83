"""What a rank's host waits for and does: reads and copies that stop it, input, tensors made there, other work, launches
and calls for memory. A value is read later, or never; copies go beside the compute, also those that stand in line.
"""

from __future__ import annotations

import numpy as np

from keepbusy.explain.edit import Draft, Finding, SideLane
from keepbusy.explain.scene import STAGED_BYTES, Scene
from keepbusy.timeline.frame_roles import Owner, Role
from keepbusy.timeline.model import NONE, Direction, FrameKind, Ints, Kind, Mask

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


def find_reads(scene: Scene) -> Finding:
    syncs = np.flatnonzero(scene.is_sync & ~of_large_copy(scene))
    frame = scene.outermost(scene.frames_with(Role.READS))
    draft = Draft("host_sync", scene.timeline)
    draft.edit.drop_wait[syncs] = True
    draft.edit.work[syncs] = 0
    draft.culprit[syncs] = syncs
    inside = np.flatnonzero((frame != NONE) & ~scene.timeline.on_device)
    culprit = _sync_of_frame(frame, syncs)[frame[inside]]
    inside, culprit = inside[culprit != NONE], culprit[culprit != NONE]
    draft.edit.work[inside] = 0
    draft.culprit[inside] = culprit
    _send_no_objects(scene, draft, syncs)
    _read_together(scene, draft, frame, syncs)
    return draft.finding(count=len(syncs))


def _send_no_objects(scene: Scene, draft: Draft, syncs: Ints) -> None:
    """Objects travel as their length and their bytes, each copied, sent and read: all of it leaves with the call."""
    call = scene.outermost(scene.frames_with(Role.OBJECTS))
    inside = np.flatnonzero(call != NONE)
    first = _sync_of_frame(call, syncs)[call[inside]]
    inside, first = inside[first != NONE], first[first != NONE]
    draft.edit.drop[inside] = True
    draft.culprit[inside] = first
    commands = np.flatnonzero((scene.launch != NONE) & draft.edit.drop[scene.launch])
    draft.edit.drop[commands] = True
    draft.culprit[commands] = draft.culprit[scene.launch[commands]]


def _read_together(scene: Scene, draft: Draft, frame: Ints, syncs: Ints) -> None:
    """Values read one by one in a loop: who reads them together computes them together, as one operation did before."""
    spans = scene.timeline.spans
    reads = syncs[frame[syncs] != NONE]
    reads = reads[scene.frames_with(Role.READS_SCALAR)[frame[reads]]]
    path, lane = scene.path[frame[reads]], spans.lane[reads]
    launched = np.concatenate([[0], np.cumsum(scene.command != NONE)])
    between = launched[reads[1:]] - launched[reads[:-1]]
    alike = (path[1:] == path[:-1]) & (lane[1:] == lane[:-1]) & (between <= LAUNCHES_BETWEEN)
    step = np.searchsorted(scene.timeline.marks, reads, side="right")
    alike &= step[1:] == step[:-1]  # a read in each of many short steps is none of a loop within a step
    edges = np.flatnonzero(np.diff(np.concatenate([[0], alike.astype(np.int8), [0]])))
    for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        if last - first >= IN_A_ROW:
            rows = np.arange(reads[first] + 1, reads[last])
            rows = rows[spans.lane[rows] == lane[first]]
            draft.edit.work[rows] = 0
            draft.culprit[rows] = reads[first]


def of_large_copy(scene: Scene) -> Mask:
    """Which syncs wait for a batch on its way in, or for much data on its way out."""
    spans, copy = scene.timeline.spans, scene.copy_of_sync
    known = copy != NONE
    inbound = spans.direction[copy] == Direction.HOST_TO_DEVICE
    return known & (inbound | (spans.size[copy] > STAGED_BYTES))


def _sync_of_frame(frame: Ints, syncs: Ints) -> Ints:
    """Of each frame, the first sync within it, or NONE. One more entry, so that NONE itself finds NONE."""
    result = np.full(int(frame.max(initial=0)) + 2, NONE, np.int64)
    within = syncs[frame[syncs] != NONE]
    result[frame[within][::-1]] = within[::-1]
    return result


def find_blocking(scene: Scene) -> Finding:
    draft, spans = Draft("blocking_copy", scene.timeline), scene.timeline.spans
    copies = np.flatnonzero(blocking(scene))
    inbound = spans.direction[copies] == Direction.HOST_TO_DEVICE
    draft.edit.lane[copies] = np.where(inbound, SideLane.FETCH, SideLane.RETURN)
    if len(copies):
        bandwidth = scene.timeline.facts.pinned_bandwidth or USUAL_BANDWIDTH
        pinned = (spans.size[copies] / bandwidth + SETUP).astype(np.int64)
        draft.edit.work[copies] = np.minimum(spans.work[copies], pinned)
    draft.culprit[copies] = scene.sync_of_copy[copies]
    syncs = np.flatnonzero(np.isin(scene.copy_of_sync, copies))  # the call itself may wait, and a sync after it
    draft.edit.drop_wait[syncs] = True
    draft.edit.work[syncs] = 0
    draft.culprit[syncs] = scene.sync_of_copy[scene.copy_of_sync[syncs]]
    return draft.finding()


def blocking(scene: Scene) -> Mask:
    """Copies that the host waits for: all that come in, and large ones that go out. A small one is a read."""
    spans = scene.timeline.spans
    inbound = spans.direction == Direction.HOST_TO_DEVICE
    outbound = (spans.direction == Direction.DEVICE_TO_HOST) & (spans.size > STAGED_BYTES)
    return scene.is_copy & (scene.sync_of_copy != NONE) & (inbound | outbound)


def find_in_line(scene: Scene) -> Finding:
    """Asynchronous, and yet the compute waits for it: on its own stream, or on one that it waits for at once."""
    draft, spans = Draft("copy_not_overlapped", scene.timeline), scene.timeline.spans
    inbound, outbound = (spans.direction == way for way in (Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST))
    alone = scene.is_copy & (scene.sync_of_copy == NONE) & (scene.launch != NONE) & (spans.size > STAGED_BYTES)
    copies = np.flatnonzero(alone & (inbound | outbound))
    draft.edit.lane[copies] = np.where(inbound[copies], SideLane.FETCH, SideLane.RETURN)
    draft.culprit[copies] = scene.launch[copies]
    return draft.finding()


def find_input(scene: Scene) -> Finding:
    """The loader prepares its batch in the training process, or its workers are too few."""
    draft, spans = Draft("input_late", scene.timeline), scene.timeline.spans
    batches = np.flatnonzero(scene.by_workers)
    draft.edit.work[batches] = spans.work[batches] // TIMES_AS_MANY
    waits = np.flatnonzero(scene.is_loader_wait)  # a batch of the workers is waited for by the loop's next wait
    draft.culprit[batches] = (
        waits[np.minimum(np.searchsorted(waits, batches), len(waits) - 1)] if len(waits) else batches
    )
    frame = loader_frame(scene)
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
    return draft.finding()


def loader_frame(scene: Scene) -> Ints:
    return scene.outermost(scene.frames_with(Role.LOADER))


def find_made(scene: Scene) -> Finding:
    """Drawn or filled on the host, at most transformed elementwise, and sent to the device at once."""
    draft, spans = Draft("made_on_host", scene.timeline), scene.timeline.spans
    copies = np.flatnonzero(scene.is_copy & (spans.direction == Direction.HOST_TO_DEVICE) & (spans.size > STAGED_BYTES))
    for copy in copies[scene.launch[copies] != NONE].tolist():
        made = _making(scene, int(scene.launch[copy]))
        if len(made):
            launch, sync = int(scene.launch[copy]), int(scene.sync_of_copy[copy])
            leaves = np.array([*made, launch, copy, *([sync] if sync != NONE else [])], np.int64)
            draft.edit.drop[leaves] = True
            draft.culprit[leaves] = launch
    return draft.finding()


def _making(scene: Scene, launch: int) -> Ints:
    """The rows before this launch in which its tensor was made; none if anything but making went on there."""
    spans, frames, lane = scene.timeline.spans, scene.timeline.frames, scene.timeline.spans.lane[launch]
    rows: list[int] = []
    row, makes = int(scene.before[launch]), False
    while row != NONE and spans.kind[row] in (Kind.WORK, Kind.ALLOCATE) and spans.lane[row] == lane:
        around = frames.around(int(spans.frame[row]))
        role = next((int(frames.role[one]) for one in around if frames.kind[one] == FrameKind.OPERATOR), 0)
        if spans.work[row] >= PRICE_OF_A_CALL and not role & (Role.MAKES | Role.SHAPES):
            break
        makes |= bool(role & Role.MAKES) and bool(spans.work[row] >= PRICE_OF_A_CALL)
        rows.append(row)
        row = int(scene.before[row])
    heavy = [one for one in rows if spans.work[one] >= PRICE_OF_A_CALL]
    return np.array(heavy if makes else [], np.int64)


def find_work(scene: Scene) -> Finding:
    """Python or CPU operators that keep the training thread from launching."""
    draft = Draft("host_work", scene.timeline)
    rows = np.flatnonzero(heavy(scene))
    draft.edit.drop[rows] = True
    draft.culprit[rows] = rows
    return draft.finding()


def heavy(scene: Scene) -> Mask:
    """Work in its own right: anything long, the user's own calls that launch nothing, and what is done to a value that
    was read before it goes back."""
    spans = scene.timeline.spans
    work = (spans.kind == Kind.WORK) & ~scene.by_workers & (loader_frame(scene) == NONE)
    call = _outermost_call(scene)
    lasting = np.append(scene.timeline.frames.end - scene.timeline.frames.start, 0)[call] >= CALL_OF_ITS_OWN
    return work & ((spans.work >= HEAVY) | ((call != NONE) & lasting) | _round_trip(scene))


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
            result[rows] = spans.work[rows].sum() >= PRICE_OF_A_CALL
    return result


def _outermost_call(scene: Scene) -> Ints:
    """Of each row, the outermost call around it that launches nothing and is no part of PyTorch's own Python."""
    timeline = scene.timeline
    framework = scene.frames_with(Role.OPTIMIZER | Role.BACKWARD | Role.MODULE)
    framework |= timeline.frames.owner == Owner.TORCH
    quiet = scene.launch_free & ~framework & (timeline.frames.kind != FrameKind.ANNOTATION)
    inside = scene.outermost(framework & ~scene.launch_free) != NONE
    within_step = scene.within(Role.OPTIMIZER)
    found = scene.outermost(quiet)
    is_operator = np.append(timeline.frames.kind, FrameKind.ANNOTATION)[found] == FrameKind.OPERATOR
    return np.where(within_step | (inside & ~is_operator), NONE, found)


def find_launches(scene: Scene) -> Finding:
    """Everything that a captured graph would not do again: launches, and the host work between them."""
    draft, spans = Draft("launch_bound", scene.timeline), scene.timeline.spans
    host = (spans.kind == Kind.LAUNCH) | (spans.kind == Kind.WORK)
    captured = host & ~heavy(scene) & ~scene.by_workers & (loader_frame(scene) == NONE)
    rows = np.flatnonzero(captured & ~scene.within(Role.OBJECTS))  # no graph pickles
    draft.edit.work[rows] = 0
    draft.culprit[rows] = scene.last_launch[rows]
    # of a graph's launch there are many commands: those are captured already
    commands = np.flatnonzero(scene.launch != NONE)
    launches = scene.launch[commands]
    commands = commands[np.bincount(launches)[launches] == 1]
    draft.edit.capture[commands] = True
    draft.culprit[commands] = scene.launch[commands]
    return draft.finding()


def find_allocations(scene: Scene) -> Finding:
    """cudaMalloc and cudaFree in the steady state: memory that the caching allocator should have kept."""
    draft = Draft("allocator", scene.timeline)
    rows = np.flatnonzero(scene.timeline.spans.kind == Kind.ALLOCATE)
    draft.edit.drop[rows] = True
    draft.culprit[rows] = rows
    return draft.finding()
