"""Runs on paper: a program's text, where it was when, and when iterations of its loops ended."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

import numpy as np

from keepbusy.program.loops.codes import Chain, Line, ProgramCodes, read_source
from keepbusy.program.loops.line_iterations import LoopKey
from keepbusy.program.loops.run_tree import LoopIterations, LoopTimes, RunTree, Whereabouts
from keepbusy.program.loops.source_loops import SourceLoop, SourceLoops
from keepbusy.timeline.model import Ints
from keepbusy.timeline.run_facts import Part

MS = 1_000_000


def codes_of(text: str, file: str = "train.py") -> dict[str, CodeType]:
    """The code of each function by its name; of the file itself too."""
    return {code.co_name: code for code in _within(compile(text, file, "exec"))}


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _within(inner)


def targets(code: CodeType) -> list[int]:
    """Where this code jumps back to."""
    jumps = (one for one in dis.get_instructions(code) if "JUMP" in one.opname and isinstance(one.argval, int))
    return sorted({one.argval for one in jumps if one.argval <= one.offset})


def loops_of_jumps(text: str, function: str = "<module>") -> list[SourceLoop | None]:
    """Of each place that is jumped back to, the loop that turns there."""
    sources = SourceLoops(lambda file: text)
    code = codes_of(text)[function]
    return [sources.of_jump(code, target) for target in targets(code)]


STAY = 30 * MS


def idle(moments: Ints) -> np.ndarray:
    """A GPU that does nothing."""
    return moments * 0.0


@dataclass
class Watched:
    """`at` says how long the program was where; `iterated` when iterations of a loop ended. Milliseconds."""

    codes: ProgramCodes = field(default_factory=ProgramCodes)
    numbers: dict[str, int] = field(default_factory=dict)
    now: float = 0
    starts: list[int] = field(default_factory=list)
    chains: list[int] = field(default_factory=list)
    known: list[Chain] = field(default_factory=list)
    ended: int = 0
    ends: dict[LoopKey, Ints] = field(default_factory=dict)
    calls: dict[int, Ints] = field(default_factory=dict)
    incomplete: set[LoopKey] = field(default_factory=set)

    def program(self, path: Path, text: str) -> Watched:
        """A file that is really there, so that its loops can be read."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        for name, code in codes_of(text, str(path)).items():
            self.code(f"{path.stem}.{name}" if name != "<module>" else path.stem, code)
        return self

    def code(self, name: str, code: CodeType) -> Watched:
        self.numbers[name] = self.codes.number(code)
        self.calls[self.numbers[name]] = np.zeros(0, np.int64)
        return self

    def at(self, time: float, *chain: tuple[str, int], every: float = 10) -> Watched:
        """From the outside in: the name of each frame's code, and its line."""
        lines = tuple(Line(self.numbers[name], line) for name, line in chain)
        if lines not in self.known:
            self.known.append(lines)
        for _ in range(round(time / every)):
            self.starts.append(round(self.now * MS))
            self.chains.append(self.known.index(lines))
            self.now += every
        self.ended = round(self.now * MS)
        return self

    def iterated(self, name: str, line: int, ends: Sequence[float]) -> Watched:
        """The loop that begins at this line."""
        self.ends[self.numbers[name], line] = np.array([round(end * MS) for end in ends], np.int64)
        return self

    def times(self, busy_until: Callable[[Ints], np.ndarray] = idle) -> LoopTimes:
        where = Whereabouts(np.array(self.starts, np.int64), np.array(self.chains, np.int64), self.known, self.ended)
        incomplete = frozenset(self.incomplete)
        iterations = LoopIterations(self.ends, self.calls, incomplete=incomplete, are_counted=bool(self.ends))
        return LoopTimes(self.codes, where, iterations, busy_until, SourceLoops(read_source), STAY)

    def tree(self, busy_until: Callable[[Ints], np.ndarray] = idle) -> Part:
        return RunTree(self.times(busy_until)).root()
