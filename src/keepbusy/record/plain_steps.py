"""From marks to the plain run: what a step usually takes, what comes only now and then, and how the run went."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from keepbusy.record.allocations import Reading
from keepbusy.record.marked import Steps
from keepbusy.record.rare_stalls import rare_stalls
from keepbusy.record.usual import mean, stalled, warm_up
from keepbusy.record.watch import Seen
from keepbusy.timeline.model import NONE, Ints
from keepbusy.timeline.plain_run import Course, PlainRun, RareStall

NO_LEAD = 100_000
"""Below this the host has no lead: a mark takes some microseconds to reach the device, and clocks align no better."""
ROWS = 512
"""Of the course of a run."""
AHEAD, FREE = 0.5, 0.25
"""A host that is usually half a step ahead does not set the pace. In a step in which it gains a quarter of it on the
device nothing holds it up: that is how the queue fills, at first and after each sync."""


def plain_run(
    steps: Steps,
    marked_by: str,
    saves: Mapping[int, int] | None = None,
    seen: Mapping[int, Seen] | None = None,
    loop: tuple[str, ...] = (),
    readings: Sequence[Reading] = (),
    delayed: float = 0.0,
    fault: str = "",
) -> PlainRun:
    """`saves`: what checkpoints took, `seen`: where overdue steps stood, by mark; `loop`: the lines where steps end."""
    plain = steps.take(steps.plain)
    begun = warm_up(plain.took)
    rest = plain.take(np.arange(len(plain)) >= begun)
    rare, usual = stalled(rest.took)
    ordinary = rest.take(~rare)
    low, high = np.percentile(ordinary.took, [10, 90]) if len(ordinary) else (0, 0)
    lead = ordinary.lead[ordinary.lead != NONE]
    steady = [one for one in readings if len(rest) and one.mark >= rest.mark[0]]
    stalls = rare_stalls(rest, rare, usual, saves or {}, seen or {}, loop)
    return PlainRun(
        marked_by=marked_by,
        steps=len(rest),
        step=mean(ordinary.took),
        low=round(low),
        high=round(high),
        warm_up=begun,
        warm_up_time=int(plain.took[:begun].sum()),
        host=_host_alone(ordinary),
        lead=_median(lead),
        no_lead=float((lead < NO_LEAD).mean()) if len(lead) else 0.0,
        input=mean(ordinary.input),
        collector=mean(ordinary.collector),
        requests=_a_step(steady, lambda one: one.requests),
        retries=steady[-1].retries - steady[0].retries if steady else 0,
        delayed=delayed,
        stalls=tuple(one for one in stalls if _is_its_own(one, delayed)),
        course=_course(plain),
        fault=fault,
    )


def _host_alone(steps: Steps) -> int:
    known = steps.lead != NONE
    if not known.any() or np.median(steps.lead[known]) < AHEAD * np.median(steps.took):
        return NONE
    return _median(steps.host[steps.host < (1 - FREE) * steps.took])


def _is_its_own(stall: RareStall, delayed: float) -> bool:
    """The program's. What has no rhythm and no reason may as well be the processor that others took."""
    return bool(stall.what) or stall.regular or stall.share > delayed


def plain_step(steps: Steps) -> int | None:
    """What a stopwatch over many plain steps shows, the warm-up and rare stalls left out; None if there are too few."""
    run = plain_run(steps, "")
    return run.step if run.steps >= 3 else None


def _a_step(readings: Sequence[Reading], counted: Callable[[Reading], int]) -> float:
    if len(readings) < 2:
        return 0.0
    first, last = readings[0], readings[-1]
    return (counted(last) - counted(first)) / max(1, last.mark - first.mark)


def _course(steps: Steps) -> Course:
    each = max(1, -(-len(steps) // ROWS))
    parts = [np.arange(first, min(first + each, len(steps))) for first in range(0, len(steps), each)]
    return Course(
        each=each,
        step=tuple(_median(steps.took[part]) for part in parts),
        longest=tuple(int(steps.took[part].max()) for part in parts),
        lead=tuple(_median(steps.lead[part][steps.lead[part] != NONE]) for part in parts),
    )


def _median(values: Ints) -> int:
    return round(float(np.median(values))) if len(values) else NONE
