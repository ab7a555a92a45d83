"""What a remedy names exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from keepbusy.explain import remedies
from keepbusy.explain.causes import FINDERS
from keepbusy.explain.remedies import PARTICULAR, REMEDIES, SYNCS, Remedy
from keepbusy.explain.run_plan import CAPTURING
from keepbusy.report import words

pytest.importorskip("torch")
ALL = [*REMEDIES.values(), *PARTICULAR.values()]


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
    said = words.fix(f"{remedy.fix} at train.py:3 and 2 more")
    assert said.endswith(" at train.py:3 and 2 more")
    assert "_" not in said.partition(" at ")[0]
    assert said != f"{remedy.fix} at train.py:3 and 2 more"


def test_what_is_more_particular_is_asked_for_somewhere() -> None:
    """By a name that stands in the table, and each of its names."""
    room = Path(remedies.__file__).parent
    asked = {*SYNCS.values()}
    for file in room.rglob("*.py"):
        for choice in re.findall(r"PARTICULAR\[(.+?)\]", file.read_text(encoding="utf-8")):
            asked.update(name for name in re.findall(r'"(\w+)"', choice.split(" if ")[0] + choice.partition("else")[2]))
    assert asked == set(PARTICULAR)


def test_a_capture_takes_the_turns_that_are_foretold() -> None:
    """Those that are rehearsed, and the one that is captured."""
    from keepbusy.runtime.graph.graphed_step import EagerStream, Rehearsal

    eager = EagerStream.__new__(EagerStream)
    eager.step = len
    assert len(Rehearsal(eager)._calls) + 1 == CAPTURING


def test_every_cause_that_can_be_fixed_has_a_remedy() -> None:
    assert set(REMEDIES) == set(FINDERS)


def test_what_makes_tensors_takes_a_device() -> None:
    for name in remedies._MAKERS:
        assert "device" in (resolve(f"torch.{name}").__doc__ or ""), name
