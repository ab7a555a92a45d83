"""Iterations of loops and calls of functions, read off the lines that the program came to.

This is for Python before 3.12, which counts no iterations: who returns to an earlier statement of a loop has begun
another one. An iteration in which nothing was called, or the same line as in the one before, passes unseen. So a loop
is counted only where two statements at least, which no iteration leaves out, have called in each of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from keepbusy.program.lines import TORCH
from keepbusy.program.loops.codes import Chain, ProgramCodes, in_common
from keepbusy.program.loops.source_loops import SourceLoops
from keepbusy.timeline.model import Ints

LoopKey = tuple[int, int]
"""A loop by the number of its code, and its first line."""


class LineIterations:
    """`times`: when the program came to each of `chains`, and when it had left the last one."""

    def __init__(
        self, times: Ints, chains: Ints, known: Sequence[Chain], codes: ProgramCodes, sources: SourceLoops
    ) -> None:
        self._chains, self._known, self._codes, self._sources = chains, known, codes, sources
        visits_of = defaultdict[LoopKey, list[Ints]](list)
        calls_of = defaultdict[int, list[Ints]](list)
        repeated = set[LoopKey]()  # else nothing tells whether there was more than one iteration
        # the way from one line to the next tells which loops iterate and which functions begin, and there are few ways
        pairs, pair = np.unique(np.append(0, chains) * len(known) + np.append(chains, 0), return_inverse=True)
        for number, chains_of_pair in enumerate(pairs.tolist()):
            first, second = (known[chain] for chain in divmod(chains_of_pair, len(known)))
            visits = np.flatnonzero(pair == number)
            depth = in_common(first, second)
            is_same_frame = depth < min(len(first), len(second)) and first[depth].code == second[depth].code
            for loop, goes_on in self._iterated(first, second, depth, is_same_frame):
                visits_of[loop].append(visits)
                repeated |= {loop} if goes_on else set()
            for code in {line.code for line in second[depth + is_same_frame :]}:
                calls_of[code].append(visits)
        self._visits_of = {loop: np.sort(np.concatenate(visits_of[loop])) for loop in visits_of if loop in repeated}
        self.ends = {loop: times[visits] for loop, visits in self._visits_of.items()}
        # as where calls are counted, the first one is none of them
        self.calls = {code: times[np.sort(np.concatenate(visits))][1:] for code, visits in calls_of.items()}

    def _iterated(self, first: Chain, second: Chain, depth: int, is_same_frame: bool) -> Iterator[tuple[LoopKey, bool]]:
        """Loops of which an iteration ended on the way, and whether another one follows: the program goes back to an
        earlier statement or to the head, or leaves the body. The last iteration of a `while` is counted elsewhere."""
        for index, (code, line) in enumerate(first[depth:], depth):
            goes_to = second[index].line if is_same_frame and index == depth else 0
            for loop in self._sources.around(self._codes.objects[code], line):
                statement, stays = bisect_right(loop.statements, line), loop.first <= goes_to <= loop.last
                if bisect_right(loop.statements, goes_to) < statement if stays else statement and loop.iterates:
                    yield (code, loop.first), stays

    def unsure(self) -> frozenset[LoopKey]:
        """Loops of which iterations may have passed unseen."""
        # the chains of each statement that every iteration passes
        calling = defaultdict[LoopKey, defaultdict[range, list[int]]](lambda: defaultdict(list))
        for number, lines in enumerate(self._known):
            for code, line in reversed(lines):
                code_object = self._codes.objects[code]
                for loop in self._sources.around(code_object, line):
                    for statement in {rows for rows in loop.certain if line in rows}:
                        calling[code, loop.first][statement].append(number)
                if self._codes.kinds[code] != TORCH and not self._sources.is_certain(code_object, line):
                    break  # who called it may do so without this call
        sure = set[LoopKey]()
        for key, found in self._visits_of.items():
            seen = 0
            for numbers in calling[key].values():
                iteration = np.searchsorted(found, np.flatnonzero(np.isin(self._chains, numbers)), "right")
                seen += len(np.unique(iteration[iteration < len(found)])) == len(found)
            if seen > 1:
                sure.add(key)
        return frozenset(self.ends) - sure
