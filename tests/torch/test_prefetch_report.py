"""What `prefetch(...).report()` says, from events of known times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keepbusy.runtime.prefetch.prefetch_iterator import CopyEvents, Handover, Overlap

MS = 1_000_000
MB = 1_000_000


@dataclass
class Passed:
    """An event that the device passes at a time, in milliseconds."""

    time: float
    done: bool = True

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, other: Passed) -> float:
        return other.time - self.time


def handover(
    asked: float, *, idle: float = 0, copied: tuple[float, float] = (0, 0), then: float = 0, **options: Any
) -> Handover:
    """The loop got its batch at `asked`; until then its stream had had nothing to do for `idle`."""
    loading, packing, packed, pageable = (options.get(name, 0) for name in ("loading", "packing", "packed", "pageable"))
    begun, ended = (Passed(time) for time in copied)
    trip = CopyEvents(begun, ended, Passed(ended.time + then), 8 * MB, packed * MB, pageable * MB)
    return Handover(Passed(asked - idle), Passed(asked), round(loading * MS), round(packing * MS), trip)


def said(*handovers: Handover, depth: int = 2) -> str:
    overlap = Overlap(depth)
    for one in handovers:
        overlap.add(one)
    return str(overlap.report())


def test_nothing_is_said_of_nothing() -> None:
    assert said() == said(handover(0)) == "Nothing was measured yet: no second batch has come from a CUDA device."


def test_all_hidden() -> None:
    assert said(handover(0), handover(10, copied=(2, 4)), handover(20, copied=(12, 14))) == (
        "100.0% of the copies were hidden (2 batches, 2 ms for 8 MB each)."
    )


def test_the_first_copy_is_not_counted() -> None:
    """Nothing could have hidden it."""
    assert "100.0%" in said(handover(0, copied=(0, 50)), handover(60, copied=(50, 52)))


def test_copies_that_outlast_the_compute() -> None:
    steps = [handover(4 * n, copied=(4 * n, 4 * n + 4)) for n in range(4)]
    assert said(*steps) == (
        "0.0% of the copies were hidden (3 batches, 4 ms for 8 MB each).\n"
        "The GPU waited 4 ms a batch for copies, which outlast the work beside them: "
        "send fewer bytes, such as uint8 made float by `then`."
    )


def test_steps_too_uneven_for_the_depth() -> None:
    steps = [handover(0), handover(1, copied=(0, 4)), handover(20, copied=(5, 9))]
    assert said(*steps, depth=1).splitlines()[1] == (
        "The GPU waited 1.5 ms a batch for copies, because depth=1 is too shallow for steps so uneven: try depth=2."
    )


def test_a_late_loader_and_a_host_that_packs() -> None:
    """The GPU fell idle at the end of the call, and packing is what the host does last."""
    late = handover(10, idle=6, copied=(2, 3), loading=20, packing=2, packed=8, pageable=7)
    assert said(handover(0), late).splitlines()[1:] == [
        "The GPU waited 2 ms a batch for the host, which packed 8 MB: let the loader pin its memory (pin_memory=True).",
        "The GPU waited 4 ms a batch for the loader, which is late: give it more workers.",
    ]


def test_small_tensors_are_no_matter_of_pinning() -> None:
    packing = handover(10, idle=6, copied=(2, 3), packing=9, packed=8)
    assert said(handover(0), packing).splitlines()[1:] == [
        "The GPU waited 6 ms a batch for the host, which packed 8 MB: "
        "give the loader workers, which join small tensors (num_workers)."
    ]


def test_a_host_without_a_lead() -> None:
    issuing = handover(1, idle=0.1, copied=(0.2, 0.3), packing=0.2)
    assert said(handover(0), issuing).splitlines()[1:] == [
        "The GPU waited 0.1 ms a batch for the host, which has no lead over it: "
        "every call counts, also those that issue copies."
    ]


def test_what_does_not_matter_is_not_said() -> None:
    assert said(handover(0), handover(100, idle=0.9, copied=(2, 3), loading=5)).count("\n") == 0


def test_what_follows_the_copies_is_waited_for_and_no_copy() -> None:
    overlap = Overlap(2)
    for one in (handover(0), handover(10, copied=(8, 9), then=3)):
        overlap.add(one)
    report = overlap.report()
    assert (report.copies, report.exposed) == (1 * MS, 2 * MS)
    assert report.hidden == 0


def test_only_what_the_device_has_passed_is_counted() -> None:
    overlap = Overlap(2)
    first, second = handover(0), handover(10, copied=(2, 4))
    second.delivered.done = False
    for one in (first, second):
        overlap.add(one)
    assert overlap.report().batches == 0
    second.delivered.done = True
    assert overlap.report().batches == 1


def test_a_new_pass_has_a_first_batch_of_its_own() -> None:
    overlap = Overlap(2)
    for one in (handover(0), handover(10)):
        overlap.add(one)
    overlap.begin()
    overlap.add(handover(500))
    overlap.add(handover(510))
    assert (overlap.report().batches, overlap.report().time) == (2, 20 * MS)
