"""The verdict on a job that hangs, in sentences and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from keepbusy.hang.collective_log import CallSite, CollectiveCall
from keepbusy.hang.waiting_ranks import HangVerdict, StuckCall, signature
from keepbusy.report.words import listing, tame

NAMED = 8
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
        return repr((signature(call), call.site, _state(call)) if call else None)

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
    if len(ordered) <= NAMED:
        return f"ranks {listing([str(rank) for rank in ordered])}"
    runs = [list(run) for _, run in groupby(enumerate(ordered), lambda place: place[1] - place[0])]
    ends = [(run[0][1], run[-1][1]) for run in runs]
    named = [str(low) if low == high else f"{low}–{high}" for low, high in ends[:NAMED]]
    more = len(ordered) - sum(high - low + 1 for low, high in ends[:NAMED])
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
        "stuck": [_stuck_json(one) for one in verdict.stuck],
    }


def _stuck_json(one: StuckCall) -> dict[str, Any]:
    return {
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


def _call_json(call: CollectiveCall) -> dict[str, Any]:
    return {
        "kind": call.kind,
        "inputs": [list(shape) for shape in call.operands[0].inputs],
        "outputs": [list(shape) for shape in call.operands[0].outputs],
        "state": _state(call),
        "file": call.site.file if call.site else None,
        "line": call.site.line if call.site else None,
    }
