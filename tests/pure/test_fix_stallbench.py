"""The table of what fixes reach, of times as a GPU gave them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from fix_stallbench import line, outcome


def case(**times: list[float]) -> dict[str, Any]:
    told = {"case": "ema_loops", "same": True, "left_to_author": "", "trial_gain": None, "left_alone": False}
    return {**told, **outcome(times), "seconds": 14.0, "done": {"foreach": 37}}


def test_the_share_is_of_what_the_author_gained() -> None:
    """Of the quickest runs of each kind: what is slow once is seldom the program."""
    found = case(plain=[24.0, 22.9], live=[18.0, 18.5], author=[14.9, 15.6])
    assert found["gain"] == pytest.approx(0.349, abs=0.001)
    assert found["share"] == pytest.approx(0.6125)
    assert found["noise"] == pytest.approx(0.048, abs=0.001)
    assert " ".join(line(found).split()) == "ema_loops 22.90 18.00 14.90 5% 35% 61% True - 14 foreach:37"


def test_where_the_author_gained_nothing_there_is_no_share() -> None:
    found = case(plain=[12.6, 11.6], live=[16.0, 12.3], author=[13.0, 12.2])
    assert found["share"] is None
    assert "left alone" in line(found)
