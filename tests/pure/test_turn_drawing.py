"""Iterations in characters: rows are as long as the drawing, and idle times bear the numbers that are explained."""

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
STREAMS = Path(__file__).parents[1] / "snapshots" / "streams"


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


@pytest.mark.parametrize("case", ["slow_loader", "late_rank"])
def test_the_gpu_is_busy_or_idle_for_a_reason_in_every_cell(case: str) -> None:
    """Also where the drawing begins or ends while the GPU is idle."""
    rows = [row[MARGIN:] for row in render(told(case), 116).splitlines() if "GPU" in row[:MARGIN]]
    assert len(rows) == len(told(case).given)
    assert [row for row in rows if "  " in row or len(row) != 116 - MARGIN] == []


def test_what_waits_for_a_late_rank_is_no_wire() -> None:
    drawn = render(told("late_rank"), 96)
    first, late, *_ = [row[MARGIN:] for row in drawn.splitlines() if row.strip()[1:].startswith(": GPU")]
    assert first.count("1") >= late.count("1")
    assert "▒" not in first
    assert re.search(r"^1  2\d\.\d ms per iteration  late peer at .*late_rank\.py:15$", drawn, re.MULTILINE)


@pytest.mark.parametrize("width", [40, 80, 110])
def test_no_row_is_wider_than_the_screen(width: int) -> None:
    rows = render(told("item_every_step"), width, unicode=False)
    assert rows.isascii()
    assert max(map(len, rows.splitlines()[2:7])) <= width


def test_what_holds_no_turns_is_not_drawn() -> None:
    assert render(explain(load(LIVE / "copy_in_line.busy")), 100) == ""


def test_a_copy_beside_a_product_looks_as_in_a_textbook(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host runs ahead and its iterations are short: those of the GPU are drawn, with a row for each stream."""
    monkeypatch.chdir(STREAMS)  # where the program is, whose lines the boxes bear
    drawn = render(explain(load(STREAMS / "two_streams.busy"), turns=True), MARGIN + 84)
    assert drawn.startswith("Two iterations, 6.5 ms\n")
    compute, copies = lane(drawn, "stream 7 (compute)"), lane(drawn, "stream 8 (copies)")
    assert compute.count("[21 result = batch @ weights") == 2
    assert "─" not in compute
    assert re.fullmatch(r"(\[10 on_g[^\]]*\]─*)+", copies)
    assert (len(compute), len(copies)) == (84, 84)


def test_a_loader_that_copies_ahead_copies_beside_each_product() -> None:
    drawn = render(explain(load(LIVE.parent / "prefetched.busy"), turns=True), 116)
    copies = lane(drawn, "stream 13 (copies)")
    assert re.fullmatch(r"(\[[^\]]+\]▓?─+)+", copies)
    assert copies.count("[") == 3
