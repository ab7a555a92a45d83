"""When a recorded process opens further windows: never once the program has replayed a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from keepbusy.recording.recorded_run import TRACE, facts_in
from keepbusy.recording.recorder import STEPS_BEFORE_WINDOW, Run, RunOptions
from keepbusy.recording.window import RECORDED_TURNS, SETTLING_TURNS
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
