"""Where the nanoseconds of a step go: a steady run laid on a circle as long as its round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from build import MB, WIRE, Run, loop
from hypothesis import given
from hypothesis import strategies as st

from keepbusy.explain.step_analysis import StepParts, busy, covered
from keepbusy.timeline.replay import steady
from keepbusy.timeline.steps import whole_steps

intervals = st.lists(st.tuples(st.integers(-50, 300), st.integers(0, 120)), max_size=8)


@given(intervals, st.integers(1, 90))
def test_what_intervals_cover_on_a_circle(drawn: list[tuple[int, int]], around: int) -> None:
    """Counted instant by instant."""
    start = np.array([begin for begin, _ in drawn], np.int64)
    end = start + np.array([length for _, length in drawn], np.int64)
    inside = {instant % around for begin, length in drawn for instant in range(begin, begin + min(length, around))}
    assert covered(start, end, around) == pytest.approx(len(inside))


def test_a_circle_of_no_length_holds_nothing() -> None:
    assert covered(np.array([5]), np.array([9]), 0.0) == 0.0


def spent(body: Callable[[Run], Any], ranks: int = 1) -> StepParts:
    """In microseconds."""
    timeline = whole_steps(loop(body, ranks=ranks))
    return busy(timeline, steady(timeline)).scaled(1e-3)


def test_computing_comes_before_copying_and_copying_before_the_wire() -> None:
    """1 ms of kernels, beside them 0.6 ms of a copy and then 0.4 ms of it alone, and 0.3 ms of a collective alone."""

    def body(run: Run) -> None:
        run.sync(None).copy(16 * MB, 1_000, pinned=True, blocking=False, stream=9)
        run.work(394).launch(1_000, host=5)
        run.order(7, WIRE).collective(300, 16 * MB)

    step = spent(body)
    assert step.computing == pytest.approx(1_000, abs=2)
    assert step.copying == pytest.approx(400, abs=5)
    assert step.wire == pytest.approx(300, abs=5)
    assert step.waiting == pytest.approx(step.step - 1_700, abs=10)


def test_kernels_of_two_streams_at_once_count_once() -> None:
    step = spent(lambda run: run.sync(None).launch(1_000).launch(1_000, stream=8))
    assert step.computing == pytest.approx(1_005, abs=3)


def test_ranks_count_in_equal_parts() -> None:
    """1 ms on one and 3 ms on the other, which then meet."""

    def body(run: Run) -> None:
        for rank, time in ((0, 1_000), (1, 3_000)):
            run.on(rank).launch(time).order(7, WIRE)
        run.collective(100)
        for rank in run.ranks:
            run.on(rank).order(WIRE, 7)

    step = spent(body, ranks=2)
    assert step.step == pytest.approx(3_100, rel=0.01)
    assert step.computing == pytest.approx(2_000, rel=0.01)
    assert step.wire == pytest.approx(100, rel=0.05)
