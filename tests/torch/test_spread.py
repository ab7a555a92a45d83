"""`keepbusy.spread`: each layout trains what one process trains, and each way to be silently wrong is told."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_python import Run, warm

import keepbusy

Found = dict[str, Any]


SWEEP = pytest.mark.sweep(room="runtime")
QUICK = (
    *("packed", "packed layers", "states from before", "sequences", "dropout", "dropout of ranks that share layers"),
    *("ResNet", "scaler", "loader", "tied over blocks", "read by another", "unused", "kept whole", "errors"),
)
SWEPT = ("GPT", "encoder", "accumulate", "norms of the optimizer", "without an example", "transformers", "timm")
"""In all layouts what the quick ones train in some, and what takes long."""


def found_by(ranks: int, *names: str) -> Found:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    finished = warm().python("spread_ranks.py", *names, cwd=Path(__file__).parent, env=environment, ranks=ranks)
    assert finished.returncode == 0, finished.stderr[-5000:]
    return json.loads(finished.stdout) | {"told": finished.stderr}


@pytest.fixture(scope="module")
def two() -> Found:
    """What two ranks over gloo found: `spread_ranks.py`."""
    return found_by(2, *QUICK)


@pytest.fixture(scope="module")
def more() -> Found:
    """What two ranks found in addition."""
    return found_by(2, *SWEPT)


@pytest.fixture(scope="module")
def four() -> Found:
    """Two parts of the batch times two parts of each layer."""
    return found_by(4)


def assert_like_one_process(found: Found, layouts: int, tolerance: float = 1e-5) -> None:
    right = found["one process"]
    assert len(found) == layouts + 1
    for name, losses in found.items():
        assert losses == pytest.approx(right, rel=tolerance), name


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("ResNet", 4),
        ("tied over blocks", 1),
        ("read by another", 1),
    ],
)
def test_two_ranks_have_the_losses_of_one_process(two: Found, name: str, layouts: int) -> None:
    assert_like_one_process(two[name], layouts)


@SWEEP
@pytest.mark.parametrize(
    ("name", "layouts"), [("encoder", 5), ("without an example", 4), ("norms of the optimizer", 3)]
)
def test_so_they_have_as_an_encoder_without_an_example_and_with_an_optimizer_of_norms(
    more: Found, name: str, layouts: int
) -> None:
    assert_like_one_process(more[name], layouts)


@SWEEP
@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_a_public_model_trains_as_it_comes(more: Found, library: str) -> None:
    if missing := more[library].get("missing"):
        pytest.skip(f"{missing} is not installed")
    assert_like_one_process(more[library], 2)


@pytest.mark.parametrize(
    ("ranks", "kind", "layouts"),
    [
        ("two", "packed layers", 3),
        pytest.param("more", "GPT", 5, marks=SWEEP),
        pytest.param("four", "GPT", 4, marks=SWEEP),
    ],
)
def test_it_trains_in_each_layout_and_a_checkpoint_is_read_by_another(
    ranks: str, kind: str, layouts: int, request: Any
) -> None:
    found = request.getfixturevalue(ranks)[kind]
    assert_like_one_process(found["trained"], layouts)
    assert_like_one_process(found["resumed"], layouts + 1)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=SWEEP)])
def test_learning_rates_schedules_and_momenta_of_each_group_go_along(ranks: int, request: Any) -> None:
    found = request.getfixturevalue({2: "two", 4: "four"}[ranks])["states from before"]
    assert_like_one_process(found, {2: 5, 4: 4}[ranks])
    assert found["shard=3"][-2:] == pytest.approx([0.25e-3, 0.75e-3])


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=SWEEP)])
def test_a_layer_that_holds_several_is_cut_through_each_of_them(ranks: int, request: Any) -> None:
    """Queries, keys and values of equal width, of fewer keys, and head by head; a gate and what it gates."""
    found = request.getfixturevalue({2: "two", 4: "four"}[ranks])["packed"]
    assert_like_one_process(found["losses"], 1)
    packed = [f"blocks.{one}.{name}.weight" for one in range(3) for name in ("attention.qkv", "gate_up")]
    assert set(packed) < set(found["cut"])
    assert found["own"], "a state has the rows in the model's own order"


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=SWEEP)])
@pytest.mark.parametrize("kind", ["GPT", "packed"])
def test_pieces_of_sequences_train_as_whole_ones(ranks: int, kind: str, request: Any) -> None:
    found = request.getfixturevalue({2: "two", 4: "four"}[ranks])["sequences"]
    assert_like_one_process(found[kind], 1)
    assert found["repeated that drops"] == pytest.approx(found["GPT that drops"], rel=1e-5)


@SWEEP
def test_accumulation_defers_in_each_layout(more: Found) -> None:
    assert_like_one_process(more["accumulate"], 5)


def test_a_scaler_skips_on_all_ranks_what_overflows_on_one(two: Found) -> None:
    assert_like_one_process(two["scaler"], 5, 1e-3)  # bfloat16
    assert {losses[-1] for losses in two["scaler"].values()} == {0.5}


def test_ranks_of_other_rows_drop_others(two: Found) -> None:
    assert len(set(two["dropout"]["outside"])) == 2


def test_two_ranks_that_share_layers_drop_the_same_but_within_their_shares(two: Found) -> None:
    found = two["dropout of ranks that share layers"]
    assert found["outside"][0] == found["outside"][1]
    assert found["inside"][0] != found["inside"][1]


@SWEEP
def test_ranks_that_share_layers_drop_the_same_but_within_their_shares(four: Found) -> None:
    outside, inside = four["dropout"]["outside"], four["dropout"]["inside"]
    assert outside[0] == outside[1] != outside[2] == outside[3]
    assert len(set(inside)) == 4


def test_a_loader_gives_each_rank_its_rows_of_the_same_batches(two: Found) -> None:
    first, second = two["loader"]["ranks"]
    assert [len(rows) for rows in first[0]] == [4, 4, 1]
    assert two["loader"]["length"] == 3
    for epoch in range(2):
        both = [row for mine in (first, second) for rows in mine[epoch] for row in rows]
        assert sorted(both) == list(range(18))
    assert first[0] != first[1], "shuffled anew"


def test_what_the_example_shows_to_be_unused_is_no_error(two: Found) -> None:
    assert all(abs(one) < 10 for one in two["unused"])


def test_a_plan_keeps_whole_what_it_names(two: Found) -> None:
    assert {name.split(".")[2] for name in two["kept whole"]} == {"up", "down"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("calls_the_module_inside", "was not exchanged, or computed from other inputs; call the model that spread"),
        ("trains_another_model", r"ValueError: group 0 of SGD has a parameter of shape (4, 4) that the model"),
        ("weighs_rows_by_the_batch", "differs from one process by 0.75 and the gradient of layer."),
        ("is_compiled", "ValueError: spread got a compiled model; spread it first"),
        (
            "has_hooks_that_would_stay_behind",
            "ValueError: weight has a hook on its gradient, which sharding would",
        ),
        ("thaws_what_ddp_does_not_know", "used.weight was frozen when the model was spread, and DDP does not send"),
        ("made_an_optimizer_afterwards", "nothing"),
        ("rounds_as_bfloat16_does", "nothing"),
        ("wraps_twice", "ValueError: the model is wrapped already, by Replicas"),
        ("cuts_what_cannot_be", "ValueError: spread found no layers to cut in 2"),
        ("cuts_sequences_that_are_read_whole", "to what is not cut: encoder.layers.0.self_attn, "),
        ("cuts_sequences_that_do_not_divide", "whose second dimension, its sequence, cannot be cut in 2"),
        ("cuts_without_an_example", "ValueError: spread needs example= with tensor="),
        ("divides_badly", "ValueError: spread got tensor=3 for 2 ranks; it must divide them"),
        ("has_no_values", "ValueError: weight has no values (it is on the meta device)"),
        ("resumes_from_nothing", "there is no checkpoint /nowhere/at/all"),
        ("reads_what_another_holds", "`return nn.functional.linear(x, self.words.weight)`"),
        ("reads_what_another_holds", "it reads a parameter of a module without calling that module"),
        ("shares_what_is_shared", "the loader has a DistributedSampler, which gives each rank a share already"),
        ("reads_other_batches", "give ranks that share layers the same batches"),
    ],
)
def test_what_would_be_silently_wrong_is_said(two: Found, name: str, said: str) -> None:
    assert said in two["errors"][name]


def test_what_it_did_is_told_once(two: Found) -> None:
    told = two["told"]
    assert "keepbusy: 2 shards, 50% of the parameters on each of 2 ranks, in 3 blocks (Block)\n" in told
    moved = "it moves 7 all-gathers of 0.3127 MB, 4 reduce-scatters of 0.1601 MB"
    assert "keepbusy: one step equals one process (gradients within" in told
    assert moved in told


def test_alone_it_gives_back_what_it_got() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert keepbusy.spread(model, optimizer, shard=3) == (model, optimizer)
    loader = [torch.ones(1)]
    assert keepbusy.spread(model, optimizer, loader)[2] is loader


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shard": 4}, "spread got shard=4; it is 0"),
        ({"tensor": 0}, "spread got tensor=0"),
        ({"tensor": 2}, "needs example="),
        ({"plan": {"up": "column"}}, "names what is not cut"),
    ],
)
def test_bad_arguments_are_told_also_alone(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        keepbusy.spread(torch.nn.Linear(2, 2), **options)
    with pytest.raises(TypeError, match="spread got a int for its model"):
        keepbusy.spread(3)


@SWEEP
@pytest.mark.sweep(room="virtual")
def test_the_page_runs_on_virtual_gpus(run: Run) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/spread.md").read_text(encoding="utf-8")
    program = page.split("```python\n")[1].split("```")[0]
    finished = run(program, before=("--clock", "modelled", "--ranks", "2"))
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "keepbusy: 2 shards, 50% of the parameters on each of 2 ranks, in 4 blocks (Block)" in finished.stderr
    assert "one step equals one process" in finished.stderr
