"""One turn in characters: its lanes are as long as the drawing, and its gaps bear the numbers that are explained."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from keepbusy.explain import explain
from keepbusy.explain.diagnosis import Diagnosis
from keepbusy.report.turn_drawing import MARGIN, render
from keepbusy.timeline.busy_file import load

LIVE = Path(__file__).parents[1] / "gpu" / "truth" / "live"


@functools.cache
def told(case: str) -> Diagnosis:
    return explain(load(LIVE / f"{case}.busy"), turns=True)


def lane(drawn: str, name: str) -> str:
    return next(row for row in drawn.splitlines() if row.strip().startswith(name))[MARGIN:]


def test_the_gpu_waits_in_as_many_cells_as_it_waits_of_the_turn() -> None:
    said = told("item_every_step")
    drawn = render(said, 116)
    gpu = lane(drawn, "GPU")
    assert gpu.count("1") / 100 == pytest.approx(said.ledger["host_sync"] / said.plain_step, abs=0.03)
    assert re.search(r"^1  4\.\d ms  host sync at .*item_every_step\.py:25$", drawn, re.MULTILINE)


def test_a_line_stands_where_it_holds_the_program() -> None:
    drawn = render(told("item_every_step"), 116)
    lines, python = lane(drawn, "your lines"), lane(drawn, "Python")
    assert lines.startswith("25 ")
    assert python.startswith("~~~~")
    assert re.findall(r"\d+", lines)[1:3] == ["8", "9"]


def test_what_waits_for_a_late_rank_is_no_wire() -> None:
    drawn = render(told("late_rank"), 96)
    first, late, *_ = [row[MARGIN:] for row in drawn.splitlines() if row.strip().startswith("GPU")]
    assert first.count("1") > late.count("1")
    assert "▒" not in first
    assert re.search(r"^1  2\d\.\d ms  late peer at .*late_rank\.py:15$", drawn, re.MULTILINE)


@pytest.mark.parametrize("width", [40, 80, 110])
def test_no_row_is_wider_than_the_screen(width: int) -> None:
    rows = render(told("item_every_step"), width, unicode=False)
    assert rows.isascii()
    assert max(map(len, rows.splitlines()[2:7])) <= width


def test_what_holds_no_turns_is_not_drawn() -> None:
    assert render(explain(load(LIVE / "copy_in_line.busy")), 100) == ""
