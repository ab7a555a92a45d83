"""What `keepbusy plan` makes of its trials: which layout is best, and what the others lose by."""

from __future__ import annotations

import pytest

from keepbusy.cli.plan import LayoutPlan, SpreadLayout, Trial, _layouts, _parsed
from keepbusy.timeline.files import BadInput

MS, GB = 1_000_000, 10**9


def trial(layout: SpreadLayout, step: int, computing: int, exposed: int, held: int, batches: int = 1) -> Trial:
    ledger = {"computing": computing * MS, "collective": exposed * MS - MS, "exposed_collective": MS}
    return Trial(layout, step * MS, ledger, held * GB, held * GB, batches)


SHARDS = trial(SpreadLayout(3, 1), 130, 100, 20, 60)
COPIES = trial(SpreadLayout(0, 1), 110, 100, 5, 150)
PARTS = trial(SpreadLayout(2, 4), 160, 100, 45, 40)


def plan(*trials: Trial, price: float | None = None) -> LayoutPlan:
    return LayoutPlan(trials, 140 * GB, price, 64)


def test_the_fastest_that_fits_comes_first_and_what_does_not_fit_last() -> None:
    found = plan(PARTS, COPIES, SHARDS)
    assert [one.layout for one in found.ordered] == [SpreadLayout(3, 1), SpreadLayout(2, 4), SpreadLayout(0, 1)]
    told = "".join(found.table())
    assert "keepbusy.spread(model, optimizer, loader, shard=3, example=batch)" in told
    assert "23% slower: more communication" in told
    assert "does not fit: 10 GB too much" in told


def test_of_batches_that_each_rank_brings_the_pace_counts_and_not_the_step() -> None:
    """Sixteen groups of four ranks take 16 batches in 160 ms, 64 ranks 64 in 130."""
    many = trial(SpreadLayout(3, 1), 130, 100, 20, 60, batches=64)
    few = trial(SpreadLayout(2, 4), 100, 80, 10, 40, batches=16)
    found = plan(few, many)
    assert found.ordered[0] is many
    assert "batches/s" in "".join(found.table())
    assert found.as_json()["layouts"][0]["batches_per_second"] == pytest.approx(64 / 0.130)


def test_what_a_million_batches_cost() -> None:
    """64 GPUs at 3 dollars an hour, 130 ms a batch."""
    [one] = plan(SHARDS, price=3.0).as_json()["layouts"]
    assert one["cost"] == pytest.approx(64 * 3 * 0.130 * 1e6 / 3600)


def test_where_nothing_fits_that_is_said() -> None:
    told = "".join(plan(COPIES).table())
    assert "None fits into 140 GB" in told
    assert "keepbusy.spread(" not in told


def test_parts_of_a_layer_stay_within_a_host() -> None:
    tried = list(_layouts(64, 8))
    assert {one.tensor for one in tried} == {1, 2, 4, 8}
    assert len(tried) == len(set(tried)) == 4 + 3 * 3
    assert SpreadLayout(1, 2) not in tried
    of_two = [(0, 1), (1, 1), (2, 1), (3, 1), (0, 2)]
    assert list(_layouts(2, 8)) == [SpreadLayout(*one) for one in of_two]
    assert {one.tensor for one in _layouts(12, 8)} == {1, 2, 4}


@pytest.mark.parametrize(
    "text", ["shard=4", "shard=3+tensor=3", "tensor=2", "shard=3+tensor=0", "", "shard=0+tensor=" + "9" * 5_000]
)
def test_a_layout_that_is_none_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(BadInput, match="is no layout of 8 GPUs; give shard=0 to 3"):
        list(_parsed(text, 8))
