"""The log of lines as it is kept: five columns, and the names of the code they speak of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import numpy as np

from keepbusy.record.lines import ENTER, LEAVE, LINES, Log
from keepbusy.timeline.model import Ints


class Stretch(NamedTuple):
    """A thread was at a line, or in what it called, from `start` to `end`; 0 is no line: somewhere in the function."""

    thread: int
    code: int
    line: int
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Seen:
    """What a log holds. Threads bear the system's numbers; a code is an index into `codes`."""

    columns: Ints  # time, thread, what, code, line: a row each
    codes: tuple[tuple[str, str, int], ...]  # file, function and first line, or 0 where each line is told
    until: int = 0  # when the profiler had stopped: what was open then, was so until then

    @staticmethod
    def of(log: Log) -> Seen:
        """What stands in a log that is closed; threads that nobody can name are left out."""
        codes = {id(entry[3]): entry[3] for entry in log.entries}
        number = {one: index for index, one in enumerate(codes)}
        rows = [(time, thread, what, number[id(code)], line) for time, thread, what, code, line in log.entries]
        columns = np.array(rows, np.int64).reshape(-1, 5)
        known = np.isin(columns[:, 1], list(log.threads))
        columns = columns[known]
        columns[:, 1] = [log.threads[one] for one in columns[:, 1].tolist()]
        return Seen(columns.T.copy(), tuple(_about(code, log) for code in codes.values()), log.clock())

    @staticmethod
    def nothing() -> Seen:
        return Seen(np.zeros((5, 0), np.int64), ())

    def save(self, path: Path) -> None:
        names = np.frombuffer(json.dumps(self.codes).encode(), np.uint8)
        np.savez(path, columns=self.columns, codes=names, until=self.until)

    @staticmethod
    def load(path: Path) -> Seen:
        """Holds no pickle, so nothing in the file is ever executed."""
        with np.load(path, allow_pickle=False) as kept:
            codes = json.loads(kept["codes"].tobytes())
            return Seen(
                kept["columns"], tuple((file, function, first) for file, function, first in codes), int(kept["until"])
            )

    def written(self, code: int, line: int) -> str:
        """A line as a timeline's frames name it."""
        file, function, first = self.codes[code]
        return f"{file}({line or first}): {function}"

    def stretches(self) -> Iterator[Stretch]:
        """How long each thread was at each line."""
        threads = self.columns[1]
        for thread in np.unique(threads).tolist():
            mine = self.columns[:, threads == thread]
            for one in _stretches(thread, mine.T.tolist(), self.until):
                if one.end > one.start and (one.line or self.codes[one.code][2]):
                    yield one


def _about(code: CodeType, log: Log) -> tuple[str, str, int]:
    from keepbusy.script.lines import shown

    first = 0 if log.detail(code) == LINES else code.co_firstlineno
    return shown(code.co_filename), code.co_name, first


class _Open(NamedTuple):
    """A function that runs: which, at which line, since when; 0 before its first line."""

    code: int
    line: int
    since: int


def _stretches(thread: int, entries: list[list[int]], last: int) -> Iterator[Stretch]:
    """Functions stand within functions. One that an exception ended is closed by the next line outside of it."""
    stack: list[_Open] = []
    for time, _, what, code, line in entries:
        if what == ENTER:
            stack.append(_Open(code, 0, time))
            continue
        for _ in range(_ended(stack, code)):
            yield Stretch(thread, *stack.pop(), time)
        if what != LEAVE:
            stack.append(_Open(code, line, time))
    for one in stack:
        yield Stretch(thread, *one, last)


def _ended(stack: list[_Open], code: int) -> int:
    """How many of the innermost functions end, or change their line, when this code speaks."""
    for depth, one in enumerate(reversed(stack)):
        if one.code == code:
            return depth + 1
    return 0
