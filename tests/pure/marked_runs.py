"""Runs of marks on paper: steps in milliseconds, and what is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from keepbusy.recording.turn_times import StepLooks, Steps, plain_run
from keepbusy.timeline.model import NONE
from keepbusy.timeline.run_facts import PlainRun

MS = 1_000_000
MAIN, LOOP = "train.py(90): <module>", "train.py(31): main"
IN_LOOP = (MAIN, LOOP)


def steps(
    milliseconds: Sequence[float] | np.ndarray,
    plain: Sequence[bool] | None = None,
    waited: Mapping[int, float] | None = None,
    collector: Mapping[int, float] | None = None,
    lead: float | None = None,
    host: Sequence[float] | None = None,
) -> Steps:
    """A step for each of these; pauses by the step they fall into. `host`: what it takes there, where that differs."""
    took = (np.asarray(milliseconds, float) * MS).astype(np.int64)
    marks = np.arange(1, len(took) + 1)
    return Steps(
        mark=marks,
        took=took,
        plain=np.ones(len(took), bool) if plain is None else np.asarray(plain, bool),
        input=_pauses(len(took), waited),
        collector=_pauses(len(took), collector),
        lead=np.full(len(took), NONE if lead is None else round(lead * MS)),
        host=(on_host := took if host is None else (np.asarray(host, float) * MS).astype(np.int64)),
        ended=np.cumsum(on_host),
    )


def looks(steps: Steps, seen: Mapping[int, tuple[str, ...]] | None, every: int = 2 * MS) -> StepLooks:
    """At the loop's own line, but in the steps where the program was seen elsewhere."""
    chains = list(dict.fromkeys([IN_LOOP, *(seen or {}).values()]))
    rows = np.repeat(np.arange(len(steps)), np.maximum(1, steps.host // every))
    first = np.searchsorted(rows, rows)
    times = (steps.ended - steps.host)[rows] + 1 + (np.arange(len(rows)) - first) * every
    chain = np.array([chains.index((seen or {}).get(row, IN_LOOP)) for row in range(len(steps))], np.int64)
    return StepLooks(times, np.full(len(rows), every), chain[rows], chains, [""] * len(chains))


def _pauses(count: int, given: Mapping[int, float] | None) -> np.ndarray:
    column = np.zeros(count, np.int64)
    for step, time in (given or {}).items():
        column[step] = round(time * MS)
    return column


def run(
    steps: Steps,
    saves: Mapping[int, float] | None = None,
    seen: Mapping[int, tuple[str, ...]] | None = None,
    delayed: float = 0.0,
) -> PlainRun:
    """`saves` and `seen`: by step, as `steps` counts them."""
    return plain_run(
        steps,
        "optimizer",
        saves={step + 1: round(time * MS) for step, time in (saves or {}).items()},
        looks=looks(steps, seen) if len(steps) else None,
        delayed=delayed,
    )
