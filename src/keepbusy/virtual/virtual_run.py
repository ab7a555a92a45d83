"""A whole run on the virtual GPU: what `keepbusy run` asks for, and the timeline that comes of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np

from keepbusy.instrument.children import follow
from keepbusy.timeline.busy_file import load, save
from keepbusy.timeline.model import Ints, Kind, Timeline
from keepbusy.timeline.ranks import merge
from keepbusy.timeline.steps import commands_between
from keepbusy.virtual import selftest
from keepbusy.virtual.costs.device import read
from keepbusy.virtual.machine import MACHINE

# Ranks that the program itself spawned: each leaves its timeline in a folder, where its parent finds it.


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


# A virtual run begins with the program. Its first steps make memory, buckets and states, and no later step does.

SEARCHED = 0.5
"""Of the steps at most so many are taken for a beginning."""


def steady(timeline: Timeline) -> Timeline:
    """Without the marks of steps that are not like those that follow: what explains a run begins at its first mark."""
    marks = {one: timeline.marks_of(one) for one in timeline.ranks}
    if min((len(one) for one in marks.values()), default=0) < 4:
        return timeline
    first = max(_first_usual(timeline, one) for one in marks.values())
    return timeline.change(marks=np.sort(np.concatenate([one[first:] for one in marks.values()])))


def _first_usual(timeline: Timeline, marks: Ints) -> int:
    """How many steps at the beginning launch more or less than later ones, or ask the driver for more memory."""
    launched, made = commands_between(timeline, marks), _allocations(timeline, marks)
    half = len(launched) - int(SEARCHED * len(launched))
    usual = set(launched[half:].tolist())
    for step in range(int(SEARCHED * len(launched))):
        if launched[step] in usual and made[step] <= made[half:].max():
            return step
    return int(SEARCHED * len(launched))


def _allocations(timeline: Timeline, marks: Ints) -> Ints:
    before = np.concatenate([[0], np.cumsum(timeline.spans.kind == Kind.ALLOCATE)])
    return np.diff(before[marks])


@dataclass(frozen=True)
class Options:
    """How to run a program that asks for a GPU."""

    on: str = "h200"  # a device file's name, or a path to one
    devices: int = 1
    measured: bool = True  # whether the time the host takes is real, or modelled
    values: bool = True  # whether anything is computed
    one_generator: bool = os.environ.get("KEEPBUSY_ONE_GENERATOR") == "1"
    """For comparing with a run on the CPU: the devices draw from the host's random numbers."""


def start(options: Options, rank: int = 0) -> Callable[..., Timeline]:
    """Give this process its virtual GPUs. What it returns gives the timeline so far, with facts to add to it."""
    timeline = _begin(options, rank)

    left = folder()
    follow(be_child, {**asdict(options), "left": left})
    return lambda **facts: with_spawned(timeline(**facts), left)


def be_child(left: str, **options: Any) -> None:
    """A process that the program spawned has the same virtual GPUs, and leaves its timeline in a folder."""
    timeline = _begin(Options(**options))

    leave_at_end(timeline, left)
    follow(be_child, {**options, "left": left})


def _begin(options: Options, rank: int = 0) -> Callable[..., Timeline]:
    device = read(options.on)
    selftest.check()
    from keepbusy.virtual.bring_up import bring_up

    machine = bring_up(device, options.devices, rank, options.measured, options.values, options.one_generator)
    return lambda **facts: machine.clock.timeline(**machine.facts(), values=options.values, **facts)
