"""A notebook, executed: a run and what was explained of it show themselves as the page, in a frame that runs alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from notebooks import execute

nbformat = pytest.importorskip("nbformat", reason="there is no nbformat: pip install nbclient ipykernel")
pytest.importorskip("nbclient", reason="there is no nbclient: pip install nbclient ipykernel")
pytest.importorskip("ipykernel", reason="there is no ipykernel: pip install ipykernel")
RUN = Path(__file__).parents[1] / "gpu" / "truth" / "live" / "item_every_step.busy"
CELLS = (
    f"import keepbusy\nrun = keepbusy.load({str(RUN)!r})\nrun",
    "told = keepbusy.explain(run)\ntold",
    "text = keepbusy.render(told)\nprint(type(text).__name__, text.splitlines()[2])",
    "run.keep(~run.on_device)",
)


@pytest.fixture(scope="module")
def outputs() -> list[Any]:
    """What the cells show, each the first thing of its cell."""
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    execute(notebook)
    return [cell.outputs[0] for cell in notebook.cells]


@pytest.mark.parametrize("cell", [0, 1])
def test_a_run_and_a_diagnosis_are_shown_as_the_page(cell: int, outputs: list[Any], chromium: Any) -> None:
    shown = outputs[cell]["data"]["text/html"]
    assert shown.startswith('<iframe sandbox="allow-scripts" srcdoc="')
    page = chromium.new_page()
    try:
        page.set_content(f"<!DOCTYPE html><body>{shown}</body>")
        frame = page.frame_locator("iframe")
        frame.locator("#timeline .view canvas").first.wait_for()
        assert "18.0 → 13.2 ms per iteration" in frame.locator("#headline").inner_text()
        frame.locator("#plan .flip").first.click()
        assert "takes 13.2 ms" in frame.locator("#plan .result").inner_text()
    finally:
        page.close()


def test_a_report_is_text_there_too(outputs: list[Any]) -> None:
    assert outputs[2]["text"].startswith("str ")


def test_what_cannot_be_explained_is_shown_as_it_is(outputs: list[Any]) -> None:
    assert "text/html" not in outputs[3]["data"]
    assert outputs[3]["data"]["text/plain"].startswith("Timeline(")
