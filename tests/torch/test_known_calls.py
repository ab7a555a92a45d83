"""A call whose like was seen before launches what it would launch if it were new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from keepbusy.virtual.pytorch.kernels import Kernel

CALLS: dict[str, Callable[[Tensor, int], Any]] = {
    "a number that changes": lambda x, turn: x * (1.5 + turn),
    "a number in a keyword": lambda x, turn: torch.add(x, x, alpha=1 + turn),
    "a whole number, and one that is not": lambda x, turn: x.long() + (2 if turn % 2 else 2.5),
    "a dimension": lambda x, turn: x.sum(turn % 2),
    "a type": lambda x, turn: x.sum(dtype=torch.float64 if turn % 2 else None),
    "strides": lambda x, turn: torch.exp(x if turn % 2 else x.t()),
    "another length": lambda x, turn: torch.exp(x[: 1 + turn]),
    "a list of tensors": lambda x, turn: torch.cat([x] * (2 + turn % 2)),
    "lists, in place": lambda x, turn: torch._foreach_mul_([x.clone()] * (1 + turn % 2), 1.0 + turn),
    "several results": lambda x, turn: torch.sort(x, dim=turn % 2),
    "a choice of results": lambda x, turn: torch.ops.aten.native_layer_norm_backward(
        x, x, [6], x.mean(1, True), x.mean(1, True), x[0], x[0], [True, bool(turn % 2), False]
    ),
    "drawing": lambda x, turn: functional.dropout(x, 0.25 + 0.25 * (turn % 2)),
    "sixteen bits": lambda x, turn: torch.linalg.vector_norm(x.half() if turn % 2 else x),
    "a tensor of one value on the host": lambda x, turn: x * torch.tensor(2.0 + turn),
}


def launched(machine: Any, call: Callable[[], object]) -> list[tuple[int, ...]]:
    """The rows of the device that a call adds: kind, name and work."""
    rows = machine.clock.rows
    before = rows.spans.count
    call()
    return [(row[1], row[2], row[6]) for row in rows.columns()[:, before:].T.tolist() if row[-2] >= 0]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_seen_before_launches_the_same(machine: Any, name: str) -> None:
    x, known = torch.arange(24.0, device="cuda").view(4, 6), machine.costs.by_call

    def call(turn: int) -> None:
        CALLS[name](x, turn)

    for turn in range(4):
        call(turn)
    seen = [launched(machine, lambda turn=turn: call(turn)) for turn in range(4)]  # type: ignore[misc]
    new = []
    for turn in range(4):
        known.clear()
        new.append(launched(machine, lambda turn=turn: call(turn)))  # type: ignore[misc]
    assert seen == new
    assert all(seen)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_known_once_its_like_was_seen(machine: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(24.0, device="cuda").view(4, 6)
    for turn in range(4):
        CALLS[name](x, turn)
    careful: list[str] = []
    run = Kernel._run
    monkeypatch.setattr(Kernel, "_run", lambda kernel, *given: careful.append(kernel.name) or run(kernel, *given))
    for turn in range(4):
        CALLS[name](x, turn)
    assert careful == [] or "host" in name


def test_numbers_that_change_are_not_remembered(machine: Any) -> None:
    x = torch.ones(3, device="cuda")
    x * 0.5
    before = len(machine.costs.by_call)
    for turn in range(50):
        x * (0.5 + turn)
    assert len(machine.costs.by_call) == before
