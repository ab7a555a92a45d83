"""Who waits in which collective, and who keeps them waiting.

Each group's calls are numbered, so ranks that were in the same call can be told from those that never came. The first
call of a group that is not well is the one that counts: what comes after it waits for it. A rank that never came may
itself wait in a call of another group; the rank to look at is the one that waits for nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice

from keepbusy.hang.collective_log import CollectiveCall, CollectiveLog, Operand

UNEVEN = ("all_to_all", "all_to_all_single", "all_to_all_v_single", "alltoall", "alltoall_base")
"""Of these each rank may give and take other sizes."""


@dataclass(frozen=True)
class StuckCall:
    """One call of one group that did not end well, as each rank saw it."""

    group: str
    title: str
    number: int
    calls: Mapping[int, CollectiveCall]  # of the ranks that came
    absent: Mapping[int, CollectiveCall | None]  # those that did not, with their last call of this group
    unknown: tuple[int, ...]  # members of which there is no dump
    differ: bool  # in kind or size
    held: tuple[int, ...] = ()  # of the absent, those that wait in a call of another group

    @property
    def waiting(self) -> list[int]:
        return [rank for rank, call in self.calls.items() if not call.ended]

    @property
    def culprits(self) -> list[int]:
        """Who is absent and waits for nobody."""
        return [rank for rank in self.absent if rank not in self.held]

    @property
    def kind(self) -> str:
        """As most ranks call it."""
        kinds = [call.kind for call in self.calls.values()]
        return max(kinds, key=kinds.count)

    @property
    def reason(self) -> int:
        """What differs can never end; who never came is next; then who is unknown, and what has no visible cause. What
        waits for another call comes last."""
        return (self.differ, bool(self.culprits), bool(self.unknown), not self.absent, True).index(True)


_HELD = 4
"""The reason of what waits for another call."""


@dataclass(frozen=True)
class HangVerdict:
    """Of all dumps; what everything else waits for comes first."""

    ranks: tuple[int, ...]
    unknown: tuple[int, ...]  # ranks that groups name and nobody has a dump of
    stuck: tuple[StuckCall, ...]
    newest: Mapping[int, CollectiveCall]  # the last call of each rank, in whatever group
    has_lines: bool
    circle: bool  # ranks wait for each other in different groups


def explain_hang(logs: Sequence[CollectiveLog]) -> HangVerdict:
    job = _Job(logs)
    stuck = [*job.collectives(), *job.messages()]
    waiting = {rank for one in stuck for rank in one.waiting}
    told = [replace(one, held=tuple(rank for rank in one.absent if rank in waiting)) for one in stuck]
    return HangVerdict(
        tuple(job.logs),
        job.unknown,
        tuple(sorted(told, key=_order)),
        {log.rank: log.calls[-1] for log in logs if log.calls},
        any(log.has_lines for log in logs),
        bool(told) and all(one.reason == _HELD for one in told),
    )


def _order(one: StuckCall) -> tuple[int, bool, int]:
    """Of calls with the same reason first what holds a rank back from another."""
    return one.reason, bool(one.held), min((call.begun for call in one.calls.values()), default=0)


class _Job:
    """All ranks' calls, by group and number."""

    def __init__(self, logs: Sequence[CollectiveLog]) -> None:
        self.logs = {log.rank: log for log in logs}

    @cached_property
    def groups(self) -> dict[tuple[str, tuple[int, ...]], dict[int, dict[int, CollectiveCall]]]:
        """Of each group its members' calls by number. Groups of other ranks may bear the same name."""
        found: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, CollectiveCall]]] = {}
        for rank, log in self.logs.items():
            for call in log.calls:
                if not call.is_message:
                    of_group = found.setdefault((call.group, log.groups.get(call.group, ())), {})
                    of_group.setdefault(rank, {})[call.number] = call
        return found

    @cached_property
    def unknown(self) -> tuple[int, ...]:
        named = {rank for log in self.logs.values() for members in log.groups.values() for rank in members}
        return tuple(sorted(named - set(self.logs)))

    def _title(self, group: str) -> str:
        return next((log.titles[group] for log in self.logs.values() if group in log.titles), "")

    def _members(self, group: str, members: tuple[int, ...]) -> tuple[int, ...]:
        """Where the dump does not say: all ranks that may be of the first group, else those that called it."""
        if members:
            return members
        return tuple(sorted(self.logs if self._title(group) == "default_pg" else self.groups[group, members]))

    def collectives(self) -> Iterator[StuckCall]:
        for (group, members), calls in self.groups.items():
            everyone = self._members(group, members)
            begin = max(min(numbers) for numbers in calls.values())  # before it some have forgotten theirs
            numbers = sorted({number for one in calls.values() for number in one if number >= begin})
            stuck = (self._stuck(group, number, everyone, calls) for number in numbers)
            yield from islice(filter(None, stuck), 1)

    def _stuck(
        self, group: str, number: int, members: Sequence[int], calls: Mapping[int, Mapping[int, CollectiveCall]]
    ) -> StuckCall | None:
        """None where all is well: all came, all ended, or it ended for those who are there."""
        came = {rank: calls[rank][number] for rank in members if number in calls.get(rank, {})}
        pending = not all(call.ended for call in came.values())
        differ = _differ(list(came.values()), pending)
        if not pending and not differ:
            return None
        known = set(self.logs).intersection(members)
        absent = {rank: _last(calls.get(rank, {}), number) for rank in members if rank in known - set(came)}
        unknown = tuple(rank for rank in members if rank not in known)
        return StuckCall(group, self._title(group), number, came, absent, unknown, differ)

    def messages(self) -> Iterator[StuckCall]:
        """Sends and receives that did not end, of each rank the first."""
        for rank, log in self.logs.items():
            pending = next((call for call in log.calls if call.is_message and not call.ended), None)
            if pending is not None:
                stuck = (self._message(rank, pending, part) for part in pending.operands if part.ends)
                yield from islice(filter(None, stuck), 1)

    def _message(self, rank: int, call: CollectiveCall, part: Operand) -> StuckCall | None:
        """None where the other end is there and takes as much: then the network is at it, or another message."""
        call = replace(call, operands=(part, *(one for one in call.operands if one is not part)))
        stuck = partial(StuckCall, call.group, self._title(call.group), call.number)
        peer = self._peer(rank, call.group, part)
        if peer not in self.logs:
            return stuck({rank: call}, {}, (peer,), False)
        mine, its = (_messages(self.logs[one], call.group) for one in (rank, peer))
        other = next((one for one in its if not one.ended and _other_end(one, part)), None)
        if other is not None:
            differ = part.kind == "send" and _size(part) != _size(_other_end(other, part) or part)
            return stuck({rank: call, peer: other}, {}, (), True) if differ else None
        if _has_arrived(part, mine, its):
            return None  # what this call waits for is another part of it
        return stuck({rank: call}, {peer: its[-1] if its else None}, (), False)

    def _peer(self, rank: int, group: str, part: Operand) -> int:
        """Ends are told as places among the group's members."""
        sender, receiver = part.ends or (0, 0)
        place = receiver if part.kind == "send" else sender
        members = sorted(self._members(group, self.logs[rank].groups.get(group, ())))
        return members[place] if place < len(members) else place


def _messages(log: CollectiveLog, group: str) -> list[CollectiveCall]:
    return [call for call in log.calls if call.is_message and call.group == group]


def _has_arrived(part: Operand, mine: Sequence[CollectiveCall], its: Sequence[CollectiveCall]) -> bool:
    """Whether the other rank has had as many of these messages, as far as both rings still hold their first one."""
    if any(min((one.number for one in calls), default=2) > 1 for calls in (mine, its)):
        return False
    return _count(its, part, True) >= _count(mine, part)


def _count(calls: Sequence[CollectiveCall], part: Operand, opposite: bool = False) -> int:
    """How many messages of these ends there are, or on the other rank how many of their other ends."""
    parts = [one for call in calls for one in call.operands if one.ends == part.ends]
    return sum((one.kind != part.kind) == opposite for one in parts)


def _other_end(call: CollectiveCall, part: Operand) -> Operand | None:
    return next((one for one in call.operands if one.ends == part.ends and one.kind != part.kind), None)


def _size(message: Operand) -> tuple[tuple[int, ...], ...]:
    return message.inputs if message.kind == "send" else message.outputs


def _last(calls: Mapping[int, CollectiveCall], before: int) -> CollectiveCall | None:
    earlier = [number for number in calls if number < before]
    return calls[max(earlier)] if earlier else None


def _differ(calls: Sequence[CollectiveCall], pending: bool) -> bool:
    """In kind; where somebody still waits, in size or type too."""
    kinds = {tuple(one.kind for one in call.operands) for call in calls}
    return len(kinds) > 1 or (pending and len({signature(call) for call in calls}) > 1)


def signature(call: CollectiveCall) -> tuple[object, ...]:
    """What must be the same on all ranks."""
    return tuple(_signature(one) for one in call.operands)


def _signature(one: Operand) -> tuple[object, ...]:
    if one.kind in UNEVEN or one.kind.endswith("_v"):
        return one.kind, one.dtypes
    inputs = one.inputs if one.kind != "scatter" else ()
    outputs = one.outputs if one.kind != "gather" else ()
    return one.kind, inputs, outputs, one.dtypes if one.kind not in ("scatter", "gather", "broadcast") else ()
