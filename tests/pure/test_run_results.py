"""What two runs of a program computed, held against one another."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from keepbusy.fix.source.proof import RunResults

TRAINED = RunResults(losses=[2.0, 1.0], weights=[11, 12], outputs=[], last=[4.0])
INFERRED = RunResults(outputs=[5, 6])


def test_what_all_ranks_computed_counts(tmp_path: Path) -> None:
    ranks = [TRAINED, replace(TRAINED, losses=[3.0, 2.5])]
    for rank, computed in enumerate(ranks):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(asdict(computed)), encoding="utf-8")
    both = RunResults.read(tmp_path)
    assert (both.losses, both.weights, both.last) == ([2.0, 1.0, 3.0, 2.5], [11, 12] * 2, [4.0] * 2)


@pytest.mark.parametrize(
    ("own", "changes", "tolerance", "why"),
    [
        (TRAINED, {}, 0.0, ""),
        (TRAINED, {"weights": [11, 13]}, 0.0, "its weights differ from step 2 on"),
        (TRAINED, {"last": [4.5]}, 0.0, "its weights differ at the end"),
        (TRAINED, {"losses": [2.0]}, 0.0, "it called backward() 1 times, the program itself 2 times"),
        (INFERRED, {}, 0.0, ""),
        (INFERRED, {"outputs": [5, 7]}, 0.0, "its outputs differ from number 2 on"),
        (INFERRED, {"outputs": [5]}, 0.0, "its outputs differ from number 2 on"),
        (TRAINED, {"last": [4.0001], "weights": [1, 2]}, 1e-4, ""),
        (TRAINED, {"last": [4.1]}, 1e-4, "its weights differ by up to 2.5%, and may by 0.01%"),
        (TRAINED, {"losses": [2.0, 1.1]}, 1e-4, "its losses differ by up to 10%, and may by 0.01%"),
        (TRAINED, {"losses": [9.0]}, 1e-4, ""),
        (TRAINED, {"last": []}, 1e-4, "its optimizers hold more or fewer weights than the program's own"),
    ],
)
def test_what_differs_is_named(own: RunResults, changes: dict[str, list[float]], tolerance: float, why: str) -> None:
    """In a graph few losses are seen: then the weights alone are compared."""
    assert own.same(replace(own, **changes), tolerance) == why  # type: ignore[arg-type]


def test_how_far_two_runs_are_apart_is_told_as_shares_the_furthest_first() -> None:
    other = replace(TRAINED, losses=[2.0, 1.1], last=[4.5])
    assert TRAINED.distances(other) == {"losses": pytest.approx([0.1, 0.0]), "weights": pytest.approx([0.125])}
    assert not TRAINED.same(other, 0.125)
    assert TRAINED.distances(replace(other, losses=[9.0]))["losses"] == []  # in a graph
    assert TRAINED.same(replace(TRAINED, last=[float("nan")]), 0.125)


def test_a_program_that_computes_nothing_proves_nothing() -> None:
    assert "there is nothing to compare" in RunResults().same(RunResults(), 0.0)
