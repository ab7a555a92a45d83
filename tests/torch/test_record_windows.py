"""When a recorded process opens further windows: never once the program has replayed a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from keepbusy.recording.occasions import Occasion
from keepbusy.recording.recorded_run import TRACE, facts_in
from keepbusy.recording.recorder import STEPS_BEFORE_WINDOW, Options, Run
from keepbusy.recording.window import RECORDED, SETTLING
from keepbusy.timeline.run_facts import STALL


def stepping(run: Run, due: Callable[[int], Occasion | None], steps: int = 40) -> None:
    """So many steps of a program, in which something is always worth another look."""
    run._occasions.due = due  # type: ignore[method-assign]
    for count in range(1, steps + 1):
        run._on_step(count)


def always(count: int) -> Occasion:
    return Occasion(STALL, count, 3, {"step": count + 3})


@pytest.mark.parametrize("graphs", [False, True])
def test_where_graphs_are_replayed_there_is_one_window(tmp_path: Path, graphs: bool) -> None:
    run = Run(Options(str(tmp_path), after=STEPS_BEFORE_WINDOW))
    run.marks._ends.replayed = graphs
    stepping(run, always, steps=STEPS_BEFORE_WINDOW + SETTLING + RECORDED + 5)
    assert (run.folder / TRACE).exists()
    assert (run.folder / "2" / TRACE).exists() is not graphs
    assert run.notes == []


def test_what_was_known_when_a_window_opened_is_left(tmp_path: Path) -> None:
    run = Run(Options(str(tmp_path), after=STEPS_BEFORE_WINDOW))
    stepping(run, always, steps=STEPS_BEFORE_WINDOW + 1)
    assert run.window.is_open
    assert (facts_in(run.folder)["steps"], facts_in(run.folder)["closed"]) == (STEPS_BEFORE_WINDOW, False)
    run._give_way()
