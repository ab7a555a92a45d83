"""What a remedy names exists."""

from __future__ import annotations

import importlib

import pytest

from keepbusy.explain.causes import FINDERS
from keepbusy.explain.remedies import (
    BRING_LATER,
    COMPILED,
    EQUAL_SHARES,
    MORE_WORKERS,
    ONE_FOR_ALL,
    REMEDIES,
    SCALER,
    SEND_ONCE,
    STAYS_SMALL,
    SYNCS,
    Remedy,
)

pytest.importorskip("torch")
ALL = [
    *REMEDIES.values(),
    *(remedy for _, remedy in SYNCS),
    MORE_WORKERS,
    EQUAL_SHARES,
    ONE_FOR_ALL,
    BRING_LATER,
    STAYS_SMALL,
    SCALER,
    SEND_ONCE,
    COMPILED,
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
    assert resolve(remedy.api) is not None


def test_every_cause_that_can_be_fixed_has_a_remedy() -> None:
    assert set(REMEDIES) == set(FINDERS)
