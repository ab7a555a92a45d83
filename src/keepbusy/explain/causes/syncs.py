"""Syncs: the host stops to learn a value, to send or fetch a batch, or for no reason at all. Read it later, or never;
copy beside the compute, as those copies should that stand in line without a sync.
"""

from __future__ import annotations

import numpy as np

from keepbusy.explain.edit import Draft, Finding, SideLane
from keepbusy.explain.scene import STAGED_BYTES, Scene
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import NONE, Direction, Ints, Mask

IN_A_ROW, LAUNCHES_BETWEEN = 8, 6
"""So many reads of one place, with no more launches between them, are a loop over small values. With more between them
the program goes on with its work by what it has read."""
USUAL_BANDWIDTH = 24.0
"""Bytes a nanosecond, from pinned memory over a link that nobody has named: PCIe 4."""
SETUP = 2_000


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
