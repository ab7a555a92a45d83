"""Frames of the program: the lines, annotations and operators around its calls and between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import NamedTuple

import numpy as np

from keepbusy.log.log_file import StackFrame
from keepbusy.log.profiler_window import OperatorBetweenCalls, Operators
from keepbusy.log.program_log import BACKWARD_PASS
from keepbusy.program.lines import HIDDEN, LIBRARY, OUTSIDE, USER, holds_loop, kind_of, shown
from keepbusy.program.loops.codes import CodeObjects, in_common
from keepbusy.timeline.frame_roles import tells_purpose
from keepbusy.timeline.model import NONE, FrameKind, Frames, Ints, Mask, Table, column

Entry = tuple[FrameKind, str]
"""A frame as it is shown: a line, an annotation or an operator."""
Chain = tuple[Entry, ...]
"""Frames from the outside in."""
NOWHERE = 0
"""The chain of a call whose place is unknown."""
Noted = tuple[tuple[int, int], ...]
"""Open annotations: the number of each note, and that of the stack it was made from."""


class SourceLines:
    """Turns stacks into chains of lines: the program's own, those of library code with a loop, and of other libraries
    the innermost line and the outermost one that shows its purpose."""

    def __init__(self, codes: CodeObjects) -> None:
        self._codes = codes
        self.of_name: dict[str, tuple[CodeType, int]] = {}
        """The code and the line number of each line by its text."""

    def of_stack(self, stack: Sequence[StackFrame]) -> Chain:
        """`stack`: innermost first."""
        return tuple(self._entry(frame) for frame in reversed([*self._kept(stack)]))

    def code_lines(self, chain: Sequence[StackFrame]) -> tuple[tuple[CodeType, int], ...]:
        """The lines that `of_stack` keeps. `chain`: outermost first."""
        return tuple((self.code(frame), frame.line) for frame in reversed([*self._kept(chain[::-1])]))

    def of_sample(self, chain: Sequence[StackFrame]) -> Chain:
        """`chain`: outermost first, with only lines that are kept."""
        return tuple(map(self._entry, chain))

    def _kept(self, stack: Sequence[StackFrame]) -> Iterator[StackFrame]:
        is_innermost, purpose = True, None
        for frame in stack:
            kind = kind_of(frame.file)
            if kind == OUTSIDE:
                break
            if kind == HIDDEN:
                continue
            if kind == LIBRARY and holds_loop(self.code(frame)):
                kind = USER
            if kind == USER and purpose is not None:
                yield purpose
                purpose = None
            if kind == USER or is_innermost:
                is_innermost = False
                yield frame
            elif tells_purpose(shown(frame.file)):
                purpose = frame  # the outermost

    def code(self, frame: StackFrame) -> CodeType:
        return self._codes.of(frame.file, frame.function, frame.line)

    def _entry(self, frame: StackFrame) -> Entry:
        code = self.code(frame)
        text = f"{shown(frame.file)}({frame.line}): {code.co_name}"
        self.of_name[text] = code, frame.line
        return FrameKind.LINE, text


class Chains:
    """All chains of a run, by number."""

    def __init__(self, lines: SourceLines, stacks: dict[int, tuple[StackFrame, ...]], notes: Sequence[str]) -> None:
        self._lines, self._stacks, self._notes = lines, stacks, notes
        self.known: list[Chain] = [()]
        self._numbers: dict[Chain, int] = {(): NOWHERE}
        self._of_stack: dict[int, Chain] = {0: ()}
        self._beneath: dict[tuple[int, int], int] = {}

    def number(self, chain: Chain) -> int:
        number = self._numbers.get(chain)
        if number is None:
            number = self._numbers[chain] = len(self.known)
            self.known.append(chain)
        return number

    def of_call(self, stack: int, noted: Noted, operators: Operators) -> int:
        if not stack:
            return NOWHERE
        names = ((FrameKind.OPERATOR, name) for name in operators.names)
        return self.number((*self.annotated(self._of(stack), noted), *names))

    def annotated(self, lines: Chain, noted: Noted) -> Chain:
        """The lines with open annotations: each is inside the lines that it shares with the stack where it began."""
        chain, reached = list[Entry](), 0
        for number, stack in noted:
            upto = max(reached, in_common(lines, self._of(stack)))
            chain += [*lines[reached:upto], (FrameKind.ANNOTATION, self._name(number))]
            reached = upto
        return (*chain, *lines[reached:])

    def beneath(self, stack: int, noted: Noted) -> int:
        """The stack of a call in PyTorch's own threads, put on top of the stack that waits for the backward pass. New
        stacks have numbers below 0."""
        waiting = next((waits for number, waits in reversed(noted) if self._name(number) == BACKWARD_PASS), 0)
        if not stack or not waiting:
            return stack or waiting
        number = self._beneath.setdefault((stack, waiting), -1 - len(self._beneath))
        if number not in self._of_stack:
            self._of_stack[number] = (*self._of(waiting), *self._of(stack))
        return number

    def _name(self, note: int) -> str:
        """The latest names are missing if the process was killed."""
        return self._notes[note] if note < len(self._notes) else "annotation"

    def _of(self, stack: int) -> Chain:
        chain = self._of_stack.get(stack)
        if chain is None:
            chain = self._of_stack[stack] = self._lines.of_stack(self._stacks.get(stack, ()))
        return chain


class Piece(NamedTuple):
    """A part of the time between two calls, with its end and its chain."""

    until: float
    chain: Chain | None
    """None for the lines of the next call."""


class SamplesBetweenCalls:
    """What the host did between two calls: the samples within that time if it was long, or else all samples between
    calls from the same lines."""

    def __init__(
        self, times: Ints, chains: Sequence[Chain], begins: Ints, ends: Ints, kinds: Sequence[tuple[int, int]]
    ) -> None:
        """`begins`, `ends` and `kinds` describe the times between calls; a kind is the pair of stacks of both calls."""
        self._times, self._chains = times, chains
        by_kind = defaultdict[tuple[int, int], list[tuple[float, Chain]]](list)
        gaps = np.searchsorted(begins, times, side="right") - 1
        for sample, gap in enumerate(gaps.tolist()):
            if gap >= 0 and begins[gap] < times[sample] < ends[gap]:
                share = float((times[sample] - begins[gap]) / (ends[gap] - begins[gap]))
                by_kind[kinds[gap]].append((share, chains[sample]))
        self.of_kind = {kind: self._shares(samples) for kind, samples in by_kind.items()}

    @staticmethod
    def _shares(samples: Sequence[tuple[float, Chain]]) -> list[tuple[float, Chain]]:
        """Chains in their mean order, each with the share of the time at which it ends."""
        shares_of = defaultdict[Chain, list[float]](list)
        for share, chain in samples:
            shares_of[chain].append(share)
        reached, ends = 0.0, list[tuple[float, Chain]]()
        for chain, shares in sorted(shares_of.items(), key=lambda item: sum(item[1]) / len(item[1])):
            reached += len(shares) / len(samples)
            ends.append((reached, chain))
        return ends

    def count(self, begins: Ints, ends: Ints) -> Ints:
        return np.searchsorted(self._times, ends) - np.searchsorted(self._times, begins)

    def between(self, begin: float, end: float, kind: tuple[int, int]) -> Iterator[Piece]:
        first, last = np.searchsorted(self._times, (begin, end))
        if last - first > 1:
            until = [*self._times[first + 1 : last].tolist(), end]
            yield from map(Piece, until, self._chains[first:last])
        elif kind in self.of_kind:
            *others, (_, latest) = self.of_kind[kind]
            yield from (Piece(begin + share * (end - begin), chain) for share, chain in others)
            yield Piece(end, latest)
        else:
            yield Piece(end, None)


def with_operators(
    pieces: Sequence[Piece], operators: Sequence[OperatorBetweenCalls], begin: float, end: float, otherwise: Chain
) -> Iterator[tuple[Piece, int]]:
    """The pieces, divided by operators that ran then without a call, and how many frames of each of these are lines."""
    reached = begin
    for operator in operators:
        first, last = (begin + (end - begin) * share for share in (operator.begin, operator.end))
        for piece in pieces:
            if reached < (until := min(piece.until, first)):
                yield Piece(until, piece.chain), NONE
                reached = until
        lines = next((piece.chain for piece in pieces if piece.until >= (first + last) / 2), None)
        chain = otherwise if lines is None else lines
        yield Piece(last, (*chain, (FrameKind.OPERATOR, operator.name))), len(chain)
        reached = last
    for piece in pieces:
        if reached < piece.until:
            yield piece, NONE
            reached = piece.until


@dataclass(frozen=True, eq=False)
class Visits(Table):
    """The places of a thread in order. Frames that two consecutive visits share did not end in between."""

    chain: Ints = column(np.int64)
    start: Ints = column(np.int64)
    end: Ints = column(np.int64)
    shared_at_most: Ints = column(np.int64)
    """How many of its outermost frames may be those of the visit before."""
    is_exact: Mask = column(np.bool_)
    """Whether it is known from a call, not only from a sample."""

    def kept(self, chains: Sequence[Chain]) -> Ints:
        """How many frames of the visit before each visit goes on with."""
        lengths = np.array([len(chain) for chain in chains], np.int64)
        before = np.concatenate([[NOWHERE], self.chain[:-1]])
        pairs, which = np.unique(before * len(chains) + self.chain, return_inverse=True)
        indices = (divmod(pair, len(chains)) for pair in pairs.tolist())
        common = [in_common(chains[first], chains[second]) for first, second in indices]
        kept = np.minimum(np.array(common, np.int64)[which], np.minimum(self.shared_at_most, lengths[self.chain]))
        # what a sample has opened, a call does not go on with
        after_sample = np.flatnonzero(self.is_exact[1:] & ~self.is_exact[:-1]) + 1
        for visit in after_sample.tolist():
            first = visit
            while first and not self.is_exact[first - 1]:
                first -= 1
            kept[visit] = min(kept[visit], kept[first:visit].min())
        return kept


def frames_of(visits: Visits, chains: Sequence[Chain], names: dict[str, int], lane: int) -> tuple[Frames, Mask, Ints]:
    """The frames of a lane in the order in which they open, whether each is exact, and the innermost frame of each
    visit. New names are added to `names`."""
    kept = visits.kept(chains)
    lengths = np.array([len(chain) for chain in chains], np.int64)[visits.chain]
    depths = range(int(lengths.max(initial=0)))
    changes = [np.flatnonzero(kept <= depth) for depth in depths]
    opens = [rows[lengths[rows] > depth] for depth, rows in enumerate(changes)]
    # the last visit of each frame that opens there
    last = [np.append(rows[1:], len(kept))[lengths[rows] > depth] - 1 for depth, rows in enumerate(changes)]
    nothing = np.zeros(0, np.int64)
    visit, until = (np.concatenate([nothing, *column]) for column in (opens, last))
    depth = np.repeat(np.arange(len(opens)), [len(rows) for rows in opens])
    order = np.lexsort((depth, visit))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    firsts = np.concatenate([[0], np.cumsum([len(rows) for rows in opens])]).astype(np.int64)
    parent, innermost = np.full(len(order), NONE, np.int64), np.full(len(kept), NONE, np.int64)
    for level in depths:
        rows = place[firsts[level] : firsts[level + 1]]
        if level:
            parent[rows] = place[firsts[level - 1] + np.searchsorted(opens[level - 1], opens[level], side="right") - 1]
        inside = np.flatnonzero(lengths == level + 1)
        innermost[inside] = rows[np.searchsorted(opens[level], inside, side="right") - 1]
    offsets = np.concatenate([[0], np.cumsum([len(chain) for chain in chains])]).astype(np.int64)
    entries = [entry for chain in chains for entry in chain]
    kinds = np.array([kind for kind, _ in entries], np.int64)
    numbers = np.array([names.setdefault(name, len(names)) for _, name in entries], np.int64)
    entry = (offsets[visits.chain[visit]] + depth)[order]
    frames = Frames.of(
        len(order),
        lane=lane,
        kind=kinds[entry],
        name=numbers[entry],
        parent=parent,
        start=visits.start[visit][order],
        end=visits.end[until][order],
    )
    return frames, visits.is_exact[visit][order], innermost
