"""The races of a run as the report has them: the program's lines, its names for streams, and the missing call."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from types import CodeType

from keepbusy.program.loops.codes import read_source
from keepbusy.timeline.frame_roles import Owner, owner_of_file, source_line
from keepbusy.timeline.model import Lane
from keepbusy.timeline.races import READ_EARLY, REFILLED, REUSED, STREAMS, DataRace, RacingUse, joined
from keepbusy.virtual.accesses import HOST, Accesses, Race
from keepbusy.virtual.clock.engine import Clock
from keepbusy.virtual.clock.order import Made


class FoundRaces:
    """The races of one process."""

    def __init__(self, clock: Clock, lines: Mapping[str, tuple[CodeType, int]]) -> None:
        """`lines`: of each line as the clock writes it, its code and its number."""
        self._clock, self._lines = clock, lines
        self._names = list(clock.rows.names)

    def all(self, accesses: Accesses) -> tuple[DataRace, ...]:
        return joined(self._race(race, accesses.times[key]) for key, race in accesses.races.items())

    def named(self, lanes: Sequence[Lane]) -> tuple[Lane, ...]:
        """With streams called as the program calls them, where a name is that of one stream alone."""
        names = [lane.name if lane.device is None else self._stream(number) for number, lane in enumerate(lanes)]
        names = [name.removeprefix("the ") for name in names]
        often = Counter((lane.device, name) for lane, name in zip(lanes, names, strict=True))
        return tuple(
            lane._replace(name=name) if often[lane.device, name] == 1 else lane
            for lane, name in zip(lanes, names, strict=True)
        )

    def _race(self, race: Race, times: int) -> DataRace:
        first, second = race.first, race.second
        uses = [
            RacingUse(self._place(use.command.place), use.writes, self._stream(use.command.stream))
            for use in (first, second)
        ]
        stream, other_stream = second.command.stream, first.command.stream
        at, after = uses[1].place, False
        event = self._name(race.event)
        event = "" if "[" in event else event  # of several, another one each time
        other = self._code(other_stream)
        waits = f"wait_event({event})" if event else f"wait_stream({other})"
        if stream == HOST:
            kind = REFILLED if second.writes else READ_EARLY
            at, after = (at, False) if at else (uses[0].place, True)  # a line that nobody knows
            call = f"{event or self._code(other_stream, is_current=True)}.synchronize()"
        elif first.is_freed:
            kind, call, at, after = REUSED, f"tensor.record_stream({self._code(other_stream)})", uses[0].place, True
        else:
            kind, this = STREAMS, self._code(stream, is_current=True)
            call = f"{this}.{waits}" if this != other else "torch.cuda.current_stream().wait_stream(other_stream)"
        return DataRace(kind, uses[0], uses[1], race.size, times, call, at, after)

    def _place(self, number: int) -> str:
        """The innermost line of the program's own."""
        lines = [source_line(self._names[name]) for name in self._clock.rows.lines[number]]
        known = [(file, line) for file, line, _ in filter(None, lines)]
        own = [(file, line) for file, line in known if owner_of_file(file) == Owner.USER]
        file, line = (own or known or [("", 0)])[-1]
        return f"{file}:{line}" if file else ""

    def _stream(self, stream: int) -> str:
        """As people call it."""
        if stream == HOST:
            return ""
        unnamed = "the default stream" if self._is_default(stream) else self._clock.rows.lanes[stream].name
        return self._name(self._clock.order.made.get(stream)) or unnamed

    def _code(self, stream: int, is_current: bool = False) -> str:
        """As code: `is_current`: where it is used, it is the current one."""
        if self._is_default(stream):
            return f"torch.cuda.{'current' if is_current else 'default'}_stream()"
        return self._name(self._clock.order.made.get(stream)) or "stream"

    def _is_default(self, stream: int) -> bool:
        return self._clock.default_stream(self._clock.rows.lanes[stream].device or 0) == stream

    def _name(self, made: Made | None) -> str:
        """What the program assigns to what is made there."""
        if made is None:
            return ""
        place, ordinal = made
        written = [self._names[name] for name in self._clock.rows.lines[place]]
        known = [self._lines[line] for line in written if line in self._lines]
        return _assigned(known[-1][0].co_filename, known[-1][1], ordinal) if known else ""


def _assigned(file: str, line: int, ordinal: int) -> str:
    statement = _assignments(file).get(line)
    if statement is None:
        return ""
    target, value = statement
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple | ast.ListComp | ast.GeneratorExp):
        return ast.unparse(target.elts[ordinal % len(target.elts)])
    if isinstance(value, ast.ListComp | ast.List | ast.Tuple):
        return f"{ast.unparse(target)}[{ordinal}]"
    return ast.unparse(target) if isinstance(value, ast.Call | ast.IfExp) else ""


def program_tree(file: str) -> ast.Module:
    """What a file of the program says, also a program that is none; nothing where it cannot be read."""
    try:
        return ast.parse(read_source(file))
    except SyntaxError:
        return ast.Module([], [])


@cache
def _assignments(file: str) -> dict[int, tuple[ast.expr, ast.expr]]:
    """By line of an assignment, its target and its value."""
    found: dict[int, tuple[ast.expr, ast.expr]] = {}
    several = set[int]()
    for node in ast.walk(program_tree(file)):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            parts = (node.targets[0], node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            parts = (node.target, node.value)
        else:
            continue
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            several |= {line} & found.keys()
            found[line] = parts
    return {line: parts for line, parts in found.items() if line not in several}
