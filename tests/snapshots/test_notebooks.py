"""The course as notebooks: the programs of the chapters as cells, run in a real kernel.

Their programs are run as the chapters' own, so the first one of the first notebook is enough here. `make sweeps` runs
the first one of each, and KEEPBUSY_NOTEBOOKS=whole all 44, in some minutes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from notebooks import execute
from warm_python import warm

nbformat = pytest.importorskip("nbformat", reason="there is no nbformat: pip install nbclient ipykernel")
pytest.importorskip("nbclient", reason="there is no nbclient: pip install nbclient ipykernel")
pytest.importorskip("ipykernel", reason="there is no ipykernel: pip install ipykernel")
COURSE = Path(__file__).parents[2] / "docs" / "course"
NOTEBOOKS = sorted(COURSE.glob("chapter?/*.ipynb"))
RUN = None if os.environ.get("KEEPBUSY_NOTEBOOKS") == "whole" else 2
"""So many cells: the first one loads the magic."""


def test_each_chapter_has_one() -> None:
    assert [path.stem for path in NOTEBOOKS] == [f"chapter{page.name[0]}" for page in sorted(COURSE.glob("[1-6]-*.md"))]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_program_of_the_chapter_is_a_cell(path: Path) -> None:
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    cells = [cell.source.partition("\n")[2] for cell in notebook.cells if cell.cell_type == "code"]
    programs = {program.read_text(encoding="utf-8").rstrip() for program in path.parent.glob("*.py")}
    assert {program.replace("Path(__file__).with_name(", "Path(") for program in programs} <= set(cells)


@pytest.mark.parametrize("count", [1, pytest.param(len(NOTEBOOKS), marks=pytest.mark.sweep(room="cli"))])
def test_the_notebooks_run(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other in one kernel, each in its own folder."""
    monkeypatch.setattr(sys, "executable", warm().executable)  # of the kernel
    of_each = {}
    for path in NOTEBOOKS[:count]:
        sources = [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"][:RUN]
        of_each[path] = [nbformat.v4.new_code_cell(source) for source in (f"%cd -q {path.parent}", *sources)]
    notebook = nbformat.v4.new_notebook(cells=[cell for cells in of_each.values() for cell in cells])
    execute(notebook)
    for _, _, *programs in of_each.values():
        assert programs
        for cell in programs:
            said = "".join(one.get("text", "") for one in cell.outputs)
            assert said
            assert "Error" not in said
            assert "assert" not in said
        assert any("text/html" in one.get("data", {}) for cell in programs for one in cell.outputs)
