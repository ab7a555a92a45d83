"""What a timeline tells of loops beside the one whose iterations are explained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from build import Run

from keepbusy.explain import explain
from keepbusy.timeline.model import Timeline
from keepbusy.timeline.run_facts import LOOP, RUN, Part

MS = 1_000_000
ORDINARY = 10_000  # microseconds of the device in a step


def train(run: Run) -> None:
    run.launch(kernel=ORDINARY, at=["train.py(31): main"])


def window(bodies: list[Callable[[Run], None]], first: int, **facts: object) -> Timeline:
    """Steps whose numbers follow `first`, the one that the first mark ends."""
    run = Run.of(1)
    for body in bodies:
        run.step()
        body(run)
    run.step().work(1)
    return run.timeline(device="NVIDIA H200", recorded=tuple(range(first, first + len(bodies) + 1)), **facts)


def test_what_lies_between_two_runs_of_a_loop_is_a_part_of_the_turn_around_it() -> None:
    """A round of an optimizer that turns eight times, and before each round points are drawn by the host, in 60 ms."""

    def draws(run: Run) -> None:
        train(run)
        for _ in range(5):
            run.launch(kernel=1_000, at=["train.py(20): main"])
        run.work(60_000, at=["train.py(20): main", "train.py(7): draw"]).launch(kernel=1_000)

    inner = Part(LOOP, "train.py:30", time=280 * 10 * MS, turns=280, turn=10 * MS, low=10 * MS)
    around = Part(LOOP, "train.py:19", time=35 * 146 * MS, turns=35, turn=146 * MS, low=146 * MS, parts=(inner,))
    run = Part(RUN, time=8_000 * MS, parts=(around,))
    steps = [train, draws, train, train, train]
    told = explain(window(steps, 1, loop="train.py:30", plain_step=10 * MS, run=run, source="train.py"))
    assert told.plain_step == 10 * MS
    assert [(one.place, one.turns) for one in told.loops] == [("train.py:19", 35)]
    [fix] = told.plan
    assert ([str(place) for place in fix.where], fix.loop) == (["train.py:7"], "train.py:19")
    assert fix.run_gain == pytest.approx(35 * 60 * MS, rel=0.1)
