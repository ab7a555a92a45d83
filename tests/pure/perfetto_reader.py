"""What Perfetto's trace processor makes of a trace in JSON: its own rules (importers/json and common/slice_tracker.cc,
flow_tracker.cc), for want of a build of it in any registry that our machines reach.

Events are taken in the order of their times, those of one time in the order of the file. Times become whole
nanoseconds by cutting off. A slice that overlaps another one of its thread in part is dropped. An arrow begins and
ends in the innermost slice that its thread has not yet closed, which may have ended already: it is closed when the
next one comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Slice(NamedTuple):
    thread: tuple[int, int]
    name: str
    start: int
    end: int
    depth: int


Begun = dict[tuple[Any, ...], tuple[Slice, int]]
"""Of each arrow the slice and the time at which it begins."""


class Arrow(NamedTuple):
    source: Slice
    left: int
    target: Slice
    reached: int


@dataclass
class Imported:
    """`faults` are the counts that the trace processor shows as errors of import."""

    slices: list[Slice] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)


def nanoseconds(value: float) -> int:
    return value * 1000 if isinstance(value, int) else int(value * 1000.0)


def imported(events: Iterable[dict[str, Any]]) -> Imported:
    timed = [event for event in events if event["ph"] != "M"]
    timed.sort(key=lambda event: nanoseconds(event["ts"]))
    found, open_slices, begun = (
        Imported(),
        dict[tuple[int, int], list[Slice]](),
        dict[tuple[Any, ...], tuple[Slice, int]](),
    )
    for event in timed:
        thread = event["pid"], event.get("tid", event["pid"])
        stack = open_slices.setdefault(thread, [])
        if event["ph"] == "X":
            _slice(event, thread, stack, found)
        elif event["ph"] == "C":
            found.counters.update(f"{event['name']} {one}" for one in event["args"])
        elif not stack:
            found.faults["flow_no_enclosing_slice"] += 1
        else:
            _arrow(event, stack[-1], begun, found)
    return found


def _slice(event: dict[str, Any], thread: tuple[int, int], stack: list[Slice], found: Imported) -> None:
    start = nanoseconds(event["ts"])
    end = start + nanoseconds(event["dur"])
    while stack and (stack[-1].end < start or (stack[-1].end == start and (stack[-1].start < start or start < end))):
        stack.pop()
    if any(start < one.end < end for one in stack):
        found.faults["slice_drop_overlapping_complete_event"] += 1
        return
    stack.append(Slice(thread, event["name"], start, end, len(stack)))
    found.slices.append(stack[-1])


def _arrow(event: dict[str, Any], here: Slice, begun: Begun, found: Imported) -> None:
    number, time = (event["id"], event["cat"], event["name"]), nanoseconds(event["ts"])
    if event["ph"] == "s":
        if number in begun:
            found.faults["flow_duplicate_id"] += 1
        begun.setdefault(number, (here, time))
    elif number not in begun:
        found.faults["flow_end_without_start"] += 1
    else:
        assert event["bp"] == "e"
        found.arrows.append(Arrow(*begun[number], here, time))
