"""Places are told apart by the code that stands there, not by what it looks like."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepbusy.program.lines import LIBRARY, USER, Places, kind_of, shown

SOURCE = "def called(places):\n    return places()\n"


def test_the_same_function_at_the_same_line_of_two_files_is_two_places(tmp_path: Path) -> None:
    told: list[tuple[str, ...]] = []
    places = Places(lambda *lines: told.append(lines) or len(told) - 1)
    functions = []
    for name in ("a.py", "b.py"):
        names: dict[str, object] = {}
        exec(compile(SOURCE, str(tmp_path / name), "exec"), names)
        functions.append(names["called"])
    first, second = functions
    assert first.__code__ == second.__code__  # to Python they are the same
    numbers = [called(lambda: places.current_place()) for called in (first, second, first)]
    assert numbers[0] == numbers[2] != numbers[1]
    assert ["a.py" in told[numbers[0]][-1], "b.py" in told[numbers[1]][-1]] == [True, True]


def test_a_package_that_pip_put_beside_the_program_is_not_the_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wheel-1.0.dist-info").mkdir()
    (tmp_path / "wheel-1.0.dist-info" / "RECORD").write_text("wheel/loop.py,sha256=x,1\nsingle.py,,\n../bin/run,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))  # as PYTHONPATH does
    installed, single, own = (str(tmp_path / name) for name in ("wheel/loop.py", "single.py", "train.py"))
    assert [kind_of(one) for one in (installed, single, own)] == [LIBRARY, LIBRARY, USER]
    assert [shown(one) for one in (installed, single)] == ["wheel/loop.py", "single.py"]


def test_a_file_is_shown_also_where_the_programs_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert shown(str(tmp_path / "train.py")) == str(tmp_path / "train.py")
