"""`torch.distributed` on virtual GPUs: `nccl` is there, and it is ours."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from keepbusy.virtual.abi import library
from keepbusy.virtual.driver import constantly, own, replace_copies
from keepbusy.virtual.guard import CUDA

OURS = "keepbusy"
"""The name that PyTorch knows our backend by; the program hears `nccl`."""
_NOBODY = 120  # a device type that there is not


def patch() -> None:
    from keepbusy.virtual.process_group import VirtualGroup

    dist.Backend.register_backend(OURS, VirtualGroup, devices=["cuda", "cpu"])
    inside = dist.distributed_c10d
    ours = {
        "init_process_group": _init(inside.init_process_group),
        "new_group": _new_group(inside.new_group),
        "get_backend": _get_backend(inside.get_backend),
        "is_nccl_available": constantly(True),
    }
    replace_copies({id(getattr(inside, name)): own(does, name) for name, does in ours.items()})
    # DDP's logger reads native CUDA timers
    torch._C._distributed_c10d.Logger.set_runtime_stats_and_log = lambda _self: None
    _hide_native_timer()


def _ours(backend: Any) -> Any:
    """`nccl`, alone or for the devices of a longer name, is ours; everything else stays."""
    named = str(backend).lower() if backend is not None else OURS
    if named in ("nccl", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo", "cuda:nccl", OURS):
        return OURS
    return backend


def _init(native: Callable[..., Any]) -> Callable[..., Any]:
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)  # it would start native NCCL early
        return native(_ours(backend), *args, **kwargs)

    return init_process_group


def _new_group(native: Callable[..., Any]) -> Callable[..., Any]:
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return native(ranks, timeout, backend if backend is None else _ours(backend), *args, **kwargs)

    return new_group


def _get_backend(native: Callable[..., Any]) -> Callable[..., Any]:
    def get_backend(group: Any = None) -> Any:
        found = native(group)
        return "nccl" if found == OURS else found

    return get_backend


def _hide_native_timer() -> None:
    """On a CUDA build DDP would time with native events: its registry of timers loses the entry for CUDA.

    The registry is a std::unordered_map: its first node and its length follow its buckets.
    """
    make = getattr(library("libtorch_cpu.so"), "_ZN4c10d13TimerRegistryEv", None)
    if make is None or not torch.backends.cuda.is_built():
        return
    make.restype = ctypes.c_void_p
    registry, word = make(), ctypes.c_uint64
    buckets, node, length = (word.from_address(registry + offset).value for offset in (8, 16, 24))
    if not (0 < buckets < 4096 and 0 < length < 16):
        return
    for _ in range(length):
        if not node:
            return
        key = ctypes.c_int8.from_address(node + 8)
        if key.value == CUDA:
            key.value = _NOBODY
        node = word.from_address(node).value
