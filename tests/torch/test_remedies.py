"""What a remedy names exists."""

from __future__ import annotations

import importlib

import pytest

from keepbusy.explain import remedies
from keepbusy.explain.causes import FINDERS
from keepbusy.explain.remedies import REMEDIES, SYNCS, Remedy
from keepbusy.report import words

pytest.importorskip("torch")
ALL = [
    *(value for value in vars(remedies).values() if isinstance(value, Remedy)),
    *REMEDIES.values(),
    *(remedy for _, remedy in SYNCS),
]


def resolve(dotted: str) -> object:
    """The longest part that is a module, and the attributes behind it."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return found
    raise LookupError(dotted)


@pytest.mark.parametrize("remedy", ALL, ids=lambda remedy: remedy.api)
def test_what_it_uses_exists(remedy: Remedy) -> None:
    assert not remedy.api or resolve(remedy.api) is not None  # some have no line of code


@pytest.mark.parametrize("remedy", ALL, ids=lambda remedy: remedy.api)
def test_a_plan_says_it_in_words(remedy: Remedy) -> None:
    said = words.fix(f"{remedy.name} at train.py:3 and 2 more")
    assert said.endswith(" at train.py:3 and 2 more")
    assert "_" not in said.partition(" at ")[0]
    assert said != f"{remedy.name} at train.py:3 and 2 more"


def test_every_cause_that_can_be_fixed_has_a_remedy() -> None:
    assert set(REMEDIES) == set(FINDERS)


def test_what_makes_tensors_takes_a_device() -> None:
    for name in remedies._MAKERS:
        assert "device" in (resolve(f"torch.{name}").__doc__ or ""), name
