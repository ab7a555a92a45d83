"""`keepbusy run --live`: how the program is doing, drawn at the bottom of the terminal by the process around it.

The terminal is told to scroll all rows but the last ones. Whatever the program prints, native code and progress bars
included, goes on as ever above.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from keepbusy.timeline.files import BadInput

if TYPE_CHECKING:
    from keepbusy.explain.diagnosis import Diagnosis
    from keepbusy.timeline.model import Timeline
    from keepbusy.timeline.run_facts import Figures, Part


INTERVAL = 0.25
_SMALLEST = 40, 5
_MODEST = 10


class Terminal:
    """Standard error, where it is one and somebody looks at it."""

    def size(self) -> tuple[int, int]:
        """Columns and rows."""
        try:
            return os.get_terminal_size(2)
        except OSError:
            return shutil.get_terminal_size()

    def write(self, text: str) -> None:
        os.write(2, text.encode("utf-8", "replace"))

    def is_seen(self) -> bool:
        """Not while the program runs in the background of its shell, nor on a handful of rows."""
        columns, rows = self.size()
        return _is_in_front() and columns >= _SMALLEST[0] and rows >= _SMALLEST[1]


def _is_in_front() -> bool:
    try:
        return os.tcgetpgrp(2) == os.getpgrp()
    except OSError:  # a session of its own, as torchrun starts them: nobody can send it to the background
        return True


@contextmanager
def live(folder: Path, source: str, explained: Callable[[Timeline], Diagnosis]) -> Iterator[None]:
    """While this lasts the line is drawn. What the window saw is explained once, as soon as it is there."""
    if not sys.stderr.isatty():
        yield
        return
    stop = threading.Event()
    window = _Window(source, explained)
    drawing = threading.Thread(target=_draw, args=(folder, window, stop), name="keepbusy live", daemon=True)
    drawing.start()
    try:
        yield
    finally:
        stop.set()
        drawing.join()


def _draw(folder: Path, window: _Window, stop: threading.Event) -> None:
    from keepbusy.report.run_report import live_lines

    terminal = Terminal()
    bottom = BottomLines(terminal)
    try:
        while not stop.wait(INTERVAL):
            if terminal.is_seen():
                process, figures = latest(folder)
                diagnosis, now = window.diagnosis(process), time.perf_counter_ns()
                bottom.show(live_lines(figures, tree_in(process), diagnosis, now, terminal.size()))
    finally:
        bottom.end()


def latest(folder: Path) -> tuple[Path | None, Figures | None]:
    """Of all processes that leave figures, the one that has taken most steps."""
    from keepbusy.recording.recorder import LIVE
    from keepbusy.timeline.run_facts import FiguresFile

    found = [(path.parent, FiguresFile(path).read()) for path in folder.glob(f"*/{LIVE}")]
    return max(
        ((process, figures) for process, figures in found if figures is not None),
        key=lambda one: one[1].steps,
        default=(None, None),
    )


def tree_in(process: Path | None) -> Part | None:
    """The run of that process as far as it has grown; None before it has left any."""
    from keepbusy.recording.recorder import TREE
    from keepbusy.timeline.files import typed
    from keepbusy.timeline.run_facts import Part

    try:
        return typed(Part, json.loads((process / TREE).read_text(encoding="utf-8"))) if process is not None else None
    except (OSError, ValueError):
        return None


class _Window:
    """What the window tells, once: explained in a thread of its own, at a low priority."""

    def __init__(self, source: str, explained: Callable[[Timeline], Diagnosis]) -> None:
        self._source, self._explained = source, explained
        self._asked = False
        self._diagnosis: Diagnosis | None = None

    def diagnosis(self, process: Path | None) -> Diagnosis | None:
        """None until there is one."""
        if process is not None and not self._asked and _has_closed(process):
            self._asked = True
            threading.Thread(target=self._explain, args=(process,), name="keepbusy explains", daemon=True).start()
        return self._diagnosis

    def _explain(self, process: Path) -> None:
        from keepbusy.recording.recorded_run import timeline_in

        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _MODEST)
        with contextlib.suppress(BadInput, OSError):
            self._diagnosis = self._explained(timeline_in(process, {"source": self._source}))


def _has_closed(process: Path) -> bool:
    from keepbusy.recording.recorded_run import facts_in
    from keepbusy.recording.windows import TRACE

    return (process / TRACE).exists() and bool(facts_in(process).get("closed"))


# How it leaves alone what the program prints

_SAVE, _RESTORE, _CLEAR = "\x1b7", "\x1b8", "\x1b[2K"


class BottomLines:
    """The last rows of a terminal. Each change is one write, so that nothing of the program's gets between."""

    def __init__(self, screen: Terminal) -> None:
        self._screen = screen
        self._rows = self._count = 0

    def show(self, texts: Sequence[str]) -> None:
        """Put these lines there; also after the terminal has changed its size."""
        _, rows = self._screen.size()
        room = "" if (rows, len(texts)) == (self._rows, self._count) else self._room(rows, len(texts))
        self._rows, self._count = rows, len(texts)
        self._screen.write(f"{room}{_SAVE}{self._written(texts)}{_RESTORE}")

    def end(self) -> None:
        """Give the rows back."""
        if self._rows:
            self._screen.write(f"{_SAVE}\x1b[r{self._written([''] * self._count)}{_RESTORE}")
            self._rows = self._count = 0

    def _written(self, texts: Sequence[str]) -> str:
        first = self._rows - len(texts) + 1
        return "".join(f"\x1b[{first + number};1H{_CLEAR}{text}" for number, text in enumerate(texts))

    def _room(self, rows: int, count: int) -> str:
        """Should the program stand where our lines are to be, all goes up; then all rows but those scroll. What is no
        longer ours is empty."""
        more = count - self._count if rows == self._rows or not self._rows else 0
        up = "\x1bD" * more + f"\x1b[{more}A" if more > 0 else ""
        freed = self._written([""] * self._count) if more < 0 else ""
        return f"{up}{_SAVE}{freed}\x1b[1;{rows - count}r{_RESTORE}"
