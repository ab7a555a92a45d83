"""What a drawing has between its boxes: which row waits for which, and, where a race is, which one should."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from keepbusy.explain.diagnosis import Turns
from keepbusy.timeline.model import EVERY_LANE, NONE, Ints, Kind, LinkKind, Mask
from keepbusy.timeline.races import DataRace, RacingUse


class MissingEdge(NamedTuple):
    """Nothing puts the first row before the second, and the race needs that."""

    first: int
    second: int
    race: DataRace


def event_links(turns: Turns) -> Ints:
    """Links by which a command, or the host, waits for a command of another stream. Two copies that share a copy engine
    wait for each other as well: that is no event of the program's."""
    spans, links = turns.timeline.spans, turns.timeline.links
    ends = spans.take(links.source), spans.take(links.target)
    source, target = ends
    shares_engine = (source.kind == Kind.COPY) & (target.kind == Kind.COPY) & (source.direction == target.direction)
    between_lanes = (source.lane != target.lane) & (source.kind >= Kind.KERNEL)
    return np.flatnonzero((links.kind == LinkKind.ORDER) & between_lanes & ~shares_engine)


def missing_edges(turns: Turns, races: Sequence[DataRace]) -> list[MissingEdge]:
    """Of each race one, if both of its lines run in these iterations."""
    found = [(race, _racing_rows(turns, race)) for race in races]
    return [MissingEdge(*rows, race) for race, rows in found if rows is not None]


def lines_of_rows(turns: Turns) -> Ints:
    """Which of the places each row belongs to: of a command that which launched it."""
    launches = turns.timeline.launches
    place = turns.place.copy()
    place[turns.timeline.on_device] = NONE
    place[launches.target] = turns.place[launches.source]
    return place


def visits(turns: Turns) -> Ints:
    """A number for each time that a thread comes to a line: its rows there, until another line has rows."""
    number, timeline = np.full(len(turns.timeline), NONE, np.int64), turns.timeline
    for lane in range(len(timeline.lanes)):
        rows = timeline.rows_of(lane)
        rows = rows[turns.place[rows] != NONE]
        number[rows] = np.cumsum(np.diff(turns.place[rows], prepend=NONE) != 0)
    return number


def _racing_rows(turns: Turns, race: DataRace) -> tuple[int, int] | None:
    """The first row of the second use that nothing orders behind the last one of the first use."""
    first = np.flatnonzero(_is_use(turns, race.first))
    for second in np.flatnonzero(_is_use(turns, race.second)).tolist():
        before = first[: np.searchsorted(first, second)]
        if len(before) and not _is_ordered(turns, int(before[-1]), second):
            return int(before[-1]), second
    return None


def _is_use(turns: Turns, use: RacingUse) -> Mask:
    """Rows of a line, on a stream or on the host. A race calls streams as the lanes of its run are called."""
    is_place = np.array([*(str(place) == use.place for place in turns.places), False])  # the last one: NONE
    on_line, timeline = is_place[lines_of_rows(turns)], turns.timeline
    if not use.stream:
        return on_line & ~timeline.on_device
    stream = use.stream.removeprefix("the ")
    is_stream = np.array([lane.device is not None and lane.name == stream for lane in timeline.lanes], bool)
    return on_line & is_stream[timeline.spans.lane]


def _is_ordered(turns: Turns, first: int, second: int) -> bool:
    """Whether in between the host waits for the first row's stream, or an event puts it before the second row."""
    spans, links = turns.timeline.spans, turns.timeline.links.take(event_links(turns))
    lane, awaits = spans.lane[first], spans.awaits[first:second]
    since = (links.source >= first) & (spans.lane[links.source] == lane) & (links.target <= second)
    reaches = (spans.lane[links.target] == spans.lane[second]) | (spans.kind[links.target] == Kind.SYNC)
    return bool(((awaits == lane) | (awaits == EVERY_LANE)).any() or (since & reaches).any())
