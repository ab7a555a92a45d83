"""Draws a short run as an SVG: the host's thread above, the streams of its GPU below, by rank.

    python docs/course/picture.py run.busy picture.svg

Whatever a program does before it waits for its GPU for the first time, it does to warm up: the picture begins there,
if it waits once more after that.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

import numpy as np

import keepbusy
from keepbusy.timeline.model import FrameKind, Kind, Timeline

WIDTH, NAMES, LANE, GAP, AXIS = 960, 104, 30, 10, 34
COLOURS = {
    Kind.WORK: "host",
    Kind.LAUNCH: "launch",
    Kind.SYNC: "wait",
    Kind.ALLOCATE: "memory",
    Kind.KERNEL: "kernel",
    Kind.COPY: "copy",
    Kind.FILL: "copy",
    Kind.COLLECTIVE: "meet",
}
STYLE = """
.lane{fill:#f2f3f5}.host{fill:#d5d8de}.launch{fill:#565d6b}.memory{fill:#a9afba}.wait{fill:url(#waiting)}
.kernel{fill:#3572c6}.copy{fill:#1d8f6f}.meet{fill:#b3541e}
text{font:12px system-ui,-apple-system,"Segoe UI",sans-serif;fill:#2b2f36}.on{fill:#fff}
.axis{fill:#6a707b;font-size:11px}
path{stroke:#c9ccd2;stroke-width:1}rect.edge{fill:none;stroke:#fff;stroke-width:1}
@media (prefers-color-scheme:dark){.lane{fill:#23262c}.host{fill:#474d57}.launch{fill:#aab1bd}.memory{fill:#6c737f}
text{fill:#dfe2e7}.axis{fill:#989fab}path{stroke:#3a3f48}.kernel{fill:#3f7fd8}.copy{fill:#1f9c79}.meet{fill:#c4622a}}
"""
WAITING = (
    '<pattern id="waiting" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#f4c7c3"/><rect width="3" height="6" fill="#e08f88"/></pattern>'
)


def drawn(timeline: Timeline) -> str:
    """The whole picture."""
    begin, end = extent(timeline)
    scale = (WIDTH - NAMES - 8) / max(1, end - begin)
    lanes = [lane for lane in order_of_lanes(timeline) if in_sight(timeline, lane, begin, end)]
    height = len(lanes) * (LANE + GAP) + AXIS
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(alternative(timeline, lanes, begin, end))}</title>",
        f"<style>{STYLE}</style><defs>{WAITING}</defs>",
    ]
    for place, lane in enumerate(lanes):
        top = place * (LANE + GAP) + 4
        parts.append(f'<text x="4" y="{top + 19}">{escape(name_of(timeline, lane))}</text>')
        parts.append(f'<rect class="lane" x="{NAMES}" y="{top}" width="{WIDTH - NAMES - 8}" height="{LANE}" rx="2"/>')
    parts += axis(begin, end, scale, height)
    for place, lane in enumerate(lanes):
        parts += spans(timeline, lane, begin, end, scale, place * (LANE + GAP) + 4)
    return "\n".join([*parts, "</svg>", ""])


def extent(timeline: Timeline) -> tuple[int, int]:
    """From the end of the first wait for the whole GPU that has commands behind it; to the end of the last command."""
    spans, device = timeline.spans, timeline.on_device
    begin, end = int(spans.start[device].min()), int(spans.end[device].max())
    for wait in np.flatnonzero(spans.kind == Kind.SYNC).tolist():
        if timeline[wait].name == "cudaDeviceSynchronize":
            behind = device & (spans.start > spans.end[wait])
            return (int(spans.end[wait]) if behind.any() else begin), end
    return begin, end


def order_of_lanes(timeline: Timeline) -> list[int]:
    lanes = timeline.lanes
    return sorted(
        range(len(lanes)), key=lambda one: (lanes[one].rank, lanes[one].device is not None, lanes[one].number)
    )


def in_sight(timeline: Timeline, lane: int, begin: int, end: int) -> bool:
    spans = timeline.spans
    shown = (spans.lane == lane) & (spans.end > begin) & (spans.start < end) & (spans.kind != Kind.WORK)
    return bool(shown.any())


def name_of(timeline: Timeline, lane: int) -> str:
    one = timeline.lanes[lane]
    rank = f"rank {one.rank} " if len(timeline.ranks) > 1 else ""
    if one.device is None:
        return f"{rank}Python"
    only_meets = (timeline.spans.kind[timeline.rows_of(lane)] == Kind.COLLECTIVE).all()
    return f"{rank}NCCL" if only_meets else f"{rank}{one.name or f'stream {one.number}'}"


def spans(timeline: Timeline, lane: int, begin: int, end: int, scale: float, top: int) -> Iterator[str]:
    """Each span that is wide enough to be seen, with its name where that fits."""
    for row in timeline.rows_of(lane).tolist():
        span = timeline[row]
        first, last = max(span.start, begin), min(span.end, end)
        if last <= first or (span.kind == Kind.WORK and (last - first) * scale < 1.5):
            continue
        x, width = NAMES + (first - begin) * scale, max(1.0, (last - first) * scale)
        what = COLOURS.get(span.kind, "host")
        yield f'<rect class="{what}" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{LANE}"/>'
        yield f'<rect class="edge" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{LANE}"/>' if width > 4 else ""
        told = label(timeline, row)
        if told and width > 7 * len(told):
            on = ' class="on"' if what in ("kernel", "copy", "meet", "launch") else ""
            yield f'<text{on} x="{x + width / 2:.1f}" y="{top + 19}" text-anchor="middle">{escape(told)}</text>'


def label(timeline: Timeline, row: int) -> str:
    span = timeline[row]
    if span.kind == Kind.SYNC:
        return f"waits, line {line_of(timeline, row)}"
    if span.kind == Kind.COPY:
        return "copy"
    names = {"gemm": "product", "_sleep": "pause", "spin": "pause", "random_": "randn", "normal": "randn"}
    if span.kind in (Kind.KERNEL, Kind.COLLECTIVE):
        name = span.name.removeprefix("ncclDevKernel_")
        return next((short for start, short in names.items() if name.startswith(start)), name.removesuffix("_"))
    return f"line {line_of(timeline, row)}" if span.kind == Kind.WORK else ""


def line_of(timeline: Timeline, row: int) -> str:
    """The number of the line of the program that the host was at."""
    frames, span = timeline.frames, timeline[row]
    at = (frames.kind == FrameKind.LINE) & (frames.lane == timeline.spans.lane[row])
    at &= (frames.start <= span.start) & (frames.end >= min(span.end, span.start + 1))
    names = [timeline.names[frames.name[one]] for one in np.flatnonzero(at)]
    found = [line for name in names if (line := re.match(r"[^/(]+\.py\((\d+)\)", name))]
    return found[-1][1] if found else "?"


def axis(begin: int, end: int, scale: float, height: int) -> Iterator[str]:
    """Some round times."""
    whole = end - begin
    step = next(
        unit for unit in (10**power * times for power in range(3, 12) for times in (1, 2, 5)) if whole / unit <= 10
    )
    for time in range(0, whole + 1, step):
        x = NAMES + time * scale
        told = f"{time / 1e6:g} ms" if step >= 10**5 else f"{time / 1e3:g} µs"
        yield f'<path d="M{x:.1f} 0V{height - 24}"/><text class="axis" x="{x:.1f}" y="{height - 9}">{told}</text>'


def alternative(timeline: Timeline, lanes: list[int], begin: int, end: int) -> str:
    """What a screen reader says."""
    return f"{(end - begin) / 1e6:.1f} ms of {', '.join(name_of(timeline, lane) for lane in lanes)}"


if __name__ == "__main__":
    run, picture = map(Path, sys.argv[1:])
    picture.write_text(drawn(keepbusy.load(run)), encoding="utf-8")
