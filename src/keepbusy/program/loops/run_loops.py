"""The loops of a run, from its timeline: the tree of the whole run, and the marks of its steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from keepbusy.program.loops.codes import Chain, Line, ProgramCodes, read_source
from keepbusy.program.loops.iteration_counts import IterationCounts
from keepbusy.program.loops.line_iterations import LineIterations, LoopKey
from keepbusy.program.loops.log_gaps import LogGaps
from keepbusy.program.loops.run_tree import BusyUntil, LoopIterations, LoopTimes, RunTree, Whereabouts
from keepbusy.program.loops.source_loops import SourceLoops
from keepbusy.program.loops.step_loop import Nest, innermost_loops, loops_beside, marked_loop, with_marks, working_loop
from keepbusy.timeline.model import NONE, FrameKind, Ints, Kind, Mask, Timeline
from keepbusy.timeline.steps import has_steps

STAY, STAY_SHARE = 60_000_000, 0.05
"""A function holds loops of the run if it lasts so long each time; of a short run, if it lasts so much of it. What is
shorter, as a model's loop over its layers, is a part of an iteration."""

CodeLine = tuple[CodeType, int]
"""A code, and one of its lines."""


class GapSamples(NamedTuple):
    """Samples within the gaps of a log. Times count from the run's first moment."""

    gaps: LogGaps
    times: Ints
    """Times of the samples."""
    chains: Sequence[tuple[CodeLine, ...]]
    """The stack of each sample, from the outside in."""


@dataclass
class LoopEvidence:
    """Evidence about a run's loops besides its timeline."""

    lines: Mapping[str, CodeLine]
    """The line of each frame name."""
    lane: int = 0
    """The lane of the thread that began the run."""
    counts: IterationCounts | None = None
    """None if Python counted nothing."""
    wires: Mapping[int, int] = field(default_factory=dict)
    """How long collectives were on the wire, by row."""
    is_announced: bool = False
    """Whether the program announces the ends of its steps."""
    exact: Mask | None = None
    """Frames that show the order of the program's lines; None if all do."""
    gap_samples: GapSamples | None = None
    """With samples in gaps, the tree is that of the whole run, and all else is about the recorded part."""
    other_threads: Sequence[tuple[CodeLine, int]] = ()
    """The processor time of other threads, by line."""
    ran: int = NONE
    """The processor time of the program's own thread."""


def with_loops(timeline: Timeline, known: LoopEvidence) -> Timeline:
    """Add the tree of the run, marks at the iterations of the loop that trains, and some iterations of other loops."""
    codes = known.counts.codes if known.counts is not None else ProgramCodes()
    sources, samples = SourceLoops(read_source), known.gap_samples

    def line_of(name: str) -> Line:
        code, line = known.lines[name]
        return Line(codes.number(code), line)

    visits = _Visits.of(timeline, known.lane, line_of)
    recorded = whole = visits.whereabouts(int(timeline.spans.end.max(initial=0)))
    busy_until = busy_in_whole_run = _busy_until(timeline, known.wires)
    if samples is not None:
        whole = _whole_run(recorded, samples, codes)
        busy_in_whole_run = _busy_in_whole_run(whole, busy_until, samples.gaps)
    in_order = visits if known.exact is None else _Visits.of(timeline, known.lane, line_of, known.exact)
    times = np.append(in_order.start[~in_order.passing], in_order.end.max(initial=0))
    read = LineIterations(times, in_order.chain[~in_order.passing], in_order.known, codes, sources)
    counted = None if known.counts is None else _counted(known.counts, whole.known, sources)
    iterations, in_whole_run = _iterations(read, counted, samples.gaps if samples is not None else None)
    nests = [_nest(chain, codes, sources, iterations.ends) for chain in recorded.known]

    def times_of(where: Whereabouts, ends: LoopIterations, busy: BusyUntil, holders: Iterable[int]) -> LoopTimes:
        return LoopTimes(codes, where, ends, busy, sources, min(STAY, round(STAY_SHARE * where.ended)), holders)

    nest: Nest = ()
    if not len(timeline.marks):
        held = {key for loop in innermost_loops(times_of(recorded, iterations, busy_until, ())) for key in loop.nest}
        nest = working_loop(timeline, visits.of_frame, nests, iterations.ends, held)
    elif not known.is_announced:
        nest = marked_loop(timeline, visits.of_frame, nests, iterations.ends)
    if nest and nest[-1] in iterations.unsure and not has_steps(timeline):
        nest = ()  # iterations would be missing; the steps are found in another way
    holders = {code for code, _ in (*nest, *loops_beside(nest, nests))}
    of_recorded = times_of(recorded, iterations, busy_until, holders)
    of_whole = of_recorded if samples is None else times_of(whole, in_whole_run, busy_in_whole_run, holders)
    other_threads = [(Line(codes.number(code), line), time) for (code, line), time in known.other_threads]
    timeline = timeline.change_facts(run=RunTree(of_whole).root(other_threads, known.ran))
    loops = innermost_loops(of_recorded) if nest else []
    trains = next((loop for loop in loops if loop.nest[-1] == nest[-1]), None)
    return timeline if trains is None else with_marks(timeline, known.lane, trains, loops)


def _iterations(
    read: LineIterations, counted: LoopIterations | None, gaps: LogGaps | None
) -> tuple[LoopIterations, LoopIterations]:
    """Iterations in the recorded part, whose lines are read, and in the whole run, in which Python counts."""
    if counted is None:
        recorded = LoopIterations(read.ends, read.calls, read.unsure())
        return recorded, recorded if gaps is None else recorded.moved(gaps.real)
    recorded = counted if gaps is None else counted.moved(gaps.recorded_alone)
    # Python counts calls of functions that hold a loop, and no others
    recorded, whole = (replace(part, calls={**read.calls, **part.calls}) for part in (recorded, counted))
    return recorded, whole


def _counted(counts: IterationCounts, known: Sequence[Chain], sources: SourceLoops) -> LoopIterations:
    """The counts of loops in these chains, copied because the program may go on."""
    seen = {line.code for chain in known for line in chain}
    ends, incomplete = defaultdict[LoopKey, list[Ints]](list), set[LoopKey]()
    for jump, times in list(counts.ends.items()):
        loop = sources.of_jump(counts.codes.objects[jump[0]], jump[1]) if jump[0] in seen else None
        if loop is not None:
            ends[jump[0], loop.first].append(np.array(times[:], np.int64))
            incomplete |= {(jump[0], loop.first)} if jump in counts.incomplete else set()
    return LoopIterations(
        {loop: np.sort(np.concatenate(times)) for loop, times in ends.items()},
        {code: np.array(times[:], np.int64) for code, times in list(counts.calls.items()) if code in seen},
        incomplete=frozenset(incomplete),
        fleeting=frozenset(counts.fleeting),
        are_counted=True,
    )


@dataclass(frozen=True)
class _Visits:
    """Frames that are lines of the program, in the order of their begin, on the thread that began the run."""

    start: Ints
    end: Ints
    chain: Ints  # the chain during each visit, as an index into `known`
    after: Ints  # the chain after each visit
    passing: Mask  # whether an inner line begins at the same time
    of_frame: Ints  # the chain of each frame of any kind; the last entry is that of no frame
    known: list[Chain]

    @classmethod
    def of(cls, timeline: Timeline, lane: int, line_of: Callable[[str], Line], exact: Mask | None = None) -> _Visits:
        frames = timeline.frames
        is_line = np.append(frames.kind == FrameKind.LINE, False)  # the last place: of no frame
        parent = np.append(frames.parent, NONE)
        around = parent.copy()  # of each frame the line that it is in, whatever stands in between
        while (up := (around != NONE) & ~is_line[around]).any():
            around[up] = parent[around[up]]
        # on the virtual GPU what an annotation holds begins with the program's outermost line again
        outer = around if timeline.facts.logged else np.where(is_line[parent], parent, NONE)
        known = list[Chain]([()])
        chain = np.zeros(len(parent), np.int64)
        level = is_line & (outer == NONE)
        while level.any():
            rows = np.flatnonzero(level)
            keys = chain[outer[rows]] * len(timeline.names) + frames.name[rows]
            distinct, place = np.unique(keys, return_inverse=True)
            chain[rows] = len(known) + place
            for key in distinct.tolist():
                before, name = divmod(key, len(timeline.names))
                known.append((*known[before], line_of(timeline.names[name])))
            level = is_line & level[outer] & (outer != NONE)
        of_lane = is_line[:-1] & (frames.lane == lane)
        rows = np.flatnonzero(of_lane if exact is None else of_lane & exact)
        inner, starts = rows + 1, np.append(frames.start, NONE)
        passing = is_line[inner] & (parent[inner] == rows) & (starts[inner] == starts[rows])
        of_frame = np.where(is_line, chain, chain[around])
        return cls(frames.start[rows], frames.end[rows], chain[rows], chain[around[rows]], passing, of_frame, known)

    def whereabouts(self, ended: int) -> Whereabouts:
        """The times at which the program changed its line, and the chain from each of them on."""
        lasts = np.flatnonzero(self.end > self.start)
        times = np.concatenate([self.end[lasts], self.start[lasts]])
        chains = np.concatenate([self.after[lasts], self.chain[lasts]])
        begins = np.repeat([False, True], len(lasts))
        inside = np.concatenate([-lasts, lasts])  # ends first and begins last
        order = np.lexsort((inside, begins, times))
        times, chains = times[order], chains[order]
        kept = np.append(times[1:] != times[:-1], True)[: len(times)]
        return Whereabouts(times[kept], chains[kept], self.known, ended)


def _nest(chain: Chain, codes: ProgramCodes, sources: SourceLoops, ends: Mapping[LoopKey, Ints]) -> Nest:
    """The loops around these lines, without those that iterate once per iteration of the loop around them."""
    nest, most = list[LoopKey](), 1
    for line in chain:
        for loop in sources.around(codes.objects[line.code], line.line):
            if (count := len(ends.get((line.code, loop.first), ()))) > most:
                nest.append((line.code, loop.first))
                most = count + 1
    return tuple(nest)


def _whole_run(where: Whereabouts, samples: GapSamples, codes: ProgramCodes) -> Whereabouts:
    """The whereabouts in the whole run: the recorded ones, and the samples in gaps."""
    gaps, known = samples.gaps, list(where.known)
    numbers = {chain: number for number, chain in enumerate(known)}
    inside = list[int]()
    for chain in samples.chains:
        lines = tuple(Line(codes.number(code), line) for code, line in chain)
        if lines not in numbers:
            numbers[lines] = len(known)
            known.append(lines)
        inside.append(numbers[lines])
    # after a gap the program is assumed to be where it was before
    before = np.searchsorted(where.times, gaps.recorded(gaps.begins), side="right") - 1
    times = np.concatenate([gaps.real(where.times), samples.times, gaps.ends])
    chains = np.concatenate([where.chains, np.array(inside, np.int64), where.chains[np.maximum(0, before)]])
    order = np.argsort(times, kind="stable")
    return Whereabouts(times[order], chains[order], known, where.ended + gaps.time)


def _busy_until(timeline: Timeline, wires: Mapping[int, int]) -> BusyUntil:
    """How long the GPUs of this process have computed until a moment, averaged over those that did anything. Copies do
    not count, and of a collective only the time on the wire."""
    spans = timeline.spans
    device = np.array([NONE if lane.device is None else lane.device for lane in timeline.lanes], np.int64)[spans.lane]
    rows = np.flatnonzero((device != NONE) & (spans.kind != Kind.COPY))
    start = spans.start.copy()  # of a collective the wait for other ranks comes first
    start[list(wires)] = spans.end[list(wires)] - list(wires.values())
    curves = list[tuple[Ints, Ints]]()  # moments at which work begins or ends, and how much was done until then
    for number in np.unique(device[rows]):
        on_device = rows[device[rows] == number]
        on_device = on_device[np.argsort(start[on_device], kind="stable")]
        begin, end = start[on_device], np.maximum.accumulate(spans.end[on_device])
        begins = np.flatnonzero(np.append(True, begin[1:] > end[:-1]))
        begun, ended = begin[begins], end[np.append(begins[1:] - 1, len(end) - 1)]
        worked = ended - begun
        done = np.cumsum(worked)
        curves.append((np.stack([begun, ended], axis=1).ravel(), np.stack([done - worked, done], axis=1).ravel()))

    def busy_until(moments: Ints) -> NDArray[np.float64]:
        nothing = np.zeros(len(moments))
        return sum((np.interp(moments, *curve) for curve in curves), nothing) / max(1, len(curves))

    return busy_until


def _busy_in_whole_run(where: Whereabouts, recorded: BusyUntil, gaps: LogGaps) -> BusyUntil:
    """As `_busy_until`, for the whole run: in gaps the GPU is assumed to be as busy at each line as in the recorded
    part, there or at the lines around it."""
    times = np.append(where.times, where.ended)
    inside = gaps.holds(times[:-1])
    durations, count = np.diff(times), len(where.known)
    passed = np.bincount(where.chains, durations * ~inside, count)
    worked = np.bincount(where.chains, np.diff(recorded(gaps.recorded(times))) * ~inside, count)
    of_lines = defaultdict[Chain, NDArray[np.float64]](lambda: np.zeros(2))  # time and work, also of lines around
    for lines, *of_chain in zip(where.known, passed, worked, strict=True):
        for depth in range(len(lines) + 1):
            of_lines[lines[:depth]] += of_chain

    def share(lines: Chain) -> float:
        known = (of_lines[lines[:depth]] for depth in range(len(lines), -1, -1))
        return float(next((work / time for time, work in known if time), 0.0))

    shares = np.array([share(lines) for lines in where.known])
    done = np.append(0, np.cumsum(durations * inside * shares[where.chains]))
    return lambda moments: recorded(gaps.recorded(moments)) + np.interp(moments, times, done)
