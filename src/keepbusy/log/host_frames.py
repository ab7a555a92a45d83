"""Where the program was while it ran: the lines, annotations and operators around its calls and between them."""

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
"""A frame as it is written: a line, an annotation or an operator."""
Chain = tuple[Entry, ...]
"""From the outside in."""
NOWHERE = 0
"""The chain of a call of which nobody knows the place."""
Noted = tuple[tuple[int, int], ...]
"""What goes on: numbers of notes, each with that of the stack that it was made from."""


class SourceLines:
    """Stacks as chains of lines: the program's own, those of libraries that loop, and of others the innermost line and
    the outermost that tells what it is for."""

    def __init__(self, codes: CodeObjects) -> None:
        self._codes = codes
        self.of_name: dict[str, tuple[CodeType, int]] = {}
        """Of each line as it is written: its code, and its number."""

    def of_stack(self, stack: Sequence[StackFrame]) -> Chain:
        """`stack`: innermost first."""
        return tuple(self._entry(frame) for frame in reversed([*self._kept(stack)]))

    def code_lines(self, chain: Sequence[StackFrame]) -> tuple[tuple[CodeType, int], ...]:
        """`chain`: outermost first; kept of it is what is kept of a stack."""
        return tuple((self.code(frame), frame.line) for frame in reversed([*self._kept(chain[::-1])]))

    def of_sample(self, chain: Sequence[StackFrame]) -> Chain:
        """`chain`: outermost first, of the program's lines already."""
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
        written = f"{shown(frame.file)}({frame.line}): {code.co_name}"
        self.of_name[written] = code, frame.line
        return FrameKind.LINE, written


class Chains:
    """All chains of a run, by number."""

    def __init__(self, lines: SourceLines, stacks: dict[int, tuple[StackFrame, ...]], notes: Sequence[str]) -> None:
        self._lines, self._stacks, self._notes = lines, stacks, notes
        self.known: list[Chain] = [()]
        self._numbers: dict[Chain, int] = {(): NOWHERE}
        self._of_stack: dict[int, Chain] = {0: ()}
        self._beneath: dict[tuple[int, int], int] = {}

    def number(self, chain: Chain) -> int:
        found = self._numbers.get(chain)
        if found is None:
            found = self._numbers[chain] = len(self.known)
            self.known.append(chain)
        return found

    def of_call(self, stack: int, noted: Noted, operators: Operators) -> int:
        if not stack:
            return NOWHERE
        names = ((FrameKind.OPERATOR, name) for name in operators.names)
        return self.number((*self.annotated(self._of(stack), noted), *names))

    def annotated(self, lines: Chain, noted: Noted) -> Chain:
        """With what goes on there: each annotation stands within the lines that it shares with where it began."""
        chain, reached = list[Entry](), 0
        for number, stack in noted:
            upto = max(reached, in_common(lines, self._of(stack)))
            chain += [*lines[reached:upto], (FrameKind.ANNOTATION, self._name(number))]
            reached = upto
        return (*chain, *lines[reached:])

    def beneath(self, stack: int, noted: Noted) -> int:
        """The stack of what PyTorch's own threads call, perhaps in Python, beneath that which waits for a backward
        pass. New stacks have numbers below 0."""
        waiting = next((waits for number, waits in reversed(noted) if self._name(number) == BACKWARD_PASS), 0)
        if not stack or not waiting:
            return stack or waiting
        number = self._beneath.setdefault((stack, waiting), -1 - len(self._beneath))
        if number not in self._of_stack:
            self._of_stack[number] = (*self._of(waiting), *self._of(stack))
        return number

    def _name(self, note: int) -> str:
        """Of a process that was killed, the latest are not known."""
        return self._notes[note] if note < len(self._notes) else "annotation"

    def _of(self, stack: int) -> Chain:
        found = self._of_stack.get(stack)
        if found is None:
            found = self._of_stack[stack] = self._lines.of_stack(self._stacks.get(stack, ()))
        return found


class Piece(NamedTuple):
    """Until when the host was in a chain."""

    until: float
    chain: Chain | None
    """None: in the lines of the call that comes next."""


class SamplesBetweenCalls:
    """What the host did between two calls: where it was for long, the samples within; else all that were between calls
    from the same lines."""

    def __init__(
        self, times: Ints, chains: Sequence[Chain], begins: Ints, ends: Ints, kinds: Sequence[tuple[int, int]]
    ) -> None:
        """`begins`, `ends`, `kinds`: of the times between calls, from when to when, and between which stacks."""
        self._times, self._chains = times, chains
        found = defaultdict[tuple[int, int], list[tuple[float, Chain]]](list)
        gaps = np.searchsorted(begins, times, side="right") - 1
        for sample, gap in enumerate(gaps.tolist()):
            if gap >= 0 and begins[gap] < times[sample] < ends[gap]:
                share = float((times[sample] - begins[gap]) / (ends[gap] - begins[gap]))
                found[kinds[gap]].append((share, chains[sample]))
        self.of_kind = {kind: self._shares(samples) for kind, samples in found.items()}

    @staticmethod
    def _shares(samples: Sequence[tuple[float, Chain]]) -> list[tuple[float, Chain]]:
        """Until which share of the time the program was in each."""
        places = defaultdict[Chain, list[float]](list)
        for share, chain in samples:
            places[chain].append(share)
        reached, found = 0.0, list[tuple[float, Chain]]()
        for chain, shares in sorted(places.items(), key=lambda item: sum(item[1]) / len(item[1])):
            reached += len(shares) / len(samples)
            found.append((reached, chain))
        return found

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
    """Each piece with the operators that ran then and called nothing, and how many of its frames are lines."""
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
    """Where a thread was, one after the other; what two in a row share has not ended in between."""

    chain: Ints = column(np.int64)
    start: Ints = column(np.int64)
    end: Ints = column(np.int64)
    shared_at_most: Ints = column(np.int64)
    """So many frames may be those of the visit before, the outermost."""
    is_exact: Mask = column(np.bool_)
    """Whether a call tells of it, else a sample."""

    def kept(self, chains: Sequence[Chain]) -> Ints:
        """How many frames of the visit before go on in each."""
        lengths = np.array([len(chain) for chain in chains], np.int64)
        before = np.concatenate([[NOWHERE], self.chain[:-1]])
        pairs, which = np.unique(before * len(chains) + self.chain, return_inverse=True)
        both = (divmod(pair, len(chains)) for pair in pairs.tolist())
        common = [in_common(chains[first], chains[second]) for first, second in both]
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
    """Frames of a lane, in the order in which they open; whether a call tells of each; and the innermost frame of each
    visit. `names`: their numbers, which new ones join."""
    kept = visits.kept(chains)
    lengths = np.array([len(chain) for chain in chains], np.int64)[visits.chain]
    depths = range(int(lengths.max(initial=0)))
    changes = [np.flatnonzero(kept <= depth) for depth in depths]
    opens = [rows[lengths[rows] > depth] for depth, rows in enumerate(changes)]
    # the visit with which a frame ends that opens there
    last = [np.append(rows[1:], len(kept))[lengths[rows] > depth] - 1 for depth, rows in enumerate(changes)]
    nothing = np.zeros(0, np.int64)
    visit, until = (np.concatenate([nothing, *column]) for column in (opens, last))
    depth = np.repeat(np.arange(len(opens)), [len(rows) for rows in opens])
    order = np.lexsort((depth, visit))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    firsts = np.concatenate([[0], np.cumsum([len(rows) for rows in opens])]).astype(np.int64)
    parent, innermost = np.full(len(order), NONE, np.int64), np.full(len(kept), NONE, np.int64)
    for at in depths:
        rows = place[firsts[at] : firsts[at + 1]]
        if at:
            parent[rows] = place[firsts[at - 1] + np.searchsorted(opens[at - 1], opens[at], side="right") - 1]
        inside = np.flatnonzero(lengths == at + 1)
        innermost[inside] = rows[np.searchsorted(opens[at], inside, side="right") - 1]
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
