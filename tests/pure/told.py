"""Explanations of programs on paper: what every one of them must hold, and how to ask for it in a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from build import US, Run, loop

from keepbusy.causes import LEDGER
from keepbusy.explain import explain
from keepbusy.explain.diagnosis import Cause, Diagnosis, Prediction
from keepbusy.timeline.model import Timeline

H200 = "NVIDIA H200"
TRAIN = "train.py(9): main"


def told(
    body: Callable[[Run], Any],
    what_if: Sequence[str] = (),
    plain_step: int | None = None,
    workers: int = 8,
    steps: int = 8,
    ranks: int = 1,
) -> Diagnosis:
    """A loop explained, everything in it called from one line of one program."""

    def within(run: Run) -> None:
        with run.inside(TRAIN):
            body(run)

    return explained(
        loop(within, steps, ranks, device=H200, pinned_bandwidth=52.0),
        what_if=what_if,
        plain_step=plain_step,
        workers=workers,
    )


def explained(timeline: Timeline, **options: Any) -> Diagnosis:
    diagnosis = explain(timeline, **options)
    assert_sound(diagnosis)
    return diagnosis


def assert_sound(diagnosis: Diagnosis) -> None:
    """What holds of every explanation, whatever was recorded."""
    assert sum(diagnosis.ledger.values()) == diagnosis.plain_step
    assert set(diagnosis.ledger) <= set(LEDGER)
    assert min(diagnosis.ledger.values()) >= 0
    for one in (diagnosis.predicted, *(cause.predicted for cause in diagnosis.causes)):
        assert_possible(one, diagnosis.plain_step)
    gains = [diagnosis.plain_step - one.predicted.step for one in diagnosis.causes]
    assert gains == sorted(gains, reverse=True)
    assert min(gains, default=diagnosis.noise + 1) > diagnosis.noise
    assert not {one.cause for one in diagnosis.harmless} & set(names(diagnosis))
    for one in diagnosis.causes:
        assert one.sites
        assert one.what.endswith(".")
        assert one.count > 0
        assert all(site.wait >= 0 and site.count > 0 for site in one.sites)


def assert_possible(one: Prediction, plain_step: int) -> None:
    assert 0 <= one.low <= one.step <= one.high <= plain_step


def names(diagnosis: Diagnosis) -> list[str]:
    """The causes, the one that gains most first."""
    return [cause.cause for cause in diagnosis.causes]


def cause(diagnosis: Diagnosis, name: str) -> Cause:
    return next(one for one in diagnosis.causes if one.cause == name)


def harmless(diagnosis: Diagnosis) -> list[str]:
    return [one.cause for one in diagnosis.harmless]


def near(microseconds: float, within: float = 0.01) -> Any:
    """So many microseconds, in nanoseconds, but for the gaps between commands."""
    return pytest.approx(microseconds * US, rel=within)
