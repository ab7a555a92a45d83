"""No plan promises what the program does not have to gain: recordings of the fourth set, made live on H200."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from keepbusy.explain import explain
from keepbusy.explain.diagnosis import Diagnosis
from keepbusy.timeline.busy_file import load

FOURTH = Path(__file__).parents[1] / "gpu" / "truth" / "fourth"
SECONDS = json.loads((FOURTH / "seconds.json").read_text(encoding="utf-8"))


@functools.cache
def told(case: str) -> Diagnosis:
    return explain(load(FOURTH / f"{case}.busy"))


def saved(case: str) -> float:
    """Seconds that the author's fix saved the run."""
    row = SECONDS[case]
    return sum(row["stalled_s"]) / len(row["stalled_s"]) - sum(row["fixed_s"]) / len(row["fixed_s"])


def test_a_loader_that_the_run_never_waited_for_is_not_blamed() -> None:
    """Its batches were taken late in the window, since recording made the loop slow."""
    case = "graph_pooling"
    assert "input_late" not in {one.cause for one in told(case).causes}
    assert told(case).causes[0].sites[0].where.line == 62


def test_workers_do_not_make_a_turn_shorter_than_what_the_gpu_computes_in_it() -> None:
    """The loader is one rank's; the other has more to compute."""
    said = told("both_late")
    [workers] = [one for one in said.plan if one.fix.startswith("num_workers=")]
    assert workers.predicted.step >= said.ledger["computing"]
    assert sum(one.run_gain for one in said.plan) / 1e9 == pytest.approx(saved("both_late"), rel=0.2)


@pytest.mark.parametrize("case", ["healthy_evaluation", "healthy_graph_decoding", "healthy_sharded_text"])
def test_where_nothing_is_wrong_nothing_is_planned(case: str) -> None:
    """Of FSDP: work taken from one rank alone promised a gain, which giving it to the other takes back."""
    assert told(case).plan == ()
    assert told(case).causes == ()
