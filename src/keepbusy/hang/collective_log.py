"""What ranks wrote down of their collectives before a job hung: which they began, from which line, which ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class CallSite(NamedTuple):
    """The user's line."""

    file: str
    line: int
    function: str


class Operand(NamedTuple):
    """What one call takes and gives; several calls that are launched together are one collective."""

    kind: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    ends: tuple[int, int] | None  # of a message: from and to, as the group counts its ranks


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One rank's part."""

    group: str
    number: int  # the group's n-th; messages are counted apart
    operands: tuple[Operand, ...]
    is_message: bool
    ended: bool
    started: bool  # on the device, as far as was seen
    timed_out: bool
    begun: int
    site: CallSite | None

    @property
    def kind(self) -> str:
        return self.operands[0].kind


@dataclass(frozen=True)
class CollectiveLog:
    """Of one rank, in the order in which it called them; the oldest may be gone."""

    rank: int
    calls: Sequence[CollectiveCall]
    groups: Mapping[str, tuple[int, ...]]  # their members, where they are known
    titles: Mapping[str, str]
    has_lines: bool
