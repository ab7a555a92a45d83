"""input_late: the loader prepares its batch in the training process, or its workers are too few."""

from __future__ import annotations

import numpy as np

from keepbusy.explain.causes.finding import Draft, Finding
from keepbusy.explain.edit import Beside
from keepbusy.explain.scene import Scene
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import NONE, Ints, Kind, Mask

MORE = 4
"""Nobody knows how many workers a loader has; the advice is to take so many times as many."""
HANDOVER = 200_000
"""What taking a ready batch from a worker costs the training process."""


def find(scene: Scene) -> Finding:
    draft, spans = Draft("input_late", scene), scene.timeline.spans
    frame = loader_frame(scene)
    batches = np.flatnonzero(scene.by_workers)
    draft.edit.work[batches] = spans.work[batches] // MORE
    draft.blame(batches, _waits_for(scene, batches))
    rows = np.flatnonzero((frame != NONE) & (spans.kind == Kind.WORK) & ~_of_many(scene, frame))
    first = _first_of_frame(frame, rows)
    stays = rows == first
    draft.edit.beside[rows[~stays]] = Beside.WORKERS
    draft.edit.work[rows] = np.maximum(np.where(stays, HANDOVER, 0), spans.work[rows] // scene.workers)
    draft.blame(rows, first)
    return draft.done()


def loader_frame(scene: Scene) -> Ints:
    return scene.outermost(scene.frames_with(Role.LOADER))


def _of_many(scene: Scene, frame: Ints) -> Mask:
    """Rows in the `__next__` of a loader that has workers: what is left there is taking a batch that is ready."""
    return np.append(scene.frames_with(Role.LOADER_WORKERS), False)[frame]


def _waits_for(scene: Scene, batches: Ints) -> Ints:
    """Of each batch of the workers, the wait for it: the next one of the loop."""
    waits = np.flatnonzero(scene.is_loader_wait)
    return waits[np.minimum(np.searchsorted(waits, batches), len(waits) - 1)] if len(waits) else batches


def _first_of_frame(frame: Ints, rows: Ints) -> Ints:
    """Of each row, the first one in its frame."""
    _, first, which = np.unique(frame[rows], return_index=True, return_inverse=True)
    return rows[first][which] if len(rows) else rows
