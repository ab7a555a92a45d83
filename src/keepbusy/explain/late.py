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
    excess = np.where(finding.owner >= 0, finding.edit.saves(scene.timeline.spans.work), 0)
    rank = scene.timeline.rank_of_rows
    late = np.unique(rank[finding.rows]).tolist()
    found = [_late(scene, finding, one, np.where(rank == one, excess, 0)) for one in late]
    latest = max(one.late for one in found)
    return tuple(sorted((one for one in found if one.late >= WORTH_NAMING * latest), key=lambda one: -one.late))


def _late(scene: Scene, finding: Finding, rank: int, excess: Ints) -> Late:
    """The place that loses most, were its rank like the others."""
    rows = np.flatnonzero(excess)
    on_device = scene.timeline.on_device[rows]
    computing = excess[rows[on_device]].sum() > excess[rows[~on_device]].sum()
    rows = rows[on_device == computing]
    hosts = finding.owner[rows]
    of_host = np.bincount(hosts, excess[rows], len(excess))
    places = gathered(scene, np.unique(hosts), apart=True)
    worst = max(places, key=lambda place: of_host[places[place]].sum())
    ranks, late = len(scene.timeline.ranks), excess[rows].sum() / scene.steps
    if computing:  # it would keep its share of what it does beyond the others
        return Late(rank, int(late * ranks / (ranks - 1)), "computing", worst)
    return Late(rank, int(late), "host_work", worst)
