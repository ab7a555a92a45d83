"""What stands in place of somebody's functions, as the program finds it."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Iterator

import pytest

from keepbusy.program.patches import Patches


@pytest.fixture
def patches() -> Iterator[Patches]:
    made = Patches()
    yield made
    made.undo()


def test_what_stands_for_a_built_in_function_is_no_method_where_a_class_has_it(patches: Patches) -> None:
    seen: list[str] = []
    for _ in range(2):
        patches.replace(time, "monotonic", lambda plain: lambda: seen.append("clock") or plain())

    class Timer:
        clock = time.monotonic

    assert Timer().clock() <= Timer.clock()
    assert seen == 4 * ["clock"]


def test_what_stands_for_a_built_in_function_is_copied_and_pickled_by_its_name(patches: Patches) -> None:
    for _ in range(2):
        patches.wrap(time, "sleep", lambda plain, seconds: plain(seconds))
    assert time.sleep.__name__ == "sleep"
    assert pickle.loads(pickle.dumps(time.sleep)) is time.sleep
    assert copy.deepcopy(time.sleep) is time.sleep


def test_what_others_put_in_place_of_what_a_class_inherits_is_called(
    patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Base:
        def __call__(self) -> str:
            return "base"

    class Derived(Base): ...

    patches.wrap(Derived, "__call__", lambda plain, one: f"seen {plain(one)}")
    assert Derived()() == "seen base"
    monkeypatch.setattr(Base, "__call__", lambda _: "traced")
    assert Derived()() == "seen traced"
    patches.undo()
    assert "__call__" not in vars(Derived)
