"""host_sync: the host stops to learn a value, or for no reason at all. Read it later, or never."""

from __future__ import annotations

import numpy as np

from keepbusy.explain.causes.finding import Draft, Finding
from keepbusy.explain.scene import LARGE, Scene
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import NONE, Direction, Ints, Mask

LOOP, BRIEF = 8, 6
"""So many reads in a row of one place, with no more launches from one to the next, are a loop over small values."""
LONG = 300_000
CALL = 3_000
"""What a synchronising call costs when nobody has to be waited for."""


def find(scene: Scene) -> Finding:
    draft = Draft("host_sync", scene)
    syncs = np.flatnonzero(scene.is_sync & ~of_large_copy(scene))
    draft.edit.free[syncs] = True
    draft.edit.work[syncs] = CALL
    draft.blame(syncs, syncs)
    frame = reading_frame(scene)
    inside = np.flatnonzero((frame != NONE) & ~scene.timeline.on_device)
    owner = _sync_of_frame(frame, syncs)[frame[inside]]
    inside, owner = inside[owner != NONE], owner[owner != NONE]
    draft.edit.work[inside] = 0  # the operator that reads leaves with its sync
    draft.blame(inside, owner)
    _batch(scene, draft, frame, syncs)
    return draft.done(seen=len(syncs))


def _batch(scene: Scene, draft: Draft, frame: Ints, syncs: Ints) -> None:
    """Values read one by one in a loop: who reads them together computes them together, as one operation did before."""
    spans = scene.timeline.spans
    reads = syncs[frame[syncs] != NONE]
    reads = reads[scene.frames_with(Role.READS_SCALAR)[frame[reads]]]
    path, lane = scene.path[frame[reads]], spans.lane[reads]
    launched = np.concatenate([[0], np.cumsum(scene.command != NONE)])
    between = launched[reads[1:]] - launched[reads[:-1]]
    alike = (path[1:] == path[:-1]) & (lane[1:] == lane[:-1]) & (between <= BRIEF)
    for first, last in _runs(alike):
        if last - first >= LOOP:
            rows = np.arange(reads[first] + 1, reads[last])
            rows = rows[(spans.lane[rows] == lane[first]) & (spans.work[rows] < LONG)]
            draft.edit.work[rows] = 0
            draft.blame(rows, reads[first])


def _runs(alike: Mask) -> list[tuple[int, int]]:
    """Stretches of True, as the first and the last index of what they join."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], alike.astype(np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def of_large_copy(scene: Scene) -> Mask:
    """Which syncs wait for a batch on its way in, or for much data on its way out."""
    spans, copy = scene.timeline.spans, scene.copy_of_sync
    known = copy != NONE
    inbound = spans.direction[copy] == Direction.HOST_TO_DEVICE
    return known & (inbound | (spans.size[copy] > LARGE))


def reading_frame(scene: Scene) -> Ints:
    """Of each row, the outermost reading operator around it, or NONE."""
    return scene.outermost(scene.frames_with(Role.READS))


def _sync_of_frame(frame: Ints, syncs: Ints) -> Ints:
    """Of each frame, the first sync within it, or NONE. One more entry, so that NONE itself finds NONE."""
    result = np.full(int(frame.max(initial=0)) + 2, NONE, np.int64)
    mine = syncs[frame[syncs] != NONE]
    result[frame[mine][::-1]] = mine[::-1]
    return result
