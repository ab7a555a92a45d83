"""No batch is overwritten while somebody may read it, and memory stays flat.

The virtual GPU computes every value at once, so a batch that was overwritten too early would not show in its
values. It shows on the clock: which memory each batch had, when that was written, and when it was last read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import keepbusy
from keepbusy.timeline.model import Direction, Kind

LATE = 3_000_000
"""Cycles that the reading stream spends before it reads: far more than a copy takes."""


class Life(NamedTuple):
    """Of a batch: where it lay, from when on that was written, and until when it was read."""

    begin: int
    end: int
    written: int
    read: int


def naive(loader: Any, then: Callable[[Any], Any] = lambda batch: batch) -> Iterator[Any]:
    """As it is often written: memory of the copy stream, which waits for nobody."""
    side, ahead = torch.cuda.Stream(), None
    for batch in loader:
        with torch.cuda.stream(side):
            ahead = then(batch.to("cuda", non_blocking=True))
        torch.cuda.current_stream().wait_stream(side)
        yield ahead
        ahead = None


def lives(machine: Any, batches: Any, use: Callable[[Tensor], Any]) -> list[Life]:
    """Of the batches of a loop that reads late: its host is far ahead of its device."""
    clock, found, begin = machine.clock, [], machine.clock.rows.spans.count
    for batch in batches:
        block = machine._memory[batch.untyped_storage().data_ptr()].block
        torch.cuda._sleep(LATE)
        use(batch)
        found.append((block.address, block.address + block.size, clock.rows.spans.count))
        del batch, block
    spans, rows = clock.timeline().spans, range(begin, clock.rows.spans.count)
    copies = [row for row in rows if spans.kind[row] == Kind.COPY and spans.direction[row] == Direction.HOST_TO_DEVICE]
    assert len(copies) == len(found)
    side, home = spans.lane[copies[0]], machine.clock.default_stream(0)
    writes = [
        [row for row in range(*between) if spans.lane[row] == side][-1] for between in pairwise([*copies, rows[-1] + 1])
    ]
    ends = [max(spans.end[row] for row in range(begin, until) if spans.lane[row] == home) for _, _, until in found]
    return [
        Life(low, high, int(spans.start[write]), int(end))
        for (low, high, _), write, end in zip(found, writes, ends, strict=True)
    ]


def overwritten(found: list[Life]) -> int:
    """How many times a batch was written where an earlier one was still to be read."""
    pairs = combinations(found, 2)
    return sum(one.begin < two.end and two.begin < one.end and two.written < one.read for one, two in pairs)


def batches(count: int = 12) -> list[Tensor]:
    return [torch.full((1 << 16,), float(index)).pin_memory() for index in range(count)]


def double(batch: Tensor) -> Tensor:
    return batch * 2


def with_temporaries(batch: Tensor) -> None:
    """As large as the batch, so that they take its memory, and it theirs."""
    for _ in range(3):
        (batch + 1).sum()


@pytest.mark.parametrize("then", [None, double])
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("use", [torch.sum, with_temporaries])
def test_no_batch_is_overwritten_before_it_was_read(machine: Any, then: Any, depth: int, use: Any) -> None:
    found = lives(machine, keepbusy.prefetch(batches(), depth=depth, then=then), use)
    assert overwritten(found) == 0
    assert len({life.begin for life in found}) < len(found)  # memory was used again, or this would show nothing


@pytest.mark.parametrize("then", [lambda batch: batch, double])
def test_the_same_look_finds_what_is_wrong_with_a_naive_one(machine: Any, then: Any) -> None:
    assert overwritten(lives(machine, naive(batches(), then), torch.sum)) > 0


def test_batches_that_were_kept_keep_their_memory(machine: Any) -> None:
    kept = list(keepbusy.prefetch(batches(), depth=1))
    blocks = [machine._memory[batch.untyped_storage().data_ptr()].block for batch in kept]
    places = sorted((block.address, block.address + block.size) for block in blocks)
    assert all(one[1] <= two[0] for one, two in pairwise(places))


def test_memory_of_the_loop_is_not_written_while_the_loop_reads_it(machine: Any) -> None:
    """What the loop let go just before it asked for a batch is the first memory that the batch may get."""
    clock, found, begin = machine.clock, [], machine.clock.rows.spans.count
    iterator = iter(keepbusy.prefetch(batches(8), depth=1))
    for _ in range(7):
        held = torch.zeros(1 << 16, device="cuda")
        block = machine._memory[held.untyped_storage().data_ptr()].block
        torch.cuda._sleep(LATE)
        held.sum()
        found.append((block.address, block.address + block.size, clock.rows.spans.count))
        del held
        next(iterator)
    spans = clock.timeline().spans
    copies = [row for row in range(begin, clock.rows.spans.count) if spans.kind[row] == Kind.COPY]
    home = clock.default_stream(0)
    for low, high, until in found:
        last = max(spans.end[row] for row in range(begin, until) if spans.lane[row] == home)
        after = [row for row in copies if row >= until]
        assert all(spans.start[row] >= last for row in after), (low, high)


def test_what_is_still_on_its_way_arrives_before_its_memory_is_used_again(machine: Any) -> None:
    """The loop is left while copies run; its next tensor takes their memory."""
    iterator = iter(keepbusy.prefetch(batches(), depth=4))
    next(iterator)
    begin = machine.clock.rows.spans.count
    del iterator
    torch.zeros(1 << 16, device="cuda")
    spans = machine.clock.timeline().spans
    copied = max(spans.end[row] for row in range(begin) if spans.kind[row] == Kind.COPY)
    home = machine.clock.default_stream(0)
    assert all(spans.start[row] >= copied for row in range(begin, len(spans)) if spans.lane[row] == home)


def test_a_loop_may_change_its_stream(machine: Any) -> None:
    """The stream that gets a batch may read it, and its memory is not used again before that stream is done."""
    other = torch.cuda.Stream()
    iterator = iter(keepbusy.prefetch(batches(), depth=2))
    found = []
    for index in range(12):
        with torch.cuda.stream(other if index % 3 else torch.cuda.default_stream()):
            batch = next(iterator)
            block = machine._memory[batch.untyped_storage().data_ptr()].block
            torch.cuda._sleep(LATE)
            batch.sum()
        found.append((block.address, machine.clock.rows.spans.count, machine.clock.rows.spans.last()))
        del batch, block
    ends = {}
    spans = machine.clock.timeline().spans
    copies = [row for row in range(len(spans)) if spans.kind[row] == Kind.COPY][-12:]
    for (address, until, _), copy in zip(found, copies, strict=True):
        assert spans.start[copy] >= ends.get(address, 0)
        ends[address] = int(spans.end[until - 1])


@pytest.mark.parametrize("then", [None, double])
def test_memory_is_flat(machine: Any, then: Any) -> None:
    """However far the host is ahead: `depth + 2` batches, and of what `then` makes no more than twice that."""

    def peak(count: int) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for batch in keepbusy.prefetch(batches(count), depth=2, then=then):
            torch.cuda._sleep(LATE)
            batch.sum()
        return (torch.cuda.memory_stats()["active_bytes.all.peak"] - before) >> 18

    assert max(peak(20), peak(200)) <= (2 + 2 if then is None else 3 * (2 + 2))


def test_the_host_gets_no_further_ahead_than_its_pinned_memory_lets_it(machine: Any) -> None:
    torch.cuda.synchronize()
    home, leads = machine.clock.queues.streams[machine.clock.queues.default_stream(0)], []
    for index, _ in enumerate(keepbusy.prefetch(batches(20), depth=2)):
        torch.cuda._sleep(LATE)
        if index < 17:  # from here on it has no more to pack, and nothing to wait for
            leads.append(home.until() - machine.clock.now())
    assert max(leads) < (2 + 2.5) * LATE / 1.98  # depth + 2 steps, and a little
