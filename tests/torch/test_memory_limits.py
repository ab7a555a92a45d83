"""What a program may set of the device's memory, and what it reads of it."""

from __future__ import annotations

import pytest
import torch


def test_a_program_may_limit_its_share_of_the_device() -> None:
    device = torch.device("cuda", 2)
    assert torch.cuda.get_per_process_memory_fraction(device) == 1.0
    torch.cuda.set_per_process_memory_fraction(0.001, device)
    try:
        assert torch.cuda.get_per_process_memory_fraction(device) == pytest.approx(0.001)
        with pytest.raises(torch.OutOfMemoryError, match=r"143\.16 MiB allowed; Of the allocated memory"):
            torch.empty(200 << 20, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_sums_start_again() -> None:
    torch.empty(1 << 20, device="cuda:2")
    assert torch.cuda.memory_stats(2)["allocation.all.allocated"] > 0
    torch.cuda.reset_accumulated_memory_stats(2)
    assert torch.cuda.memory_stats(2)["allocation.all.allocated"] == 0
