"""The course as notebooks: the programs of the chapters as cells, run in a real kernel.

Their programs are run as the chapters' own, so of each notebook the first one is enough here; KEEPBUSY_NOTEBOOKS=whole
runs all 44, in some minutes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="there is no nbformat: pip install nbclient ipykernel")
nbclient = pytest.importorskip("nbclient", reason="there is no nbclient: pip install nbclient ipykernel")
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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path) -> None:
    notebook = nbformat.read(path, 4)
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code"][:RUN]
    where = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    for cell in notebook.cells[1:]:
        said = "".join(one.get("text", "") for one in cell.outputs)
        assert said
        assert "Error" not in said
        assert "assert" not in said
    assert any("text/html" in one.get("data", {}) for cell in notebook.cells for one in cell.outputs)
