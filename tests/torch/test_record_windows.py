"""When a recorded process opens further windows: never once the program has replayed a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from keepbusy.recording.recorded_run import facts_in
from keepbusy.recording.recorder import STEPS_BEFORE_WINDOW, Run, RunOptions
from keepbusy.recording.window import LONGEST_OPEN, RECORDED_TURNS, SETTLING_TURNS, TRACE, Window
from keepbusy.recording.window_plan import Occasion
from keepbusy.timeline.run_facts import STALL


def stepping(run: Run, due: Callable[[int], Occasion | None], steps: int = 40) -> None:
    """So many steps of a program, in which something is always worth another look."""
    run._plan.due = due  # type: ignore[method-assign]
    for count in range(1, steps + 1):
        run._on_step(count)


def always(count: int) -> Occasion:
    return Occasion(STALL, 0, 3, {"step": count + 3}, count)


@pytest.mark.parametrize("graphs", [False, True])
def test_where_graphs_are_replayed_there_is_one_window(tmp_path: Path, graphs: bool) -> None:
    run = Run(RunOptions(str(tmp_path), after=STEPS_BEFORE_WINDOW))
    run.marks._ends.replayed = graphs
    stepping(run, always, steps=STEPS_BEFORE_WINDOW + SETTLING_TURNS + RECORDED_TURNS + 5)
    assert (run.folder / TRACE).exists()
    assert (run.folder / "2" / TRACE).exists() is not graphs
    run._give_way()
    assert run.notes == []


def test_what_was_known_when_a_window_opened_is_left(tmp_path: Path) -> None:
    run = Run(RunOptions(str(tmp_path), after=STEPS_BEFORE_WINDOW))
    stepping(run, always, steps=STEPS_BEFORE_WINDOW + 1)
    assert run.window.is_open
    assert (facts_in(run.folder)["steps"], facts_in(run.folder)["closed"]) == (STEPS_BEFORE_WINDOW, False)
    run._give_way()


def busy_turn(window: Window, milliseconds: int = 3_000) -> None:
    """A turn in which each line works."""
    until = window.clock() + milliseconds * 1_000_000
    while window.is_open and window.clock() < until:
        torch.ones(8).sum()


@pytest.mark.parametrize("turns", [0, 1])
def test_a_window_within_a_long_turn_closes_where_a_line_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    monkeypatch.setattr("keepbusy.recording.window.LONGEST_OPEN", 10_000_000)
    told: list[int] = []
    window = Window(tmp_path, closed=lambda: told.append(1))
    window.usual, window.longest = 60_000_000, 10_000_000
    window.open(7)
    for turn in range(turns):
        window.step(8 + turn)
    busy_turn(window)
    assert (window.is_open, told) == (False, [1])
    assert (window.is_cut, window.is_part) == (True, turns == 0)
    assert [tick.number for tick in window.ticks] == [7, 8]
    assert (tmp_path / TRACE).exists()


def test_a_turn_that_waits_is_recorded_to_its_end(tmp_path: Path) -> None:
    """Little is to be closed of it."""
    window = Window(tmp_path)
    window.usual, window.longest = 60_000_000, 1_000_000
    window.open(7)
    worked = window._worked = time.thread_time_ns()
    busy_turn(window, 5)
    assert window.is_open
    assert time.thread_time_ns() - worked < LONGEST_OPEN
    window.close()
    assert window.open_for() > 0
