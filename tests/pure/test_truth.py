"""A few of the traces whose truth was measured on H200: the right cause, and what fixing it really gave.

All of them: `python benchmarks/accuracy.py`. Here stand the ones that are read in a moment, one or two a cause.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from told import assert_sound, names

from keepbusy.explain import explain
from keepbusy.explain.diagnosis import Diagnosis
from keepbusy.timeline.busy_file import load
from keepbusy.timeline.model import Timeline
from keepbusy.timeline.replay import replay
from keepbusy.traces import read

HERE = Path(__file__).parents[2]
OURS, STALLBENCH = HERE / "tests" / "gpu" / "truth", HERE.parent / "shared" / "stallbench" / "truth"
PLANTED = json.loads((HERE / "benchmarks" / "stalls" / "planted.json").read_text())
CASES: dict[Path, list[str]] = {
    OURS / case: PLANTED[Path(case).name]
    for case in (
        "with_stack/bucket_empty_cache",
        "with_stack/diffusion_timed",
        "with_stack/evaluate_masks",
        "with_stack/few_workers",
        "with_stack/flat_all_reduce",
        "with_stack/gc_every_step",
        "with_stack/graph_unique",
        "with_stack/healthy_resnet",
        "with_stack/long_sequences_rank",
        "with_stack/print_big_model",
        "with_stack/side_stream_waits_at_once",
        "with_stack/unpinned_nonblocking",
        "without_stack/recommender_copies",
    )
} | {
    STALLBENCH / "with_stack/healthy": [],
    STALLBENCH / "with_stack/made_on_host": ["made_on_host", "blocking_copy"],
    STALLBENCH / "with_stack/pageable_copy": ["blocking_copy"],
    STALLBENCH / "with_stack/slow_loader": ["input_late"],
    STALLBENCH / "without_stack/launch_bound": ["launch_bound"],
}
SWEPT = {
    OURS / "with_stack/diffusion_timed",
    OURS / "with_stack/print_big_model",
    OURS / "with_stack/side_stream_waits_at_once",
    OURS / "without_stack/recommender_copies",
    *(STALLBENCH / f"with_stack/{name}" for name in ("healthy", "made_on_host", "pageable_copy", "slow_loader")),
}
"""Whose causes others have, too."""
IDS = {f"{path.parent.name}/{path.name}": path for path in CASES if path.with_suffix(".json").exists()}
SWEEP = pytest.mark.sweep(room="explain")
each = pytest.mark.parametrize(
    "path", [pytest.param(path, id=case, marks=SWEEP if path in SWEPT else ()) for case, path in IDS.items()]
)

EVERYWHERE = ("launch_bound", "host_work")
"""A program that is healthy may have a little of these all the same; they accuse no line."""


@functools.cache
def timeline_of(path: Path) -> Timeline:
    saved = path.with_suffix(".stalled.busy")
    return load(saved) if saved.exists() else read(sorted(path.parent.glob(f"{path.name}.stalled.rank*.trace.json.gz")))


def truth_of(path: Path) -> dict[str, Any]:
    return json.loads(path.with_suffix(".json").read_text())


@functools.cache
def told(path: Path) -> Diagnosis:
    """With the planted causes as what is fixed, which is nothing to the causes that are found."""
    plain_step = round(truth_of(path)["stalled_ms"] * 1e6)
    return explain(timeline_of(path), plain_step=plain_step, what_if=CASES[path])


@each
def test_an_unchanged_replay_of_a_real_run_is_the_identity(path: Path) -> None:
    timeline = timeline_of(path)
    again = replay(timeline)
    np.testing.assert_array_equal(again.spans.start, timeline.spans.start)
    np.testing.assert_array_equal(again.spans.end, timeline.spans.end)


@each
def test_the_planted_cause_is_named_and_nothing_else_accused(path: Path) -> None:
    """At least half of what fixing it gained is foretold of one planted cause; where nothing was gained, silence."""
    truth, planted, found = truth_of(path), CASES[path], told(path)
    assert_sound(found)
    steps = {one.cause: one.predicted.step / 1e6 for one in found.causes}
    if planted:
        best = min(steps.get(cause, truth["stalled_ms"]) for cause in planted)
        assert truth["stalled_ms"] - best >= 0.5 * (truth["stalled_ms"] - truth["fixed_ms"]), names(found)
    accused = [cause for cause, step in steps.items() if step < 0.9 * truth["stalled_ms"]]
    assert set(accused) <= {*planted, *EVERYWHERE}


@each
def test_what_fixing_the_planted_causes_gives(path: Path) -> None:
    """Within 12% of the stalled step."""
    truth, planted = truth_of(path), CASES[path]
    if planted:
        found = told(path)
        assert found.predicted.step / 1e6 == pytest.approx(truth["fixed_ms"], abs=0.12 * truth["stalled_ms"])
