"""Data races: two uses of the same memory that nothing orders, one of which writes. Plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

STREAMS, REUSED, REFILLED, READ_EARLY = "streams", "reused memory", "refilled pinned memory", "read too early"
"""What a race is about: two streams; memory that was freed and given out again; pinned memory that the program fills
while a copy reads it; a copy to the host that is read before it is done."""
KINDS = (STREAMS, REUSED, REFILLED, READ_EARLY)


@dataclass(frozen=True)
class RacingUse:
    """One of the two uses in a race."""

    place: str  # file:line
    writes: bool
    stream: str  # the program's name for it; "" for the host itself


@dataclass(frozen=True)
class DataRace:
    """The first use may still be under way when the second one begins."""

    kind: str
    first: RacingUse
    second: RacingUse
    size: int  # bytes that both use
    times: int  # how often it happened
    call: str  # what would order them
    at: str  # the line where the call belongs: file:line
    after: bool = False  # whether the call belongs behind that line or in front of it


def joined(races: Iterable[DataRace]) -> tuple[DataRace, ...]:
    """Each race once, in order of first occurrence: ranks have the same ones, and a line may race in several calls."""
    races_: dict[tuple[str, RacingUse, RacingUse], DataRace] = {}
    for race in races:
        key = (race.kind, race.first, race.second)
        races_[key] = replace(races_[key], times=races_[key].times + race.times) if key in races_ else race
    return tuple(races_.values())
