"""Who waits in which collective, and who keeps them waiting: in sentences and as JSON.

Each group's calls are numbered, which tells the ranks in a call from those that never came. Only the first stuck call
of a group counts: later ones wait for it. A rank that never came may itself wait in a call of another group, so the
rank to look at is the one that waits for nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby, islice
from typing import Any, TypeAlias

from keepbusy.hang.flight_recorder import CallSite, CollectiveCall, CollectiveLog, Operand
from keepbusy.report.labels import tame
from keepbusy.timeline.figures import listing

_UNEVEN = ("all_to_all", "all_to_all_single", "all_to_all_v_single", "alltoall", "alltoall_base")
"""In these each rank may send and receive other sizes."""


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
    waiting_elsewhere: tuple[int, ...] = ()  # absent ranks that wait in a call of another group

    @property
    def waiting(self) -> list[int]:
        return [rank for rank, call in self.calls.items() if not call.ended]

    @property
    def culprits(self) -> list[int]:
        """Absent ranks that wait for nobody."""
        return [rank for rank in self.absent if rank not in self.waiting_elsewhere]

    @property
    def kind(self) -> str:
        """The operation that most ranks called."""
        return Counter(call.operands[0].kind for call in self.calls.values()).most_common(1)[0][0]

    @property
    def reason(self) -> int:
        """The first that applies, most certain first: ranks disagree, ranks never came, ranks are unknown, no visible
        cause, and last that absent ranks wait in another call."""
        return (self.differ, bool(self.culprits), bool(self.unknown), not self.absent, True).index(True)


_WAITS_ELSEWHERE = 4
"""The last reason: absent ranks wait in another call."""


@dataclass(frozen=True)
class HangVerdict:
    """What all dumps together say."""

    ranks: tuple[int, ...]
    unknown: tuple[int, ...]  # members of groups without a dump
    stuck: tuple[StuckCall, ...]  # what everything else waits for comes first
    newest: Mapping[int, CollectiveCall]  # the last call of each rank, in whatever group
    has_lines: bool
    circle: bool  # ranks wait for each other in different groups


def explain_hang(logs: Sequence[CollectiveLog]) -> HangVerdict:
    job = _Job(logs)
    named = {rank for log in logs for members in log.groups.values() for rank in members}
    stuck = [*job.collectives(), *job.messages()]
    waiting = {rank for call in stuck for rank in call.waiting}
    stuck = [replace(call, waiting_elsewhere=tuple(rank for rank in call.absent if rank in waiting)) for call in stuck]
    return HangVerdict(
        tuple(job.logs),
        tuple(sorted(named - set(job.logs))),
        tuple(sorted(stuck, key=_order)),
        {log.rank: log.calls[-1] for log in logs if log.calls},
        any(call.site for log in logs for call in log.calls),
        bool(stuck) and all(call.reason == _WAITS_ELSEWHERE for call in stuck),
    )


def _order(stuck: StuckCall) -> tuple[int, bool, int]:
    """By reason; for the same reason first the calls that keep no rank from another call, then by time."""
    return stuck.reason, bool(stuck.waiting_elsewhere), min((call.begun for call in stuck.calls.values()), default=0)


class _Job:
    """The calls of all ranks, by group and number."""

    def __init__(self, logs: Sequence[CollectiveLog]) -> None:
        self.logs = {log.rank: log for log in logs}
        self._messages = cache(lambda rank, group: _Messages(self.logs[rank], group))

    @cached_property
    def groups(self) -> dict[tuple[str, tuple[int, ...]], dict[int, dict[int, CollectiveCall]]]:
        """The calls of each group, by rank and number. Two groups of different ranks may have the same name."""
        groups: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, CollectiveCall]]] = {}
        for rank, log in self.logs.items():
            of_rank: dict[str, dict[int, CollectiveCall]] = {}
            for call in log.calls:
                if not call.is_message:
                    of_rank.setdefault(call.group, {})[call.number] = call
            for group, calls in of_rank.items():
                groups.setdefault((group, log.groups.get(group, ())), {})[rank] = calls
        return groups

    def _title(self, group: str) -> str:
        return next((log.titles[group] for log in self.logs.values() if group in log.titles), "")

    def _members(self, group: str, members: tuple[int, ...]) -> tuple[int, ...]:
        """If the dump does not say, all ranks for the default group, else the ranks that called the group."""
        if members:
            return members
        return tuple(sorted(self.logs if self._title(group) == "default_pg" else self.groups[group, members]))

    def collectives(self) -> Iterator[StuckCall]:
        for (group, members), calls in self.groups.items():
            everyone = dict.fromkeys(self._members(group, members))
            begin = max(min(numbers) for numbers in calls.values())  # earlier calls are missing on some ranks
            numbers = sorted({number for of_rank in calls.values() for number in of_rank if number >= begin})
            stuck = (self._stuck(group, number, everyone, calls) for number in numbers)
            yield from islice(filter(None, stuck), 1)

    def _stuck(
        self, group: str, number: int, members: Mapping[int, None], calls: Mapping[int, Mapping[int, CollectiveCall]]
    ) -> StuckCall | None:
        """None if the call is well: it ended on all ranks that recorded it, and they agree."""
        present = {rank: numbers[number] for rank, numbers in calls.items() if number in numbers and rank in members}
        pending = not all(call.ended for call in present.values())
        differ = len({tuple(operand.kind for operand in call.operands) for call in present.values()}) > 1
        if pending and not differ:  # while a rank still waits, sizes and types must agree, too
            differ = len({_must_agree(call) for call in present.values()}) > 1
        if not pending and not differ:
            return None
        unknown = tuple(rank for rank in members if rank not in self.logs)
        missing = [rank for rank in members if rank in self.logs and rank not in present]
        absent = {rank: _last(calls.get(rank, {}), number) for rank in missing}
        return StuckCall(group, self._title(group), number, present, absent, unknown, differ)

    def messages(self) -> Iterator[StuckCall]:
        """The first send or receive of each rank that did not end."""
        for rank, log in self.logs.items():
            pending = next((call for call in log.calls if call.is_message and not call.ended), None)
            if pending is not None:
                members = sorted(self._members(pending.group, log.groups.get(pending.group, ())))
                parts = (part for part in pending.operands if part.ends)
                stuck = (self._message(rank, pending, part, members) for part in parts)
                yield from islice(filter(None, stuck), 1)

    def _message(self, rank: int, call: CollectiveCall, part: Operand, members: Sequence[int]) -> StuckCall | None:
        """None if the other end takes part with the same size: then this waits for the network or another message."""
        sender, receiver = part.ends or (0, 0)
        index = receiver if part.kind == "send" else sender
        peer = members[index] if index < len(members) else index  # ends count the members of the group
        if peer not in self.logs:
            return self._stuck_message({rank: call}, part, {}, (peer,))
        messages, peer_messages = self._messages(rank, call.group), self._messages(peer, call.group)
        other, end = peer_messages.pending.get(_other_end(part), (None, part))
        if other is not None:
            calls = {rank: call, peer: other}
            differ = part.kind == "send" and _size(part) != _size(end)
            return self._stuck_message(calls, part, {}) if differ else None
        complete = all(min((each.number for each in side.calls), default=2) <= 1 for side in (messages, peer_messages))
        if complete and peer_messages.counts[_other_end(part)] >= messages.counts[part.ends, part.kind]:
            return None  # it has arrived, so this call waits for another of its parts
        return self._stuck_message({rank: call}, part, {peer: peer_messages.calls[-1] if peer_messages.calls else None})

    def _stuck_message(
        self,
        calls: dict[int, CollectiveCall],
        part: Operand,
        absent: Mapping[int, CollectiveCall | None],
        unknown: tuple[int, ...] = (),
    ) -> StuckCall:
        """The first of these calls is stuck, and waits in `part`. A second one disagrees with it."""
        rank, call = next(iter(calls.items()))
        calls[rank] = replace(call, operands=(part, *(operand for operand in call.operands if operand is not part)))
        return StuckCall(call.group, self._title(call.group), call.number, calls, absent, unknown, len(calls) > 1)


_MessageEnd: TypeAlias = tuple[tuple[int, int] | None, str]
"""The two ranks of a message, and which end this is: `send` or `recv`."""


class _Messages:
    """The messages of one rank in one group."""

    def __init__(self, log: CollectiveLog, group: str) -> None:
        self.calls = [call for call in log.calls if call.is_message and call.group == group]
        self.counts = Counter[_MessageEnd]()
        self.pending: dict[_MessageEnd, tuple[CollectiveCall, Operand]] = {}
        """The first message of each end that has not ended."""
        for call in self.calls:
            for operand in call.operands:
                self.counts[operand.ends, operand.kind] += 1
                if not call.ended:
                    self.pending.setdefault((operand.ends, operand.kind), (call, operand))


def _other_end(part: Operand) -> _MessageEnd:
    return part.ends, "recv" if part.kind == "send" else "send"


def _size(message: Operand) -> tuple[tuple[int, ...], ...]:
    return message.inputs if message.kind == "send" else message.outputs


def _last(calls: Mapping[int, CollectiveCall], before: int) -> CollectiveCall | None:
    earlier = [number for number in calls if number < before]
    return calls[max(earlier)] if earlier else None


def _must_agree(call: CollectiveCall) -> tuple[object, ...]:
    """What must be the same on all ranks, for each operand."""
    agreed = list[tuple[object, ...]]()
    for operand in call.operands:
        if operand.kind in _UNEVEN or operand.kind.endswith("_v"):
            agreed.append((operand.kind, operand.dtypes))
            continue
        inputs = operand.inputs if operand.kind != "scatter" else ()
        outputs = operand.outputs if operand.kind != "gather" else ()
        dtypes = operand.dtypes if operand.kind not in ("scatter", "gather", "broadcast") else ()
        agreed.append((operand.kind, inputs, outputs, dtypes))
    return tuple(agreed)


# The verdict in sentences

_NAMED = 8
"""So many ranks are named one by one; runs of more are folded."""


def hang_report(verdict: HangVerdict) -> Iterator[str]:
    ranks = len(verdict.ranks)
    yield f"keepbusy explain · what {ranks} {'rank' if ranks == 1 else 'ranks'} wrote down of their collectives\n\n"
    if not verdict.stuck:
        yield "Nothing hangs in these dumps: every call that a rank began has ended on it.\n"
    if verdict.circle:
        yield "Ranks wait for each other in calls of different groups, in a circle: none of them can go on.\n\n"
    for number, stuck in enumerate(verdict.stuck):
        if number == 1:
            yield "\nWaiting besides, for the same or another reason:\n\n"
        yield f"{_sentence(stuck)}\n\n"
        yield from _table(stuck)
        if number == 0:
            yield f"\nlook    {_remedy(stuck, verdict)}\n"
    if verdict.unknown:
        yield f"note    There is no dump of {_ranks(verdict.unknown)}.\n"
    if verdict.stuck and not verdict.has_lines:
        yield "note    These dumps hold no lines: JSON never does; the pickle does unless stacks were left out.\n"


def _sentence(stuck: StuckCall) -> str:
    numbered = f"{'message' if _is_message(stuck) else 'call'} {stuck.number} of {_group(stuck)}"
    where = f"{stuck.kind}, {numbered}"
    waiting = f"{_ranks(stuck.waiting)} {'waits' if len(stuck.waiting) == 1 else 'wait'}"
    if stuck.differ:
        sides = sorted(_alike(stuck.calls), key=lambda side: len(side[0]))  # the odd ones are probably the fewest
        parts = listing([f"{_operands(call)} on {_ranks(ranks)}" for ranks, call in sides])
        return f"Ranks disagree in {numbered}: {parts}."
    if stuck.culprits and _is_message(stuck):
        does = "sent" if stuck.kind == "recv" else "received"
        return f"{_capital(_ranks(stuck.culprits))} never {does} {numbered}; {waiting} for it."
    if stuck.culprits:
        return f"{_capital(_ranks(stuck.culprits))} never came to {where}; {waiting} there."
    if stuck.unknown:
        return f"{_capital(waiting)} in {where}; of {_ranks(stuck.unknown)} nobody knows."
    if stuck.waiting_elsewhere:
        does = "waits in another call itself" if len(stuck.waiting_elsewhere) == 1 else "wait in other calls themselves"
        return f"{_capital(waiting)} in {where}, for {_ranks(stuck.waiting_elsewhere)}, which {does}."
    if len(stuck.calls) == 1:
        return f"{_capital(waiting)} in {where}, where no other rank is to come."
    return f"All {len(stuck.calls)} ranks are in {where}, alike, and it has not ended on {_ranks(stuck.waiting)}."


def _is_message(stuck: StuckCall) -> bool:
    return any(call.is_message for call in stuck.calls.values())


def _group(stuck: StuckCall) -> str:
    """The group's description, such as `default_pg`, or its name if it has none."""
    return tame(stuck.title if stuck.title not in ("", "undefined") else f"group {stuck.group}", 40)


def _remedy(stuck: StuckCall, verdict: HangVerdict) -> str:
    if stuck.differ:
        return "why these ranks took different ways: a condition on the rank, on data, or batches of different number"
    if stuck.culprits:
        rank = stuck.culprits[0]
        last = verdict.newest.get(rank)
        after = f"after {_site(last.site)}" if last and last.site else "from its start on"
        return f"what rank {rank} does {after}: its own log, or `py-spy dump` while it hangs"
    if stuck.unknown:
        return f"whether {_ranks(stuck.unknown)} died: its log, its host, `dmesg`; then whether it could write its dump"
    if verdict.circle:
        return "the order in which these lines use their groups: it must be the same on all ranks"
    return "the network and the GPUs: `nvidia-smi -q`, NCCL_DEBUG=INFO, and `keepbusy doctor --ranks` once it is free"


# The table of who does what


def _table(stuck: StuckCall) -> Iterator[str]:
    rows = [(_ranks(ranks), _operands(call), _site(call.site), _state(call)) for ranks, call in _alike(stuck.calls)]
    for ranks, call in _folded(stuck.absent):
        name = f"last was {_operands(call)}" if call else "no call of this group"
        rows.append((_ranks(ranks), name, _site(call.site) if call else "", _state(call) if call else ""))
    widths = [max(len(row[place]) for row in rows) for place in range(3)]
    for row in rows:
        cells = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False))
        yield f"  {cells}  {row[3]}".rstrip() + "\n"


def _alike(calls: Mapping[int, CollectiveCall]) -> list[tuple[list[int], CollectiveCall]]:
    return [(ranks, call) for ranks, call in _folded(calls) if call]


def _folded(calls: Mapping[int, CollectiveCall | None]) -> list[tuple[list[int], CollectiveCall | None]]:
    """Ranks that did the same at the same line, together."""

    def key(rank: int) -> str:
        call = calls[rank]
        return repr((_must_agree(call), call.site, _state(call)) if call else None)

    sides = [list(ranks) for _, ranks in groupby(sorted(calls, key=lambda rank: (key(rank), rank)), key)]
    return [(ranks, calls[ranks[0]]) for ranks in sorted(sides)]


def _operands(call: CollectiveCall) -> str:
    operand = call.operands[0]
    shapes = " ".join("×".join(map(str, shape)) for shape in (operand.inputs or operand.outputs)[:2])
    several = f" and {len(call.operands) - 1} more" if len(call.operands) > 1 else ""
    ends = f" {operand.ends[0]}→{operand.ends[1]}" if operand.ends else ""
    dtypes = " ".join(operand.dtypes[:2])
    return tame(" ".join(filter(None, [f"{operand.kind}{ends}", shapes, dtypes])) + several, 60)


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
                "sentence": _sentence(stuck),
                "group": stuck.group,
                "description": stuck.title,
                "number": stuck.number,
                "differ": stuck.differ,
                "waiting": stuck.waiting,
                "culprits": stuck.culprits,
                "held": list(stuck.waiting_elsewhere),
                "without_dump": list(stuck.unknown),
                "calls": {str(rank): _call_json(call) for rank, call in stuck.calls.items()},
                "last": {str(rank): call and _call_json(call) for rank, call in stuck.absent.items()},
            }
            for stuck in verdict.stuck
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
