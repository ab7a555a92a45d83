"""The allocations of a logged program: the memory history of PyTorch's allocator, as columns."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keepbusy.program.loops.log_gaps import LogGaps
from keepbusy.timeline.model import MemoryUse

HISTORY = "memory.npz"
"""A file in the folder of a process."""
_KEPT = 200_000
"""The most events that are kept: the latest."""
_ALLOCATED = {"alloc": 1, "free_completed": -1}
_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def begin() -> None:
    """Record the history, once PyTorch is imported. It begins when the program first uses its GPU."""
    from keepbusy.torch_names.hooks import call_once_ready, record_memory

    call_once_ready(lambda: record_memory(context=None, max_entries=_KEPT))


def save(folder: Path) -> None:
    """Save the history, in the program's process, at its end."""
    cuda: Any = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return
    from keepbusy.torch_names.hooks import memory_snapshot, record_memory

    device, now = cuda.current_device(), {"wall": time.time_ns(), "clock": time.perf_counter_ns()}
    events = memory_snapshot()["device_traces"][device]
    record_memory(enabled=None)
    columns = columns_of(events, cuda.memory_allocated(), cuda.memory_reserved(), now["clock"] - now["wall"])
    np.savez(folder / HISTORY, **columns)


def columns_of(events: Iterable[Mapping[str, Any]], allocated: int, reserved: int, ahead: int) -> dict[str, Any]:
    """`allocated`, `reserved`: values at the end. `ahead`: by how much the log's clock is ahead of the system's."""
    events = [event for event in events if event["action"] in _ALLOCATED or event["action"] in _RESERVED]
    sizes = {
        name: np.array([signs.get(event["action"], 0) * event["size"] for event in events], np.int64)
        for name, signs in (("allocated", _ALLOCATED), ("reserved", _RESERVED))
    }
    totals = {
        name: last - sizes[name].sum() + np.cumsum(sizes[name])
        for name, last in (("allocated", allocated), ("reserved", reserved))
    }
    of_tensors = sizes["allocated"] != 0
    columns = {
        "time": np.array([1000 * event["time_us"] + ahead for event in events], np.int64),
        "block": np.array([event["addr"] for event in events], np.int64),
        "size": sizes["allocated"],
        **totals,
    }
    return {name: values[of_tensors] for name, values in columns.items()}


def memory_use(folder: Path, began: int, gaps: LogGaps) -> MemoryUse:
    """The saved history of a process, in the time of its timeline."""
    if not (folder / HISTORY).exists():
        return MemoryUse.of(0)
    with np.load(folder / HISTORY) as saved:
        columns = dict(saved)
    columns["time"] = gaps.recorded(columns["time"]) - began
    is_within = columns["time"] >= 0
    columns = {name: values[is_within] for name, values in columns.items()}
    return MemoryUse.of(len(columns["time"]), lane=0, device=0, **columns)
