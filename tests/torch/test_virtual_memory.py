"""The caching allocator: which block serves, when the driver is asked, and what the statistics say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from operator import call as operator_call
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_programs import clock, operator, rows

from keepbusy.virtual.clock.engine import Clock
from keepbusy.virtual.device_memory import CONTEXT, LARGE_SEGMENT, SMALL_SEGMENT, Memory, OutOfMemory
from keepbusy.virtual.memory_blocks import Block
from keepbusy.virtual.pytorch.tensors import native_is_pinned, native_pins

MB = 1 << 20


def memory() -> tuple[Clock, Memory, int]:
    on = clock()
    return on, Memory(on), on.default_stream()


def calls(on: Clock) -> list[str]:
    timeline = on.timeline()
    return [timeline[row].name for row in range(len(timeline)) if timeline[row].name.startswith("cuda")]


def test_blocks_are_rounded_and_segments_shared() -> None:
    on, mine, stream = memory()
    one, other = mine.allocate(0, 1, stream), mine.allocate(0, 513, stream)
    assert one is not None
    assert other is not None
    assert (one.size, other.size, other.address - one.address) == (512, 1024, 512)
    stats = mine.stats()
    assert stats["reserved_bytes.all.current"] == SMALL_SEGMENT
    assert stats["allocated_bytes.small_pool.current"] == 1536
    assert stats["requested_bytes.all.current"] == 514
    assert stats["inactive_split_bytes.all.current"] == SMALL_SEGMENT - 1536
    assert calls(on) == ["cudaMalloc"]


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (MB, SMALL_SEGMENT),
        (MB + 1, LARGE_SEGMENT),
        (9 * MB, LARGE_SEGMENT),
        (10 * MB, 10 * MB),
        (11 * MB, 12 * MB),
    ],
)
def test_segments_by_size(size: int, segment: int) -> None:
    _, mine, stream = memory()
    mine.allocate(0, size, stream)
    assert mine.stats()["reserved_bytes.all.current"] == segment


def test_a_large_block_keeps_a_rest_of_a_megabyte() -> None:
    _, mine, stream = memory()
    block = mine.allocate(0, 19 * MB, stream)
    assert block is not None
    assert block.size == 20 * MB
    mine.free(block)
    less = mine.allocate(0, 18 * MB, stream)
    assert less is not None
    assert less.size == 18 * MB


def test_the_smallest_block_that_is_large_enough_serves() -> None:
    on, mine, stream = memory()
    sizes = (30 * MB, 20 * MB, 40 * MB)
    blocks = [mine.allocate(0, size, stream) for size in sizes]
    for block in blocks:
        mine.free(block)
    again = mine.allocate(0, 21 * MB, stream)
    assert again is blocks[0]
    assert calls(on) == ["cudaMalloc"] * 3


def test_neighbours_grow_together_again() -> None:
    _, mine, stream = memory()
    blocks = [mine.allocate(0, 4 * MB, stream) for _ in range(5)]
    for block in (blocks[1], blocks[3], blocks[2]):
        mine.free(block)
    assert mine.stats()["inactive_split.all.current"] == 1
    assert mine.stats()["inactive_split_bytes.all.current"] == 12 * MB
    for block in (blocks[0], blocks[4]):
        mine.free(block)
    assert mine.stats()["inactive_split.all.current"] == 0
    assert mine.allocate(0, 20 * MB, stream) is not None
    assert mine.stats()["segment.all.current"] == 1


def test_another_stream_has_blocks_of_its_own() -> None:
    on, mine, stream = memory()
    mine.free(mine.allocate(0, 5 * MB, stream))
    mine.allocate(0, 5 * MB, on.new_stream())
    assert mine.stats()["segment.all.current"] == 2


def test_a_block_in_use_by_another_stream_waits_for_it() -> None:
    on, mine, stream = memory()
    side = on.new_stream()
    block = mine.allocate(0, 5 * MB, stream)
    mine.record_stream(block, side)
    operator(on, side, 10_000)
    mine.free(block)
    other = mine.allocate(0, 15 * MB, stream)
    assert mine.stats()["active_bytes.all.current"] == 20 * MB
    on.sync_device()
    assert mine.allocate(0, 5 * MB, stream) is block
    assert mine.stats()["active_bytes.all.current"] == 20 * MB
    assert other is not None


def test_empty_cache_gives_whole_segments_back_and_waits_for_the_device() -> None:
    on, mine, stream = memory()
    kept, gone = mine.allocate(0, 4 * MB, stream), mine.allocate(0, 30 * MB, stream)
    operator(on, stream, 5_000)
    mine.free(gone)
    mine.empty_cache()
    assert mine.stats()["reserved_bytes.all.current"] == LARGE_SEGMENT
    assert rows(on.timeline())[-1][3] > 5_000
    assert calls(on)[-1] == "cudaFree"
    assert kept is not None


def test_a_full_device_first_gives_back_and_then_gives_up() -> None:
    on, mine, stream = memory()
    total = mine.size - CONTEXT
    first = mine.allocate(0, total // 2, stream)
    mine.free(first)
    second = mine.allocate(0, total - 40 * MB, stream)
    assert second is not None
    assert calls(on) == ["cudaMalloc", "cudaFree", "cudaMalloc"]
    with pytest.raises(OutOfMemory, match=r"^CUDA out of memory. Tried to allocate 100.00 MiB. GPU 0 has a total capa"):
        mine.allocate(0, 100 * MB, stream)
    stats = mine.stats()
    assert (stats["num_alloc_retries"], stats["num_ooms"]) == (2, 1)
    assert mine.info() == (total - stats["reserved_bytes.all.current"], mine.size)


def test_a_share_of_the_device() -> None:
    _, mine, stream = memory()
    assert mine.share() == 1.0
    mine.limit(0.1)
    assert mine.share() == pytest.approx(0.1)
    with pytest.raises(OutOfMemory, match=r"memory in use\. 102\.40 MiB allowed; Of the allocated memory"):
        mine.allocate(0, mine.size // 5, stream)
    mine.limit(1.0)
    assert mine.allocate(0, mine.size // 5, stream) is not None


def test_the_driver_keeps_its_part_whatever_share_is_set() -> None:
    _, mine, stream = memory()
    mine.limit(1.0)
    with pytest.raises(OutOfMemory):
        mine.allocate(0, mine.size - CONTEXT + 1, stream)


def test_peaks_and_sums_start_again() -> None:
    _, mine, stream = memory()
    mine.free(mine.allocate(0, 6 * MB, stream))
    assert mine.stats()["allocated_bytes.all.peak"] == 6 * MB
    mine.reset_peak()
    mine.reset_accumulated()
    stats = mine.stats()
    assert stats["allocated_bytes.all.peak"] == stats["allocation.all.allocated"] == stats["allocation.all.freed"] == 0


def test_nothing_needs_no_memory() -> None:
    _, mine, stream = memory()
    assert mine.allocate(0, 0, stream) is None
    mine.free(None)
    mine.record_stream(None, 1)


def native(*calls: Callable[[], object]) -> list[object]:
    """As native code does that calls back several times within one call of it."""
    return list(map(operator_call, calls))


def test_native_code_finds_the_memory_pinned_that_it_has_just_taken() -> None:
    assert native(native_pins, partial(native_is_pinned, 1), partial(native_is_pinned, 2)) == [None, True, False]


def test_an_unknown_address_is_not_pinned_because_somebody_took_pinned_memory_before() -> None:
    native(native_pins)
    assert native(partial(native_is_pinned, 1)) == [False]
    assert native(partial(native_is_pinned, 1)) == [False]
    asked: list[object] = []
    native(native_pins, lambda: asked.extend(in_a_thread(partial(native_is_pinned, 1))))
    assert asked == [False]


def in_a_thread(does: Callable[[], object]) -> list[object]:
    found: list[object] = []
    thread = Thread(target=lambda: found.append(does()))
    thread.start()
    thread.join()
    return found


@settings(max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30 * MB), st.integers(0, 2)), max_size=80))
def test_blocks_never_overlap_and_sums_hold(program: list[tuple[bool, int, int]]) -> None:
    on, mine, stream = memory()
    streams = [stream, on.new_stream(), on.new_stream()]
    live: list[Block] = []
    for frees, size, which in program:
        if frees and live:
            mine.free(live.pop(size % len(live)))
            continue
        try:
            block = mine.allocate(0, size, streams[which])
        except OutOfMemory:
            continue
        assert block is not None
        live.append(block)
    places = sorted((block.address, block.address + block.size) for block in live)
    assert all(one[1] <= other[0] for one, other in pairwise(places))
    stats = mine.stats()
    assert stats["allocated_bytes.all.current"] == sum(block.size for block in live)
    assert stats["allocation.all.current"] == len(live)
    assert stats["reserved_bytes.all.current"] <= mine.size - CONTEXT
    for block in live:
        mine.free(block)
    mine.empty_cache()
    assert mine.stats()["reserved_bytes.all.current"] == 0
    assert mine.stats()["inactive_split_bytes.all.current"] == 0


def test_the_timeline_tells_what_was_held_over_time() -> None:
    on, mine, stream = memory()
    first = mine.allocate(0, 3 * MB, stream)
    mine.allocate(0, 512, stream)
    mine.free(first)
    mine.allocate(0, 4 * MB, stream)
    held = on.timeline().memory
    assert held.size.tolist() == [3 * MB, 512, -3 * MB, 4 * MB]
    assert held.allocated.tolist() == [3 * MB, 3 * MB + 512, 512, 4 * MB + 512]
    assert held.reserved[-1] == mine.stats()["reserved_bytes.all.current"]
    assert held.block[0] == held.block[2]
