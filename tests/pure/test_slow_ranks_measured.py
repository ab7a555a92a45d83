"""Slow loaders and exchanged objects of several ranks, and a window on another loop, as measured on H200.

Recordings of `benchmarks/stalls/third`. Seconds that the authors' fixes saved are of single pairs of runs, in
stallbench/whole-runs.md.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from told import cause, explained

from keepbusy.explain.diagnosis import Diagnosis
from keepbusy.timeline.busy_file import load

THIRD = Path(__file__).parents[1] / "gpu" / "truth" / "third"


@functools.cache
def told(case: str) -> Diagnosis:
    return explained(load(THIRD / f"{case}.busy"))


def test_a_loader_of_one_rank_is_as_slow_as_the_whole_run_shows_it() -> None:
    said = told("slow_loader_rank1")
    late = cause(said, "input_late")
    assert late.where.line == 46
    assert late.what.startswith("Rank 1 waits")
    assert sum(one.run_gain for one in said.plan) / 1e9 == pytest.approx(2.4, rel=0.15)


def test_objects_that_travel_every_step_are_named() -> None:
    said = told("objects_each_step")
    fix = next(one for one in said.plan if one.fix == "send_tensors")
    assert {place.line for place in fix.where} <= {34, 49}
    gain = said.plain_step - cause(said, "host_sync").predicted.step
    assert 0.03 * said.plain_step < gain < 0.09 * said.plain_step


def test_a_window_on_another_loop_promises_no_more_than_that_loop() -> None:
    """The program times 15 steps before it trains, and these were recorded: 0.7 s came of both of its fixes."""
    said = told("copy_behind_loader")
    assert said.steps_of_run == 15
    assert sum(one.run_gain for one in said.plan) / 1e9 < 0.7
