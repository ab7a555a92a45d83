"""`%%keepbusy`: runs a cell of a notebook and explains it. `%load_ext keepbusy` defines it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from typing import Any

from keepbusy.program.processes import make_folder
from keepbusy.timeline.files import BadInput


def keepbusy_cell(line: str, cell: str) -> Any:
    """%%keepbusy [options of `keepbusy run`]

    On a real GPU the cell runs in the notebook, with its names, and is recorded. Without one, or with options
    (`%%keepbusy --clock modelled`, `--ranks 2`), it runs as a program of its own. The result is the diagnosis.
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
        result = get_ipython().run_cell(cell)
    return run.explain() if result.success else None  # the traceback has been shown


def _program(options: list[str], cell: str) -> Any:
    """Run the cell as a program, and show its output as it is printed."""
    import keepbusy

    folder = make_folder()  # kept as long as the notebook's process, because pages show the cell's lines
    script, saved = folder / "cell.py", folder / "run.busy"
    script.write_text(cell, encoding="utf-8")
    command = [sys.executable, "-u", "-m", "keepbusy", "run", "--quiet", "--save", str(saved), *options, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
        for text in program.stdout or ():
            sys.stdout.write(text.replace(f"{folder}/", ""))
    run = keepbusy.load(saved) if saved.exists() else None
    return keepbusy.explain(run) if run is not None and run.on_device.any() else None


def load(shell: Any) -> None:
    """Define `%%keepbusy`. A diagnosis is shown as its page, or as its report if only text can be shown."""
    import keepbusy
    from keepbusy.explain.diagnosis import Diagnosis

    shell.register_magic_function(keepbusy_cell, "cell", "keepbusy")
    texts = shell.display_formatter.formatters["text/plain"]
    texts.for_type(Diagnosis, lambda diagnosis, printer, _: printer.text(keepbusy.render(diagnosis)))
