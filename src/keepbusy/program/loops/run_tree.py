"""The tree of a run: its loops, the lines beside them, and where each second went.

The program's place is known at every moment, so the parts always sum to the run. Counted iterations only divide them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from keepbusy.program.lines import LIBRARY, PROGRAM_CODE, TORCH, USER
from keepbusy.program.loops.codes import IMPORTING, NO_LINE, Chain, Line, ProgramCodes
from keepbusy.program.loops.line_iterations import LoopKey
from keepbusy.program.loops.slow_iterations import PlacesInTime, beat_of, slow_kinds, warm_up
from keepbusy.program.loops.source_loops import SourceLoop, SourceLoops
from keepbusy.timeline.model import NONE, Ints, Mask
from keepbusy.timeline.run_facts import FIRST_USE, IMPORTS, LINE, LOOP, RUN, LineTime, Part, SlowIterations, loop_name

STRETCHES = 240
"""The run is divided into so many equal parts for the course of the GPU's busy share."""
SHORTEST_PART = 0.005
"""Share of the run: a shorter loop is merged into the part around it."""
SLOW_ITERATIONS_MATTER = 0.02
"""Share of a loop: slow iterations that cost less are left out."""
KEPT_LINES, KEPT_KINDS = 8, 3
FEWEST_ITERATIONS = 4
"""Iterations of a loop are compared if there are so many."""
AGREEMENT = 0.6
"""A line is the place if so large a share of the time passed at it."""
NEVER: Ints = np.zeros(0, np.int64)

BusyUntil = Callable[[Ints], npt.NDArray[np.float64]]
"""How long the GPU has been busy until each of these moments."""


@dataclass(frozen=True)
class Whereabouts:
    """The program's place over time: from each of `times` on, the chain whose index in `known` is in `chains`."""

    times: Ints
    chains: Ints
    known: Sequence[Chain]
    ended: int


@dataclass(frozen=True)
class LoopIterations:
    """When iterations of loops ended, and when the functions that hold loops were called."""

    ends: Mapping[LoopKey, Ints] = field(default_factory=dict)
    calls: Mapping[int, Ints] = field(default_factory=dict)
    """By the number of the code, without its first call."""
    unsure: frozenset[LoopKey] = frozenset()
    """Loops that may have had more iterations than these."""
    incomplete: frozenset[LoopKey] = frozenset()
    """Loops whose counting was stopped."""
    fleeting: frozenset[int] = frozenset()
    """Codes of functions whose counting was stopped, because they are called too often to hold a loop of the run."""
    are_counted: bool = False
    """Whether Python counted, so that a loop without counts has no iterations."""

    def moved(self, move: Callable[[Ints], Ints]) -> LoopIterations:
        """The same iterations on another clock."""
        ends = {loop: move(times) for loop, times in self.ends.items()}
        return replace(self, ends=ends, calls={code: move(times) for code, times in self.calls.items()})


def follows(ends: Ints, anew: Ints) -> Mask:
    """For each iteration but the first, whether it directly follows the one before."""
    runs = np.searchsorted(anew, ends)
    return np.asarray(runs[1:] == runs[:-1])


@dataclass(eq=False)
class LoopNode:
    """A loop, or the run itself, while the tree is built."""

    code: int = NONE
    loop: SourceLoop | None = None
    leads_here: Line | None = None  # the user's line that leads to a library's loop
    ends: Ints | None = None  # of its iterations here; None where nobody saw it go back anywhere
    children: dict[tuple[LoopKey, Line | None], LoopNode] = field(default_factory=dict)
    chains: list[tuple[int, Line]] = field(default_factory=list)  # in no inner loop: each with its line

    @property
    def key(self) -> LoopKey:
        assert self.loop is not None  # only the root has none
        return self.code, self.loop.first

    @property
    def line(self) -> Line:
        """Where it is shown: at the program's own line, which leads to a library's loop."""
        return self.leads_here or Line(*self.key)

    def all_chains(self) -> list[int]:
        chains = [chain for chain, _ in self.chains]
        for child in self.children.values():
            chains += child.all_chains()
        return chains

    def iterations_within(self, outer: LoopNode) -> Ints:
        """How often it iterated in each iteration of the loop around it, and in the last one, which may not go back."""
        ends, around = (NEVER if node.ends is None else node.ends for node in (self, outer))
        return np.diff(np.concatenate([[0], np.searchsorted(ends, around, "right"), [len(ends)]]))


class LoopTimes:
    """The loops that a run was in, and how long it and the GPU were in them. `stay`: a function holds loops of the run
    if it lasts so long each time; `holders`: codes that hold some in any case."""

    def __init__(
        self,
        codes: ProgramCodes,
        where: Whereabouts,
        iterations: LoopIterations,
        busy_until: BusyUntil,
        sources: SourceLoops,
        stay: int,
        holders: Iterable[int] = (),
    ) -> None:
        self.codes, self.where, self.iterations, self.sources = codes, where, iterations, sources
        edges = np.concatenate([[0], where.times[1:], [max(where.ended, *where.times[-1:], 0)]])
        if not len(where.times):
            edges = edges[:1]
        self.length = np.diff(edges)
        """Of each stay at a chain."""
        count = len(where.known)
        self.time_of = np.bincount(where.chains, self.length, count)
        self.busy_of = np.bincount(where.chains, np.diff(busy_until(edges)), count)
        self.first_of = np.full(count, np.iinfo(np.int64).max)
        np.minimum.at(self.first_of, where.chains, edges[:-1])
        self.busy_shares = _shares(busy_until, int(edges[-1])) if len(where.times) else ()
        self.staying = self._staying(stay, {*holders})
        self.ends = {loop: ends for loop, ends in iterations.ends.items() if loop[0] in self.staying}

    def _staying(self, stay: int, holders: set[int]) -> set[int]:
        within: defaultdict[int, float] = defaultdict(float)
        for chain, lines in enumerate(self.where.known):
            for code in {line.code for line in lines}:
                within[code] += self.time_of[chain]
        calls = self.iterations.calls
        found = {code for code in within if code in calls and within[code] >= stay * (len(calls[code]) + 1)}
        return (found | holders & within.keys()) - self.iterations.fleeting

    def root(self) -> LoopNode:
        """All chains, in their loops."""
        root = LoopNode()
        for chain, lines in enumerate(self.where.known):
            if self.time_of[chain] > 0:
                self._place(root, chain, lines)
        return root

    def _place(self, root: LoopNode, chain: int, lines: Chain) -> None:
        """Down to the innermost loop that this chain is in."""
        codes = self.codes
        if self.kind(chain) == IMPORTS:  # a library that imports something in a loop of its own is importing
            root.chains.append((chain, lines[-1]))
            return
        node, deepest, leads_here = root, None, None
        for line in lines:
            is_user = codes.is_users(line)
            if line.code in self.staying:
                leads: Line | None = None if is_user else leads_here
                for loop in self.sources.around(codes.objects[line.code], line.line):
                    key = (line.code, loop.first), leads
                    node = node.children.setdefault(key, LoopNode(line.code, loop, leads))
                deepest = line
            if is_user:
                leads_here = line
        if deepest is None or not codes.is_users(deepest):
            users = [line for line in lines if codes.is_users(line)]
            installed = [line for line in lines if codes.kinds[line.code] in (LIBRARY, TORCH)]
            # Python itself, once the program is over, is nowhere
            deepest = users[-1] if users else deepest if deepest in installed else next(iter(installed), NO_LINE)
        node.chains.append((chain, deepest))

    def kind(self, chain: int) -> str:
        """What the program did there, beside its loops."""
        lines = self.where.known[chain]
        if any(self.codes.kinds[line.code] == IMPORTING for line in lines):
            return IMPORTS
        users = [line for line in lines if self.codes.is_users(line)]
        if users and self.text(users[-1]).startswith(("import ", "from ")):
            return IMPORTS
        return FIRST_USE if any(self.codes.objects[line.code].co_name == "_lazy_init" for line in lines) else LINE

    def text(self, line: Line) -> str:
        if line == NO_LINE:
            return ""
        return self.sources.text(self.codes.objects[line.code].co_filename, line.line)

    def function(self, node: LoopNode) -> str:
        """The one that holds the loop; of a library's with its place."""
        name = self.codes.objects[node.code].co_name
        return f"{self.codes.place(Line(*node.key))} in {name}" if node.leads_here else name

    def name(self, node: LoopNode) -> str:
        return loop_name(self.codes.place(node.line), self.function(node))

    def time(self, chains: Sequence[int]) -> int:
        return round(float(self.time_of[list(chains)].sum()))

    def busy(self, chains: Sequence[int]) -> int:
        return round(float(self.busy_of[list(chains)].sum()))

    def begun_anew(self, node: LoopNode, outer: LoopNode) -> Ints:
        """When a loop may have begun from the start: its function was called, or the loop around it iterated."""
        calls = np.sort(self.iterations.calls.get(node.code, NEVER))
        if outer.loop is None or outer.code != node.code:
            return calls
        return np.sort(np.concatenate([calls, self.ends.get(outer.key, NEVER)]))


def _shares(busy_until: BusyUntil, ended: int) -> tuple[int, ...]:
    """Of each of some equal stretches of the run, percent of it in which the GPU was at work."""
    borders = np.linspace(0, ended, STRETCHES + 1).astype(np.int64)
    shares = 100 * np.diff(busy_until(borders)) / np.maximum(1, np.diff(borders))
    return tuple(np.clip(shares, 0, 100).round().astype(int).tolist())


class RunTree:
    """Makes the tree of what is known of the loops."""

    def __init__(self, times: LoopTimes) -> None:
        self._times, self._codes, self._where = times, times.codes, times.where
        self._whole = max(1, int(times.length.sum()))

    def root(self, other_threads: Iterable[tuple[Line, int]] = (), ran: int = NONE) -> Part:
        """`other_threads`: what the processors gave to them, by line; `ran`: and to the program's own."""
        times, root = self._times, self._times.root()
        self._divide_iterations(root)
        self._fold(root)
        parts = [*self._beside(root), *(self._loop(child, root) for child in root.children.values())]
        given = Counter[str]()
        for line, time in other_threads:
            given[self._codes.place(line)] += time
        lines = {line for chain in self._where.known for line in chain if self._codes.kinds[line.code] in PROGRAM_CODE}
        objects, decides = self._codes.objects, times.sources.decides
        return Part(
            RUN,
            time=self._whole,
            busy=round(float(times.busy_of.sum())),
            turns=1,
            turn=self._whole,
            parts=_in_order(parts),
            clock=0,
            shares=times.busy_shares,
            decides=tuple(
                sorted({self._codes.place(line) for line in lines if decides(objects[line.code], line.line)})
            ),
            beside=tuple(LineTime(place, time) for place, time in given.most_common(KEPT_LINES) if time),
            ran=ran,
        )

    def _divide_iterations(self, root: LoopNode) -> None:
        """A function that is called from several places holds one loop. Its iterations belong each to the place that
        the program was at just then."""
        places = defaultdict[LoopKey, list[LoopNode]](list)
        nodes = [root]
        for node in nodes:
            nodes += node.children.values()
            if node.loop is not None:
                places[node.key].append(node)
        for loop, nodes_of_loop in places.items():
            if (ends := self._times.ends.get(loop)) is None:
                continue
            owner = np.full(len(self._where.known), NONE, np.int64)
            for number, node in enumerate(nodes_of_loop):
                owner[node.all_chains()] = number
            inside = np.flatnonzero(owner[self._where.chains] != NONE)
            starts = self._where.times[inside]
            after = np.searchsorted(starts, ends)
            before = np.maximum(after - 1, 0)
            after = np.minimum(after, len(inside) - 1)
            is_before = ends - starts[before] <= starts[after] - ends
            owners = owner[self._where.chains[inside[np.where(is_before, before, after)]]]
            for number, node in enumerate(nodes_of_loop):
                node.ends = ends[owners == number]

    def _fold(self, node: LoopNode) -> None:
        """Loops that hardly matter stand among the lines of what they are in."""
        for key, child in list(node.children.items()):
            self._fold(child)
            is_short = self._times.time_of[child.all_chains()].sum() < SHORTEST_PART * self._whole
            if is_short or self._iterates_once(child, node):
                del node.children[key]
                node.chains += child.chains
                for inner, grandchild in child.children.items():
                    node.children.setdefault(inner, grandchild)

    def _iterates_once(self, node: LoopNode, outer: LoopNode) -> bool:
        """Whether a loop iterates but once wherever it does in the loop around it: it is no loop to speak of.

        So does one that tries again until it has something, and a generator that the loop around it asks for batches.
        """
        if node.ends is None:  # nobody saw it go back, and of a library's that is all that makes it a loop of the run
            iterations = self._times.iterations
            was_counted = iterations.are_counted and node.code in iterations.calls
            return was_counted or self._codes.kinds[node.code] != USER
        often = node.iterations_within(outer)
        return not often.any() or float(np.median(often[often > 0])) <= 1

    def _beside(self, root: LoopNode) -> list[Part]:
        """What the run does beside its loops, line by line; importing and waking the GPU under their own names."""
        groups: defaultdict[tuple[str, str], list[tuple[int, Line]]] = defaultdict(list)
        for chain, line in root.chains:
            kind = self._times.kind(chain)
            groups[kind, self._codes.place(line) if kind == LINE else ""].append((chain, line))
        parts = []
        for (kind, place), found in groups.items():
            chains = [chain for chain, _ in found]
            time = self._times.time(chains)
            part = Part(
                kind,
                place,
                source=self._times.text(found[0][1]) if kind == LINE else "",
                began=self._began(chains),
                time=time,
                busy=self._times.busy(chains),
                turns=1,
                turn=time,
                lines=() if kind == LINE else self._lines(found),
            )
            parts.append(part)
        return parts

    def _began(self, chains: Sequence[int]) -> int:
        return int(self._times.first_of[list(chains)].min())

    def _loop(self, node: LoopNode, outer: LoopNode) -> Part:
        times, chains = self._times, node.all_chains()
        time, ends = times.time(chains), NEVER if node.ends is None else node.ends
        assert node.loop is not None
        count = 0 if node.key in times.iterations.unsure else len(ends)
        if count and not node.loop.iterates:  # the last iteration of a `while` does not jump back
            count += len(np.unique(np.searchsorted(times.begun_anew(node, outer), ends)))
        is_incomplete = node.key in times.iterations.incomplete
        part = Part(
            LOOP,
            place=self._codes.place(node.line),
            source=times.text(node.line),
            function=times.function(node),
            began=self._began(chains),
            time=time,
            busy=times.busy(chains),
            turns=count,
            passes=int((node.iterations_within(outer) > 0).sum()) if count else NONE,
            at_least=is_incomplete,
            turn=time // count if count and not is_incomplete else NONE,
            lines=self._lines(self._own_lines(node)),
            parts=_in_order(self._loop(child, node) for child in node.children.values()),
        )
        is_compared = count >= FEWEST_ITERATIONS and not is_incomplete
        return self._with_variation(part, node, times.begun_anew(node, outer)) if is_compared else part

    def _with_variation(self, part: Part, node: LoopNode, anew: Ints) -> Part:
        """How its iterations vary: only those that follow another one, with nothing in between but the loop itself."""
        assert node.ends is not None
        number = 1 + np.flatnonzero(follows(node.ends, anew))
        began, ended = node.ends[number - 1], node.ends[number]
        took = ended - began
        if len(took) < FEWEST_ITERATIONS:
            return part
        cold = warm_up(took)
        rest = took[cold:]
        usual = int(np.median(rest))
        first = int(began[0]) - part.began  # the iteration that was under way when counting began
        is_first_slow = first > 2 * usual
        cold_time = max(0, first - usual) + int(took[:cold].sum()) - cold * usual
        return replace(
            part,
            low=round(float(np.quantile(rest, 0.2))),
            high=round(float(np.quantile(rest, 0.8))),
            warm_up=cold + is_first_slow,
            warm_up_time=max(0, cold_time) if cold or is_first_slow else 0,
            kinds=self._slow_kinds(node, number[cold:], part.time),
        )

    def _slow_kinds(self, node: LoopNode, number: Ints, whole: int) -> tuple[SlowIterations, ...]:
        """Iterations that take far longer than the others, by the line of the loop's own at which they do."""
        assert node.ends is not None
        own_lines = dict(self._own_lines(node))
        known = list(dict.fromkeys(own_lines.values()))
        place_of = np.full(len(self._where.known), NONE, np.int64)
        place_of[[*own_lines]] = [known.index(line) for line in own_lines.values()]
        place = place_of[self._where.chains]
        inside = place != NONE
        where = PlacesInTime(self._where.times[inside], self._times.length[inside], place[inside])
        found = []
        for kind in slow_kinds(node.ends[number - 1], node.ends[number], where)[:KEPT_KINDS]:
            if kind.total < SLOW_ITERATIONS_MATTER * whole:
                break
            rhythm = beat_of(number[kind.rows], number)
            found.append(
                SlowIterations(
                    count=len(kind.rows),
                    every=len(number) / len(kind.rows) if rhythm is None else rhythm,
                    regular=rhythm is not None,
                    longer=int(np.median(kind.longer)),
                    total=kind.total,
                    place=self._codes.place(known[kind.place]) if kind.place != NONE else "",
                )
            )
        return tuple(found)

    def _own_lines(self, node: LoopNode) -> list[tuple[int, Line]]:
        """The line of the loop's own body for each chain in it, also for chains in inner loops."""
        own_lines = []
        for chain in node.all_chains():
            lines = self._where.known[chain]
            own = next((index for index, line in enumerate(lines) if line.code == node.code), len(lines) - 1)
            users = [line for line in lines[own:] if self._codes.is_users(line)]
            own_lines.append((chain, users[0] if users and node.leads_here else lines[own]))
        return own_lines

    def _lines(self, placed: Sequence[tuple[int, Line]]) -> tuple[LineTime, ...]:
        groups: defaultdict[Line, list[int]] = defaultdict(list)
        for chain, line in placed:
            groups[line].append(chain)
        found = []
        for line, chains in groups.items():
            time, busy = self._times.time(chains), self._times.busy(chains)
            found.append(LineTime(self._codes.place(line), time, max(0, time - busy), *self._within(line, chains)))
        return tuple(sorted(found, key=lambda line_time: -line_time.time)[:KEPT_LINES])

    def _within(self, line: Line, chains: Sequence[int]) -> tuple[str, str]:
        """What most of the time at this line was spent in, and at which of the program's own lines, as in a hook."""
        calls: defaultdict[str, float] = defaultdict(float)
        places: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for chain in chains:
            lines, time = self._where.known[chain], self._times.time_of[chain]
            below = lines[lines.index(line) + 1 :] if line in lines else ()
            calls[self._codes.function(below[0]) if below else ""] += time
            places[tuple(self._codes.place(inner) for inner in below if self._codes.is_users(inner))] += time
        return max(calls, key=lambda name: calls[name], default=""), (_agreed(places) or ("",))[-1]


def _in_order(parts: Iterable[Part]) -> tuple[Part, ...]:
    return tuple(sorted(parts, key=lambda part: part.began))


def _agreed(weights: Mapping[tuple[str, ...], float]) -> tuple[str, ...]:
    """The longest beginning that most of the time was in: a function that is called works at many lines, and the call
    is its place."""
    least, found = AGREEMENT * sum(weights.values()), tuple[str, ...]()
    while True:
        longer: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for chain, weight in weights.items():
            if len(chain) > len(found) and chain[: len(found)] == found:
                longer[chain[: len(found) + 1]] += weight
        best, weight = max(longer.items(), key=lambda item: item[1], default=(found, 0.0))
        if not weight or weight < least:
            return found
        found = best
