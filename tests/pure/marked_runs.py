"""Runs of marks on paper: steps in milliseconds, and what is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from keepbusy.recording.plain_steps import plain_run
from keepbusy.recording.step_clock import Steps
from keepbusy.recording.watch import Seen
from keepbusy.timeline.model import NONE
from keepbusy.timeline.plain_run import PlainRun

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
        host=took if host is None else (np.asarray(host, float) * MS).astype(np.int64),
    )


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
        seen={step + 1: Seen(lines) for step, lines in (seen or {}).items()},
        loop=IN_LOOP,
        delayed=delayed,
    )
