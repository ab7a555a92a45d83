"""Runs that were looked at on paper: a program's text, where each look found it, and when its loops turned."""

from __future__ import annotations

import dis
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

from keepbusy.instrument.loops import Line, Looks
from keepbusy.instrument.source_loops import SourceLoop, SourceLoops

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


@dataclass
class Watched:
    """`at` says how long the program was where; `turned` when a loop ended its turns. Milliseconds."""

    looks: Looks = field(default_factory=Looks)
    numbers: dict[str, int] = field(default_factory=dict)
    now: float = 0

    def program(self, path: Path, text: str) -> Watched:
        """A file that is really there, so that its loops can be read."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        for name, code in codes_of(text, str(path)).items():
            self.code(f"{path.stem}.{name}" if name != "<module>" else path.stem, code)
        return self

    def code(self, name: str, code: CodeType, longest: int = 1_000) -> Watched:
        self.numbers[name] = self.looks.meet(code)
        self.looks.longest_stay[self.numbers[name]] = longest
        return self

    def at(self, time: float, *chain: tuple[str, int], every: float = 10) -> Watched:
        """From the outside in: the name of each frame's code, and its line."""
        lines = tuple(Line(self.numbers[name], line) for name, line in chain)
        known = self.looks.known_chains
        if lines not in known:
            known.append(lines)
        for _ in range(round(time / every)):
            self.looks.times.append(round(self.now * MS))
            self.looks.chains.append(known.index(lines))
            self.now += every
        self.looks.ended = round(self.now * MS)
        return self

    def turned(self, name: str, line: int, ends: Sequence[float]) -> Watched:
        """The loop that begins at this line."""
        number = self.numbers[name]
        code = self.looks.codes[number]
        sources = SourceLoops(lambda file: Path(file).read_text(encoding="utf-8"))
        found: Mapping[int, int] = {
            loop.first: target for target in targets(code) if (loop := sources.of_jump(code, target)) is not None
        }
        self.looks.turns[number, found[line]] = array("q", [round(end * MS) for end in ends])
        self.looks.entries.setdefault(number, array("q"))
        return self
