"""Which ranks come late, by how much, and what they do meanwhile."""

from __future__ import annotations

import numpy as np

from keepbusy.explain.diagnosis import Late
from keepbusy.explain.fixes.finding import Finding
from keepbusy.explain.scene import Scene
from keepbusy.explain.where import where
from keepbusy.timeline.model import Timeline


def late_ranks(scene: Scene, finding: Finding | None) -> tuple[Late, ...]:
    if finding is None:
        return ()
    timeline, spans = scene.timeline, scene.timeline.spans
    fair = np.minimum(spans.work, finding.edit.work) * finding.edit.scale
    excess = np.where(finding.owner >= 0, spans.work - fair, 0)
    rank = timeline.rank_of_rows
    found = []
    for one in np.unique(rank[finding.rows]).tolist():
        mine = np.where(rank == one, excess, 0)
        worst = int(mine.argmax())
        late = int(mine.sum() / scene.steps)
        found.append(Late(one, late, _doing(timeline, worst), where(timeline, _host_row(scene, worst))))
    return tuple(sorted(found, key=lambda one: -one.late))


def _host_row(scene: Scene, row: int) -> int:
    return int(scene.launch[row]) if scene.launch[row] >= 0 else row


def _doing(timeline: Timeline, row: int) -> str:
    return "computing" if timeline.on_device[row] else "host_work"
