"""Stalls that keep a beat: what is seen at several lines is one, and where two beats meet neither loses its own.

A function that is called every fiftieth step is seen now at this line of it, now at that one. And every two hundredth
step both what comes every fortieth and what comes every fiftieth holds up the program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from keepbusy.record.watch import Seen, leads_to
from keepbusy.timeline.plain_run import RareStall

ENOUGH = 3
"""So often something has come before it is said to keep a beat."""
ALIKE = 1.5
"""Stalls of one kind take up to so many times as long as each other."""
BOTH = 0.5
"""One that takes less than this share of two kinds together is not both."""


class Stall(NamedTuple):
    """One step that took far longer than those around it."""

    mark: int
    longer: int
    usual: int
    what: str
    seen: Seen


Group: TypeAlias = "list[Stall]"
Told: TypeAlias = "Callable[[Group], RareStall]"
"""What is told of stalls that are one."""


class Beat(NamedTuple):
    """Stalls that come after so many steps exactly."""

    stalls: Group
    told: RareStall

    def has(self, stall: Stall) -> bool:
        """Whether that is its step, or one beside it; the step after it may be slow for itself."""
        alone = all(abs(one.mark - stall.mark) > 1 for one in self.stalls)
        return alone and self.told.comes_in(stall.mark + 1)


def by_beat(groups: Iterable[Group], told: Told, loop: tuple[str, ...]) -> list[Group]:
    """The groups, with single stalls given to the beats that they belong to."""
    joined = _joined(groups, told, loop)
    beats = _beats(joined, told)
    others = [group for group in joined if not any(group == beat.stalls for beat in beats)]
    left = [_given(group, beats, loop) for group in others]
    return [*(beat.stalls for beat in beats), *filter(None, left)]


def _joined(groups: Iterable[Group], told: Told, loop: tuple[str, ...]) -> list[Group]:
    """What leaves the loop at the same line, and keeps a beat together."""
    alike: defaultdict[tuple[str, str], list[Group]] = defaultdict(list)
    for group in groups:
        alike[group[0].what, _leaves_at(told(group).lines, loop)].append(group)
    return [one for (_, line), several in alike.items() for one in (_as_one(several, told) if line else several)]


def _as_one(groups: list[Group], told: Told) -> list[Group]:
    whole = [stall for group in groups for stall in group]
    times = [told(group).time for group in groups]
    return [whole] if max(times) <= ALIKE * min(times) and told(whole).punctual else groups


def _leaves_at(lines: tuple[str, ...], loop: tuple[str, ...]) -> str:
    """The line of the loop that led there; nothing where the loop is not known, or where the line is its own."""
    shared = sum(1 for _ in _shared(lines, loop))
    return lines[shared] if loop and shared < len(lines) else ""


def _shared(lines: tuple[str, ...], loop: tuple[str, ...]) -> Iterator[str]:
    for mine, its in zip(lines, loop, strict=False):
        if mine != its:
            return
        yield mine


def _beats(groups: Iterable[Group], told: Told) -> list[Beat]:
    """But for those which are nothing but others that meet."""
    found: list[Beat] = []
    candidates = [Beat([*group], told(group)) for group in groups if len(group) >= ENOUGH]
    for one in sorted((one for one in candidates if one.told.punctual), key=lambda one: one.told.every):
        if not all(_is_both(stall, [beat for beat in found if beat.has(stall)]) for stall in one.stalls):
            found.append(one)
    return found


def _is_both(stall: Stall, beats: list[Beat]) -> bool:
    return len(beats) > 1 and stall.longer >= BOTH * sum(beat.told.time for beat in beats)


def _given(group: Group, beats: list[Beat], loop: tuple[str, ...]) -> Group:
    """Give away what comes with a beat and has no place or reason of its own, or is two beats that meet."""
    left = []
    for stall in group:
        homes = [beat for beat in beats if beat.has(stall)]
        nowhere = not stall.what and (not stall.seen.lines or leads_to(stall.seen.lines, loop))
        if _is_both(stall, homes):
            for beat in homes:
                beat.stalls.append(stall._replace(longer=beat.told.time, seen=Seen()))
        elif homes and nowhere:
            homes[0].stalls.append(stall._replace(seen=Seen()))
        else:
            left.append(stall)
    return left
