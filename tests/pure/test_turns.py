"""The turns as pages draw them: each gap has the cause whose fix takes it away, and each row its line."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from keepbusy.explain import explain
from keepbusy.explain.diagnosis import CAUSES, Diagnosis, Turns
from keepbusy.explain.step_analysis import idle_before
from keepbusy.timeline.busy_file import load
from keepbusy.timeline.model import NONE, Kind
from keepbusy.timeline.replay import steady

LIVE = Path(__file__).parents[1] / "gpu" / "truth" / "live"


@functools.cache
def drawn(case: str) -> tuple[Diagnosis, Turns]:
    told = explain(load(LIVE / f"{case}.busy"), turns=True)
    assert told.turns is not None
    return told, told.turns


@pytest.mark.parametrize(
    ("case", "cause", "line"), [("item_every_step", "host_sync", 25), ("slow_loader", "input_late", 25)]
)
def test_the_longest_gap_has_the_planted_cause_and_line(case: str, cause: str, line: int) -> None:
    _, turns = drawn(case)
    gaps = idle_before(turns.timeline, steady(turns.timeline))
    row = int(gaps.argmax())
    where = turns.places[turns.place[turns.culprit[row]]]
    assert (CAUSES[turns.cause[row]], Path(where.file).name, where.line) == (cause, f"{case}.py", line)


def test_a_copy_that_should_run_beside_the_compute_says_so() -> None:
    _, turns = drawn("copy_in_line")
    copies = np.flatnonzero(turns.timeline.spans.kind == Kind.COPY)
    assert {CAUSES[one] for one in turns.aside[copies] if one != NONE} == {"copy_not_overlapped"}


def test_collectives_that_do_run_beside_it_are_told_nothing() -> None:
    told, turns = drawn("healthy_ddp")
    assert not told.causes
    assert (turns.aside == NONE).all()


def test_gaps_add_up_to_what_the_gpu_waits_and_only_gaps_have_causes() -> None:
    told, turns = drawn("item_every_step")
    gaps = idle_before(turns.timeline, steady(turns.timeline))
    assert ((turns.cause != NONE) == (gaps > 0)).all()
    assert abs(gaps.sum() * turns.ratio / told.steps - told.waiting) < 0.001 * told.plain_step


def test_rows_of_the_backward_pass_stand_at_a_line_of_the_program() -> None:
    _, turns = drawn("item_every_step")
    timeline = turns.timeline
    backward = next(index for index, lane in enumerate(timeline.lanes) if "autograd" in lane.name)
    rows = timeline.rows_of(backward)
    assert (turns.place[rows] != NONE).mean() > 0.8


def test_nobody_pays_for_turns_that_nobody_draws() -> None:
    assert explain(load(LIVE / "copy_in_line.busy")).turns is None
