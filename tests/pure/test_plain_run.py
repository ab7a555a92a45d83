"""The plain run as a fact of a timeline: through a file and back."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from build import loop
from hypothesis import given
from hypothesis import strategies as st
from marked_runs import run, steps

from keepbusy.instrument.slow_turns import quantile
from keepbusy.timeline.busy_file import from_bytes, to_bytes
from keepbusy.timeline.model import Timeline
from keepbusy.timeline.run_facts import PlainRun

TOOK = np.tile([10.0] * 24 + [90.0], 40)
RUN = run(steps(TOOK, lead=2.5), seen=dict.fromkeys(range(24, 1000, 25), ("a.py(1): f",)))


def test_it_goes_through_json() -> None:
    assert PlainRun.of_fact(json.loads(json.dumps(asdict(RUN)))) == RUN


def test_it_goes_through_a_file() -> None:
    def body(run: object) -> None:
        run.launch(5)  # type: ignore[attr-defined]

    timeline: Timeline = loop(body, 3)
    kept = timeline.change_facts(plain_runs={0: RUN})
    assert from_bytes(to_bytes(kept)).facts.plain_runs == {0: RUN}


def test_what_a_later_version_adds_is_passed_over() -> None:
    fact = asdict(RUN) | {"moon": "full"}
    fact["stalls"] = [one | {"tide": 3} for one in fact["stalls"]]
    assert PlainRun.of_fact(fact) == RUN


@pytest.mark.parametrize("fact", [None, {}, {"steps": 3}, {"stalls": 3}, {"course": [1]}, 7, "seven"])
def test_what_is_no_plain_run_is_none(fact: object) -> None:
    assert PlainRun.of_fact(fact) is None


def test_the_course_has_few_rows_and_keeps_the_longest() -> None:
    long = run(steps(np.tile(TOOK, 100)))
    assert len(long.course.step) == len(long.course.longest) == len(long.course.lead) <= 512
    assert max(long.course.longest) == 90_000_000
    assert len(long.course.ended) == len(long.course.step)
    assert np.diff(long.course.ended).min() > 0
    assert set(long.course.step) == {10_000_000}


def test_the_lead_is_told_with_the_share_that_has_none() -> None:
    assert RUN.lead == 2_500_000
    assert RUN.no_lead == 0
    assert run(steps(TOOK, lead=0.02)).no_lead == 1
    assert run(steps(TOOK)).lead == -1


def test_what_the_host_takes_alone_is_seen_where_its_queue_fills() -> None:
    """Steps of 10 ms on the device, one in 25 with a sync, after which the host is quick until its queue is full."""
    host = np.tile([10.0, 4.0, 4.2, 9.0] + [10.0] * 21, 40)
    took = np.full(1000, 10.0)
    assert run(steps(took, lead=20, host=host)).host == pytest.approx(4_100_000)
    assert run(steps(took, lead=2, host=host)).host == -1  # this host may well set the pace now and then
    assert run(steps(took, lead=20)).host == -1


@given(st.lists(st.integers(0, 1 << 50), min_size=1), st.floats(0, 1))
def test_quantiles_are_numpys(took: list[int], share: float) -> None:
    assert quantile(np.array(took), share) == pytest.approx(np.quantile(took, share))
    rows = np.array([took, took[::-1]], np.float64)
    assert quantile(rows, share) == pytest.approx(np.quantile(rows, share, axis=1))
