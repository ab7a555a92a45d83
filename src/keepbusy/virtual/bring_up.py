"""Bring the virtual GPU up in this process. There is no way back: who starts it wants it until the end."""

from __future__ import annotations

import atexit
import ctypes

import torch.distributed as dist

from keepbusy.instrument.patches import Patches
from keepbusy.virtual import loader_workers
from keepbusy.virtual.costs.device import Device
from keepbusy.virtual.cpp_hooks import replace_guard, replace_hooks
from keepbusy.virtual.machine import MACHINE, Machine
from keepbusy.virtual.memory import host_memory
from keepbusy.virtual.pytorch import cuda_api, host_side, operators, process_group, randomness, tensors
from keepbusy.virtual.pytorch.outlines import VALUES


def bring_up(
    device: Device,
    devices: int = 1,
    rank: int = 0,
    measured: bool = True,
    values: bool = True,
    one_generator: bool = False,
) -> Machine:
    """From now on this process has `devices` GPUs. `selftest.check` says beforehand whether its PyTorch can carry them.

    `measured`: host time is what really passes, else what the device file says. `values`: whether
    anything is computed. `one_generator`: the devices draw from the host's random numbers, so that a
    run can be compared with one on the CPU.
    """
    if _started:
        return MACHINE
    _started.append(True)
    if values:
        _keep_freed_memory()
    MACHINE.start(device, devices, rank, measured)
    VALUES.real, randomness.DEFAULTS.shared = values, one_generator
    for undo in (replace_guard(), replace_hooks(host_memory.native_is_pinned, host_memory.native_pins)):
        atexit.register(undo)
    cuda_api.patch()
    tensors.patch(MACHINE.resize)
    host_side.patch(_PATCHES)
    loader_workers.patch(_PATCHES, measured)
    operators.register()
    operators.refuse_triton(_PATCHES)
    if dist.is_available():
        process_group.patch()
    if not measured:
        host_side.patch_modelled(_PATCHES)
    MACHINE.calibrate()
    cuda_api.Initialization.requested = False
    return MACHINE


_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_PATCHES = Patches()
_started: list[bool] = []


def _keep_freed_memory() -> None:
    """Let the C library keep what is freed: giving it back takes time that no GPU would have taken."""
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        for parameter, value in ((_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, -1)):
            tune(parameter, value)
