"""Turns of loops that were counted in one process, and code objects that another one finds again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from keepbusy.instrument.loop_counts import IS_COUNTED, CodeObjects, LoopCounts, counted

PROGRAM = """
class Trainer:
    def fit(self, steps):
        for step in range(steps):
            self.step = step


def fit(steps):
    for step in range(steps):
        helper = [one for one in range(3)]


Trainer().fit(5)
fit(7)
fit(2)
"""


def codes_of(path: Path) -> CodeObjects:
    return CodeObjects(lambda file: Path(file).read_text() if Path(file).exists() else "")


def test_a_function_is_found_by_its_qualified_name_and_a_line_in_it(tmp_path: Path) -> None:
    (path := tmp_path / "program.py").write_text(PROGRAM)
    codes = codes_of(path)
    method, function = codes.of(str(path), "Trainer.fit", 5), codes.of(str(path), "fit", 9)
    assert (method.co_firstlineno, function.co_firstlineno) == (3, 8)
    assert codes.of(str(path), "fit", 10) is function


def test_what_has_no_source_has_a_code_object_without_loops(tmp_path: Path) -> None:
    codes = codes_of(tmp_path)
    code = codes.of("<string>", "made.here", 3)
    assert (code.co_filename, code.co_name) == ("<string>", "here")
    assert codes.of("<string>", "made.here", 9) is code
    (broken := tmp_path / "broken.py").write_text("def f(:")
    assert codes.of(str(broken), "f", 1).co_filename == str(broken)


@pytest.mark.skipif(not IS_COUNTED, reason="Python tells of jumps from 3.12 on")
def test_all_turns_are_counted_from_the_first_one_on(tmp_path: Path) -> None:
    (path := tmp_path / "program.py").write_text(PROGRAM)
    moments = iter(range(1_000, 10_000))
    counts = LoopCounts(lambda: next(moments))
    counts.begin()
    try:
        exec(compile(PROGRAM, str(path), "exec"), {})
    finally:
        counts.end()
    counts.save(tmp_path)
    looks = counted(tmp_path, codes_of(path), origin=1_000)
    assert looks is not None
    turns = {
        looks.codes[code].co_qualname: len(ends)
        for (code, _), ends in looks.turns.items()
        if looks.codes[code].co_filename == str(path)
    }
    assert turns == {"Trainer.fit": 5, "fit": 9}
    assert min(min(ends) for ends in looks.turns.values()) >= 0


@pytest.mark.skipif(IS_COUNTED, reason="before Python 3.12")
def test_without_counts_nothing_is_left(tmp_path: Path) -> None:
    counts = LoopCounts(lambda: 0)
    counts.begin()
    counts.end()
    counts.save(tmp_path)
    assert counted(tmp_path, codes_of(tmp_path), 0) is None
    assert sys.version_info < (3, 12)
