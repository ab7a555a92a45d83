"""Turns of loops that were counted in one process, and code objects that another one finds again."""

from __future__ import annotations

from pathlib import Path
from types import CodeType

import pytest

from keepbusy.program.loops.codes import CodeObjects
from keepbusy.program.loops.iteration_counts import IS_COUNTED, IterationCounter, IterationCounts

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


def test_code_is_made_as_the_program_made_it(tmp_path: Path) -> None:
    """Jumps are known by where they stand in the code: of a run with fixes, in that of the rewritten source."""
    (path := tmp_path / "program.py").write_text(PROGRAM)
    codes = CodeObjects(lambda file: Path(file).read_text(), rewritten)
    assert codes.of(str(path), "<module>", 1).co_consts[0] == "rewritten"


def rewritten(source: bytes, file: str) -> CodeType:
    return compile(b'"rewritten"\n' + source.lstrip(), file, "exec")


@pytest.mark.skipif(not IS_COUNTED, reason="Python tells of jumps from 3.12 on")
def test_all_iterations_are_counted_from_the_first_one_on(tmp_path: Path) -> None:
    (path := tmp_path / "program.py").write_text(PROGRAM)
    moments = iter(range(1_000, 1_000_000))
    counter = IterationCounter(lambda: next(moments))
    counter.begin()
    try:
        exec(compile(PROGRAM, str(path), "exec"), {})
    finally:
        counter.end()
    counter.counts.save(tmp_path)
    counts = IterationCounts.load(tmp_path, codes_of(path), origin=1_000)
    assert counts is not None
    objects = counts.codes.objects
    iterations = {
        objects[code].co_qualname: len(ends)
        for (code, _), ends in counts.ends.items()
        if objects[code].co_filename == str(path)
    }
    assert iterations == {"Trainer.fit": 5, "fit": 9}
    assert min(min(ends) for ends in counts.ends.values()) >= 0


@pytest.mark.skipif(IS_COUNTED, reason="before Python 3.12")
def test_before_python_3_12_nothing_is_counted(tmp_path: Path) -> None:
    counter = IterationCounter(lambda: 0)
    counter.begin()
    counter.end()
    assert counter.counted is None
    assert IterationCounts.load(tmp_path, codes_of(tmp_path), 0) is None
