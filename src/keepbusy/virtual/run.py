"""A whole run on the virtual GPU: what `keepbusy run` asks for, and the timeline that comes of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from keepbusy.script.children import follow
from keepbusy.timeline.model import Timeline
from keepbusy.virtual import selftest
from keepbusy.virtual.device_files import read


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
    from keepbusy.virtual import spawned

    left = spawned.folder()
    follow(be_child, {**asdict(options), "left": left})
    return lambda **facts: spawned.with_spawned(timeline(**facts), left)


def be_child(left: str, **options: Any) -> None:
    """A process that the program spawned has the same virtual GPUs, and leaves its timeline in a folder."""
    timeline = _begin(Options(**options))
    from keepbusy.virtual import spawned

    spawned.leave_at_end(timeline, left)
    follow(be_child, {**options, "left": left})


def _begin(options: Options, rank: int = 0) -> Callable[..., Timeline]:
    device = read(options.on)
    selftest.check()
    from keepbusy.virtual.bring_up import bring_up

    machine = bring_up(device, options.devices, rank, options.measured, options.values, options.one_generator)
    return lambda **facts: machine.clock.timeline(**machine.facts(), values=options.values, **facts)
