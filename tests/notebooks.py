"""Runs a notebook's cells in a kernel of its own, which the tests reach through files: a free port may be taken
before the kernel listens there."""

from __future__ import annotations

from typing import Any

from warm_python import PATIENCE


def execute(notebook: Any) -> None:
    import nbclient
    from traitlets.config import Config

    patience = {"timeout": PATIENCE, "startup_timeout": PATIENCE, "iopub_timeout": PATIENCE}
    config = Config({"KernelManager": {"transport": "ipc"}})
    nbclient.NotebookClient(notebook, kernel_name="python3", config=config, **patience).execute()
