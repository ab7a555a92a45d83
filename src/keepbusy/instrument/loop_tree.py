"""From looks and turns to the tree of a run: its loops, the lines beside them, and where each second went.

Where a look found the program tells which loops it was in; each look counts for the time until the next one. So the
tree sums to the run whatever the program did, and turns, where they were counted, only divide what is in it. It also
tells which loop's turns are the steps of the run: the innermost one that trains.
"""

from __future__ import annotations

import linecache
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from keepbusy.instrument.lines import LIBRARY, PROGRAM_CODE, TEXTS, TORCH, USER
from keepbusy.instrument.loops import (
    IMPORTING,
    LOOKS_IN_ONE_FRAME,
    LOOKS_WITHOUT_COUNTS,
    Line,
    Looks,
)
from keepbusy.instrument.slow_turns import LookTable, beat_of, quantile, slow_kinds, warm_up
from keepbusy.instrument.source_loops import SourceLoop, SourceLoops
from keepbusy.timeline.model import NONE, Ints, Mask
from keepbusy.timeline.run_facts import FIRST_USE, IMPORTS, LINE, LOOP, RUN, LineTime, Part, SlowTurns, loop_name

STRETCHES = 240
"""So many shares tell how busy the GPU was over the run; a pixel or two each where they are drawn."""
SHORTEST_PART = 0.005
"""Of the run: a shorter loop stands among the lines of what it is in."""
SLOW_TURNS_MATTER = 0.02
"""Of a loop: what its slow turns take longer."""
KEPT_LINES, KEPT_KINDS = 8, 3
LOOP_IS_WORTH = 0.1
"""Of the time of all loops, for start-up weighs less the longer a run is: a loop in which the GPU waits for less is not
looked at closely."""
RECORDED_AT_MOST = 64
"""Turns of a loop whose turns are short."""

BusyUntil = Callable[[Ints], npt.NDArray[np.float64]]
"""How long the GPU has been at work until each of these moments."""


def read_source(file: str) -> str:
    """What runs as this file, which `keepbusy fix` may have put in its place; "" where there is none."""
    return TEXTS[file] if file in TEXTS else "".join(linecache.getlines(file))


def tree_of(looks: Looks, busy_until: BusyUntil | None = None, sources: SourceLoops | None = None) -> Part:
    """`sources`: files that were read already."""
    return _Tree(looks, busy_until, sources).root()


LoopKey = tuple[int, int]
"""A loop by its code, as looks number it, and its first line."""


class BusyLoop(NamedTuple):
    """A loop that could be looked at closely: the jumps that end its turns, and what is known of it so far."""

    jumps: frozenset[tuple[int, int]]
    """None before Python 3.12: then it cannot be followed."""
    place: str
    """As the tree calls it."""
    time: int
    waits: int
    ends: Ints
    nest: tuple[LoopKey, ...] = ()
    """The loops around it, from the outside in, and itself."""
    anew: Ints = np.zeros(0, np.int64)
    """When it may have begun from the start."""

    @property
    def turns(self) -> Ints:
        """What those took that follow another one."""
        return np.diff(self.ends)[follows(self.ends, self.anew)]


def innermost_loops(looks: Looks, busy_until: BusyUntil | None, sources: SourceLoops | None = None) -> list[BusyLoop]:
    """Loops that turn, each without those within it, the one in which the GPU waits longest first."""
    tree = _Tree(looks, busy_until, sources)
    found: list[BusyLoop] = []

    def visit(node: _Node, above: _Node, nest: tuple[LoopKey, ...]) -> list[int]:
        """Returns the looks that are no loop's by then: of one that cannot be followed they are those of the loop
        around it."""
        own = [chain for chain, _ in node.chains]
        for (loop, _), child in node.children.items():
            own += visit(child, node, (*nest, loop))
        if node.loop is None:
            return own
        jumps = tree.jumps_of(node)
        ends = tree.turns.get((node.code, node.loop.first), np.zeros(0, np.int64))
        if not len(ends) or jumps & looks.uncounted:
            return own
        time, busy = int(tree.time_of[own].sum()), tree._busy(own)
        waits = time if busy == NONE else max(0, time - busy)
        name = loop_name(tree.place_of(node), tree.function_of(node))
        found.append(BusyLoop(jumps, name, time, waits, ends, nest, tree._begun_anew(node, above)))
        return []

    root = tree.placed()
    visit(root, root, ())
    return sorted(found, key=lambda one: -one.waits)


Jumps = frozenset[tuple[int, int]]
"""Of a code, by number, and of the instruction that turns begin at."""


def _in_order(times: Iterable[array[int]]) -> Ints:
    """Copies, for the program may go on."""
    return np.sort(np.concatenate([np.zeros(0, np.int64), *(np.array(one[:], np.int64) for one in times)]))


def worth_a_look(loops: Sequence[BusyLoop]) -> list[BusyLoop]:
    worth = LOOP_IS_WORTH * sum(one.time for one in loops)
    return [one for one in loops if one.waits >= worth]


def turns_of_loops(looks: Looks, sources: SourceLoops) -> dict[LoopKey, Ints]:
    """When the turns of each loop ended."""
    found: dict[LoopKey, list[array[int]]] = {}
    for (code, target), ends in list(looks.turns.items()):
        loop = sources.of_jump(looks.codes[code], target)
        if loop is not None:
            found.setdefault((code, loop.first), []).append(ends)
    return _passed(looks, sources) | {loop: _in_order(ends) for loop, ends in found.items()}


def _passed(looks: Looks, sources: SourceLoops) -> dict[LoopKey, Ints]:
    """Where turns cannot be counted: of each loop the line in it that was passed most often."""
    found: dict[LoopKey, Ints] = {}
    for line, times in list(looks.passes.items()):
        around = sources.around(looks.codes[line.code], line.line)
        loop = (line.code, around[-1].first) if around else None
        if loop is not None and len(times) > len(found.get(loop, ())):
            found[loop] = np.array(times[:], np.int64)
    return found


def follows(ends: Ints, anew: Ints) -> Mask:
    """Of each turn but the first, whether it follows the one before, with nothing in between."""
    runs = np.searchsorted(anew, ends)
    return np.asarray(runs[1:] == runs[:-1])


AGREEMENT = 0.6
"""Of the time so much must have been seen at a line for that to be the place."""


def agreed(weights: Mapping[tuple[str, ...], float], trunk: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The longest beginning that most of the time was in. While it is still the loop itself, whichever line had most.

    A function that is called from the loop works at many lines, and the call is its place. The loop is no such place.
    """
    least = AGREEMENT * sum(weights.values())
    found: tuple[str, ...] = ()
    while True:
        longer: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for chain, weight in weights.items():
            if len(chain) > len(found) and chain[: len(found)] == found:
                longer[chain[: len(found) + 1]] += weight
        best, weight = max(longer.items(), key=lambda one: one[1], default=(found, 0.0))
        inside = len(found) < len(trunk) and found == trunk[: len(found)]
        if not weight or (weight < least and not inside):
            return found
        found = best


@dataclass(eq=False)
class _Node:
    """A loop, or the run itself, while the tree is built."""

    code: int = NONE
    loop: SourceLoop | None = None
    leads_here: Line | None = None  # the user's line that leads to a library's loop
    ends: Ints | None = None  # of its turns here; None where nobody saw it go back anywhere
    children: dict[tuple[LoopKey, Line | None], _Node] = field(default_factory=dict)
    chains: list[tuple[int, Line]] = field(default_factory=list)  # looks in no inner loop: their chain, and its line

    def all_chains(self) -> list[int]:
        """Of all looks within."""
        mine = [chain for chain, _ in self.chains]
        for child in self.children.values():
            mine += child.all_chains()
        return mine


def _turns_within(node: _Node, above: _Node) -> Ints:
    """How often a loop turned in each turn of the loop around it, also in the last one, which may not go back."""
    ends = node.ends if node.ends is not None else np.zeros(0, np.int64)
    around = above.ends if above.ends is not None else ends[:0]
    return np.diff(np.concatenate([[0], np.searchsorted(ends, around, "right"), [len(ends)]]))


def _shares(busy_until: BusyUntil, edges: Ints) -> tuple[int, ...]:
    """Of each of some equal stretches of the run, percent of it in which the GPU was at work."""
    borders = np.linspace(edges[0], edges[-1], STRETCHES + 1).astype(np.int64)
    shares = 100 * np.diff(busy_until(borders)) / np.maximum(1, np.diff(borders))
    return tuple(np.clip(shares, 0, 100).round().astype(int).tolist())


class _Tree:
    def __init__(self, looks: Looks, busy_until: BusyUntil | None, sources: SourceLoops | None) -> None:
        self.looks = looks
        self.times = np.array(looks.times, np.int64)
        self.chain = np.array(looks.chains, np.int64)
        edges = np.concatenate([[looks.began], self.times[1:], [max(looks.ended, *self.times[-1:], looks.began)]])
        self.weight = np.diff(edges) if len(self.times) else np.zeros(0, np.int64)
        self.has_busy = busy_until is not None
        self.shares = _shares(busy_until, edges) if busy_until is not None and len(self.times) else ()
        self.busy = np.diff(busy_until(edges)) if busy_until is not None and len(self.times) else self.weight * 0.0
        count = len(looks.known_chains)
        self.time_of = np.bincount(self.chain, self.weight, count)
        self.busy_of = np.bincount(self.chain, self.busy, count)
        self.first_of = np.full(count, np.iinfo(np.int64).max)
        np.minimum.at(self.first_of, self.chain, edges[:-1])
        self.sources = sources or SourceLoops(read_source)
        self.staying = self._staying()
        turns = turns_of_loops(looks, self.sources)
        self.turns = {loop: ends for loop, ends in turns.items() if loop[0] in self.staying}
        self.whole = max(1, int(self.weight.sum()))

    def _staying(self) -> set[int]:
        """Codes whose frames last through several looks: only these hold loops of the run."""
        within: defaultdict[int, float] = defaultdict(float)
        for chain, lines in enumerate(self.looks.known_chains):
            for code in {line.code for line in lines}:
                within[code] += self.time_of[chain]
        look = float(quantile(self.weight)) if len(self.weight) else 0.0
        stay = self.looks.stay or LOOKS_IN_ONE_FRAME * look
        found = set()
        for code, longest in self.looks.longest_stay.items():
            if code in self.looks.fleeting:
                continue
            entered = self.looks.entries.get(code)
            unentered = longest >= LOOKS_WITHOUT_COUNTS
            stays = unentered if entered is None else within[code] >= stay * (len(entered) + 1)
            if stays or code in self.looks.holders:
                found.add(code)
        return found

    def placed(self) -> _Node:
        """All looks, in their loops."""
        root = _Node()
        for chain, lines in enumerate(self.looks.known_chains):
            if self.time_of[chain] > 0:
                self._place(root, chain, lines)
        return root

    def _divide_turns(self, root: _Node) -> None:
        """A function that is called from several places holds one loop, whose turns belong each where looks found it
        just then."""
        places = defaultdict[LoopKey, list[_Node]](list)
        nodes = [root]
        for node in nodes:
            nodes += node.children.values()
            if node.loop is not None:
                places[node.code, node.loop.first].append(node)
        for loop, here in places.items():
            if (ends := self.turns.get(loop)) is None:
                continue
            owner = np.full(len(self.time_of), NONE, np.int64)
            for number, node in enumerate(here):
                owner[node.all_chains()] = number
            inside = np.flatnonzero(owner[self.chain] != NONE)
            after = np.searchsorted(self.times[inside], ends)
            before = np.maximum(after - 1, 0)
            after = np.minimum(after, len(inside) - 1)
            is_before = ends - self.times[inside[before]] <= self.times[inside[after]] - ends
            whose = owner[self.chain[inside[np.where(is_before, before, after)]]]
            for number, node in enumerate(here):
                node.ends = ends[whose == number]

    def jumps_of(self, node: _Node) -> Jumps:
        """Those that ended turns of this loop."""
        known = ((code, target) for code, target in list(self.looks.turns) if code == node.code)
        return frozenset(one for one in known if self.sources.of_jump(self.looks.codes[one[0]], one[1]) == node.loop)

    def root(self) -> Part:
        root = self.placed()
        self._divide_turns(root)
        self._fold(root)
        beside = self._beside(root)
        loops = [self._part(child, root) for child in root.children.values()]
        return Part(
            RUN,
            time=self.whole,
            busy=round(float(self.busy.sum())) if self.has_busy else NONE,
            turns=1,
            turn=self.whole,
            parts=tuple(sorted([*beside, *loops], key=lambda part: part.began)),
            clock=self.looks.began,
            shares=self.shares,
            decides=tuple(sorted(self._deciding())),
            beside=self._of_other_threads(),
            ran=self.looks.ran,
        )

    def _of_other_threads(self) -> tuple[LineTime, ...]:
        times: Counter[str] = Counter()
        for line, time in self.looks.beside.items():
            times[self._written(line)] += time
        return tuple(LineTime(place, time) for place, time in times.most_common(KEPT_LINES) if time)

    def _deciding(self) -> set[str]:
        lines = {line for lines in self.looks.known_chains for line in lines}
        of_program = [line for line in lines if self.looks.kinds[line.code] in PROGRAM_CODE]
        codes = self.looks.codes
        return {self._written(line) for line in of_program if self.sources.decides(codes[line.code], line.line)}

    def _place(self, root: _Node, chain: int, lines: Sequence[Line]) -> None:
        """Down to the innermost loop that this chain is in."""
        node, deepest, leads_here = root, None, None
        if self._kind(chain) == IMPORTS:  # a library that imports something in a loop of its own is importing
            root.chains.append((chain, lines[-1]))
            return
        for line in lines:
            code = self.looks.codes[line.code]
            is_user = self.looks.is_users(line)
            if line.code in self.staying:
                for loop in self.sources.around(code, line.line):
                    leads: Line | None = None if is_user else leads_here
                    key = (line.code, loop.first), leads
                    node = node.children.setdefault(key, _Node(line.code, loop, leads))
                deepest = line
            if is_user:
                leads_here = line
        users = [line for line in lines if self.looks.is_users(line)]
        if deepest is None or not self.looks.is_users(deepest):
            installed = [line for line in lines if self.looks.kinds[line.code] in (LIBRARY, TORCH)]
            nowhere = Line(NONE, 0)  # Python itself, once the program is over
            deepest = users[-1] if users else deepest if deepest in installed else next(iter(installed), nowhere)
        node.chains.append((chain, deepest))

    def _fold(self, node: _Node) -> None:
        """Loops that hardly matter stand among the lines of what they are in."""
        for key, child in list(node.children.items()):
            self._fold(child)
            time = sum(self.time_of[chain] for chain in child.all_chains())
            if time < SHORTEST_PART * self.whole or self._turns_once(child, node):
                del node.children[key]
                node.chains += child.chains
                for inner, grandchild in child.children.items():
                    node.children.setdefault(inner, grandchild)

    def _turns_once(self, node: _Node, above: _Node) -> bool:
        """Whether a loop turns but once wherever it turns in the loop around it: it is no loop to speak of.

        So does one that tries again until it has something, and a generator that the loop around it asks for batches.
        """
        if node.ends is None:  # nobody saw it go back, and of a library's that is all that makes it a loop of the run
            counted = bool(self.looks.turns) and node.code in self.looks.entries
            return counted or self.looks.kinds[node.code] != USER
        often = _turns_within(node, above)
        return not often.any() or float(quantile(often[often > 0])) <= 1

    def _beside(self, root: _Node) -> list[Part]:
        """What the run does beside its loops, line by line; importing and waking the GPU under their own names."""
        groups: defaultdict[tuple[str, str], list[tuple[int, Line]]] = defaultdict(list)
        for chain, line in root.chains:
            kind = self._kind(chain)
            groups[kind, self._written(line) if kind == LINE else ""].append((chain, line))
        parts = []
        for (kind, place), found in groups.items():
            chains, (_, line) = [chain for chain, _ in found], found[0]
            time = round(float(self.time_of[chains].sum()))
            parts.append(
                Part(
                    kind,
                    place=place,
                    source=self._text(line) if kind == LINE else "",
                    began=int(self.first_of[chains].min()) - self.looks.began,
                    time=time,
                    busy=self._busy(chains),
                    turns=1,
                    turn=time,
                    lines=self._lines(found) if kind != LINE else (),
                )
            )
        return parts

    def _kind(self, chain: int) -> str:
        lines = self.looks.known_chains[chain]
        if any(self.looks.kinds[line.code] == IMPORTING for line in lines):
            return IMPORTS
        users = [line for line in lines if self.looks.is_users(line)]
        if users and self._text(users[-1]).startswith(("import ", "from ")):
            return IMPORTS
        return FIRST_USE if any(self.looks.codes[line.code].co_name == "_lazy_init" for line in lines) else LINE

    def place_of(self, node: _Node) -> str:
        """The program's own line: of a library's loop the one that leads there."""
        assert node.loop is not None  # only the root has none
        return self._written(node.leads_here or Line(node.code, node.loop.first))

    def function_of(self, node: _Node) -> str:
        """The one that holds the loop; of a library's with its place."""
        assert node.loop is not None
        name = self.looks.codes[node.code].co_name
        return f"{self.looks.file(node.code)}:{node.loop.first} in {name}" if node.leads_here else name

    def _part(self, node: _Node, above: _Node) -> Part:
        assert node.loop is not None
        chains = node.all_chains()
        time = round(float(self.time_of[chains].sum()))
        ends = node.ends if node.ends is not None else np.zeros(0, np.int64)
        is_sure = (node.code, node.loop.first) not in self.looks.unsure
        count = len(ends) if node.loop.iterates else self._turns_of_while(node, above, ends)
        count, uncounted = count * is_sure, bool(self.jumps_of(node) & self.looks.uncounted)
        part = Part(
            LOOP,
            place=self.place_of(node),
            source=self._text(node.leads_here or Line(node.code, node.loop.first)),
            function=self.function_of(node),
            began=int(self.first_of[chains].min()) - self.looks.began,
            time=time,
            busy=self._busy(chains),
            turns=count,
            passes=int((_turns_within(node, above) > 0).sum()) if count else NONE,
            at_least=uncounted,
            turn=time // count if count and not uncounted else NONE,
            lines=self._lines(self._lines_within(node)),
            parts=tuple(
                sorted((self._part(child, node) for child in node.children.values()), key=lambda one: one.began)
            ),
        )
        return self._with_turns(part, node, above, ends) if count >= 4 and not uncounted else part

    def _with_turns(self, part: Part, node: _Node, above: _Node, ends: Ints) -> Part:
        """How its turns vary: only between two that ended in a row, with nothing in between but the loop itself."""
        number = 1 + np.flatnonzero(follows(ends, self._begun_anew(node, above)))
        began, over = ends[number - 1], ends[number]
        took = over - began
        if len(took) < 4:
            return part
        cold = warm_up(took)
        rest = took[cold:]
        usual = int(quantile(rest))
        first = int(began[0]) - self.looks.began - part.began  # the turn that was under way when counting began
        cold_time = max(0, first - usual) + int(took[:cold].sum()) - cold * usual
        return replace(
            part,
            low=round(float(quantile(rest, 0.2))),
            high=round(float(quantile(rest, 0.8))),
            warm_up=cold + (first > 2 * usual),
            warm_up_time=max(0, cold_time) if cold or first > 2 * usual else 0,
            kinds=self._slow_kinds(node, number[cold:], ends, part.time),
        )

    def _slow_kinds(self, node: _Node, number: Ints, ends: Ints, whole: int) -> tuple[SlowTurns, ...]:
        """Turns that take far longer than the others, by the line of the loop's own at which looks found them."""
        began, over = ends[number - 1], ends[number]
        lines = dict(self._lines_within(node))
        known = list(dict.fromkeys(lines.values()))
        place_of = np.full(len(self.looks.known_chains), NONE, np.int64)
        for chain, line in lines.items():
            place_of[chain] = known.index(line)
        place = place_of[self.chain]
        inside = place != NONE
        looks = LookTable(self.times[inside], self.weight[inside], place[inside])
        told = []
        for kind in slow_kinds(over - began, began, over, looks):
            if kind.total < SLOW_TURNS_MATTER * whole:
                break
            beat = beat_of(number[kind.rows], number)
            told.append(
                SlowTurns(
                    count=len(kind.rows),
                    every=beat.every if beat.regular else len(number) / len(kind.rows),
                    regular=beat.regular,
                    longer=int(quantile(kind.longer)),
                    total=kind.total,
                    place=self._written(known[kind.place]) if kind.place != NONE else "",
                )
            )
        return tuple(told[:KEPT_KINDS])

    def _turns_of_while(self, node: _Node, above: _Node, ends: Ints) -> int:
        """The last turn of a `while` does not jump back."""
        return len(ends) + len(np.unique(np.searchsorted(self._begun_anew(node, above), ends)))

    def _begun_anew(self, node: _Node, above: _Node) -> Ints:
        """When a loop may have begun from the start: its function was entered, or the loop around it turned."""
        entered = _in_order([self.looks.entries[node.code]] if node.code in self.looks.entries else [])
        if above.loop is None or above.code != node.code:
            return entered
        return np.sort(np.concatenate([entered, self.turns.get((above.code, above.loop.first), entered[:0])]))

    def _lines_within(self, node: _Node) -> list[tuple[int, Line]]:
        """Of each look in this loop, the line of the loop's own turn that it stood at, whatever loops are within."""
        found = []
        for chain in node.all_chains():
            lines = self.looks.known_chains[chain]
            at = next((index for index, line in enumerate(lines) if line.code == node.code), len(lines) - 1)
            deeper = [line for line in lines[at:] if self.looks.is_users(line)]
            found.append((chain, deeper[0] if deeper and node.leads_here else lines[at]))
        return found

    def _lines(self, placed: Sequence[tuple[int, Line]]) -> tuple[LineTime, ...]:
        groups: defaultdict[Line, list[int]] = defaultdict(list)
        for chain, line in placed:
            groups[line].append(chain)
        found = []
        for line, chains in groups.items():
            time, busy = round(float(self.time_of[chains].sum())), self._busy(chains)
            idle = NONE if busy == NONE else max(0, time - busy)
            found.append(LineTime(self._written(line), time, idle, *self._inside(line, chains)))
        return tuple(sorted(found, key=lambda one: -one.time)[:KEPT_LINES])

    def _inside(self, line: Line, chains: Sequence[int]) -> tuple[str, str]:
        """What most of the time at this line was spent in, and at which of the program's own lines, as in a hook."""
        calls: defaultdict[str, float] = defaultdict(float)
        places: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for chain in chains:
            lines, time = self.looks.known_chains[chain], self.time_of[chain]
            below = lines[lines.index(line) + 1 :] if line in lines else ()
            calls[self.looks.codes[below[0].code].co_name if below else ""] += time
            places[tuple(map(self._written, filter(self.looks.is_users, below)))] += time
        return max(calls, key=lambda name: calls[name], default=""), (agreed(places) or ("",))[-1]

    def _busy(self, chains: Sequence[int]) -> int:
        return round(float(self.busy_of[list(chains)].sum())) if self.has_busy else NONE

    def _written(self, line: Line) -> str:
        return f"{self.looks.file(line.code)}:{line.line}" if line.code != NONE else ""

    def _text(self, line: Line) -> str:
        return self.sources.text(self.looks.codes[line.code].co_filename, line.line) if line.code != NONE else ""


# Which loop's turns are the steps.
#
# What ends a step is an optimizer, a forward pass or a graph, and which loop that stands in is known. But two
# optimizers of one turn are one step, and what lies between two runs of the loop, as an evaluation after each epoch, is
# no step.

PATIENCE = 8
"""Who steps so many times while another one does not is no part of its step."""
HOLDS_TRAINING = 0.5
"""Of the backward passes: a loop with fewer of them, as one over optimizers, is a part of a turn."""

Nest = tuple[LoopKey, ...]
"""The loops that something stands in, from the outside in."""


def loop_that_trains(marks: Mapping[Nest, int], passes: Mapping[Nest, int], turns: Mapping[LoopKey, Ints]) -> Nest:
    """The innermost loop in whose turns the marks of steps are, with those around it. `passes`: backward passes."""
    found: Nest = ()
    while True:
        depth = len(found)
        here = {nest: count for nest, count in marks.items() if nest[:depth] == found}
        inner = Counter[LoopKey]()
        for nest, count in here.items():
            if len(nest) > depth:
                inner[nest[depth]] += count
        if not inner:
            return found
        best, held = inner.most_common(1)[0]
        alone = held == sum(here.values()) or len(turns[best]) >= PATIENCE * len(turns[found[-1]]) if found else True
        within, outside = (_held(passes, nest) for nest in ((*found, best), found))
        if not alone or within < HOLDS_TRAINING * outside:
            return found
        found = (*found, best)


def _held(passes: Mapping[Nest, int], loop: Nest) -> int:
    return sum(count for nest, count in passes.items() if nest[: len(loop)] == loop)


def loops_beside(trains: BusyLoop, loops: Sequence[BusyLoop]) -> Iterator[BusyLoop]:
    """Loops that stand neither around the one that trains nor within its ordinary turns: a trainer may evaluate the
    model within one of many."""
    parts = {loop for one in loops if _is_part(one, trains) for loop in one.nest}
    return (one for one in loops if one.nest[-1] not in parts and one.nest[-1] not in trains.nest)


def _is_part(one: BusyLoop, trains: BusyLoop) -> bool:
    if trains.nest[-1] not in one.nest:
        return False
    turned = np.diff(np.searchsorted(one.ends, trains.ends)) > 0
    return 2 * int(turned.sum()) >= len(turned)
