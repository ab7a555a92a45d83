"""Tests that need a real GPU: skipped where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
THERE = bool(torch.version.cuda) and torch.cuda.is_available()  # before other tests bring up virtual ones


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.filterwarnings("default"))  # PyTorch's own warnings are not ours to fix
            if not THERE:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
