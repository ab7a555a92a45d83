"""The course's first chapter on the virtual GPU: what its programs do not assert themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from course_statements import STATEMENTS
from warm_python import WarmPython

NOT_MODELLED = "two large products on two streams take about as long as on one"
"""The chapter says so."""


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_statement_holds(statement: str, tmp_path: Path, warm_python: WarmPython) -> None:
    (tmp_path / "statement.py").write_text(STATEMENTS[statement], encoding="utf-8")
    values = ("--values", "real" if "finds the result" in statement else "none")
    done = warm_python.keepbusy("run", "--clock", "modelled", *values, "--quiet", "statement.py", cwd=tmp_path)
    assert done.returncode == (statement == NOT_MODELLED), done.stderr
