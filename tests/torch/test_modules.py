"""One sample of each module in PyTorch's own database; `python tests/torch/module_sweep.py 100` takes all of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from warm_python import SOURCES, warm


@pytest.mark.sweep(room="virtual")
def test_modules_give_what_the_cpu_gives_forward_and_backward() -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "PYTHONWARNINGS": "ignore"}
    done = warm().python("module_sweep.py", "1", cwd=Path(__file__).parent, env=environment)
    *wrong, summary = done.stdout.splitlines()
    assert wrong == [], done.stderr[-500:]
    assert int(summary.split()[0]) >= 120
