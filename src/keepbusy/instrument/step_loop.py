"""Which loop's turns are the steps of a run: the innermost one that trains, where its tree of loops tells.

What ends a step is an optimizer, a forward pass or a graph, and which loop that stands in is known. But two optimizers
of one turn are one step, and what lies between two runs of the loop, as an evaluation after each epoch, is no step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from keepbusy.instrument.loop_tree import BusyLoop, LoopKey
from keepbusy.instrument.slow_turns import quantile
from keepbusy.timeline.model import Ints

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


def turned_by(marks: Ints, around: Sequence[LoopKey], loops: Sequence[BusyLoop]) -> BusyLoop | None:
    """The innermost of the loops around a mark, where it turns once from mark to mark as long as it turns; else the
    next one that always does. Where a loop around it does, too, it is that one: what it does beside is part of a step;
    as one that asks a generator for what its loops make, one in the other. Only of loops whose turns were counted."""
    known = {one.nest[-1]: one for one in loops if one.jumps}
    found: BusyLoop | None = None
    for number, loop in enumerate(loop for loop in reversed(around) if loop in known):
        turns = np.diff(np.searchsorted(known[loop].ends, marks))
        if turns.any() and quantile(turns if number else turns[turns > 0]) == 1:
            found = known[loop]
    return found


def beside(trains: BusyLoop, loops: Sequence[BusyLoop]) -> Iterator[BusyLoop]:
    """Loops that stand neither around the one that trains nor anywhere within its turns."""
    parts = {loop for one in loops if trains.nest[-1] in one.nest for loop in one.nest}
    return (one for one in loops if one.nest[-1] not in parts and one.nest[-1] not in trains.nest)
