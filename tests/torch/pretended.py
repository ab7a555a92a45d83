"""A program that was logged where there is no GPU, with the GPU's part of another: a real log of an H200."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

PURE = Path(__file__).parents[1] / "pure"


def pretend(folder: Path) -> None:
    """Each process of the run that has launched nothing gets the rows of a training that copies from pageable memory;
    how it ended is its own."""
    sys.path[:0] = [str(PURE)]
    from handwritten_log import unpacked

    from keepbusy.log.program_log import FACTS

    for process in [one for one in folder.iterdir() if (one / FACTS).exists()]:
        own = json.loads((process / FACTS).read_text())
        with tempfile.TemporaryDirectory() as made:
            [real] = unpacked("pageable_copy.tar.gz", Path(made)).iterdir()
            known = json.loads((real / FACTS).read_text())
            shutil.rmtree(process)
            shutil.copytree(real, process)
        known |= {name: own.get(name) for name in ("cut_short", "stopped", "faults")}
        (process / FACTS).write_text(json.dumps(known))
