"""Which ranks come late, by how much, and what they do meanwhile."""

from __future__ import annotations

import numpy as np

from keepbusy.explain.diagnosis import Late
from keepbusy.explain.fixes.finding import Finding
from keepbusy.explain.scene import Scene
from keepbusy.explain.sites import gathered
from keepbusy.timeline.model import Ints

WORTH_NAMING = 0.2
"""Ranks that are late by less than this share of the latest one are not worth a line."""


def late_ranks(scene: Scene, finding: Finding | None) -> tuple[Late, ...]:
    if finding is None:
        return ()
    excess, rank = _excess(scene, finding), scene.timeline.rank_of_rows
    found = [_late(scene, one, np.where(rank == one, excess, 0)) for one in np.unique(rank[finding.rows]).tolist()]
    latest = max(one.late for one in found)
    return tuple(sorted((one for one in found if one.late >= WORTH_NAMING * latest), key=lambda one: -one.late))


def _excess(scene: Scene, finding: Finding) -> Ints:
    """What each row would lose, were its rank like the others."""
    work, edit = scene.timeline.spans.work, finding.edit
    left = np.minimum(work, edit.work) * edit.scale
    return np.where(finding.owner >= 0, np.maximum(work - left, 0), 0).astype(np.int64)


def _late(scene: Scene, rank: int, excess: Ints) -> Late:
    """The place that loses most."""
    rows = np.flatnonzero(excess)
    on_device = scene.timeline.on_device[rows]
    computing = excess[rows[on_device]].sum() > excess[rows[~on_device]].sum()
    rows = rows[on_device == computing]
    hosts = np.where(scene.launch[rows] >= 0, scene.launch[rows], rows)
    of_host = np.bincount(hosts, excess[rows], len(excess))
    places = gathered(scene, np.unique(hosts))
    worst = max(places, key=lambda place: of_host[places[place]].sum())
    return Late(rank, int(excess.sum() / scene.steps), "computing" if computing else "host_work", worst)
