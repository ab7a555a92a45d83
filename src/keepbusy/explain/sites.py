"""The places to blame for a cause: its rows gathered by where they stand."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from keepbusy.explain.diagnosis import Site, Where
from keepbusy.explain.fixes.finding import Finding
from keepbusy.explain.forecast import Forecast
from keepbusy.explain.scene import Scene
from keepbusy.explain.where import where
from keepbusy.timeline.model import NONE, Ints

MOST_REPLAYED = 3
MOST_SHOWN = 8


def sites_of(scene: Scene, finding: Finding, forecast: Forecast, whole_gain: int) -> tuple[Site, ...]:
    """The costliest first. The wait of a place is what mending it alone recovers."""
    groups = gathered(scene, finding.rows, apart=finding.cause == "peer_late")
    per_step = scene.steps * len(scene.timeline.ranks)
    held = {place: _held(scene, finding, rows) for place, rows in groups.items()}
    ordered = sorted(groups, key=lambda place: -held[place])[:MOST_SHOWN]
    gains = {place: whole_gain if len(ordered) == 1 else 0 for place in ordered}
    if len(ordered) > 1:
        for place in ordered[:MOST_REPLAYED]:
            gains[place] = forecast.gain(finding.only(groups[place]))
    ordered.sort(key=lambda place: (-gains[place], -held[place]))
    return tuple(Site(place, len(groups[place]) / per_step, gains[place]) for place in ordered)


def gathered(scene: Scene, rows: Ints, apart: bool = False) -> dict[Where, Ints]:
    """Rows by place. Rows reached along the same path of calls share one, so only one of them is looked up.

    `apart`: the place is where a rank goes a way of its own, if it does.
    """
    spans = scene.timeline.spans
    own = scene.apart[rows] if apart else np.full(len(rows), NONE)
    frame = np.where(own == NONE, spans.frame[rows], own)
    path = np.where(frame == NONE, spans.name[rows], scene.path[np.maximum(frame, 0)] if len(scene.path) else 0)
    _, first, which, count = np.unique(path, return_index=True, return_inverse=True, return_counts=True)
    groups: dict[str, list[Ints]] = defaultdict(list)
    places: dict[str, Where] = {}
    for index in np.argsort(-count, kind="stable").tolist():
        place = where(scene.timeline, int(rows[first[index]]), int(own[first[index]]))
        key = f"{place} {place.function}"  # one line of the program is one place, whichever operators it calls
        places.setdefault(key, place)
        groups[key].append(rows[which == index])
    return {places[key]: np.concatenate(parts) for key, parts in groups.items()}


def _held(scene: Scene, finding: Finding, rows: Ints) -> int:
    """How long the host was held there: a cheap measure, good enough to choose which places to replay."""
    spans = scene.timeline.spans
    mine = np.isin(finding.owner, rows)
    return int((spans.end[mine] - spans.start[mine]).sum())
