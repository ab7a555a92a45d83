"""`%%keepbusy`: a cell of a notebook, run and explained. `%load_ext keepbusy` brings it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from typing import Any

from keepbusy.program.processes import make_folder
from keepbusy.timeline.files import BadInput


def keepbusy_cell(line: str, cell: str) -> Any:
    """%%keepbusy [options of `keepbusy run`]

    On a real GPU the cell runs here, with the names of the notebook, and is recorded. Where there is none, or with
    options (`%%keepbusy --clock modelled`, `--ranks 2`), it is a program of its own. It gives the diagnosis.
    """
    import torch

    try:
        return _here(cell) if torch.cuda.is_available() and not line.strip() else _program(shlex.split(line), cell)
    except (BadInput, ValueError) as error:
        sys.stderr.write(f"keepbusy: {error}\n")
        return None


def _here(cell: str) -> Any:
    from IPython import get_ipython

    import keepbusy

    with keepbusy.record() as run:
        done = get_ipython().run_cell(cell)
    return run.explain() if done.success else None  # else its traceback has been shown


def _program(options: list[str], cell: str) -> Any:
    """What it prints comes here while it prints it."""
    import keepbusy

    folder = make_folder()  # it stays as long as the notebook's process, for pages that show the cell's lines
    script, kept = folder / "cell.py", folder / "run.busy"
    script.write_text(cell, encoding="utf-8")
    command = [sys.executable, "-u", "-m", "keepbusy", "run", "--quiet", "--save", str(kept), *options, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
        for text in program.stdout or ():
            sys.stdout.write(text.replace(f"{folder}/", ""))
    run = keepbusy.load(kept) if kept.exists() else None
    return keepbusy.explain(run) if run is not None and run.on_device.any() else None


def load(shell: Any) -> None:
    """A diagnosis shows itself as its page; where nothing but text is shown, as its report."""
    import keepbusy
    from keepbusy.explain.diagnosis import Diagnosis

    shell.register_magic_function(keepbusy_cell, "cell", "keepbusy")
    texts = shell.display_formatter.formatters["text/plain"]
    texts.for_type(Diagnosis, lambda found, printer, _: printer.text(keepbusy.render(found)))
