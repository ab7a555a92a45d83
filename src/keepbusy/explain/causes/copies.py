"""Copies that hold up the host, or stand in line with the compute instead of running beside it."""

from __future__ import annotations

import numpy as np

from keepbusy.explain.causes.finding import Draft, Finding
from keepbusy.explain.edit import SideLane
from keepbusy.explain.rules import rule
from keepbusy.explain.scene import STAGED_BYTES, Scene
from keepbusy.timeline.model import NONE, Direction, Kind, Mask, Timeline

USUAL_BANDWIDTH = 24.0
"""Bytes a nanosecond, from pinned memory over a link that nobody has named: PCIe 4."""
SETUP = 2_000


def find_blocking(scene: Scene) -> Finding:
    draft, spans = Draft("blocking_copy", scene), scene.timeline.spans
    copies = np.flatnonzero(blocking(scene))
    inbound = spans.direction[copies] == Direction.HOST_TO_DEVICE
    draft.edit.lane[copies] = np.where(inbound, SideLane.FETCH, SideLane.RETURN)
    if len(copies):
        pinned = (spans.size[copies] / pinned_bandwidth(scene.timeline) + SETUP).astype(np.int64)
        draft.edit.work[copies] = np.minimum(spans.work[copies], pinned)
    draft.blame(copies, scene.sync_of_copy[copies])
    syncs = np.flatnonzero(np.isin(scene.copy_of_sync, copies))  # the call itself may wait, and a sync after it
    draft.edit.drop_wait[syncs] = True
    draft.edit.work[syncs] = 0
    draft.blame(syncs, scene.sync_of_copy[scene.copy_of_sync[syncs]])
    return draft.finding()


def blocking(scene: Scene) -> Mask:
    """Copies that the host waits for: all that come in, and large ones that go out. A small one is a read."""
    spans = scene.timeline.spans
    inbound = spans.direction == Direction.HOST_TO_DEVICE
    outbound = (spans.direction == Direction.DEVICE_TO_HOST) & (spans.size > STAGED_BYTES)
    return scene.is_copy & (scene.sync_of_copy != NONE) & (inbound | outbound)


def find_in_line(scene: Scene) -> Finding:
    """Asynchronous, and yet the compute waits for it: on its own stream, or on one that it waits for at once."""
    draft, spans = Draft("copy_not_overlapped", scene), scene.timeline.spans
    inbound = (spans.direction == Direction.HOST_TO_DEVICE) & (spans.size > STAGED_BYTES)
    copies = np.flatnonzero(scene.is_copy & inbound & (scene.sync_of_copy == NONE) & (scene.launch != NONE))
    draft.edit.lane[copies] = SideLane.FETCH
    draft.blame(copies, scene.launch[copies])
    return draft.finding()


def pinned_bandwidth(timeline: Timeline) -> float:
    """Bytes a nanosecond: what this run's own pinned copies reach, else what the device's link usually gives."""
    spans = timeline.spans
    known = (spans.kind == Kind.COPY) & (spans.pinned == 1) & (spans.size > 1 << 22) & (spans.work > 0)
    known &= (spans.direction == Direction.HOST_TO_DEVICE) | (spans.direction == Direction.DEVICE_TO_HOST)
    if known.any() and rule("own_bandwidth"):
        return float(np.median(spans.size[known] / spans.work[known]))
    return timeline.facts.pinned_bandwidth or USUAL_BANDWIDTH
