"""input_late: the loader prepares its batch in the training process, or its workers are too few."""

from __future__ import annotations

import numpy as np

from keepbusy.explain.causes.finding import Draft, Finding
from keepbusy.explain.edit import SideLane
from keepbusy.explain.rules import rule
from keepbusy.explain.scene import Scene
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import NONE, Ints, Kind

TIMES_AS_MANY = 4
"""Nobody knows how many workers a loader has; the prediction is for so many times as many."""
HANDOVER = 200_000
"""What taking a ready batch from a worker costs the training process."""


def find(scene: Scene) -> Finding:
    draft, spans = Draft("input_late", scene), scene.timeline.spans
    batches = np.flatnonzero(scene.by_workers)
    draft.edit.work[batches] = spans.work[batches] // TIMES_AS_MANY
    waits = np.flatnonzero(scene.is_loader_wait)  # a batch of the workers is waited for by the loop's next wait
    draft.blame(batches, waits[np.minimum(np.searchsorted(waits, batches), len(waits) - 1)] if len(waits) else batches)
    frame = loader_frame(scene)
    rows = np.flatnonzero((frame != NONE) & (spans.kind == Kind.WORK))
    # a loader that has workers only takes what they prepared
    takes = np.append(scene.frames_with(Role.LOADER_WORKERS), False)[frame[rows]]
    if takes.any() and rule("take_from_workers"):
        rows = rows[~takes]
    _, first, which = np.unique(frame[rows], return_index=True, return_inverse=True)
    first_of_frame = rows[first][which] if len(rows) else rows
    stays = rows == first_of_frame
    draft.edit.lane[rows[~stays]] = SideLane.WORKERS
    handover = HANDOVER if len(rows) and rule("handover") else 0
    draft.edit.work[rows] = np.maximum(np.where(stays, handover, 0), spans.work[rows] // scene.workers)
    draft.blame(rows, first_of_frame)
    return draft.finding()


def loader_frame(scene: Scene) -> Ints:
    return scene.outermost(scene.frames_with(Role.LOADER))
