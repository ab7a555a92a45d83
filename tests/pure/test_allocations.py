"""The allocator's counters, read now and then."""

from __future__ import annotations

from collections.abc import Iterator

from marked_runs import MS, steps

from keepbusy.recording.run_counters import BETWEEN_READINGS, KEPT_READINGS, Allocations, AllocatorReading
from keepbusy.recording.turn_times import plain_run


def counted(requests: int, retries: int) -> Iterator[dict[str, int]]:
    """What an allocator shows that asks for so much more at each look."""
    look = 0
    while True:
        yield {"num_device_alloc": look * requests, "num_alloc_retries": look * retries, "num_ooms": 0}
        look += 1


def test_they_are_read_once_a_second() -> None:
    asked = counted(1, 0)
    allocations = Allocations(lambda: next(asked))
    for mark in range(1000):
        if mark * 10 * MS >= allocations.due:
            allocations.read(mark, mark * 10 * MS)
    assert len(allocations.readings) == 10
    assert allocations.readings[3] == AllocatorReading(300, 3, 0)


def test_a_long_run_keeps_few_readings() -> None:
    asked = counted(1, 0)
    allocations = Allocations(lambda: next(asked))
    for mark in range(20_000):
        allocations.read(mark, mark * BETWEEN_READINGS)
    marks = [one.mark for one in allocations.readings]
    assert len(marks) <= KEPT_READINGS
    assert marks == sorted(marks)
    assert marks[0] == 0


def test_a_device_that_sleeps_has_none() -> None:
    allocations = Allocations(dict)
    allocations.read(1, 10 * BETWEEN_READINGS)
    assert allocations.readings == []


def test_the_warm_up_may_ask_for_memory() -> None:
    took = [500.0, 400.0, 300.0, *[10.0] * 997]
    warm, steady = AllocatorReading(2, 0, 0), [AllocatorReading(mark, 50, 1) for mark in (100, 500, 900)]
    assert plain_run(steps(took), "optimizer", readings=[warm, *steady]).requests == 0
    asks = [AllocatorReading(mark, 2 * mark, mark // 300) for mark in (100, 500, 900)]
    run = plain_run(steps(took), "optimizer", readings=[warm, *asks])
    assert (run.requests, run.retries) == (2.0, 3)
