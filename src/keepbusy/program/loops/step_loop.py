"""Finds the loop whose iterations are the steps: the innermost one that trains, or else the one with most GPU work.

A step ends with an optimizer, a forward pass or a graph, and the loops around these are known. But two optimizers in
one iteration are one step, and the time between two runs of the loop, such as an evaluation, is no step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from keepbusy.program.loops.line_iterations import LoopKey
from keepbusy.program.loops.run_tree import NEVER, LoopNode, LoopTimes, follows
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import FrameKind, Ints, Kind, LinkKind, Timeline
from keepbusy.timeline.run_facts import LOOP, WindowReason
from keepbusy.timeline.steps import by_pattern, comes_again, has_steps, loop_alone

LOOP_IS_WORTH = 0.03
"""Share of the time of all loops: a loop with less idle time of the GPU is not explained separately."""
KEPT_ITERATIONS = 64
"""The most iterations that are kept of a further loop."""
PATIENCE = 8
"""A loop that iterates so many times as often as the one around it is a loop of steps of its own."""
HOLDS_TRAINING = 0.5
"""Share of the backward passes: a loop with fewer of them, such as one over optimizers, is a part of an iteration."""
WORKING_SHARE = 0.5
"""Share of the GPU's work that the main loop has if no step is announced."""
FEWEST_ITERATIONS = 6
"""The fewest iterations of a main loop that is known only by its work."""
FEWEST_MARKS = 3
"""Two whole iterations need so many marks."""

Nest = tuple[LoopKey, ...]
"""The loops around a place, from the outside in."""


class BusyLoop(NamedTuple):
    """A loop without its inner loops."""

    place: str
    """Its name in the tree."""
    time: int
    waits: int
    """Idle time of the GPU within `time`."""
    ends: Ints
    nest: Nest = ()
    """The loops around it, and itself."""
    anew: Ints = NEVER
    """Times at which it may have begun from the start."""


def innermost_loops(times: LoopTimes) -> list[BusyLoop]:
    """Loops that iterate, each without those within it, the one in which the GPU waits longest first."""
    found: list[BusyLoop] = []

    def visit(node: LoopNode, outer: LoopNode, nest: Nest) -> list[int]:
        """Returns the chains that are no loop's by then: those of one that was not counted are its outer loop's."""
        chains = [chain for chain, _ in node.chains]
        for (loop, _), child in node.children.items():
            chains += visit(child, node, (*nest, loop))
        if node.loop is None:
            return chains
        ends = times.ends.get(node.key, NEVER)
        if not len(ends) or node.key in times.iterations.incomplete:
            return chains
        time = int(times.time_of[chains].sum())
        waits = max(0, time - times.busy(chains))
        found.append(BusyLoop(times.name(node), time, waits, ends, nest, times.begun_anew(node, outer)))
        return []

    root = times.root()
    visit(root, root, ())
    return sorted(found, key=lambda loop: -loop.waits)


def loop_that_trains(marks: Mapping[Nest, int], passes: Mapping[Nest, int], ends: Mapping[LoopKey, Ints]) -> Nest:
    """The innermost loop that the marks of steps are in, with those around it. `passes`: backward passes."""
    found: Nest = ()
    while True:
        depth = len(found)
        inside = {nest: count for nest, count in marks.items() if nest[:depth] == found}
        inner = Counter[LoopKey]()
        for nest, count in inside.items():
            if len(nest) > depth:
                inner[nest[depth]] += count
        if not inner:
            return found
        best, held = inner.most_common(1)[0]
        is_alone = not found or held == sum(inside.values()) or len(ends[best]) >= PATIENCE * len(ends[found[-1]])
        if not is_alone or _held(passes, (*found, best)) < HOLDS_TRAINING * _held(passes, found):
            return found
        found = (*found, best)


def _held(passes: Mapping[Nest, int], loop: Nest) -> int:
    return sum(count for nest, count in passes.items() if nest[: len(loop)] == loop)


def marked_loop(timeline: Timeline, of_frame: Ints, nests: Sequence[Nest], ends: Mapping[LoopKey, Ints]) -> Nest:
    """The loop whose iterations are the steps, with those around it. Of a program that trains nothing, one in most of
    whose iterations its modules are called anew: not the loop over a model's layers.

    `of_frame`: of each frame, where in `nests` its loops are."""
    frames = timeline.frames
    is_pass = (frames.kind == FrameKind.ANNOTATION) & (frames.role & Role.BACKWARD != 0)

    def counted(frame: Ints) -> Counter[Nest]:
        found = Counter[Nest]()
        for chain, count in zip(*np.unique(of_frame[frame], return_counts=True), strict=True):
            found[nests[chain]] += int(count)
        return found

    nest = loop_that_trains(counted(timeline.spans.frame[timeline.marks]), counted(np.flatnonzero(is_pass)), ends)
    began = timeline.spans.start[timeline.marks]
    while nest and not has_steps(timeline):
        if 2 * len(np.unique(np.searchsorted(ends[nest[-1]], began, "right"))) >= len(ends[nest[-1]]):
            break
        nest = nest[:-1]
    return nest


def working_loop(
    timeline: Timeline, of_frame: Ints, nests: Sequence[Nest], ends: Mapping[LoopKey, Ints], held: set[LoopKey]
) -> Nest:
    """Of a program in which nothing announces a step, the loop that most of the GPU's work is launched from. What
    another function does in a part of an iteration, as a model with its layers, is no loop unless it is in `held`."""
    lasting = list[Nest]()
    for nest in nests:
        pairs = enumerate(pairwise(nest), 1)
        inner = (depth for depth, (outer, loop) in pairs if loop[0] != outer[0] and loop not in held)
        lasting.append(nest[: next(inner, len(nest))])
    launches = timeline.links.take(np.flatnonzero(timeline.links.kind == LinkKind.LAUNCH))
    launches = launches.take(np.flatnonzero(timeline.spans.kind[launches.target] == Kind.KERNEL))
    chain, work = of_frame[timeline.spans.frame[launches.source]], timeline.spans.work[launches.target]
    launched = Counter[Nest]()
    for number, nanoseconds in enumerate(np.bincount(chain, work, len(nests)).tolist()):
        launched[lasting[number]] += round(nanoseconds)
    found = loop_that_trains(launched, {}, ends)
    return found if _held(launched, found) > WORKING_SHARE * work.sum() else ()


def loops_beside(nest: Nest, nests: Iterable[Nest]) -> Iterator[LoopKey]:
    """Loops beside the one that trains, as an evaluation; not those within one iteration of it, or of each other."""
    for other in nests:
        yield from islice((loop for loop, outer in zip(other, nest, strict=False) if loop != outer), 1)


# What of it the timeline is marked with.


def with_marks(timeline: Timeline, lane: int, trains: BusyLoop, loops: Sequence[BusyLoop]) -> Timeline:
    """With its steps at the iterations of the loop that trains, and with iterations of others. Without a step of the
    program's own it is explained whole where there are few iterations, or most of the waiting was done before they were
    alike."""
    marked = _marked(timeline, lane, trains)
    if not len(timeline.marks):
        guessed = by_pattern(timeline)
        guesses = len(guessed.marks_of(guessed.ranks[0]))
        # on a real GPU any script waits most while it starts
        is_about = marked.facts.logged or comes_again(guessed if guesses > FEWEST_MARKS else marked)
        if len(trains.ends) < FEWEST_ITERATIONS or not is_about:
            return timeline
        if abs(guesses - len(trains.ends)) <= 2:  # as often, and begun where it waits
            marked = guessed.change_facts(loop=trains.place)
    worth = LOOP_IS_WORTH * sum(loop.time for loop in loops)
    known = {key for loop in loops if _is_part(loop, trains) for key in loop.nest} | {*trains.nest}
    further = list[Timeline]()  # a few iterations of each
    for loop in loops:
        if loop.nest[-1] not in known and loop.waits >= worth:
            known.add(loop.nest[-1])  # it may be entered from several others
            window = _marked(timeline, lane, loop, KEPT_ITERATIONS)
            if window.facts.loop:
                reason = WindowReason(LOOP, place=loop.place)
                further.append(loop_alone(window, brief=True).change_facts(reason=reason, run=None, notes=()))
    return marked.change(further=tuple(further))


def _is_part(loop: BusyLoop, trains: BusyLoop) -> bool:
    """Whether it is within usual iterations of the one that trains: a trainer may evaluate the model in few of them."""
    if trains.nest[-1] not in loop.nest:
        return False
    iterated = np.diff(np.searchsorted(loop.ends, trains.ends)) > 0
    return 2 * int(iterated.sum()) >= len(iterated)


def _marked(timeline: Timeline, lane: int, loop: BusyLoop, last: int = 0) -> Timeline:
    """With a mark where each iteration of a loop ends, or of its last ones, as far as there are whole ones. The first
    iteration after the loop has begun lies beside it, for nobody knows where that began."""
    rows = timeline.rows_of(lane)
    following = np.searchsorted(timeline.spans.start[rows], loop.ends)
    has_rows = np.append(np.diff(following) > 0, True) & (following < len(rows))  # others are no iterations
    marks, ends = rows[following[has_rows]][-last:], loop.ends[has_rows][-last:]
    apart = np.flatnonzero(~follows(ends, loop.anew))
    if len(marks) - len(apart) < FEWEST_MARKS:
        return timeline
    return timeline.change(marks=marks).change_facts(loop=loop.place, beside=tuple(apart.tolist()))
