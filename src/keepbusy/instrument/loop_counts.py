"""How often the loops of a program turn, counted by Python itself from each loop's first turn on.

`sys.monitoring` (Python 3.12) tells of backward jumps. Before that nothing is counted here, and the loops are read off
the lines from which the program calls its GPU.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

from keepbusy.instrument.lines import LIBRARY, USER, holds_loop, kind_of
from keepbusy.instrument.loops import Looks, Monitor, TurnCounters

COUNTS = "counts.npz"
IS_COUNTED = sys.version_info >= (3, 12)


class LoopCounts:
    """Counts in this process."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._looks = Looks()
        self._counters = TurnCounters(self._looks, clock) if IS_COUNTED else None
        self._entries = Monitor(PY_START=self._entered) if IS_COUNTED else None

    def begin(self) -> None:
        if self._entries is not None and self._entries.begin():
            self._entries.watch_all(self._entries.events.PY_START)

    def _entered(self, code: CodeType, _: int) -> Any:
        """Of each code this is told once."""
        if self._counters is not None and kind_of(code.co_filename) in (USER, LIBRARY) and holds_loop(code):
            self._counters.count(self._looks.meet(code), code)
        return self._entries.disabled if self._entries is not None else None

    def end(self) -> None:
        for one in (self._entries, self._counters):
            if one is not None:
                one.end()

    def save(self, folder: Path) -> None:
        looks = self._looks
        names = {
            "codes": [[code.co_filename, code.co_qualname, code.co_firstlineno] for code in looks.codes],
            "turns": [[*loop] for loop in looks.turns],
            "entries": [*looks.entries],
            "uncounted": [[*loop] for loop in looks.uncounted],
            "fleeting": [*looks.fleeting],
        }
        columns = [np.array(one, np.int64) for one in (*looks.turns.values(), *looks.entries.values())]
        np.savez(
            folder / COUNTS,
            names=np.frombuffer(json.dumps(names).encode(), np.uint8),
            sizes=np.array([len(one) for one in columns], np.int64),
            times=np.concatenate([*columns, np.zeros(0, np.int64)]),
        )


def counted(folder: Path, codes: CodeObjects, origin: int) -> Looks | None:
    """What was counted there, with times that count from `origin`; None where nothing was."""
    if not IS_COUNTED or not (folder / COUNTS).exists():
        return None
    with np.load(folder / COUNTS) as left:
        names = json.loads(left["names"].tobytes())
        columns = np.split(left["times"] - origin, np.cumsum(left["sizes"])[:-1])
    looks = Looks()
    for file, name, line in names["codes"]:
        looks.meet(codes.of(file, name, line))
    times = [array("q", one.tolist()) for one in columns]
    looks.turns = dict(zip((tuple(loop) for loop in names["turns"]), times, strict=False))
    looks.entries = dict(zip(names["entries"], times[len(names["turns"]) :], strict=False))
    looks.uncounted = {tuple(loop) for loop in names["uncounted"]}
    looks.fleeting = {*names["fleeting"]}
    return looks


_UNKNOWN = compile("0", "", "eval")


class CodeObjects:
    """The code objects of a program that ran in another process: its sources are compiled once more."""

    def __init__(self, read_source: Callable[[str], str]) -> None:
        self._read_source = read_source
        self._found: dict[tuple[str, str, int], CodeType] = {}
        self._in_file: dict[str, dict[str, list[CodeType]]] = {}

    def of(self, file: str, name: str, line: int) -> CodeType:
        """The one with this qualified name that holds the line; one without loops where there is no such source."""
        key = file, name, line
        found = self._found.get(key)
        if found is None:
            holding = [one for one in self._of_file(file).get(name, ()) if line in _lines_of(one)]
            latest = max(holding, key=lambda one: one.co_firstlineno, default=None)
            found = self._found[key] = latest or self._placeholder(file, name)
        return found

    @cache  # noqa: B019  # as long as this one lives: two lines of a function without source are in one code
    def _placeholder(self, file: str, name: str) -> CodeType:
        return _UNKNOWN.replace(co_filename=file, co_name=name.rpartition(".")[2] or name, co_qualname=name)

    def _of_file(self, file: str) -> dict[str, list[CodeType]]:
        known = self._in_file.get(file)
        if known is None:
            known = self._in_file[file] = defaultdict(list)
            try:
                text = self._read_source(file)
                module = compile(text, file, "exec", dont_inherit=True) if text else None
            except (SyntaxError, ValueError):
                module = None
            for code in _within(module) if module is not None else ():
                known[code.co_qualname].append(code)
        return known


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _within(one)


@cache
def _lines_of(code: CodeType) -> frozenset[int]:
    return frozenset(line for _, _, line in code.co_lines() if line is not None) | {code.co_firstlineno}
