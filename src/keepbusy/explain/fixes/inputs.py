"""input_late: the loader prepares its batch in the training process, or its workers are too few."""

from __future__ import annotations

import numpy as np

from keepbusy.explain.edit import Beside
from keepbusy.explain.fixes.finding import Draft, Finding
from keepbusy.explain.scene import Scene
from keepbusy.timeline.model import NONE, Ints, Kind, Mask

LOADER = "enumerate(DataLoader)#"
HANDOVER = 200_000
"""What taking a ready batch from a worker costs the training process."""


def find(scene: Scene) -> Finding:
    draft, spans = Draft("input_late", scene), scene.timeline.spans
    frame = loader_frame(scene)
    rows = np.flatnonzero((frame != NONE) & (spans.kind == Kind.WORK))
    first = _first_of_frame(frame, rows)
    stays = rows == first
    draft.edit.beside[rows[~stays]] = Beside.WORKERS
    share = np.where(multiprocess(scene)[frame[rows]], 2, scene.workers)
    draft.edit.work[rows] = np.where(stays, HANDOVER, spans.work[rows] // share)
    draft.blame(rows, first)
    return draft.done()


def loader_frame(scene: Scene) -> Ints:
    names = np.array([name.startswith(LOADER) for name in scene.timeline.names], bool)
    return scene.outermost(scene.frames_named(names))


def multiprocess(scene: Scene) -> Mask:
    """Which frames are of a loader that has workers already: they are too few or too slow."""
    names = np.array(["_MultiProcessing" in name for name in scene.timeline.names], bool)
    return np.append(scene.frames_named(names), False)


def _first_of_frame(frame: Ints, rows: Ints) -> Ints:
    """Of each row, the first one in its frame."""
    _, first, which = np.unique(frame[rows], return_index=True, return_inverse=True)
    return rows[first][which] if len(rows) else rows
