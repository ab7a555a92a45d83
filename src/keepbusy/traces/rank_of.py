"""Which rank a file is, and whether the files are one run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from keepbusy.timeline.errors import BadInput
from keepbusy.traces.event_columns import Trace
from keepbusy.traces.kineto_names import RANK, WORLD_SIZE

MOST_NAMED = 8
MOST_RANKS = 1 << 30
_IN_NAME = re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE)


def ranks_of(traces: Sequence[Trace]) -> list[int]:
    """By `distributedInfo`, else by the file's name, else by the order given."""
    ranks = [_said(trace) for trace in traces]
    if None in ranks or len(set(ranks)) < len(ranks):
        named = [_named(trace) for trace in traces]
        if None not in named and len(set(named)) == len(named):
            ranks = named
        elif all(rank is None for rank in ranks):
            ranks = list(range(len(traces)))
    known = [rank for rank in ranks if rank is not None]
    if len(known) < len(ranks) or len(set(known)) < len(known):
        raise BadInput(
            f"{traces[0].path} and {traces[-1].path} are not the ranks of one run: {len(traces)} traces name "
            f"{len(set(known))} different ranks; give the traces of one run, each rank's once."
        )
    _refuse_other_runs(traces, known)
    return known


def _distributed(trace: Trace) -> dict[str, object]:
    about = trace.facts.get("distributedInfo")
    return about if isinstance(about, dict) else {}


def _said(trace: Trace) -> int | None:
    rank = _distributed(trace).get(RANK)
    return rank if isinstance(rank, int) and 0 <= rank < MOST_RANKS else None


def _named(trace: Trace) -> int | None:
    found = _IN_NAME.search(Path(trace.path).name)
    return int(found.group(1)) if found and len(found.group(1)) < 10 else None


def world_of(trace: Trace) -> int | None:
    size = _distributed(trace).get(WORLD_SIZE)
    return size if isinstance(size, int) else None


def _refuse_other_runs(traces: Sequence[Trace], ranks: Sequence[int]) -> None:
    """Several files must be all the ranks of one run; one file alone may be any rank of it."""
    if len(traces) == 1:
        return
    sizes = {world_of(trace) for trace in traces}
    if len(sizes) > 1:
        raise BadInput(
            f"{traces[0].path} and the other traces are of runs with {sorted(map(str, sizes))} ranks; "
            "give the traces of one run."
        )
    size = sizes.pop()
    missing = list(islice((rank for rank in range(size or 0) if rank not in ranks), MOST_NAMED + 1))
    if missing:
        named = ", ".join(map(str, missing[:MOST_NAMED])) + (" and more" if len(missing) > MOST_NAMED else "")
        raise BadInput(
            f"{traces[0].path} is of a run with {size} ranks, and the traces of rank {named} "
            "are missing; give them all, or one rank alone."
        )
    start = max(int(trace.events.start.min()) for trace in traces)
    end = min(int(trace.events.end.max()) for trace in traces)
    if start > end and _one_clock(traces):
        raise BadInput(
            f"{traces[0].path} and the other traces do not overlap in time; give the traces that one run's ranks "
            "recorded together."
        )


def _one_clock(traces: Sequence[Trace]) -> bool:
    """Traces of one base time and less than an hour apart; other hosts may have other clocks."""
    starts = [int(trace.events.start.min()) for trace in traces]
    return max(starts) - min(starts) < 3_600 * 10**9
