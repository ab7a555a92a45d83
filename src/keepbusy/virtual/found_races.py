"""Races as the report shows them: with the program's lines, its names for streams, and the call that is missing."""

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
from keepbusy.virtual.clock.order import Origin


class FoundRaces:
    """The races of one process."""

    def __init__(self, clock: Clock, lines: Mapping[str, tuple[CodeType, int]]) -> None:
        """`lines`: the code and the line number of each line, by its text in the clock."""
        self._clock, self._lines = clock, lines
        self._names = list(clock.rows.names)

    def all(self, accesses: Accesses) -> tuple[DataRace, ...]:
        return joined(self._race(race, accesses.counts[key]) for key, race in accesses.races.items())

    def named(self, lanes: Sequence[Lane]) -> tuple[Lane, ...]:
        """The lanes with the program's own names for streams, where a name belongs to a single stream."""
        names = [lane.name if lane.device is None else self._stream(number) for number, lane in enumerate(lanes)]
        names = [name.removeprefix("the ") for name in names]
        counts = Counter((lane.device, name) for lane, name in zip(lanes, names, strict=True))
        return tuple(
            lane._replace(name=name) if counts[lane.device, name] == 1 else lane
            for lane, name in zip(lanes, names, strict=True)
        )

    def _race(self, race: Race, times: int) -> DataRace:
        first, second = race.first, race.second
        uses = [
            RacingUse(self._place(use.command.place), use.writes, self._stream(use.command.stream))
            for use in (first, second)
        ]
        stream, other_stream = second.command.stream, first.command.stream
        place, after = uses[1].place, False
        event = self._name(race.event)
        event = "" if "[" in event else event  # an event of a list may differ each time
        other = self._code(other_stream)
        waits = f"wait_event({event})" if event else f"wait_stream({other})"
        if stream == HOST:
            kind = REFILLED if second.writes else READ_EARLY
            place, after = (place, False) if place else (uses[0].place, True)  # no line is known
            call = f"{event or self._code(other_stream, is_current=True)}.synchronize()"
        elif first.is_freed:
            kind, call, place, after = REUSED, f"tensor.record_stream({self._code(other_stream)})", uses[0].place, True
        else:
            kind, current = STREAMS, self._code(stream, is_current=True)
            call = f"{current}.{waits}" if current != other else "torch.cuda.current_stream().wait_stream(other_stream)"
        return DataRace(kind, uses[0], uses[1], race.size, times, call, place, after)

    def _place(self, number: int) -> str:
        """The innermost line of the user's own code."""
        lines = [source_line(self._names[name]) for name in self._clock.rows.lines[number]]
        in_files = [(file, line) for file, line, _ in filter(None, lines)]
        own = [(file, line) for file, line in in_files if owner_of_file(file) == Owner.USER]
        file, line = (own or in_files or [("", 0)])[-1]
        return f"{file}:{line}" if file else ""

    def _stream(self, stream: int) -> str:
        """A stream's name for people."""
        if stream == HOST:
            return ""
        unnamed = "the default stream" if self._is_default(stream) else self._clock.rows.lanes[stream].name
        return self._name(self._clock.order.stream_origins.get(stream)) or unnamed

    def _code(self, stream: int, is_current: bool = False) -> str:
        """A stream as source code. `is_current`: it is the current one where the code would stand."""
        if self._is_default(stream):
            return f"torch.cuda.{'current' if is_current else 'default'}_stream()"
        return self._name(self._clock.order.stream_origins.get(stream)) or "stream"

    def _is_default(self, stream: int) -> bool:
        return self._clock.default_stream(self._clock.rows.lanes[stream].device or 0) == stream

    def _name(self, origin: Origin | None) -> str:
        """The name that the program assigns to a stream or an event."""
        if origin is None:
            return ""
        place, ordinal = origin
        lines = [self._names[name] for name in self._clock.rows.lines[place]]
        with_code = [self._lines[line] for line in lines if line in self._lines]
        return _assigned(with_code[-1][0].co_filename, with_code[-1][1], ordinal) if with_code else ""


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
    """The syntax tree of a file of the program; empty where it cannot be parsed."""
    try:
        return ast.parse(read_source(file))
    except SyntaxError:
        return ast.Module([], [])


@cache
def _assignments(file: str) -> dict[int, tuple[ast.expr, ast.expr]]:
    """Target and value of each assignment, by its lines."""
    parts_by_line: dict[int, tuple[ast.expr, ast.expr]] = {}
    ambiguous = set[int]()
    for node in ast.walk(program_tree(file)):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            parts = (node.targets[0], node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            parts = (node.target, node.value)
        else:
            continue
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            ambiguous |= {line} & parts_by_line.keys()
            parts_by_line[line] = parts
    return {line: parts for line, parts in parts_by_line.items() if line not in ambiguous}
