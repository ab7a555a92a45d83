"""Reports of many short scripts from one process: PyTorch is imported once, and each script runs in a fork of it.

python snippets.py FOLDER examples/snippets/item.py ...    # writes FOLDER/item.out
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn


def command(path: Path, script: str) -> list[str]:
    """`path` is where the script lies, seen from here."""
    ranks = ["--ranks", "2"] if "torch.distributed" in path.read_text(encoding="utf-8") else []
    return ["run", *ranks, "--clock", "modelled", "--values", "none", script]


def _report(script: str, out: Path) -> NoReturn:
    """In a child of its own, which ends as a program does: the report comes with its end."""
    from keepbusy.cli import main

    with out.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main(command(Path(script), script)))


NEEDED = ("keepbusy.cli", "keepbusy.virtual.bring_up", "keepbusy.virtual.virtual_run", "sympy", "torch._dynamo")
"""What every child would import. PyTorch imports the last two once the shape of a result is computed."""


def run(folder: Path, scripts: list[str]) -> int:
    for module in NEEDED:
        import_module(module)
    gc.freeze()
    failed = 0
    for script in scripts:
        child = os.fork()
        if not child:
            _report(script, folder / f"{Path(script).stem}.out")
        failed |= os.waitpid(child, 0)[1]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
