"""Several ranks: who comes late to the collectives, and collectives that could have travelled during the compute."""

from __future__ import annotations

import numpy as np

from keepbusy.explain.edit import Beside
from keepbusy.explain.fixes.finding import Draft, Finding
from keepbusy.explain.scene import LARGE, Scene
from keepbusy.explain.stretches import Stretches, device_work, has_more, stretches
from keepbusy.timeline.model import NONE, Ints, Kind


def find_exposed(scene: Scene) -> Finding:
    draft, spans = Draft("exposed_collective", scene), scene.timeline.spans
    paired = np.array(["SendRecv" in name for name in scene.timeline.names], bool)[spans.name]
    rows = np.flatnonzero((spans.kind == Kind.COLLECTIVE) & (spans.size > LARGE) & ~paired)
    draft.edit.beside[rows] = Beside.WIRE
    draft.blame(rows, np.where(scene.launch[rows] == NONE, rows, scene.launch[rows]))
    return draft.done()


def find_late(scene: Scene) -> Finding:
    """Between two collectives, what a rank does beyond its peers in every step, on its host or on its device."""
    draft = Draft("peer_late", scene)
    found = stretches(scene.timeline)
    if found is not None:
        _trim(scene, draft, found)
    if len(scene.timeline.ranks) > 1:
        _balance(scene, draft)
    return draft.done()


def _balance(scene: Scene, draft: Draft) -> None:
    """Device work that is unequal is shared out, stretch by stretch: nobody has less to do altogether."""
    spent, cell = device_work(scene.timeline)
    mean = spent.sum(axis=1) / scene.steps
    late = has_more(mean, np.array([np.median(np.delete(mean, rank)) for rank in range(len(mean))]))
    if not late.any():
        return
    rows = np.flatnonzero(cell != NONE)
    fair = spent.mean(axis=0, keepdims=True) / np.maximum(spent, 1.0)
    draft.edit.scale[rows] = fair.ravel()[cell[rows]]
    is_late = late[cell[rows] // spent.shape[1]]
    owner = np.where(scene.launch[rows] == NONE, rows, scene.launch[rows])
    draft.blame(rows[is_late], owner[is_late])
    draft.share(rows[~is_late], int(owner[is_late][0]))


def _trim(scene: Scene, draft: Draft, found: Stretches) -> None:
    work, steps = scene.timeline.spans.work, found.spent.shape[2]
    excess = found.usual - found.peers()
    for rank, place in np.argwhere(found.late()).tolist():
        for step in range(steps):
            here = (rank * found.spent.shape[1] + place) * steps + step
            _shorten(draft, work, np.flatnonzero(found.cell == here), excess[rank, place])
            _release(draft, found, here, place, step)


def _release(draft: Draft, found: Stretches, here: int, place: int, step: int) -> None:
    """Syncs that only the late rank makes go with what it does there."""
    syncs = np.flatnonzero(found.syncs == here)
    ranks, places, steps = found.spent.shape
    peers = [(found.syncs == (rank * places + place) * steps + step).sum() for rank in range(ranks)]
    if len(syncs) > np.median(peers):
        draft.edit.free[syncs] = True
        draft.edit.work[syncs] = 0
        draft.blame(syncs, syncs)


def _shorten(draft: Draft, work: Ints, rows: Ints, excess: float) -> None:
    """Take the excess from the longest rows first: one long row is what a person would call late."""
    rows = rows[np.argsort(-work[rows], kind="stable")]
    taken = np.minimum(work[rows], np.maximum(excess - (np.cumsum(work[rows]) - work[rows]), 0)).astype(np.int64)
    cut = taken > 0
    draft.edit.work[rows[cut]] = (work[rows] - taken)[cut]
    draft.blame(rows[cut], rows[cut])
