"""Programs recorded live on H200: what their reports say, and what fixing them really gained in the same job.

All of them: `python benchmarks/record_stallbench.py score --out tests/gpu/truth/live --planted …`.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from keepbusy.explain import explain
from keepbusy.explain.diagnosis import Diagnosis
from keepbusy.timeline.busy_file import load

LIVE = Path(__file__).parents[1] / "gpu" / "truth" / "live"
LOGS = LIVE.with_name("logged")
LINES = {
    "copy_in_line": ("copy_not_overlapped", 25),
    "late_rank": ("peer_late", 15),
    "made_on_host": ("made_on_host", 12),
    "pageable_copy": ("blocking_copy", 27),
    "read_then_prepare": ("host_sync", 26),
    "slow_loader": ("input_late", 25),
}
"""Of each case the planted cause, and the line where it was planted."""
WITHIN = 0.15


@functools.cache
def told(case: str) -> Diagnosis:
    return explain(load(LIVE / f"{case}.busy"))


@pytest.mark.parametrize("case", LINES)
def test_the_planted_cause_is_named_at_its_exact_line(case: str) -> None:
    cause, line = LINES[case]
    named = {one.cause: one for one in told(case).causes}
    place = named[cause].sites[0].where
    assert (Path(place.file).name, place.line, place.exact) == (f"{case}.py", line, True)


@pytest.mark.parametrize("case", ["copy_in_line", "late_rank", "pageable_copy", "read_then_prepare", "slow_loader"])
def test_the_predicted_step_is_what_the_fixed_program_takes(case: str) -> None:
    truth, said = json.loads((LIVE / f"{case}.json").read_text()), told(case)
    predicted = next(one.predicted.step for one in said.causes if one.cause == LINES[case][0]) / 1e6
    assert abs(predicted - truth["fixed_ms"]) < WITHIN * truth["stalled_ms"]


LOGGED = {
    "evaluate_masks": ("blocking_copy", 21),
    "few_workers": ("input_late", 25),
    "graph_unique": ("host_sync", 37),
    "made_on_host": ("made_on_host", 12),
    "mask_index": ("host_sync", 18),
}
"""Recorded whole: 40 iterations each. In another job, the fixed program was timed (`record_stallbench.py`)."""


@pytest.mark.parametrize("case", LOGGED)
def test_the_first_fix_of_a_logged_run_is_the_one_that_was_measured(case: str) -> None:
    truth, first = json.loads((LOGS / f"{case}.json").read_text()), explain(load(LOGS / f"{case}.busy")).plan[0]
    assert (first.causes[0], first.where[0].line) == LOGGED[case]
    assert abs(first.predicted.step / 1e6 - truth["fixed_ms"]) < WITHIN * truth["stalled_ms"]


def test_a_healthy_program_is_left_alone() -> None:
    said = told("healthy")
    assert said.causes == ()
    assert any(note.startswith("Recorded were steps 10 to 14 of 30") for note in said.notes)


def test_a_host_that_was_recorded_slowly_is_not_blamed_where_marks_saw_it_ahead() -> None:
    """Four ranks; the window made the hosts slower than the devices, and marks had seen one alone at 17 ms of 28."""
    said = explain(load(LIVE.parent / "host_alone.busy"))
    assert [one.cause for one in said.causes] == ["exposed_collective"]
    assert said.causes[0].sites[0].where.line == 19
    assert said.ledger["launch_bound"] < 0.05 * said.plain_step
