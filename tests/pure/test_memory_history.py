"""What the allocator's own history says of the GPU's memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from keepbusy.log.memory_history import HISTORY, columns_of, memory_use
from keepbusy.program.loops.log_gaps import LogGaps


def event(action: str, microseconds: int, size: int, address: int = 0) -> dict[str, int | str]:
    return {"action": action, "time_us": microseconds, "size": size, "addr": address, "stream": 0}


def test_what_was_held_is_counted_back_from_the_end(tmp_path: Path) -> None:
    """The history may begin late: what was taken before it is part of what is held."""
    events = [
        event("segment_alloc", 10, 2_000),
        event("alloc", 11, 512, 64),
        event("free_requested", 15, 512, 64),
        event("free_completed", 20, 512, 64),
        event("alloc", 30, 1_024, 64),
    ]
    columns = columns_of(events, allocated=5_024, reserved=9_000, ahead=1_000_000)
    np.savez(tmp_path / HISTORY, **columns)
    memory = memory_use(tmp_path, 1_000_000, LogGaps())
    assert memory.time.tolist() == [11_000, 20_000, 30_000]
    assert memory.size.tolist() == [512, -512, 1_024]
    assert memory.allocated.tolist() == [4_512, 4_000, 5_024]
    assert memory.reserved.tolist() == [9_000] * 3
    assert memory.block.tolist() == [64] * 3


def test_a_run_without_one_holds_nothing(tmp_path: Path) -> None:
    assert len(memory_use(tmp_path, 0, LogGaps())) == 0
