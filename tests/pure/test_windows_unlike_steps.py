"""Programs of the seventh set, met live on H200, whose recorded turns are not simply plain steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepbusy.explain import explain
from keepbusy.timeline.busy_file import load

SEVENTH = Path(__file__).parents[1] / "gpu" / "truth" / "seventh"
SECONDS = json.loads((SEVENTH / "seconds.json").read_text(encoding="utf-8"))


def test_a_part_of_a_step_foretells_what_the_whole_run_gained() -> None:
    """A window saw but the beginning of a step, in which pandas prepares a batch; the GPU's share says the rest."""
    said = explain(load(SEVENTH / "shop_demand.busy"))
    came = SECONDS["shop_demand"]["stalled_s"][0] - SECONDS["shop_demand"]["fixed_s"][0]
    assert said.plain_step / 1e6 == pytest.approx(149, rel=0.02)
    assert {place.line for place in said.plan[0].where} >= {38, 39}
    assert sum(one.run_gain for one in said.plan) / 1e9 == pytest.approx(came, rel=0.15)


def test_turns_that_often_wait_for_a_full_queue_take_their_mean() -> None:
    """Of 0.51 ms on the device nothing shows where the host runs ahead: 0.34 ms is what a turn typically takes."""
    said = explain(load(SEVENTH / "salt_dome_migration.busy"))
    [loop] = said.loops
    assert said.plain_step / 1e6 == pytest.approx(0.51, rel=0.02)
    assert loop.diagnosis.plain_step / 1e6 == pytest.approx(0.51, rel=0.02)
    assert said.plain_given
    assert said.steps_of_run > 10_000
