"""One sample of each module in PyTorch's own database; `python tests/torch/module_sweep.py 100` takes all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_modules_give_what_the_cpu_gives_forward_and_backward() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("module_sweep.py")), "1"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    *wrong, summary = done.stdout.splitlines()
    assert wrong == [], done.stderr[-500:]
    assert int(summary.split()[0]) >= 120
