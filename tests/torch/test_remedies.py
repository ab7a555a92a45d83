"""What a remedy names exists."""

from __future__ import annotations

import importlib

import pytest

from keepbusy.explain import remedies
from keepbusy.explain.causes import FINDERS
from keepbusy.explain.remedies import REMEDIES, SYNCS, Remedy

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


def test_every_cause_that_can_be_fixed_has_a_remedy() -> None:
    assert set(REMEDIES) == set(FINDERS)
