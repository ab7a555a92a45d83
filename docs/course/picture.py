"""Draws a short run as an SVG: the host's thread above, the streams of its GPU below, by rank.

    python docs/course/picture.py run.busy picture.svg

Boxes bear the program's lines. Arrows are events that a stream or the host waits for. Where a data race lacks one, the
arrow is dashed and crossed out.

Whatever a program does before it waits for its GPU for the first time, it does to warm up: the picture begins there,
if it waits once more after that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

import keepbusy
from keepbusy.causes.places import Where
from keepbusy.report.edges import event_links, missing_edges
from keepbusy.timeline.frame_roles import Owner, owner_of_file, source_line
from keepbusy.timeline.model import NONE, FrameKind, Kind, Timeline

WIDTH, NAMES, LANE, AXIS = 960, 104, 30, 34
GAP, ARROW_GAP = 10, 22
MOST_ARROWS = 12
LETTER = 7
"""Pixels."""
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
path{stroke:#c9ccd2;stroke-width:1}.event{stroke:#0b62c4;stroke-width:1.6;fill:none}
.event.head{fill:#0b62c4;stroke:none}.missing{stroke:#c4002f;stroke-width:1.8;fill:none}
.missing.to{stroke-dasharray:5 3}text.missing{fill:#c4002f;stroke:none}
rect.edge{fill:none;stroke:#fff;stroke-width:1}
@media (prefers-color-scheme:dark){.lane{fill:#23262c}.host{fill:#474d57}.launch{fill:#aab1bd}.memory{fill:#6c737f}
text{fill:#dfe2e7}.axis{fill:#989fab}path{stroke:#3a3f48}.kernel{fill:#3f7fd8}.copy{fill:#1f9c79}.meet{fill:#c4622a}
.event{stroke:#6cb0ff}.event.head{fill:#6cb0ff}.missing{stroke:#ff6b81}text.missing{fill:#ff6b81}}
"""
WAITING = (
    '<pattern id="waiting" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#f4c7c3"/><rect width="3" height="6" fill="#e08f88"/></pattern>'
)


class Sheet(NamedTuple):
    """Where times and lanes stand on the picture."""

    begin: int
    end: int
    lanes: list[int]  # from top to bottom
    gap: int

    @property
    def scale(self) -> float:
        return (WIDTH - NAMES - 8) / max(1, self.end - self.begin)

    @property
    def height(self) -> int:
        return len(self.lanes) * (LANE + self.gap) + AXIS

    def x(self, time: int) -> float:
        return NAMES + (time - self.begin) * self.scale

    def top(self, lane: int) -> int:
        return self.lanes.index(lane) * (LANE + self.gap) + 4

    def between(self, lane: int, other: int) -> tuple[int, int]:
        """The edges of two lanes that face each other."""
        down = LANE if self.top(lane) < self.top(other) else 0
        return self.top(lane) + down, self.top(other) + LANE - down

    def shows(self, lane: int, time: int) -> bool:
        return lane in self.lanes and self.begin <= time <= self.end


def drawn(timeline: Timeline) -> str:
    """The whole picture."""
    begin, end = extent(timeline)
    lanes = [lane for lane in order_of_lanes(timeline) if in_sight(timeline, lane, begin, end)]
    program = lines_of(timeline)
    sheet = Sheet(begin, end, lanes, ARROW_GAP)
    arrows = [*events(program, sheet), *missing(program, sheet)]
    if not arrows:
        sheet = sheet._replace(gap=GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {sheet.height}" role="img">',
        f"<title>{escape(alternative(timeline, sheet))}</title>",
        f"<style>{STYLE}</style><defs>{WAITING}</defs>",
    ]
    for lane in lanes:
        top = sheet.top(lane)
        parts.append(f'<text x="4" y="{top + 19}">{escape(name_of(timeline, lane))}</text>')
        parts.append(f'<rect class="lane" x="{NAMES}" y="{top}" width="{WIDTH - NAMES - 8}" height="{LANE}" rx="2"/>')
    parts += axis(sheet)
    for lane in lanes:
        parts += spans(program, lane, sheet)
    return "\n".join([*parts, *arrows, "</svg>", ""])


def lines_of(timeline: Timeline) -> SimpleNamespace:
    """The timeline, the lines of the program, and which of them each row of the host belongs to."""
    spans, frames = timeline.spans, timeline.frames
    places, place, of_name = list[Where](), np.full(len(timeline), NONE), dict[int, int]()
    for frame in np.flatnonzero(frames.kind == FrameKind.LINE).tolist():  # parents first: the innermost one stays
        name = int(frames.name[frame])
        found = source_line(timeline.names[name])
        if found is None or owner_of_file(found[0]) != Owner.USER:
            continue
        if name not in of_name:
            of_name[name] = len(places)
            places.append(Where(found[0], found[1], exact=True))
        within = (spans.lane == frames.lane[frame]) & (spans.start >= frames.start[frame])
        place[within & (spans.start < max(frames.end[frame], frames.start[frame] + 1))] = of_name[name]
    place[timeline.on_device] = NONE
    return SimpleNamespace(timeline=timeline, places=tuple(places), place=place)


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
    name = one.name or f"stream {one.number}"
    return f"{rank}NCCL" if only_meets else f"{rank}{name.removesuffix(' stream') if rank else name}"


def spans(program: SimpleNamespace, lane: int, sheet: Sheet) -> Iterator[str]:
    """Each span that is wide enough to be seen, with its line where that fits: in it, or beside it."""
    timeline = program.timeline
    shown = [row for row in timeline.rows_of(lane).tolist() if is_seen(timeline, row, sheet)]
    beside, reached = list[str](), 0.0  # what belongs to boxes that are too narrow, and where the box before them ends
    for place, row in enumerate(shown):
        span = timeline[row]
        x, right = sheet.x(max(span.start, sheet.begin)), sheet.x(min(span.end, sheet.end))
        width, top, what = max(1.0, right - x), sheet.top(lane), COLOURS.get(span.kind, "host")
        yield f'<rect class="{what}" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{LANE}"/>'
        yield f'<rect class="edge" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{LANE}"/>' if width > 4 else ""
        told = labels(program, row)
        inside = next((one for one in told if width > LETTER * len(one)), "")
        free = (sheet.x(timeline[shown[place + 1]].start) if place + 1 < len(shown) else WIDTH) - x - width
        beside += [told[0]] if timeline.on_device[row] and told and not inside and told[0] not in beside else []
        text = " · ".join(beside)
        if inside:
            on = ' class="on"' if what in ("kernel", "copy", "meet", "launch") else ""
            yield f'<text{on} x="{x + width / 2:.1f}" y="{top + 19}" text-anchor="middle">{escape(inside)}</text>'
        elif text and free > LETTER * len(text) + 8:
            yield f'<text x="{x + width + 4:.1f}" y="{top + 19}">{escape(text)}</text>'
        elif text and row == shown[-1] and x - reached > LETTER * len(text) + 24:
            yield f'<text x="{x - 20:.1f}" y="{top + 19}" text-anchor="end">{escape(text)}</text>'
        reached = reached if not inside and free <= 4 else x + width
        beside = [] if inside or free > 4 else beside


def is_seen(timeline: Timeline, row: int, sheet: Sheet) -> bool:
    span = timeline[row]
    first, last = max(span.start, sheet.begin), min(span.end, sheet.end)
    return last > first and (span.kind != Kind.WORK or (last - first) * sheet.scale >= 1.5)


def labels(program: SimpleNamespace, row: int) -> list[str]:
    """What may stand in its box, the longest first."""
    timeline = program.timeline
    span, where = timeline[row], line_of(program, row)
    number = str(where.line) if where else "?"
    code = f"{number} {text_of(where, timeline)}" if where else ""
    if span.kind == Kind.SYNC:
        return [f"{code} waits", f"waits, line {number}"]
    if span.kind == Kind.WORK:
        return [code, f"line {number}"]
    if span.kind == Kind.COLLECTIVE:
        return [span.name.removeprefix("ncclDevKernel_")]
    if span.kind not in (Kind.KERNEL, Kind.COPY):
        return []
    names = {"gemm": "product", "_sleep": "pause", "spin": "pause", "random_": "randn", "normal": "randn"}
    name = next((short for start, short in names.items() if span.name.startswith(start)), span.name.removesuffix("_"))
    return [one for one in (code, "copy" if span.kind == Kind.COPY else name, number if where else "") if one]


def text_of(where: Where, timeline: Timeline) -> str:
    """The line as the program has it, without its comment."""
    text = Path(timeline.facts.folder, where.file).read_text(encoding="utf-8").splitlines()[where.line - 1]
    return text.partition("  #")[0].strip()


def line_of(program: SimpleNamespace, row: int) -> Where | None:
    """The line of the program that the host was at; of a command when it launched it."""
    launches = program.timeline.launches
    if program.timeline.on_device[row]:
        row = int(launches.source[launches.target == row][0])
    return program.places[program.place[row]] if program.place[row] != NONE else None


def events(program: SimpleNamespace, sheet: Sheet) -> list[str]:
    """An arrow from what is waited for to what waits; none where there are many."""
    timeline, drawn = program.timeline, []
    links = timeline.links.take(event_links(program))
    for source, target in zip(links.source.tolist(), links.target.tolist(), strict=True):
        lane, other = int(timeline.spans.lane[source]), int(timeline.spans.lane[target])
        begin, end = (
            timeline[source].end,
            timeline[target].start if timeline.on_device[target] else timeline[target].end,
        )
        if sheet.shows(lane, begin) and sheet.shows(other, end):
            (x, to), (y, y_to) = (sheet.x(begin), sheet.x(end)), sheet.between(lane, other)
            bend, head = min(60.0, max(14.0, (to - x) / 2)), 6 if y_to > y else -6
            curve = f"M{x:.1f} {y}C{x + bend:.1f} {y + head} {to - bend:.1f} {y_to - head} {to:.1f} {y_to}"
            drawn.append(f'<path class="event" d="{curve}"/><circle class="event head" cx="{x:.1f}" cy="{y}" r="2.5"/>')
            drawn.append(f'<path class="event head" d="M{to:.1f} {y_to}l-7 {-head / 2:g}l3 {-head / 1.5:g}z"/>')
    return drawn if len(drawn) <= 2 * MOST_ARROWS else []


def missing(program: SimpleNamespace, sheet: Sheet) -> list[str]:
    """The event that a data race lacks, to where the second use begins."""
    timeline, drawn = program.timeline, []
    for first, second, race in missing_edges(program, timeline.facts.races):
        lane, other = int(timeline.spans.lane[first]), int(timeline.spans.lane[second])
        began, to = timeline[first].start, timeline[second].start
        if not (sheet.shows(lane, began) and sheet.shows(other, to)):
            continue
        begin = began if began > to else min(timeline[first].end, to)
        (x, x_to), (y, y_to) = (sheet.x(begin), sheet.x(to)), sheet.between(lane, other)
        middle, height = (x + x_to) / 2, (y + y_to) / 2
        drawn.append(f'<path class="missing to" d="M{x:.1f} {y}L{x_to:.1f} {y_to}"/>')
        drawn.append(f'<path class="missing" d="M{middle - 5:.1f} {height - 5}l10 10m0 -10l-10 10"/>')
        lines = [place.rpartition(":")[2] for place in (race.first.place, race.second.place)]
        says = f"nothing orders lines {lines[0]} and {lines[1]}"
        anchor = "start" if WIDTH - x_to > LETTER * len(says) + 12 else "end"
        at, base = x_to + (10 if anchor == "start" else -10), height + 4
        if x - x_to > 50:  # beside the line, near its end
            base = y + 12 if y_to > y else y - 4
        drawn.append(f'<text class="missing" x="{at:.1f}" text-anchor="{anchor}" y="{base}">{says}</text>')
    return drawn


def axis(sheet: Sheet) -> Iterator[str]:
    """Some round times."""
    whole = sheet.end - sheet.begin
    step = next(
        unit for unit in (10**power * times for power in range(3, 12) for times in (1, 2, 5)) if whole / unit <= 10
    )
    for time in range(0, whole + 1, step):
        x = NAMES + time * sheet.scale
        told = f"{time / 1e6:g} ms" if step >= 10**5 else f"{time / 1e3:g} µs"
        yield f'<path d="M{x:.1f} 0V{sheet.height - 24}"/>'
        end = ' text-anchor="end"' if x > WIDTH - LETTER * len(told) else ""
        yield f'<text class="axis" x="{x:.1f}"{end} y="{sheet.height - 9}">{told}</text>'


def alternative(timeline: Timeline, sheet: Sheet) -> str:
    """What a screen reader says."""
    names = ", ".join(name_of(timeline, lane) for lane in sheet.lanes)
    return f"{(sheet.end - sheet.begin) / 1e6:.1f} ms of {names}"


if __name__ == "__main__":
    run, picture = map(Path, sys.argv[1:])
    picture.write_text(drawn(keepbusy.load(run)), encoding="utf-8")
