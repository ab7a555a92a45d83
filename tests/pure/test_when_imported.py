"""What waits for a module that the program imports."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepbusy.program.patches import when_imported


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.startswith("expected_")]:
        del sys.modules[name]


def test_it_happens_right_after_the_import(folder: Path) -> None:
    (folder / "expected_one.py").write_text("value = 3\n")
    seen: list[int] = []
    when_imported("expected_one", lambda: seen.append(sys.modules["expected_one"].value))
    assert seen == []
    importlib.import_module("expected_one")
    assert seen == [3]
    importlib.reload(sys.modules["expected_one"])
    assert seen == [3]


def test_it_happens_at_once_for_what_is_there_already() -> None:
    seen: list[int] = []
    when_imported("sys", lambda: seen.append(1))
    assert seen == [1]


def test_the_import_system_is_left_as_it_was(folder: Path) -> None:
    (folder / "expected_two.py").write_text("")
    before = list(sys.meta_path)
    when_imported("expected_two", lambda: None)
    module = importlib.import_module("expected_two")
    assert sys.meta_path == before
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert "exec_module" not in vars(module.__loader__)


def test_who_only_asks_where_a_module_is_has_not_imported_it(folder: Path) -> None:
    (folder / "expected_four.py").write_text("")
    before, seen = list(sys.meta_path), list[int]()
    when_imported("expected_four", lambda: seen.append(1))
    assert importlib.util.find_spec("expected_four") is not None  # as transformers and datasets ask for torch
    assert importlib.util.find_spec("expected_four") is not None
    assert seen == []
    importlib.import_module("expected_four")
    assert (seen, sys.meta_path) == ([1], before)


def test_a_submodule_is_waited_for_too(folder: Path) -> None:
    (folder / "expected_three").mkdir()
    (folder / "expected_three" / "__init__.py").write_text("")
    (folder / "expected_three" / "part.py").write_text("")
    seen: list[str] = []
    when_imported("expected_three.part", lambda: seen.append("part"))
    importlib.import_module("expected_three")
    assert seen == []
    importlib.import_module("expected_three.part")
    assert seen == ["part"]


def test_a_module_that_does_not_exist_is_missed_as_ever(folder: Path) -> None:
    when_imported("expected_nowhere", lambda: None)
    with pytest.raises(ModuleNotFoundError, match="No module named 'expected_nowhere'"):
        importlib.import_module("expected_nowhere")


def test_a_module_that_fails_fails_as_ever(folder: Path) -> None:
    (folder / "expected_bad.py").write_text("1 / 0\n")
    seen: list[int] = []
    when_imported("expected_bad", lambda: seen.append(1))
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("expected_bad")
    assert seen == []


def test_several_may_wait_for_one_module(folder: Path) -> None:
    (folder / "expected_five.py").write_text("")
    seen: list[str] = []
    for name in ("first", "second"):
        when_imported("expected_five", lambda name=name: seen.append(name))  # type: ignore[misc]
    module = importlib.import_module("expected_five")
    assert sorted(seen) == ["first", "second"]
    assert "exec_module" not in vars(module.__loader__)
