"""Ranks that the program itself spawned: each leaves its timeline in a folder, where its parent finds it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path

from keepbusy.timeline.model import Timeline
from keepbusy.timeline.ranks import merge
from keepbusy.timeline.store import load, save
from keepbusy.virtual.machine import MACHINE


def folder() -> str:
    """A new one, which goes when the process ends that asked for it."""
    made = tempfile.TemporaryDirectory(prefix="keepbusy-")
    _kept.append(made)
    return made.name


_kept: list[tempfile.TemporaryDirectory[str]] = []


def leave_at_end(timeline: Callable[[], Timeline], into: str) -> None:
    """When this process ends, however it ends by itself, its timeline is left for its parent."""
    Finalize(None, _leave, (timeline, into), exitpriority=0)


def _leave(timeline: Callable[[], Timeline], into: str) -> None:
    """One that joined no process group is no rank, and what it did belongs to no step of the others."""
    if MACHINE.rank is not None and Path(into).is_dir():
        save(_as_rank(timeline(), MACHINE.rank), Path(into) / f"rank{MACHINE.rank}.busy")


def _as_rank(timeline: Timeline, rank: int) -> Timeline:
    return timeline.change(lanes=tuple(lane._replace(rank=rank) for lane in timeline.lanes))


def with_spawned(timeline: Timeline, left: str) -> Timeline:
    """The ranks that were left there; what spawned them counts only where it spawned none."""
    ranks = [load(path) for path in sorted(Path(left).glob("rank*.busy"))]
    return merge(ranks) if ranks else timeline
