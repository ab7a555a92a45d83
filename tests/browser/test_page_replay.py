"""The replay in the page is ours: span by span, to the nanosecond, on recordings of real GPUs; a sweep takes all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keepbusy.causes import findings
from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.explain.diagnosis import Diagnosis, PlannedFix, Prediction, Turns
from keepbusy.explain.step_analysis import busy
from keepbusy.report.page import render
from keepbusy.timeline.busy_file import load
from keepbusy.timeline.edit import Edit, apply
from keepbusy.timeline.files import BadInput
from keepbusy.timeline.model import NONE, Timeline
from keepbusy.timeline.replay import Replayed, run, steady
from keepbusy.timeline.steps import as_one_step, whole_steps

TRUTH = Path(__file__).parents[1] / "gpu" / "truth"
RECORDINGS = sorted(TRUTH.rglob("*.busy"))
OF_EACH_KIND = {
    *("logged/made_on_host", "logged/evaluate_masks", "fourth/healthy_graph_decoding", "live/slow_loader"),
    *("with_stack/bucket_empty_cache.stalled", "sixth/lidar_sorted", "seventh/shop_demand"),
}
"""Small ones: between them they have every kind of row, link, wait and edit, one rank and several."""
SWEEPS = [pytest.mark.sweep(room="report"), pytest.mark.sweep(room="timeline")]
MANY = 5_000
NEVER, NEVER_IN_THE_PAGE = -(1 << 62), -(1 << 52)
REPLAYED = """(everything) => {
    const fixes = everything ? keepbusy.choice.moment.fixes.map((_, fix) => fix) : [];
    return JSON.stringify(keepbusy.replayed(fixes)); // one text: numbers one by one take longer than the replay
}"""


def whole_of(path: Path) -> Timeline:
    """Whole turns; of large recordings the first two, for every row is compared."""
    timeline = load(path)
    try:
        whole = whole_steps(timeline)
    except BadInput:
        return as_one_step(timeline)
    return first_two(whole) if len(whole) > MANY else whole


def first_two(whole: Timeline) -> Timeline:
    kept, row, rank = np.zeros(len(whole), bool), np.arange(len(whole)), whole.rank_of_rows
    for one in whole.ranks:
        third = whole.marks_of(one)[2:3].tolist()
        kept |= (rank == one) & (row < (third[0] if third else len(whole)))
    marks = np.sort(np.concatenate([whole.marks_of(one)[:2] for one in whole.ranks]))
    return whole.change(marks=marks).keep(kept)


def page_of(timeline: Timeline, edits: list[Edit]) -> str:
    none, nowhere = Prediction(0, 0, 0), np.full(len(timeline), NONE)
    plan = tuple(PlannedFix(str(number), (), (), 0, none, 0, edit=edit) for number, edit in enumerate(edits))
    return render(
        Diagnosis(
            plain_step=1,
            plain_given=True,
            traced_step=1,
            steps=1,
            ledger={"computing": 1},
            causes=(),
            harmless=(),
            predicted=none,
            noise=0,
            plan=plan,
            turns=Turns(timeline, 1.0, (), *[nowhere] * 6),
        )
    )


def expected(timeline: Timeline, edits: list[Edit]) -> tuple[Timeline, np.ndarray, Replayed]:
    """Every row has its times here; `steady` joins those that nothing waits for."""
    together = Edit.nothing(timeline)
    for edit in edits:
        together = together | edit
    changed = apply(timeline, together)
    return changed, np.flatnonzero(~together.drop), steady(changed)


def times(values: list[float], origin: int) -> np.ndarray:
    """On our clock: a page counts from its first span. What never was is as far away for both."""
    told = np.array(values, np.int64)
    return np.where(told < NEVER_IN_THE_PAGE // 2, told - NEVER_IN_THE_PAGE + NEVER, told + origin)


def assert_same(said: dict[str, Any], timeline: Timeline, edits: list[Edit]) -> None:
    changed, rows, paced = expected(timeline, edits)
    done = run(changed, 1 if timeline.facts.one_turn else paced.passes)
    assert said["row"] == rows.tolist()
    origin = int(timeline.spans.start.min())
    np.testing.assert_array_equal(times(said["start"], origin), done.start)
    np.testing.assert_array_equal(times(said["end"], origin), done.end)
    assert said["pace"] == paced.pace
    spent = busy(changed, replace(done, lasted=paced.lasted))
    shares = [said["busy"][name] for name in ("computing", "copying", "wire")]
    np.testing.assert_allclose(shares, [spent.computing, spent.copying, spent.wire], atol=2)


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if name_of(path) in OF_EACH_KIND else SWEEPS, id=name_of(path))
        for path in RECORDINGS
    ],
)
def test_the_page_replays_a_recording_as_it_is_and_with_everything_fixed(path: Path, opened: Any) -> None:
    timeline = whole_of(path)
    edits = [finding.edit for finding in findings(CauseInputs(timeline)).values()]
    page = opened(page_of(timeline, edits), width=320, height=240)
    assert_same(json.loads(page.evaluate(REPLAYED, False)), timeline, [])
    assert_same(json.loads(page.evaluate(REPLAYED, True)), timeline, edits)
