"""A whole run on the virtual GPU: its options, and the timeline that comes of it."""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from keepbusy.program.patches import Patches
from keepbusy.program.processes import RunFolder, follow
from keepbusy.timeline.busy_file import load, save
from keepbusy.timeline.model import Timeline
from keepbusy.timeline.ranks import merge
from keepbusy.virtual import selftest
from keepbusy.virtual.clock.real_time import NOTE, ScriptClocks
from keepbusy.virtual.costs.device import Device, read
from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.pytorch.tensors import VALUES


@dataclass(frozen=True)
class Options:
    """How to run a program on the virtual GPU."""

    on: str = "h200"  # a device file's name, or a path to one
    devices: int = 1
    measured: bool = True  # whether host time is measured or modelled
    values: bool = True  # whether values are computed
    script_clocks: bool = True  # whether the program's own clocks follow the virtual one
    alike: int = 1  # how many equal ranks this process stands for
    one_generator: bool = os.environ.get("KEEPBUSY_ONE_GENERATOR") == "1"
    """The devices draw from the host's generator, so that results can be compared with a run on the CPU."""


def start(options: Options, rank: int = 0, spawned_into: RunFolder | None = None) -> Callable[..., Timeline]:
    """Give this process its virtual GPUs. Returns a function that gives the timeline so far, with facts to add.

    Ranks that the program spawns leave their timelines in a folder, `spawned_into`; these replace that of this process.
    """
    timeline, folder = _begin(options, rank), spawned_into or RunFolder()
    follow(be_child, {**asdict(options), "run_folder": lambda: str(folder.path())})

    def with_spawned(**facts: Any) -> Timeline:
        ranks = [load(path) for path in folder.files("rank*.busy")]
        return merge(ranks) if ranks else timeline(**facts)

    return with_spawned


def be_child(run_folder: str, **options: Any) -> None:
    """A spawned process gets the same virtual GPUs, and leaves its timeline in a folder when it ends."""
    timeline = _begin(Options(**options))
    Finalize(None, _leave, (timeline, Path(run_folder)), exitpriority=0)  # unless it is killed
    follow(be_child, {**options, "run_folder": run_folder})


def _leave(timeline: Callable[[], Timeline], folder: Path) -> None:
    """Save the timeline of a rank. A process without a process group is no rank, and takes part in no step."""
    rank = MACHINE.rank
    if rank is not None and folder.is_dir():
        run = timeline()
        lanes = tuple(lane._replace(rank=rank) for lane in run.lanes)
        save(run.change(lanes=lanes), folder / f"rank{rank}.busy")


def _begin(options: Options, rank: int = 0) -> Callable[..., Timeline]:
    device = read(options.on)
    selftest.check()
    devices = options.devices
    if options.alike > 1:
        devices = max(devices, min(options.alike, device.wire.devices))
        # as torchrun would set them for the first rank
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": str(options.alike)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(devices), "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    bring_up(device, devices, rank, options)
    MACHINE.alike = options.alike
    clocks = ScriptClocks(MACHINE.read_clock) if options.script_clocks else None

    def timeline(**facts: Any) -> Timeline:
        MACHINE.read_clock()  # the work since the last operator is a part of the run
        notes = MACHINE.facts()["notes"]
        if clocks is not None and clocks.readings:
            notes += (NOTE,)
        return MACHINE.timeline(notes=notes, values=options.values, **facts)

    return timeline


_PATCHES = Patches()
_started: list[bool] = []


def bring_up(device: Device, devices: int, rank: int, options: Options) -> None:
    """Give this process `devices` GPUs, until it ends."""
    if _started:
        return
    # only after `selftest.check` has passed
    from keepbusy.virtual.cpp_hooks import replace_guard, replace_hooks
    from keepbusy.virtual.pytorch import cuda_api, host_side, operators, process_group, randomness, tensor_types

    _started.append(True)
    if options.values:  # let the C library keep freed memory: giving it back takes time that a GPU would not take
        library, mmap_threshold, trim_threshold = ctypes.CDLL(None), -3, -1
        library.mallopt(mmap_threshold, 1 << 30)
        library.mallopt(trim_threshold, -1)
    MACHINE.start(device, devices, rank, options.measured)
    VALUES.real, randomness.DEFAULTS.shared = options.values, options.one_generator
    for undo in (replace_guard(), replace_hooks()):
        atexit.register(undo)
    cuda_api.patch()
    host_side.patch(_PATCHES, options.measured)
    tensor_types.patch(_PATCHES)  # around the patches of host_side
    operators.register()
    operators.refuse_triton(_PATCHES)
    process_group.patch()
    if not options.measured:
        host_side.patch_modelled(_PATCHES)
    MACHINE.calibrate()
    cuda_api.Initialization.requested = False
