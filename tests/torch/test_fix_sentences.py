"""What a remedy names exists."""

from __future__ import annotations

import importlib

import pytest

from keepbusy.causes import KINDS
from keepbusy.explain.run_plan import CAPTURING
from keepbusy.fixes import FIXES
from keepbusy.fixes.creating import MAKERS
from keepbusy.fixes.definition import Advice, Fix
from keepbusy.report import labels

pytest.importorskip("torch")
ALL = [(fix.name, said) for fix in FIXES for said in fix.advices()]


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


@pytest.mark.parametrize(("name", "said"), ALL)
def test_what_a_fix_uses_exists(name: str, said: Advice) -> None:
    assert not said.api or resolve(said.api) is not None  # some have no line of code


@pytest.mark.parametrize("fix", FIXES, ids=lambda fix: fix.name)
def test_a_plan_names_it_in_words(fix: Fix) -> None:
    named = labels.fix(f"{fix.name} at train.py:3 and 2 more")
    assert named == f"{fix.label} at train.py:3 and 2 more"
    assert "_" not in fix.label


def test_each_says_something_and_is_the_only_one_of_its_name() -> None:
    assert all(fix.advices() for fix in FIXES)
    assert len({fix.name for fix in FIXES}) == len(FIXES)


def test_a_capture_takes_the_turns_that_are_foretold() -> None:
    """Those that are rehearsed, and the one that is captured."""
    from keepbusy.runtime.graph.graphed_step import EagerStream, Rehearsal

    eager = EagerStream.__new__(EagerStream)
    eager.step = len
    assert len(Rehearsal(eager)._calls) + 1 == CAPTURING


def test_every_cause_that_can_be_fixed_has_a_remedy() -> None:
    assert sorted(cause for fix in FIXES for cause in fix.usual) == sorted(KINDS)


def test_what_makes_tensors_takes_a_device() -> None:
    for name in MAKERS:
        assert "device" in (resolve(f"torch.{name}").__doc__ or ""), name
