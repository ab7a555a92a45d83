"""How much of the copies ran beside the loop's own work, from events that the device has passed: nothing waits."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

_REPORTED_SHARE = 0.01
"""Of the time of a step: what is less is noise."""
_SATURATED_SHARE = 0.95
"""Copies that fill this much of the time leave none to hide the rest in."""
_PACKED_MEGABYTES = 1.0
"""Megabytes of a batch below which packing takes the host no longer than a few calls."""


class CopyEvents(NamedTuple):
    """The copies of a batch: events of their stream, and how many bytes."""

    begun: Any
    copied: Any
    ready: Any  # what follows the copies is done as well
    size: int
    packed: int  # bytes that the host packed first
    pageable: int  # of which these it would not have had to pack, had they been pinned


class Handover(NamedTuple):
    """A batch given to the loop."""

    entered: Any  # an event of the loop's stream: the loop asked for the batch
    asked: Any  # and another: what the loop launches next comes after this
    loading: int  # nanoseconds that the host waited for the loader in between
    packing: int  # and those that it took to pack and to issue copies
    copies: CopyEvents


@dataclass(frozen=True)
class PrefetchReport:
    """What prefetching did so far. Times are nanoseconds of the device, sizes are bytes; `print` it."""

    depth: int
    batches: int = 0
    time: int = 0
    size: int = 0
    packed: int = 0
    pageable: int = 0
    copies: int = 0
    exposed: int = 0
    loader_late: int = 0
    packing: int = 0

    @property
    def hidden(self) -> float:
        """The share of the copies that the loop did not wait for."""
        return 1 - min(self.exposed, self.copies) / self.copies if self.copies else 1.0

    def __str__(self) -> str:
        if not self.batches:
            return "Nothing was measured yet: no second batch has come from a CUDA device."
        copied = f"{self._each(self.copies)} ms for {self.size / self.batches / 1e6:.3g} MB"
        lines = [f"{self.hidden:.1%} of the copies were hidden ({self.batches} batches, {copied} each)."]
        reasons = (
            (self.exposed, f"copies, {self._why_exposed()}"),
            (self.packing, f"the host, which {self._why_packing()}"),
            (self.loader_late, "the loader, which is late: give it more workers."),
        )
        for time, reason in reasons:
            if time > _REPORTED_SHARE * self.time:
                lines.append(f"The GPU waited {self._each(time)} ms a batch for {reason}")
        return "\n".join(lines)

    def _why_exposed(self) -> str:
        if self.copies > _SATURATED_SHARE * self.time:
            return "which outlast the work beside them: send fewer bytes, such as uint8 made float by `then`."
        return f"because depth={self.depth} is too shallow for steps so uneven: try depth={2 * self.depth}."

    def _why_packing(self) -> str:
        packed = self.packed / self.batches / 1e6
        if packed < _PACKED_MEGABYTES:
            return "has no lead over it: every call counts, also those that issue copies."
        if 2 * self.pageable > self.packed:
            return f"packed {packed:.3g} MB: let the loader pin its memory (pin_memory=True)."
        return f"packed {packed:.3g} MB: give the loader workers, which join small tensors (num_workers)."

    def _each(self, time: int) -> str:
        return f"{time / self.batches / 1e6:.3g}"


class Overlap:
    """The sums of a report, brought up to what the device has passed."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._sums: Counter[str] = Counter()
        self._pending: deque[Handover] = deque()
        self._previous_asked: Any = None  # when the loop got the batch before

    def add(self, handover: Handover) -> None:
        self._pending.append(handover)
        self._settle()

    def begin(self) -> None:
        """A pass over the loader begins: nothing could hide its first copy, and it is not counted."""
        self._settle()
        self._pending.clear()
        self._previous_asked = None

    def report(self) -> PrefetchReport:
        self._settle()
        return PrefetchReport(self._depth, **self._sums)

    def _settle(self) -> None:
        while self._pending and self._pending[0].asked.query() and self._pending[0].copies.ready.query():
            one, previous = self._pending.popleft(), self._previous_asked
            self._previous_asked = one.asked
            if previous is None:
                continue
            idle, exposed = _between(one.entered, one.asked), _between(one.asked, one.copies.ready)
            if exposed:  # copies of an earlier call came last: a quicker host would have waited for them, too
                idle, exposed = 0, exposed + idle
            packing = min(idle, one.packing)  # the host packs last: the end of its call is what the GPU waited for
            self._sums.update(
                batches=1,
                time=_between(previous, one.asked),
                size=one.copies.size,
                packed=one.copies.packed,
                pageable=one.copies.pageable,
                copies=_between(one.copies.begun, one.copies.copied),
                exposed=exposed,
                loader_late=min(idle - packing, one.loading),
                packing=packing,
            )


def _between(first: Any, second: Any) -> int:
    """Nanoseconds from an event to a later one; 0 if it was the earlier one."""
    return max(0, round(first.elapsed_time(second) * 1e6))
