"""The last run of `keepbusy run`, and for each program the plan of its last run, in the user's cache.

`explain` and `show` take the run if they are given no file; `run --fix` takes the program's plan.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from keepbusy.timeline import busy_file
from keepbusy.timeline.files import BadInput, write_whole
from keepbusy.timeline.model import Timeline

_PLANS_KEPT = 100


def place() -> Path | None:
    """Where the last run is kept; None for a user without a home."""
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(caches) / "keepbusy" / "last.busy"


def plan_of(program: str) -> Path | None:
    """Where the plan of a program's last run is kept; None for a user without a home."""
    last = place()
    name = hashlib.sha256(program.encode()).hexdigest()[:16] + ".json"
    return None if last is None else last.parent / "plans" / name


def keep(timeline: Timeline, began: float, plan: str, program: str) -> bool:
    """Whether the run could be kept: a full disk or a read-only home costs nobody their report. The files bear the time
    at which the run began, so that sources which changed later are known."""
    last, path = place(), plan_of(program)
    if last is None or path is None:
        return False
    with suppress(OSError):
        last.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        busy_file.save(timeline, last)
        path.parent.mkdir(exist_ok=True)
        write_whole(path, plan)
        for file in (last, path):
            os.utime(file, (began, began))
        plans = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in plans[_PLANS_KEPT:]:
            file.unlink(missing_ok=True)
        return True
    return False


def forget(program: str) -> None:
    """For a run that begins: if it leaves nothing, no older run is taken for it."""
    for path in (place(), plan_of(program)):
        if path is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def path() -> Path:
    """The last run, for a verb that was given no file."""
    kept = place()
    if kept is None or not kept.is_file():
        raise BadInput("no file was given, and there is no last run; name a file, or `keepbusy run` a script first.")
    return kept
