"""The edges of a drawing: which row waits for which, and where a race shows that a row should wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from keepbusy.explain.diagnosis import Turns
from keepbusy.timeline.model import EVERY_LANE, NONE, Ints, Kind, LinkKind, Mask
from keepbusy.timeline.races import DataRace, RacingUse


class MissingEdge(NamedTuple):
    """Two rows that race: the second must wait for the first, and nothing makes it wait."""

    first: int
    second: int
    race: DataRace


def event_links(iterations: Turns) -> Ints:
    """Links by which a command, or the host, waits for a command of another stream. Copies that share a copy engine
    also wait for each other, but not because of an event, so they are left out."""
    spans, links = iterations.timeline.spans, iterations.timeline.links
    source, target = spans.take(links.source), spans.take(links.target)
    shares_engine = (source.kind == Kind.COPY) & (target.kind == Kind.COPY) & (source.direction == target.direction)
    between_lanes = (source.lane != target.lane) & (source.kind >= Kind.KERNEL)
    return np.flatnonzero((links.kind == LinkKind.ORDER) & between_lanes & ~shares_engine)


def missing_edges(iterations: Turns, races: Sequence[DataRace]) -> list[MissingEdge]:
    """One edge for each race both of whose lines run in these iterations."""
    racing = [(race, _racing_rows(iterations, race)) for race in races]
    return [MissingEdge(*rows, race) for race, rows in racing if rows is not None]


def lines_of_rows(iterations: Turns) -> Ints:
    """The index of each row's place; a command has the place that launched it."""
    launches = iterations.timeline.launches
    place = iterations.place.copy()
    place[iterations.timeline.on_device] = NONE
    place[launches.target] = iterations.place[launches.source]
    return place


def visits(iterations: Turns) -> Ints:
    """A number for each visit of a thread to a line; a visit ends where another line has rows."""
    number, timeline = np.full(len(iterations.timeline), NONE, np.int64), iterations.timeline
    for lane in range(len(timeline.lanes)):
        rows = timeline.rows_of(lane)
        rows = rows[iterations.place[rows] != NONE]
        number[rows] = np.cumsum(np.diff(iterations.place[rows], prepend=NONE) != 0)
    return number


def _racing_rows(iterations: Turns, race: DataRace) -> tuple[int, int] | None:
    """The first row of the second use that is not ordered after the first use, and the row before it that it races."""
    first = np.flatnonzero(_is_use(iterations, race.first))
    for second in np.flatnonzero(_is_use(iterations, race.second)).tolist():
        before = first[: np.searchsorted(first, second)]
        if len(before) and not _is_ordered(iterations, int(before[-1]), second):
            return int(before[-1]), second
    return None


def _is_use(iterations: Turns, use: RacingUse) -> Mask:
    """Rows of a line, on a stream or on the host. A race names streams as the run names its lanes."""
    is_place = np.array([*(str(place) == use.place for place in iterations.places), False])  # the last one: NONE
    on_line, timeline = is_place[lines_of_rows(iterations)], iterations.timeline
    if not use.stream:
        return on_line & ~timeline.on_device
    stream = use.stream.removeprefix("the ")
    is_stream = np.array([lane.device is not None and lane.name == stream for lane in timeline.lanes], bool)
    return on_line & is_stream[timeline.spans.lane]


def _is_ordered(iterations: Turns, first: int, second: int) -> bool:
    """True if the host waits for the first row's stream in between, or an event orders the two rows."""
    spans, links = iterations.timeline.spans, iterations.timeline.links.take(event_links(iterations))
    lane, awaits = spans.lane[first], spans.awaits[first:second]
    since = (links.source >= first) & (spans.lane[links.source] == lane) & (links.target <= second)
    reaches = (spans.lane[links.target] == spans.lane[second]) | (spans.kind[links.target] == Kind.SYNC)
    return bool(((awaits == lane) | (awaits == EVERY_LANE)).any() or (since & reaches).any())
