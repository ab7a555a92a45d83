"""What decides between remedies of one cause."""

from __future__ import annotations

import numpy as np

from keepbusy.explain.edit import Beside
from keepbusy.explain.fixes.finding import Finding
from keepbusy.explain.remedies import Seen
from keepbusy.explain.scene import LARGE, Scene
from keepbusy.timeline.model import NONE, Direction, Ints, Kind


def seen(scene: Scene, finding: Finding) -> Seen:
    spans, edit = scene.timeline.spans, finding.edit
    host_excess = np.maximum(spans.work - edit.work, 0)[~scene.timeline.on_device & edit.touched].sum()
    device_excess = (spans.work * (1 - edit.scale))[edit.scale < 1].sum()
    copies = scene.is_copy & (edit.beside > 0)
    home = copies & (spans.direction == Direction.DEVICE_TO_HOST)
    return Seen(
        unequal=bool(device_excess > host_excess),
        alone=bool(finding.cause == "peer_late" and (scene.apart[finding.rows] != NONE).all()),
        homeward=bool(spans.work[home].sum() > spans.work[copies & ~home].sum()),
        small=bool(spans.size[copies].max(initial=0) <= LARGE),
        peers=bool((spans.kind == Kind.COLLECTIVE).any()),
        again=_again(scene, np.flatnonzero(edit.beside == Beside.WIRE)),
    )


def _again(scene: Scene, rows: Ints) -> bool:
    """Each of several buckets of gradients travels more than once a step. Of a single one that could not be told."""
    spans, rank = scene.timeline.spans, scene.timeline.rank_of_rows
    reducing = np.array(["AllReduce" in name or "ReduceScatter" in name for name in scene.timeline.names], bool)
    mine = rows[reducing[spans.name[rows]] & (rank[rows] == scene.timeline.ranks[0])]
    times = np.unique(spans.size[mine], return_counts=True)[1] / scene.steps
    return len(times) > 1 and bool(times.min() > 1.5)
