"""What stands beside the events of a trace: which rank of which run it is, and on which device it ran."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keepbusy.timeline.files import BadInput
from keepbusy.timeline.model import LARGEST_RANK
from keepbusy.timeline.run_facts import RunFacts
from keepbusy.traces.event_columns import Trace
from keepbusy.traces.kineto_names import CAPABILITY, RANK, WORLD_SIZE

ONE_CLOCK = 3_600 * 10**9
"""Traces that begin further apart than an hour are of hosts with clocks of their own."""
LINKS = ((9, 52.0), (8, 24.0), (1, 12.0))
"""From which compute capability on a link carries so many bytes a nanosecond: PCIe 5 as measured on an H200, 4 and 3
by their share."""
_IN_NAME = re.compile(r"rank[-_.]?(\d{1,9})(?!\d)", re.IGNORECASE)


def ranks_of(traces: Sequence[Trace]) -> list[int]:
    """By `distributedInfo`, else by the file's name, else by the order given; refused if they are not of one run."""
    ranks = _ranks_told(traces)
    known = [rank for rank in ranks if rank is not None]
    if len(known) < len(ranks) or len(set(known)) < len(known):
        raise BadInput(
            f"{traces[0].path} and {traces[-1].path} are not the ranks of one run: {len(traces)} traces name "
            f"{len(set(known))} different ranks; give the traces of one run, each rank's once."
        )
    if len(traces) > 1:  # one file alone may be any rank of any run
        _refuse_other_runs(traces)
    return known


def _ranks_told(traces: Sequence[Trace]) -> list[int | None]:
    stated = [_stated_rank(trace) for trace in traces]
    if None not in stated and len(set(stated)) == len(stated):
        return stated
    found = [_IN_NAME.search(Path(trace.path).name) for trace in traces]
    named = [int(one[1]) if one else None for one in found]
    if None not in named and len(set(named)) == len(named):
        return named
    return list(range(len(traces))) if set(stated) == {None} else stated


def _stated_rank(trace: Trace) -> int | None:
    rank = _object(trace.facts.get("distributedInfo")).get(RANK)
    return rank if isinstance(rank, int) and 0 <= rank < LARGEST_RANK else None


def _object(fact: object) -> dict[str, Any]:
    return fact if isinstance(fact, dict) else {}


def world_size(trace: Trace) -> int | None:
    """How many ranks the run has, of which some may not be given."""
    size = _object(trace.facts.get("distributedInfo")).get(WORLD_SIZE)
    return size if isinstance(size, int) and 0 < size <= LARGEST_RANK else None


def _device(trace: Trace) -> dict[str, Any]:
    devices = trace.facts.get("deviceProperties")
    return _object(devices[0]) if isinstance(devices, list) and devices else {}


def devices_of_host(trace: Trace) -> int:
    """How many its program saw."""
    devices = trace.facts.get("deviceProperties")
    return len(devices) if isinstance(devices, list) else 0


def facts_of(trace: Trace, groups: Mapping[int, int]) -> RunFacts:
    """What it tells of the run that it is of. `groups`: how many ranks belong to each."""
    capability = _device(trace).get(CAPABILITY)
    known = capability if isinstance(capability, int) else 0
    return RunFacts(
        device=str(_device(trace).get("name", "")),
        pinned_bandwidth=next((bandwidth for since, bandwidth in LINKS if known >= since), None),
        stacks=bool(trace.facts.get("with_stack")),
        source=trace.path,
        skipped=trace.skipped,
        world=world_size(trace),
        groups=groups,
    )


def _refuse_other_runs(traces: Sequence[Trace]) -> None:
    sizes = {world_size(trace) for trace in traces}
    if len(sizes) > 1:
        raise BadInput(
            f"{traces[0].path} and the other traces are of runs with {sorted(map(str, sizes))} ranks; "
            "give the traces of one run."
        )
    starts = [int(trace.events.start.min()) for trace in traces]
    ends = [int(trace.events.end.max()) for trace in traces]
    if max(starts) > min(ends) and max(starts) - min(starts) < ONE_CLOCK:
        raise BadInput(
            f"{traces[0].path} and the other traces do not overlap in time; give the traces that one run's ranks "
            "recorded together."
        )
