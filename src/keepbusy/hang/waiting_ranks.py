"""Who waits in which collective, and who keeps them waiting: found, and told in sentences and as JSON.

Each group's calls are numbered, so ranks that were in the same call can be told from those that never came. The first
call of a group that is not well is the one that counts: what comes after it waits for it. A rank that never came may
itself wait in a call of another group; the rank to look at is the one that waits for nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby, islice
from typing import Any, TypeAlias

from keepbusy.hang.flight_recorder import CallSite, CollectiveCall, CollectiveLog, Operand
from keepbusy.report.words import tame
from keepbusy.timeline.figures import listing

_UNEVEN = ("all_to_all", "all_to_all_single", "all_to_all_v_single", "alltoall", "alltoall_base")
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
        """Absent ranks that wait for nobody."""
        return [rank for rank in self.absent if rank not in self.held]

    @property
    def kind(self) -> str:
        """As most ranks call it."""
        return Counter(call.operands[0].kind for call in self.calls.values()).most_common(1)[0][0]

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
    named = {rank for log in logs for members in log.groups.values() for rank in members}
    stuck = [*job.collectives(), *job.messages()]
    waiting = {rank for one in stuck for rank in one.waiting}
    told = [replace(one, held=tuple(rank for rank in one.absent if rank in waiting)) for one in stuck]
    return HangVerdict(
        tuple(job.logs),
        tuple(sorted(named - set(job.logs))),
        tuple(sorted(told, key=_order)),
        {log.rank: log.calls[-1] for log in logs if log.calls},
        any(call.site for log in logs for call in log.calls),
        bool(told) and all(one.reason == _HELD for one in told),
    )


def _order(one: StuckCall) -> tuple[int, bool, int]:
    """Of calls with the same reason first what holds a rank back from another."""
    return one.reason, bool(one.held), min((call.begun for call in one.calls.values()), default=0)


class _Job:
    """All ranks' calls, by group and number."""

    def __init__(self, logs: Sequence[CollectiveLog]) -> None:
        self.logs = {log.rank: log for log in logs}
        self._messages = cache(lambda rank, group: _Messages(self.logs[rank], group))

    @cached_property
    def groups(self) -> dict[tuple[str, tuple[int, ...]], dict[int, dict[int, CollectiveCall]]]:
        """Of each group its members' calls by number. Groups of other ranks may bear the same name."""
        found: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, CollectiveCall]]] = {}
        for rank, log in self.logs.items():
            of_rank: dict[str, dict[int, CollectiveCall]] = {}
            for call in log.calls:
                if not call.is_message:
                    of_rank.setdefault(call.group, {})[call.number] = call
            for group, calls in of_rank.items():
                found.setdefault((group, log.groups.get(group, ())), {})[rank] = calls
        return found

    def _title(self, group: str) -> str:
        return next((log.titles[group] for log in self.logs.values() if group in log.titles), "")

    def _members(self, group: str, members: tuple[int, ...]) -> tuple[int, ...]:
        """Where the dump does not say: all ranks that may be of the first group, else those that called it."""
        if members:
            return members
        return tuple(sorted(self.logs if self._title(group) == "default_pg" else self.groups[group, members]))

    def collectives(self) -> Iterator[StuckCall]:
        for (group, members), calls in self.groups.items():
            everyone = dict.fromkeys(self._members(group, members))
            begin = max(min(numbers) for numbers in calls.values())  # before it some have forgotten theirs
            numbers = sorted({number for one in calls.values() for number in one if number >= begin})
            stuck = (self._stuck(group, number, everyone, calls) for number in numbers)
            yield from islice(filter(None, stuck), 1)

    def _stuck(
        self, group: str, number: int, members: Mapping[int, None], calls: Mapping[int, Mapping[int, CollectiveCall]]
    ) -> StuckCall | None:
        """None where all is well: all came, all ended, or it ended for those who are there."""
        came = {rank: numbers[number] for rank, numbers in calls.items() if number in numbers and rank in members}
        pending = not all(call.ended for call in came.values())
        differ = len({tuple(one.kind for one in call.operands) for call in came.values()}) > 1
        if pending and not differ:  # where somebody still waits, sizes and types must be the same, too
            differ = len({_must_agree(call) for call in came.values()}) > 1
        if not pending and not differ:
            return None
        known = self.logs
        absent = {rank: _last(calls.get(rank, {}), number) for rank in members if rank in known and rank not in came}
        unknown = tuple(rank for rank in members if rank not in known)
        return StuckCall(group, self._title(group), number, came, absent, unknown, differ)

    def messages(self) -> Iterator[StuckCall]:
        """Sends and receives that did not end, of each rank the first."""
        for rank, log in self.logs.items():
            pending = next((call for call in log.calls if call.is_message and not call.ended), None)
            if pending is not None:
                members = sorted(self._members(pending.group, log.groups.get(pending.group, ())))
                parts = (part for part in pending.operands if part.ends)
                stuck = (self._message(rank, pending, part, members) for part in parts)
                yield from islice(filter(None, stuck), 1)

    def _message(self, rank: int, call: CollectiveCall, part: Operand, members: Sequence[int]) -> StuckCall | None:
        """None where the other end is there and takes as much: then the network is at it, or another message."""
        sender, receiver = part.ends or (0, 0)
        place = receiver if part.kind == "send" else sender
        peer = members[place] if place < len(members) else place  # ends are told as places among the members
        if peer not in self.logs:
            return self._stuck_message({rank: call}, part, {}, (peer,))
        mine, its = self._messages(rank, call.group), self._messages(peer, call.group)
        other, end = its.pending.get(_other_end(part), (None, part))
        if other is not None:
            both = {rank: call, peer: other}
            differ = part.kind == "send" and _size(part) != _size(end)
            return self._stuck_message(both, part, {}, (), differ) if differ else None
        begins_known = all(min((one.number for one in side.calls), default=2) <= 1 for side in (mine, its))
        if begins_known and its.counts[_other_end(part)] >= mine.counts[part.ends, part.kind]:
            return None  # it has arrived: what this call waits for is another part of it
        return self._stuck_message({rank: call}, part, {peer: its.calls[-1] if its.calls else None})

    def _stuck_message(
        self,
        calls: dict[int, CollectiveCall],
        part: Operand,
        absent: Mapping[int, CollectiveCall | None],
        unknown: tuple[int, ...] = (),
        differ: bool = False,
    ) -> StuckCall:
        """Of the first of these calls, in which this part is the one that waits."""
        rank, call = next(iter(calls.items()))
        calls[rank] = replace(call, operands=(part, *(one for one in call.operands if one is not part)))
        return StuckCall(call.group, self._title(call.group), call.number, calls, absent, unknown, differ)


_MessageEnd: TypeAlias = tuple[tuple[int, int] | None, str]
"""From and to, and which of them it is: `send` or `recv`."""


class _Messages:
    """Those of one rank in one group."""

    def __init__(self, log: CollectiveLog, group: str) -> None:
        self.calls = [call for call in log.calls if call.is_message and call.group == group]
        self.counts: Counter[_MessageEnd] = Counter(
            (one.ends, one.kind) for call in self.calls for one in call.operands
        )
        self.pending: dict[_MessageEnd, tuple[CollectiveCall, Operand]] = {}
        """Of each end the first that has not ended."""
        for call in self.calls:
            for one in call.operands if not call.ended else ():
                self.pending.setdefault((one.ends, one.kind), (call, one))


def _other_end(part: Operand) -> _MessageEnd:
    return part.ends, "recv" if part.kind == "send" else "send"


def _size(message: Operand) -> tuple[tuple[int, ...], ...]:
    return message.inputs if message.kind == "send" else message.outputs


def _last(calls: Mapping[int, CollectiveCall], before: int) -> CollectiveCall | None:
    earlier = [number for number in calls if number < before]
    return calls[max(earlier)] if earlier else None


def _must_agree(call: CollectiveCall) -> tuple[object, ...]:
    """What must be the same on all ranks, of each operand."""
    agreed = list[tuple[object, ...]]()
    for one in call.operands:
        if one.kind in _UNEVEN or one.kind.endswith("_v"):
            agreed.append((one.kind, one.dtypes))
            continue
        inputs = one.inputs if one.kind != "scatter" else ()
        outputs = one.outputs if one.kind != "gather" else ()
        dtypes = one.dtypes if one.kind not in ("scatter", "gather", "broadcast") else ()
        agreed.append((one.kind, inputs, outputs, dtypes))
    return tuple(agreed)


# The verdict in sentences

_NAMED = 8
"""Ranks that are named one by one before runs of them are folded."""


def told(verdict: HangVerdict) -> Iterator[str]:
    ranks = len(verdict.ranks)
    yield f"keepbusy explain · what {ranks} {'rank' if ranks == 1 else 'ranks'} wrote down of their collectives\n\n"
    if not verdict.stuck:
        yield "Nothing hangs in these dumps: every call that a rank began has ended on it.\n"
    if verdict.circle:
        yield "Ranks wait for each other in calls of different groups, in a circle: none of them can go on.\n\n"
    for number, one in enumerate(verdict.stuck):
        if number == 1:
            yield "\nWaiting besides, for the same or another reason:\n\n"
        yield f"{_sentence(one)}\n\n"
        yield from _table(one)
        if number == 0:
            yield f"\nlook    {_remedy(one, verdict)}\n"
    if verdict.unknown:
        yield f"note    There is no dump of {_ranks(verdict.unknown)}.\n"
    if verdict.stuck and not verdict.has_lines:
        yield "note    These dumps hold no lines: JSON never does; the pickle does unless stacks were left out.\n"


def _sentence(one: StuckCall) -> str:
    where = f"{one.kind}, {'message' if _is_message(one) else 'call'} {one.number} of {_group(one)}"
    waiting = f"{_ranks(one.waiting)} {'waits' if len(one.waiting) == 1 else 'wait'}"
    if one.differ:
        sides = sorted(_alike(one.calls), key=lambda side: len(side[0]))  # the odd ones are probably the fewest
        told = listing([f"{_operands(call)} on {_ranks(ranks)}" for ranks, call in sides])
        return f"Ranks disagree in {where.partition(', ')[2]}: {told}."
    if one.culprits and _is_message(one):
        does = "sent" if one.kind == "recv" else "received"
        return f"{_capital(_ranks(one.culprits))} never {does} message {one.number} of {_group(one)}; {waiting} for it."
    if one.culprits:
        return f"{_capital(_ranks(one.culprits))} never came to {where}; {waiting} there."
    if one.unknown:
        return f"{_capital(waiting)} in {where}; of {_ranks(one.unknown)} nobody knows."
    if one.held:
        elsewhere = "waits in another call itself" if len(one.held) == 1 else "wait in other calls themselves"
        return f"{_capital(waiting)} in {where}, for {_ranks(one.held)}, which {elsewhere}."
    if len(one.calls) == 1:
        return f"{_capital(waiting)} in {where}, where no other rank is to come."
    return f"All {len(one.calls)} ranks are in {where}, alike, and it has not ended on {_ranks(one.waiting)}."


def _is_message(one: StuckCall) -> bool:
    return any(call.is_message for call in one.calls.values())


def _group(one: StuckCall) -> str:
    """`default_pg`, or the group's name where it was given no description."""
    return tame(one.title if one.title not in ("", "undefined") else f"group {one.group}", 40)


def _remedy(one: StuckCall, verdict: HangVerdict) -> str:
    if one.differ:
        return "why these ranks took different ways: a condition on the rank, on data, or batches of different number"
    if one.culprits:
        rank = one.culprits[0]
        last = verdict.newest.get(rank)
        after = f"after {_site(last.site)}" if last and last.site else "from its start on"
        return f"what rank {rank} does {after}: its own log, or `py-spy dump` while it hangs"
    if one.unknown:
        return f"whether {_ranks(one.unknown)} died: its log, its host, `dmesg`; then whether it could write its dump"
    if verdict.circle:
        return "the order in which these lines use their groups: it must be the same on all ranks"
    return "the network and the GPUs: `nvidia-smi -q`, NCCL_DEBUG=INFO, and `keepbusy doctor --ranks` once it is free"


# Who does what


def _table(one: StuckCall) -> Iterator[str]:
    rows = [(_ranks(ranks), _operands(call), _site(call.site), _state(call)) for ranks, call in _alike(one.calls)]
    for ranks, call in _folded(one.absent):
        name = f"last was {_operands(call)}" if call else "no call of this group"
        rows.append((_ranks(ranks), name, _site(call.site) if call else "", _state(call) if call else ""))
    widths = [max(len(row[place]) for row in rows) for place in range(3)]
    for row in rows:
        cells = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False))
        yield f"  {cells}  {row[3]}".rstrip() + "\n"


def _alike(calls: Mapping[int, CollectiveCall]) -> list[tuple[list[int], CollectiveCall]]:
    return [(ranks, call) for ranks, call in _folded(calls) if call]


def _folded(calls: Mapping[int, CollectiveCall | None]) -> list[tuple[list[int], CollectiveCall | None]]:
    """Ranks that did the same at the same line stand together."""

    def key(rank: int) -> str:
        call = calls[rank]
        return repr((_must_agree(call), call.site, _state(call)) if call else None)

    sides = [list(ranks) for _, ranks in groupby(sorted(calls, key=lambda rank: (key(rank), rank)), key)]
    return [(ranks, calls[ranks[0]]) for ranks in sorted(sides)]


def _operands(call: CollectiveCall) -> str:
    one = call.operands[0]
    shapes = " ".join("×".join(map(str, shape)) for shape in (one.inputs or one.outputs)[:2])
    several = f" and {len(call.operands) - 1} more" if len(call.operands) > 1 else ""
    ends = f" {one.ends[0]}→{one.ends[1]}" if one.ends else ""
    dtypes = " ".join(one.dtypes[:2])
    return tame(" ".join(filter(None, [f"{one.kind}{ends}", shapes, dtypes])) + several, 60)


def _site(site: CallSite | None) -> str:
    return tame(f"{site.file.rpartition('/')[2]}:{site.line} in {site.function}", 60) if site else ""


def _state(call: CollectiveCall) -> str:
    if call.ended:
        return "ended"
    return "timed out" if call.timed_out else "on the GPU" if call.started else "waits"


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0, 1 and 3`, `ranks 0–6 and 8–511`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    ordered = sorted(ranks)
    if len(ordered) <= _NAMED:
        return f"ranks {listing([str(rank) for rank in ordered])}"
    runs = [list(run) for _, run in groupby(enumerate(ordered), lambda place: place[1] - place[0])]
    ends = [(run[0][1], run[-1][1]) for run in runs]
    named = [str(low) if low == high else f"{low}–{high}" for low, high in ends[:_NAMED]]
    more = len(ordered) - sum(high - low + 1 for low, high in ends[:_NAMED])
    return f"ranks {listing([*named, *([f'{more} more'] if more else [])])}"


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


# For programs


def as_json(verdict: HangVerdict) -> dict[str, Any]:
    return {
        "version": 1,
        "ranks": list(verdict.ranks),
        "without_dump": list(verdict.unknown),
        "circle": verdict.circle,
        "stuck": [
            {
                "sentence": _sentence(one),
                "group": one.group,
                "description": one.title,
                "number": one.number,
                "differ": one.differ,
                "waiting": one.waiting,
                "culprits": one.culprits,
                "held": list(one.held),
                "without_dump": list(one.unknown),
                "calls": {str(rank): _call_json(call) for rank, call in one.calls.items()},
                "last": {str(rank): call and _call_json(call) for rank, call in one.absent.items()},
            }
            for one in verdict.stuck
        ],
    }


def _call_json(call: CollectiveCall) -> dict[str, Any]:
    return {
        "kind": call.operands[0].kind,
        "inputs": [list(shape) for shape in call.operands[0].inputs],
        "outputs": [list(shape) for shape in call.operands[0].outputs],
        "state": _state(call),
        "file": call.site.file if call.site else None,
        "line": call.site.line if call.site else None,
    }
