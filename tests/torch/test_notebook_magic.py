"""`%%keepbusy` in a real kernel: a cell on the virtual GPU, and what goes wrong in one."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from notebooks import execute
from warm_python import warm

nbformat = pytest.importorskip("nbformat", reason="there is no nbformat: pip install nbclient ipykernel")
pytest.importorskip("nbclient", reason="there is no nbclient: pip install nbclient ipykernel")
pytest.importorskip("ipykernel", reason="there is no ipykernel: pip install ipykernel")
SUMS = """%%keepbusy --clock modelled
import torch
x = torch.ones(64, 64, device="cuda")
for _ in range(5):
    print((x @ x).sum().item())
"""
CELLS = (
    "%load_ext keepbusy",
    SUMS,
    "print(type(_).__name__, _.plan[0].where[0].line)",
    "%%keepbusy --ranks nonsense\nprint(1)",
    "%%keepbusy\nprint(1 / 0)",
)


def printed(outputs: list[Any]) -> str:
    """It comes in pieces, as it was printed."""
    return "".join(one["text"] for one in outputs if one["output_type"] == "stream")


def test_a_cell_is_run_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", warm().executable)  # of the kernel
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    execute(notebook)
    _, sums, about, nonsense, failed = (cell.outputs for cell in notebook.cells)
    assert printed(sums) == "262144.0\n" * 5
    assert sums[-1]["data"]["text/html"].startswith('<iframe sandbox="allow-scripts" srcdoc="')
    report = sums[-1]["data"]["text/plain"]
    assert report.startswith("keepbusy · cell.py · virtual NVIDIA H200 · ")
    assert "\n1  cell.py:4  " in report
    assert printed(about) == "Diagnosis 4\n"
    assert printed(nonsense).startswith("keepbusy: argument --ranks: 'nonsense' is no number of GPUs")
    assert printed(failed) == (
        "Traceback (most recent call last):\n"
        '  File "cell.py", line 1, in <module>\n    print(1 / 0)\n          ~~^~~\n'
        "ZeroDivisionError: division by zero\n"
        "keepbusy: cell.py ended with ZeroDivisionError before anything ran on the GPU.\n"
    )
