"""The last run of `keepbusy run`, kept in the user's cache, so that it can be looked at without running again."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from keepbusy.timeline import busy_file
from keepbusy.timeline.files import BadInput, write_whole
from keepbusy.timeline.model import Timeline


def place() -> Path | None:
    """Where it is kept; None for a user without a home."""
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(caches) / "keepbusy" / "last.busy"


def _place_of_plan(path: Path) -> Path:
    return path.with_name("last_plan.json")


def keep(timeline: Timeline, began: float, plan: str) -> bool:
    """Whether the run could be kept: a full disk or a read-only home costs nobody their report. The file bears the time
    at which the run began, so that sources which changed later are known."""
    path = place()
    if path is None:
        return False
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        busy_file.save(timeline, path)
        os.utime(path, (began, began))
        write_whole(_place_of_plan(path), plan)
        return True
    return False


def forget() -> None:
    """For a run that begins: if it leaves nothing, no older run is taken for it."""
    path = place()
    if path is not None:
        with suppress(OSError):
            path.unlink(missing_ok=True)
            _place_of_plan(path).unlink(missing_ok=True)


def kept_plan() -> str:
    """What was kept with it; raises OSError where there is none."""
    return _place_of_plan(place() or Path()).read_text(encoding="utf-8")


def path() -> Path:
    """The file, for a verb that was given none."""
    kept = place()
    if kept is None or not kept.is_file():
        raise BadInput("no file was given, and there is no last run; name a file, or `keepbusy run` a script first.")
    return kept
