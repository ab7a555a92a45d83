"""Tests on the virtual GPU: eight of them, brought up once in the test process, with the host's random numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

SOURCES = Path(__file__).parents[2] / "src"
Run = Callable[..., subprocess.CompletedProcess[str]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))  # PyTorch's own warnings are not ours to fix


@pytest.fixture(scope="session", autouse=True)
def machine():
    """The whole process has its virtual GPUs from here on."""
    if torch.version.cuda is not None and torch.cuda.is_available():
        pytest.skip("there is a real GPU here")
    from keepbusy.virtual.virtual_run import Options, start

    start(Options(devices=8, measured=False, one_generator=True))
    from keepbusy.virtual.machine import MACHINE

    MACHINE.notes = MACHINE.costs.notes = None  # a law that fails is a failed test
    return MACHINE


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Write a script and run it with `keepbusy run`, in a folder of its own."""

    def run(
        source: str, *arguments: str, before: tuple[str, ...] = ("--clock", "modelled")
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(source)
        return subprocess.run(
            [sys.executable, "-m", "keepbusy", "run", *before, "train.py", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCES), str(tmp_path)])},
        )

    return run
