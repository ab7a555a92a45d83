"""Several ranks of one run: started together, and brought back together by the first of them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keepbusy.timeline.model import Timeline

PATIENCE = 30.0
"""Seconds that the first rank waits for the others' timelines once its own program has ended."""
_POLL = 0.05


def launch(count: int, command: Sequence[str]) -> int:
    """Start the ranks through torchrun's own agent, each with the same `keepbusy run`; returns its exit code."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # what the agent would set, with a warning
    return subprocess.run([*agent, "-m", "keepbusy", "run", *command], check=False, env=environment).returncode


def rank() -> int:
    """Of this process, as its launcher numbers it; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def devices(asked: int) -> int:
    """Each rank of this host has a device of its own."""
    return max(asked, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def gathered(timeline: Timeline) -> Timeline | None:
    """On the first rank the timeline of all of them, on the others nothing."""
    if world() == 1:
        return timeline
    folder = _folder()
    _leave(timeline, folder / f"rank{rank()}.busy")
    if rank() != 0:
        return None
    return _merged(folder)


def _folder() -> Path:
    """One that the ranks of this run know, and no other run."""
    run = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}-{os.environ.get('MASTER_PORT', '')}"
    folder = Path(tempfile.gettempdir()) / f"keepbusy-{os.getuid()}-{run}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _leave(timeline: Timeline, path: Path) -> None:
    """It appears once it is whole."""
    from keepbusy.timeline.store import save

    part = path.with_suffix(".part.busy")
    save(timeline, part)
    part.replace(path)


def _merged(folder: Path) -> Timeline:
    """Of all ranks that came to an end; one that crashed before it could say anything is missing."""
    from keepbusy.timeline.ranks import merge
    from keepbusy.timeline.store import load

    paths = [folder / f"rank{one}.busy" for one in range(world())]
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and not all(path.exists() for path in paths):
        time.sleep(_POLL)
    there = [path for path in paths if path.exists()]
    timelines = [load(path) for path in there]
    for path in there:
        path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
    return merge([one for one in timelines if len(one)] or timelines[:1])
