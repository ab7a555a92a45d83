"""Data races in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keepbusy.causes.places import Where
from keepbusy.report import labels
from keepbusy.report.source import source_of
from keepbusy.timeline.races import READ_EARLY, REFILLED, REUSED, DataRace


def sentence(race: DataRace) -> str:
    """`train.py:14 reads memory that train.py:11 may still be writing on stream copies.`"""
    first, second = _short(race.first.place), _short(race.second.place)
    on_stream = f" on {_stream(race.first.stream)}"
    if race.kind == REUSED:
        may = "write" if race.first.writes else "read"
        return f"{second} is given memory that was freed while {first} may still {may} it{on_stream}."
    if race.kind == REFILLED:
        if not race.second.place:
            return f"Pinned memory is changed while the copy at {first} may still read it{on_stream}."
        return f"{second} changes pinned memory that the copy at {first} may still read{on_stream}."
    if race.kind == READ_EARLY:
        return f"{second} reads what the copy at {first} may not have written yet{on_stream}."
    does = "writes to" if race.second.writes else "reads"
    may = "writing" if race.first.writes else "reading"
    return f"{second} {does} memory that {first} may still be {may}{on_stream}."


def remedy(race: DataRace) -> str:
    """The missing call, and where it belongs."""
    return f"Add {race.call} {'after' if race.after else 'before'} {_short(race.at)}."


def several(number: int) -> str:
    """`no data races`, `1 data race`, `2 data races`."""
    return f"{number or 'no'} data race{'' if number == 1 else 's'}"


def in_short(races: Sequence[DataRace]) -> str:
    """The first race, and how many more there are; "" where there is none."""
    if not races:
        return ""
    more = f" ({len(races) - 1} more in the full report)" if races[1:] else ""
    return f"Data race: {sentence(races[0])} {remedy(races[0])}{more}"


def paragraph(race: DataRace) -> Iterator[str]:
    """The lines of a race's paragraph in the report."""
    yield f"data race   {sentence(race)}"
    for use in (race.first, race.second):
        source = source_of(Where.of(use.place)) if use.place else None
        if source is not None:
            yield f"  {_short(use.place)}  {source.text}"
    often = f" It happened {race.times:,} times." if race.times > 1 else ""
    yield f"  {remedy(race)}{often}"


def _short(place: str) -> str:
    return labels.spot(Where.of(place), 40)


def _stream(name: str) -> str:
    return name if name.startswith(("the ", "stream ")) else f"stream {name}"
