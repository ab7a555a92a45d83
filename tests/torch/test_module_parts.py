"""Modules whose class defines `parameters()` and its kin in a way of its own, as code for meta-learning does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from keepbusy.runtime.module_parts import own_weights, submodules  # noqa: E402
from keepbusy.runtime.spread.module_tree import TrainedNames, blocks_of, tied_parameters  # noqa: E402


class OwnWay(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
        self.tied = self.inner[0]

    def parameters(self) -> list[torch.nn.Parameter]:
        return [*self.inner.parameters()]

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [*self.inner.named_parameters()]


def test_parts_are_those_of_pytorch() -> None:
    model = OwnWay()
    assert submodules([model, model.inner]) == [*model.modules()]
    assert [*own_weights(model.inner[1])] == [*model.inner[1].parameters(recurse=False)]


@pytest.mark.parametrize(
    "ask", [lambda model: blocks_of(torch.nn.Sequential(model, OwnWay())), lambda model: TrainedNames(model, None)]
)
def test_nothing_is_asked_that_such_a_class_does_not_take(ask: Callable[[Any], Any]) -> None:
    assert ask(OwnWay().cuda())


def test_tied_weights_are_found() -> None:
    weights = [["inner.0.weight", "tied.weight"], ["inner.0.bias", "tied.bias"]]
    assert [*tied_parameters(OwnWay()).values()] == weights
