"""`keepbusy.accumulate`: groups and their scales; between ranks, what travels when, counted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from warm_python import warm

from keepbusy.runtime.accumulate import accumulate

torch = pytest.importorskip("torch")
DEFERRED = {"c10d.allreduce_", "c10d._reduce_scatter_base_"}
"""What carries gradients; weights are gathered by other means."""


def groups(batches: Any, count: int) -> list[tuple[Any, float, bool]]:
    return [tuple(one) for one in accumulate(torch.nn.Linear(1, 1), batches, count=count)]


def test_batches_come_in_groups_that_each_weigh_one() -> None:
    assert groups([10, 11, 12, 13], 2) == [(10, 0.5, False), (11, 0.5, True), (12, 0.5, False), (13, 0.5, True)]


def test_a_last_group_that_is_short_weighs_one_too() -> None:
    found = groups(range(5), 3)
    assert [one[1] for one in found] == [1 / 3, 1 / 3, 1 / 3, 0.5, 0.5]
    assert [one[2] for one in found] == [False, False, True, False, True]


@pytest.mark.parametrize("number", range(8))
def test_without_a_length_the_last_batch_ends_its_group(number: int) -> None:
    found = groups(iter(range(number)), 3)
    assert [one[0] for one in found] == [*range(number)]
    assert [one[2] for one in found] == [place % 3 == 2 or place == number - 1 for place in range(number)]
    assert {one[1] for one in found} <= {1 / 3}


class Promises:
    """An iterable whose length is not true."""

    def __init__(self, length: int, number: int) -> None:
        self.length, self.number = length, number

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return iter(range(self.number))


@pytest.mark.parametrize(("promised", "given"), [(6, 4), (3, 5)])
def test_a_length_that_is_not_true_is_told_before_gradients_are_lost(promised: int, given: int) -> None:
    with pytest.raises(RuntimeError, match=rf"len\(batches\) = {promised} and got {given}"):
        groups(Promises(promised, given), 3)


def test_a_plain_module_trains_as_with_the_whole_batch() -> None:
    def trained(batches: list[Any], count: int) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for micro in accumulate(model, batches, count=count):
            (model(micro.batch).square().mean() * micro.scale).backward()
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()
        return model.weight.flatten().tolist()

    whole = [torch.randn(8, 3, dtype=torch.double, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    micro = [part for batch in whole for part in batch.chunk(4)]
    assert trained(micro, 4) == pytest.approx(trained(whole, 1), rel=1e-12)


def test_a_step_inside_a_group_is_refused_on_one_rank_too() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = accumulate(model, torch.ones(4, 2, 3), count=2)
    model(next(loop).batch).sum().backward()
    with pytest.raises(RuntimeError, match="not the last of its group"):
        optimizer.step()


def test_an_optimizer_of_another_model_may_step() -> None:
    model, other = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1, bias=False)
    optimizer, steps = torch.optim.SGD(other.parameters(), lr=0.1), [other.weight.tolist()]
    for micro in accumulate(model, torch.ones(4, 2, 3), count=2):
        (model(micro.batch) + other(micro.batch)).sum().backward()
        optimizer.step()
        steps.append(other.weight.tolist())
    assert len({str(one) for one in steps}) == 1 + 4


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (object(), {"count": 2}, "accumulate got a object for its model"),
        (torch.nn.Linear(1, 1), {"count": 0}, "accumulate got count=0"),
        (torch.nn.Linear(1, 1), {"count": 2, "keep_sharded": True}, "a model without HSDP"),
    ],
)
def test_what_it_cannot_do_is_said_at_the_call(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        accumulate(model, [], **options)


@pytest.fixture(scope="module")
def ranks() -> dict[str, Any]:
    """What two ranks over gloo found: `accumulate_ranks.py`."""
    finished = warm().python(
        "accumulate_ranks.py", cwd=Path(__file__).parent, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, ranks=2
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout)


def gradients_sent(counts: list[dict[str, int]]) -> list[int]:
    return [sum(number for name, number in one.items() if name in DEFERRED) for one in counts]


@pytest.mark.parametrize(
    "name",
    [
        "ddp",
        "ddp with unused parameters",
        "fsdp",
        "fsdp, kept whole",
        "hsdp of replicas",
        "hsdp of shards",
        "held in another module",
    ],
)
def test_gradients_travel_with_the_last_of_four_alone(ranks: dict[str, Any], name: str) -> None:
    sent = gradients_sent(ranks[name]["counts"])
    assert [number > 0 for number in sent] == [False, False, False, True] * 2


def test_a_short_last_group_sends_too(ranks: dict[str, Any]) -> None:
    sent = gradients_sent(ranks["ddp, short last group"]["counts"])
    assert [number > 0 for number in sent] == [False, False, False, True, False, True]


def test_a_static_graph_sends_once_more_at_its_very_first_batch(ranks: dict[str, Any]) -> None:
    sent = gradients_sent(ranks["ddp of a static graph"]["counts"])
    assert [number > 0 for number in sent] == [True, False, False, True, False, False, False, True]


def test_kept_sharded_only_the_reduction_between_replicas_waits(ranks: dict[str, Any]) -> None:
    counts = ranks["hsdp of shards, kept sharded"]["counts"]
    assert all(one["c10d._reduce_scatter_base_"] == 2 for one in counts)
    assert ["c10d.allreduce_" in one for one in counts] == [False, False, False, True] * 2


def test_weights_that_stay_whole_are_gathered_once_a_group(ranks: dict[str, Any]) -> None:
    counts = ranks["fsdp, kept whole"]["counts"]
    assert [one.get("c10d._allgather_base_", 0) > 0 for one in counts[1:3]] == [False, False]


def test_the_weights_are_those_of_the_loop_that_sends_every_time(ranks: dict[str, Any]) -> None:
    for name, found in ranks.items():
        if "naive" in found:
            ours, naive = (
                torch.cat([torch.tensor(one).flatten() for one in found[key]]) for key in ("weights", "naive")
            )
            torch.testing.assert_close(ours, naive, rtol=1e-5, atol=1e-7, msg=name)


def test_the_model_is_left_as_it_was(ranks: dict[str, Any]) -> None:
    assert ranks["leaves early"] == {"ddp": [True, True], "fsdp": True}


def test_a_compiled_model_defers_too(ranks: dict[str, Any]) -> None:
    """The buckets are made anew once, which is a broadcast and no gradient."""
    assert [bool(one) for one in ranks["compiled"]["counts"][8:]] == [False, False, False, True] * 2


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("calls_the_inner_module", "call it, and not its `.module`"),
        ("passes_the_inner_module", "give it the DistributedDataParallel itself"),
        ("runs_forward_before", "inside the loop and at every micro-batch"),
        ("steps_each_time", "step under `if micro.last:`"),
        ("turns_sync_on_again", "leave both to accumulate"),
        ("turns_sharded_sync_on_again", "leave it to accumulate"),
        ("makes_the_optimizer_first", "it was made before the model was wrapped: make it afterwards"),
        ("forgets_backward", "call the model and its backward pass inside the loop"),
    ],
)
def test_what_went_wrong_is_said(ranks: dict[str, Any], what: str, message: str) -> None:
    assert ranks["errors"][what].startswith("NotDeferred: ")
    assert message in ranks["errors"][what]


def test_what_cannot_be_kept_sharded_is_said(ranks: dict[str, Any]) -> None:
    assert "keep_sharded=True for a model on one mesh dimension" in ranks["errors"]["keeps_sharded_what_is_not"]
