"""Several ranks: who comes late to the collectives, and collectives that could have travelled during the compute."""

from __future__ import annotations

import numpy as np

from keepbusy.explain.causes.finding import Draft, Finding
from keepbusy.explain.edit import Beside, Edit
from keepbusy.explain.scene import LARGE, Scene
from keepbusy.explain.stretches import Stretches, device_work, has_more, stretches
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import NONE, Ints, Kind

MOST = 0.5
"""What a rank does on a way of its own explains its lateness, if it takes at least so much of it."""


def find_exposed(scene: Scene) -> Finding:
    draft, spans = Draft("exposed_collective", scene), scene.timeline.spans
    paired = np.array(["SendRecv" in name for name in scene.timeline.names], bool)[spans.name]
    rows = np.flatnonzero((spans.kind == Kind.COLLECTIVE) & (spans.size > LARGE) & ~paired)
    draft.edit.beside[rows] = Beside.WIRE
    draft.blame(rows, np.where(scene.launch[rows] == NONE, rows, scene.launch[rows]))
    return draft.done()


def without_messages(scene: Scene) -> Edit:
    """No fix, but a measure: what stages of a pipeline would spend if no message had to be waited for."""
    within = np.append(scene.within(scene.frames_with(Role.MESSAGE)), False)
    edit = Edit.nothing(scene.timeline)
    edit.beside[(scene.timeline.spans.kind == Kind.COLLECTIVE) & within[scene.launch]] = Beside.WIRE
    return edit


def find_late(scene: Scene) -> Finding:
    """Between two collectives, what a rank does beyond its peers in every step, on its host or on its device."""
    draft = Draft("peer_late", scene)
    found = stretches(scene.timeline)
    if found is not None:
        _trim(scene, draft, found)
    if len(scene.timeline.ranks) > 1:
        _balance(scene, draft)
        _blame_what_is_apart(scene, draft)
    return draft.done()


def _blame_what_is_apart(scene: Scene, draft: Draft) -> None:
    """Where a late rank goes a way of its own, and that takes as long as it is late, that way is to blame for all."""
    work, owner, rank = scene.timeline.spans.work, draft.owner, scene.timeline.rank_of_rows
    blamed = np.flatnonzero(owner != NONE)
    for one in np.unique(rank[owner[blamed]]).tolist():
        mine = blamed[rank[owner[blamed]] == one]
        apart = scene.apart[owner[mine]] != NONE
        spent = np.where(rank[mine] == one, work[mine], 0)
        if spent[apart].sum() >= MOST * draft.edit.saves(np.where(rank == one, work, 0))[mine].sum() > 0:
            owner[mine[~apart]] = owner[mine[apart][np.argmax(spent[apart])]]


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
    draft.blame(rows[~is_late], int(owner[is_late][0]))  # they change along with the late one's


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
