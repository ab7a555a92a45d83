"""What decides between remedies of one cause."""

from __future__ import annotations

import numpy as np

from keepbusy.explain.fixes.finding import Finding
from keepbusy.explain.remedies import Seen
from keepbusy.explain.scene import LARGE, Scene
from keepbusy.timeline.model import Direction


def seen(scene: Scene, finding: Finding) -> Seen:
    spans, edit = scene.timeline.spans, finding.edit
    host_excess = np.maximum(spans.work - edit.work, 0)[~scene.timeline.on_device & edit.touched].sum()
    device_excess = (spans.work * (1 - edit.scale))[edit.scale < 1].sum()
    copies = scene.is_copy & (edit.beside > 0)
    home = copies & (spans.direction == Direction.DEVICE_TO_HOST)
    return Seen(
        unequal=bool(device_excess > host_excess),
        homeward=bool(spans.work[home].sum() > spans.work[copies & ~home].sum()),
        small=bool(spans.size[copies].max(initial=0) <= LARGE),
    )
