"""The loops of a run that was recorded whole: nothing has to be sampled.

The timeline tells at which line the program was at any moment. Turns are counted as they pass, by Python itself; before
Python 3.12, which cannot, they are read off the lines: who comes back to an earlier statement of a loop has turned. A
turn in which nothing was called, or the same line as in the one before, passes unseen. So a loop is counted only where
each turn called from two statements at least that no turn leaves out, whatever the program decides.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from keepbusy.instrument.lines import TORCH, USER, holds_loop, kind_of
from keepbusy.instrument.loop_counts import IS_COUNTED
from keepbusy.instrument.loop_tree import (
    RECORDED_AT_MOST,
    BusyLoop,
    BusyUntil,
    LoopKey,
    Nest,
    follows,
    innermost_loops,
    loop_that_trains,
    loops_beside,
    read_source,
    tree_of,
    turns_of_loops,
    worth_a_look,
)
from keepbusy.instrument.loops import LOOKS_IN_ONE_FRAME, LeftOut, Line, Looks, Monitor, TurnCounters
from keepbusy.instrument.source_loops import SourceLoops
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import NONE, FrameKind, Ints, Kind, LinkKind, Mask, Timeline
from keepbusy.timeline.run_facts import LOOP, WindowReason
from keepbusy.timeline.steps import by_pattern, comes_again, has_steps, turns_alone

STAY, STAY_SHARE = 60_000_000, 0.05
"""A function holds loops of the run if it lasts so long each time, as where a run is recorded; of a short run, if it
lasts so much of it. What is shorter, as a model's loop over its layers, is a part of a turn."""
TURNS_A_SECOND, TURNS_IN_A_ROW = 1_000_000, 1 << 14
"""A loop that turns more often, so many times in a row, computes in Python, and is counted no further."""
WORKING_SHARE = 0.5
"""Of the GPU's work, where no step is announced: a loop with less of it is not what the program is for."""
FEWEST_TURNS = 6
"""Of a loop that nothing but its work makes the program's."""
FEWEST_MARKS = 3
"""For two whole turns."""

Chain = tuple[Line, ...]
"""Where the program is, from the outside in."""


class UnrecordedTime(NamedTuple):
    """What is known of stretches that left no calls. Times since the run's first moment."""

    left_out: LeftOut
    times: Ints
    """Looks within them."""
    chains: Sequence[tuple[tuple[CodeType, int], ...]]
    """Where the program was at each, from the outside in: codes and lines."""


class RunLoops:
    """Which codes hold loops, and their turns so far."""

    def __init__(self, moment: Callable[[], int] | None = None, counted: Looks | None = None) -> None:
        """`moment`: how far the program is, where turns are to be counted from now on. `counted`: what was counted
        where the program ran."""
        self._looks = counted or Looks()
        self._numbers = {id(code): number for number, code in enumerate(self._looks.codes)}  # `codes` keeps them alive
        self._is_counted = counted is not None or (moment is not None and IS_COUNTED)
        self._counters: TurnCounters | None = None
        self._early: _EarlyTurns | None = None
        if moment is not None and IS_COUNTED:
            self._counters = TurnCounters(self._looks, moment, TURNS_A_SECOND, TURNS_IN_A_ROW)
            self._early = _EarlyTurns()
        self._begun_uncounted: set[tuple[int, int]] = set()  # loops, by code and the instruction that turns begin at

    def meet(self, code: CodeType) -> None:
        """From here the program calls for the first time: if there is a loop in it, its turns count from now on."""
        number = self._number_of(code)
        if self._counters is not None and self._early is not None and holds_loop(code):
            self._counters.count(number, code)
            self._begun_uncounted |= {(number, target) for target in self._early.of(code)}

    def of_other_threads(self, beside: Iterable[tuple[CodeType, int, int]], ran: int) -> None:
        """What the processors gave to them, by line, and to the program's own thread."""
        self._looks.beside = {Line(self._number_of(code), line): time for code, line, time in beside}
        self._looks.ran = ran

    def end(self) -> None:
        for one in (self._counters, self._early):
            if one is not None:
                one.end()

    def told(
        self,
        timeline: Timeline,
        lines: Mapping[str, tuple[CodeType, int]],
        lane: int,
        wires: Mapping[int, int] | None = None,
        announced: bool = False,
        exact: Mask | None = None,
        unrecorded: UnrecordedTime | None = None,
    ) -> Timeline:
        """A run so far with its tree, its marks at the turns of the loop that trains, and a few turns of other loops.

        `lines`: of the names of frames their code and number; `lane`: the thread that began it; `wires`: of rows of
        collectives, how long they were on the wire; `announced`: the program says itself where its steps end;
        `exact`: frames that tell in which order the program came to its lines, where not all do; `unrecorded`: the tree
        is of the whole run, all else of what was recorded."""
        visits = _Visits.of(timeline, lane, lambda name: self._line(lines, name))
        in_order = visits if exact is None else _Visits.of(timeline, lane, lambda name: self._line(lines, name), exact)
        sources = SourceLoops(read_source)
        counted = self._looks if unrecorded is None else _in_recorded_time(self._looks, unrecorded.left_out)
        looks = self._looks_of(counted, visits, in_order, sources, int(timeline.spans.end.max(initial=0)))
        turns, busy = turns_of_loops(looks, sources), _busy_until(timeline, wires or {})
        nests = [_nest(chain, looks, sources, turns) for chain in visits.known]
        is_marked, steps_itself = len(timeline.marks) > 0, has_steps(timeline)
        if is_marked:
            nest = () if announced else _step_loop(timeline, visits.of_frame, nests, turns, steps_itself)
        else:
            held = {loop for one in innermost_loops(looks, busy, sources) for loop in one.nest}
            nest = _working_loop(timeline, visits.of_frame, [_lasting(one, held) for one in nests], turns)
        if (
            nest and nest[-1] in looks.unsure and not steps_itself
        ):  # where steps end is known, else turns would be missing
            nest = ()
        looks = replace(looks, holders=frozenset(code for code, _ in (*nest, *_beside(nest, nests))))
        if unrecorded is None:
            tree = tree_of(looks, busy, sources)
        else:
            whole = self._of_whole_run(looks, unrecorded)
            tree = tree_of(whole, _busy_in_whole_run(whole, busy, unrecorded.left_out), sources)
        told = timeline.change_facts(run=tree)
        loops = innermost_loops(looks, busy, sources) if nest else []
        trains = next((one for one in loops if one.nest[-1] == nest[-1]), None)
        return told if trains is None else _with_marks(told, lane, trains, loops, is_marked)

    def _looks_of(self, counted: Looks, visits: _Visits, in_order: _Visits, sources: SourceLoops, ended: int) -> Looks:
        """What a recording would have seen, at every line that the program came to. `in_order`: those visits of which
        it is known that no other came between."""
        times, chains = visits.looks()
        looks = replace(
            counted,
            times=times,
            chains=chains,
            known_chains=visits.known,
            longest_stay={line.code: LOOKS_IN_ONE_FRAME for chain in visits.known for line in chain},
            stay=min(STAY, round(STAY_SHARE * ended)),
            ended=ended,
        )
        passes, entries, sure = _read_off(in_order, looks, sources)
        # as where entries are counted, the one at which a code was met first is none of them
        entries = {code: times[1:] for code, times in entries.items()} | looks.entries
        looks = replace(looks, passes=passes, entries=entries)
        known = {Line(*loop) for loop in turns_of_loops(looks, sources)}
        sure = self._counted(sources) if self._is_counted else sure
        return replace(looks, unsure=frozenset(known - sure))

    def _of_whole_run(self, looks: Looks, unrecorded: UnrecordedTime) -> Looks:
        """With what was seen in stretches that were not recorded."""
        left_out, known = unrecorded.left_out, list(looks.known_chains)
        numbers = {chain: number for number, chain in enumerate(known)}
        inside = list[int]()
        for chain in unrecorded.chains:
            lines = tuple(Line(self._number_of(code), line) for code, line in chain)
            if lines not in numbers:
                numbers[lines] = len(known)
                known.append(lines)
            inside.append(numbers[lines])
        cut = np.array(looks.times, np.int64)
        chains = np.array(looks.chains, np.int64)
        # once a stretch is over, the program is where it was when it began, as far as is known
        back = chains[np.maximum(0, np.searchsorted(cut, left_out.recorded(left_out.begins), side="right") - 1)]
        times = np.concatenate([left_out.real(cut), unrecorded.times, left_out.ends])
        chains = np.concatenate([chains, np.array(inside, np.int64), back])
        order = np.argsort(times, kind="stable")
        return replace(
            looks,
            times=array("q", times[order].tolist()),
            chains=array("l", chains[order].tolist()),
            known_chains=known,
            longest_stay={line.code: LOOKS_IN_ONE_FRAME for chain in known for line in chain},
            turns=self._looks.turns,
            entries=looks.entries | self._looks.entries,
            passes={
                line: array("q", left_out.real(np.array(at, np.int64)).tolist()) for line, at in looks.passes.items()
            },
            stay=looks.stay and min(STAY, round(STAY_SHARE * (looks.ended + left_out.time))),
            ended=looks.ended + left_out.time,
        )

    def _counted(self, sources: SourceLoops) -> set[Line]:
        """Loops whose turns Python has counted, from the first one on."""
        loops = ((one, sources.of_jump(self._looks.codes[one[0]], one[1])) for one in self._begun_uncounted)
        begun = {(code, loop.first) for (code, _), loop in loops if loop is not None}
        return {Line(*loop) for loop in turns_of_loops(self._looks, sources) if loop not in begun}

    def _line(self, lines: Mapping[str, tuple[CodeType, int]], name: str) -> Line:
        code, line = lines[name]
        return Line(self._number_of(code), line)

    def _number_of(self, code: CodeType) -> int:
        number = self._numbers.get(id(code))
        if number is None:
            number = self._numbers[id(code)] = self._looks.meet(code)
        return number


class _EarlyTurns:
    """Loops of the user's code that turned before a call of the device came from there. Each is told once."""

    def __init__(self) -> None:
        self._turned = defaultdict[int, set[int]](set)  # of each code, by identity, where turns begin
        self._monitor = Monitor(JUMP=self._jumped, PY_START=self._entered)
        if self._monitor.begin():
            self._monitor.watch_all(self._monitor.events.PY_START)

    def of(self, code: CodeType) -> set[int]:
        return self._turned[id(code)]

    def _entered(self, code: CodeType, _: int) -> Any:
        if kind_of(code.co_filename) == USER and holds_loop(code):
            self._monitor.watch(code, self._monitor.events.JUMP)
        return self._monitor.disabled

    def _jumped(self, code: CodeType, source: int, target: int) -> Any:
        if target < source:
            self._turned[id(code)].add(target)
        return self._monitor.disabled

    def end(self) -> None:
        self._monitor.end()


def _in_recorded_time(counted: Looks, left_out: LeftOut) -> Looks:
    """Iterations and calls that ended while the run was recorded."""

    def recorded(moments: array[int]) -> array[int]:
        times = np.array(moments, np.int64)
        return array("q", left_out.recorded(times[~left_out.holds(times)]).tolist())

    turns = {loop: recorded(ends) for loop, ends in counted.turns.items()}
    return replace(counted, turns=turns, entries={code: recorded(one) for code, one in counted.entries.items()})


@dataclass(frozen=True)
class _Visits:
    """Frames that are lines of the program, in the order in which it came there, on the thread that began the run."""

    start: Ints
    end: Ints
    chain: Ints  # of each, where the program is then: which of `known`
    after: Ints  # the same once it ends
    passing: Mask  # whether another one within begins at once
    of_frame: Ints  # of each frame, whatever it is, where the program is: which of `known`; the last place of none
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
            for before, name in zip(*(one.tolist() for one in np.divmod(distinct, len(timeline.names))), strict=True):
                known.append((*known[before], line_of(timeline.names[name])))
            level = is_line & level[outer] & (outer != NONE)
        told = is_line[:-1] & (frames.lane == lane)
        rows = np.flatnonzero(told if exact is None else told & exact)
        inner, starts = rows + 1, np.append(frames.start, NONE)
        passing = is_line[inner] & (parent[inner] == rows) & (starts[inner] == starts[rows])
        of_frame = np.where(is_line, chain, chain[around])
        return cls(frames.start[rows], frames.end[rows], chain[rows], chain[around[rows]], passing, of_frame, known)

    def looks(self) -> tuple[array[int], array[int]]:
        """When the program came to another line, and where it was from then on."""
        lasts = np.flatnonzero(self.end > self.start)
        times = np.concatenate([self.end[lasts], self.start[lasts]])
        chains = np.concatenate([self.after[lasts], self.chain[lasts]])
        begins = np.repeat([False, True], len(lasts))
        inside = np.concatenate([-lasts, lasts])  # ends first and begins last
        order = np.lexsort((inside, begins, times))
        times, chains = times[order], chains[order]
        kept = np.append(times[1:] != times[:-1], True)[: len(times)]
        return array("q", times[kept].tolist()), array("l", chains[kept].tolist())


def _step_loop(
    timeline: Timeline, of_frame: Ints, nests: Sequence[Nest], turns: Mapping[LoopKey, Ints], steps_itself: bool
) -> Nest:
    """The loop whose turns are the steps, with those around it. Of a program that trains nothing, one in most of whose
    turns its modules are called anew: not the loop over a model's layers."""
    frames = timeline.frames
    passes = np.flatnonzero((frames.kind == FrameKind.ANNOTATION) & (frames.role & Role.BACKWARD != 0))

    def counted(frame: Ints) -> Counter[Nest]:
        found = Counter[Nest]()
        for chain, count in zip(*np.unique(of_frame[frame], return_counts=True), strict=True):
            found[nests[chain]] += int(count)
        return found

    nest = loop_that_trains(counted(timeline.spans.frame[timeline.marks]), counted(passes), turns)
    began = timeline.spans.start[timeline.marks]
    while nest and not steps_itself:
        ends = turns[nest[-1]]
        if 2 * len(np.unique(np.searchsorted(ends, began, "right"))) >= len(ends):
            break
        nest = nest[:-1]
    return nest


def _lasting(nest: Nest, held: Container[LoopKey]) -> Nest:
    """Without what another function does in a part of a turn, as a model with its layers."""
    inner = (index for index, (one, loop) in enumerate(pairwise(nest), 1) if loop[0] != one[0] and loop not in held)
    return nest[: next(inner, len(nest))]


def _working_loop(timeline: Timeline, of_frame: Ints, nests: Sequence[Nest], turns: Mapping[LoopKey, Ints]) -> Nest:
    """Of a program in which nothing announces a step, the loop that most of the GPU's work is launched from."""
    launches = timeline.links.take(np.flatnonzero(timeline.links.kind == LinkKind.LAUNCH))
    launches = launches.take(np.flatnonzero(timeline.spans.kind[launches.target] == Kind.KERNEL))
    chain, work = of_frame[timeline.spans.frame[launches.source]], timeline.spans.work[launches.target]
    held = Counter[Nest]()
    for number, each in enumerate(np.bincount(chain, work, len(nests)).tolist()):
        held[nests[number]] += round(each)
    nest = loop_that_trains(held, {}, turns)
    within = sum(each for one, each in held.items() if one[: len(nest)] == nest)
    return nest if within > WORKING_SHARE * work.sum() else ()


def _is_about(loop: BusyLoop, marked: Timeline, guessed: Timeline) -> bool:
    """Whether the script is about this loop: most waiting comes again in each of its turns, or of the stretches after
    which launches repeat themselves, as where every seventh turn prints something. On a real GPU any script waits most
    while it starts."""
    has_pattern = len(guessed.marks_of(guessed.ranks[0])) > FEWEST_MARKS
    is_long = len(loop.ends) >= FEWEST_TURNS
    return is_long and (marked.facts.logged or comes_again(guessed if has_pattern else marked))


def _beside(nest: Nest, nests: Iterable[Nest]) -> Iterator[LoopKey]:
    """Loops beside the one that trains, as an evaluation; not those within one turn of it, or of each other."""
    for one in nests:
        yield from islice((loop for loop, other in zip(one, nest, strict=False) if loop != other), 1)


def _nest(chain: Chain, looks: Looks, sources: SourceLoops, turns: Mapping[LoopKey, Ints]) -> Nest:
    """The loops around these lines, but for those that turn once in each turn of the one around them."""
    found, most = list[LoopKey](), 1
    for line in chain:
        for loop in sources.around(looks.codes[line.code], line.line):
            if (count := len(turns.get((line.code, loop.first), ()))) > most:
                found.append((line.code, loop.first))
                most = count + 1
    return tuple(found)


def _with_marks(
    timeline: Timeline, lane: int, trains: BusyLoop, loops: Sequence[BusyLoop], is_marked: bool
) -> Timeline:
    """With its steps at the turns of the loop that trains, and turns of others. Without a step of the program's own it
    is explained whole where there are few turns, or most of the waiting was done before they were alike."""
    marked = _marked(timeline, lane, trains)
    if not is_marked:
        guessed = by_pattern(timeline)
        if not _is_about(trains, marked, guessed):
            return timeline
        if abs(len(guessed.marks_of(guessed.ranks[0])) - len(trains.ends)) <= 2:  # as often, and begun where it waits
            marked = guessed.change_facts(loop=trains.place)
    worth = {one.nest for one in worth_a_look(loops)}
    further = [_window(timeline, lane, one) for one in loops_beside(trains, loops) if one.nest in worth]
    return marked.change(further=tuple(one for one in further if one is not None))


def _marked(timeline: Timeline, lane: int, loop: BusyLoop, last: int = 0) -> Timeline:
    """With a mark where each turn of a loop ends, or of its last ones, as far as there are whole ones. The first turn
    after the loop has begun lies beside it, for nobody knows where that began."""
    rows = timeline.rows_of(lane)
    at = np.searchsorted(timeline.spans.start[rows], loop.ends)
    kept = np.append(np.diff(at) > 0, True) & (at < len(rows))  # a turn in which nothing happened is none
    marks, ends = rows[at[kept]][-last:], loop.ends[kept][-last:]
    apart = np.flatnonzero(~follows(ends, loop.anew))
    if len(marks) - len(apart) < FEWEST_MARKS:
        return timeline
    return timeline.change(marks=marks).change_facts(loop=loop.place, beside=tuple(apart.tolist()))


def _window(timeline: Timeline, lane: int, loop: BusyLoop) -> Timeline | None:
    """A few turns of another loop, as where a run is recorded; None where there are none."""
    marked = _marked(timeline, lane, loop, RECORDED_AT_MOST)
    if not marked.facts.loop:
        return None
    return turns_alone(marked, brief=True).change_facts(reason=WindowReason(LOOP, place=loop.place), run=None, notes=())


def _read_off(
    visits: _Visits, looks: Looks, sources: SourceLoops
) -> tuple[dict[Line, array[int]], dict[int, array[int]], set[Line]]:
    """When loops turned, each by its first line, when functions were entered, and of which loops no turn is missing.

    Each way from one line to the next tells which loops turn on it and which functions begin, and there are few ways.
    """
    chain = visits.chain[~visits.passing]
    ways, kind = np.unique(np.append(0, chain) * len(visits.known) + np.append(chain, 0), return_inverse=True)
    times = np.append(visits.start[~visits.passing], visits.end.max(initial=0))
    turned, entered = defaultdict[Line, list[Ints]](list), defaultdict[int, list[Ints]](list)  # at which visits
    repeated = set[Line]()  # else nothing tells whether there was more than one turn
    for number, way in enumerate(ways.tolist()):
        first, second = (visits.known[one] for one in divmod(way, len(visits.known)))
        came = np.flatnonzero(kind == number)
        for loop, back in _turned(first, second, looks, sources):
            turned[loop].append(came)
            repeated |= {loop} if back else set()
        for code in _entered(first, second):
            entered[code].append(came)
    ends = {loop: np.sort(np.concatenate(found)) for loop, found in turned.items() if loop in repeated}
    return (
        {loop: array("q", times[found].tolist()) for loop, found in ends.items()},
        {code: array("q", times[np.sort(np.concatenate(found))].tolist()) for code, found in entered.items()},
        _seen_in_each_turn(chain, ends, visits.known, looks, sources),
    )


def _seen_in_each_turn(
    chain: Ints, ends: Mapping[Line, Ints], known: Sequence[Chain], looks: Looks, sources: SourceLoops
) -> set[Line]:
    """Loops of which no turn has passed unseen: two statements that every turn passes have called in each of them."""
    calls = defaultdict[Line, defaultdict[range, list[int]]](lambda: defaultdict(list))  # the chains of each statement
    for number, lines in enumerate(known):
        for code, line in reversed(lines):
            for loop in sources.around(looks.codes[code], line):
                for statement in {one for one in loop.certain if line in one}:
                    calls[Line(code, loop.first)][statement].append(number)
            if looks.kinds[code] != TORCH and not sources.is_certain(looks.codes[code], line):
                break  # who called it may do so without this call
    sure = set[Line]()
    for place, found in ends.items():
        turns = [np.searchsorted(found, np.flatnonzero(np.isin(chain, one)), "right") for one in calls[place].values()]
        if sum(len(np.unique(one[one < len(found)])) == len(found) for one in turns) > 1:
            sure.add(place)
    return sure


def _parting(first: Chain, second: Chain) -> tuple[int, bool]:
    """From which frame on the two are no longer alike, and whether both have that one, at another line."""
    alike = [one == other for one, other in zip(first, second, strict=False)]
    depth = alike.index(False) if False in alike else len(alike)
    return depth, depth < len(alike) and first[depth].code == second[depth].code


def _entered(first: Chain, second: Chain) -> set[int]:
    depth, same = _parting(first, second)
    return {line.code for line in second[depth + same :]}


def _turned(first: Chain, second: Chain, looks: Looks, sources: SourceLoops) -> Iterator[tuple[Line, bool]]:
    """Loops of which a turn ended on the way, each by its first line, and whether another one follows: it goes back to
    an earlier statement or to the head, or leaves the body. The last turn of a `while` counts where all are counted."""
    depth, same = _parting(first, second)
    for at, (code, line) in enumerate(first[depth:], depth):
        goes_to = second[at].line if same and at == depth else 0
        for loop in sources.around(looks.codes[code], line):
            statement, stays = bisect_right(loop.statements, line), loop.first <= goes_to <= loop.last
            if bisect_right(loop.statements, goes_to) < statement if stays else statement and loop.iterates:
                yield Line(code, loop.first), stays


def _busy_until(timeline: Timeline, wires: Mapping[int, int]) -> BusyUntil:
    """How long the GPUs of this process computed until then, in the mean of those that did anything. A copy is no
    computing, and of a collective only the time on the wire."""
    spans = timeline.spans
    device = np.array([NONE if lane.device is None else lane.device for lane in timeline.lanes], np.int64)[spans.lane]
    rows = np.flatnonzero((device != NONE) & (spans.kind != Kind.COPY))
    start = spans.start.copy()  # of a collective the wait for other ranks comes first
    start[list(wires)] = spans.end[list(wires)] - list(wires.values())
    of_devices = [rows[device[rows] == one] for one in np.unique(device[rows])]
    curves = [_reached(start[mine], spans.end[mine]) for mine in of_devices]

    def busy_until(moments: Ints) -> NDArray[np.float64]:
        nothing = np.zeros(len(moments))
        return sum((np.interp(moments, *curve) for curve in curves), nothing) / max(1, len(curves))

    return busy_until


def _busy_in_whole_run(looks: Looks, recorded: BusyUntil, left_out: LeftOut) -> BusyUntil:
    """In what was left out, at each line the GPU was as busy as it was there, or around it, while it was recorded."""
    times, chains = np.append(looks.times, looks.ended), np.array(looks.chains, np.int64)
    inside = left_out.holds(times[:-1])
    passed, worked = np.diff(times) * ~inside, np.diff(recorded(left_out.recorded(times))) * ~inside
    of_lines = defaultdict[Chain, NDArray[np.float64]](lambda: np.zeros(2))  # time and work, also of lines around
    for lines, *of_chain in zip(
        looks.known_chains,
        *(np.bincount(chains, one, len(looks.known_chains)) for one in (passed, worked)),
        strict=True,
    ):
        for depth in range(len(lines) + 1):
            of_lines[lines[:depth]] += of_chain

    def share(lines: Chain) -> float:
        known = (of_lines[lines[:depth]] for depth in range(len(lines), -1, -1))
        return float(next((work / time for time, work in known if time), 0.0))

    shares = np.array([share(lines) for lines in looks.known_chains])
    done = np.append(0, np.cumsum(np.diff(times) * inside * shares[chains]))
    return lambda moments: recorded(left_out.recorded(moments)) + np.interp(moments, times, done)


def _reached(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Moments at which work begins or ends, and how much was done until then."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    begins = np.flatnonzero(np.append(True, start[1:] > end[:-1]))
    begun, ended = start[begins], end[np.append(begins[1:] - 1, len(end) - 1)]
    done = np.cumsum(ended - begun)
    return np.stack([begun, ended], axis=1).ravel(), np.stack([done - (ended - begun), done], axis=1).ravel()
