"""The same statements on a real GPU, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from course_statements import STATEMENTS


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_statement_holds(statement: str) -> None:
    done = subprocess.run([sys.executable, "-c", STATEMENTS[statement]], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
