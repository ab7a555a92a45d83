"""`keepbusy run --live`: how the program is doing, drawn at the bottom of the terminal by the process around it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from keepbusy.timeline.errors import BadInput

if TYPE_CHECKING:
    from keepbusy.explain.diagnosis import Diagnosis
    from keepbusy.timeline.figures import Figures

FILE = "live"
INTERVAL = 0.25
_SMALLEST = 40, 5
_MODEST = 10


class Terminal:
    """Standard error, where it is one and somebody looks at it."""

    def size(self) -> tuple[int, int]:
        return shutil.get_terminal_size((100, 24))

    def write(self, text: str) -> None:
        os.write(2, text.encode("utf-8", "replace"))

    def is_seen(self) -> bool:
        """Not while the program runs in the background of its shell, nor on a handful of rows."""
        columns, rows = self.size()
        with contextlib.suppress(OSError):
            return os.tcgetpgrp(2) == os.getpgrp() and columns >= _SMALLEST[0] and rows >= _SMALLEST[1]
        return False


@contextmanager
def live(folder: Path, explained: Callable[[Path], Diagnosis | None]) -> Iterator[None]:
    """While this lasts the line is drawn; `explained` is asked once there is a window to explain."""
    if not sys.stderr.isatty():
        yield
        return
    stop = threading.Event()
    drawing = threading.Thread(target=_draw, args=(folder, explained, stop), name="keepbusy live", daemon=True)
    drawing.start()
    try:
        yield
    finally:
        stop.set()
        drawing.join(5.0)


def _draw(folder: Path, explained: Callable[[Path], Diagnosis | None], stop: threading.Event) -> None:
    from keepbusy.report.live import BottomLine, line

    terminal, window = Terminal(), _Window(explained)
    bottom = BottomLine(terminal)
    try:
        while not stop.wait(INTERVAL):
            if terminal.is_seen():
                process, figures = latest(folder)
                columns, _ = terminal.size()
                bottom.show(line(figures, window.diagnosis(process), time.perf_counter_ns(), columns))
    finally:
        bottom.end()


def latest(folder: Path) -> tuple[Path | None, Figures | None]:
    """Of all processes that leave figures, the one that has taken most steps."""
    from keepbusy.timeline.figures import FiguresFile

    found = [(path.parent, FiguresFile(path).read()) for path in folder.glob(f"*/{FILE}")]
    return max(
        ((process, figures) for process, figures in found if figures is not None),
        key=lambda one: one[1].steps,
        default=(None, None),
    )


class _Window:
    """What the window tells, once: explained in a thread of its own, at a low priority."""

    def __init__(self, explained: Callable[[Path], Diagnosis | None]) -> None:
        self._explained = explained
        self._asked: Path | None = None
        self._diagnosis: Diagnosis | None = None

    def diagnosis(self, process: Path | None) -> Diagnosis | None:
        if process is not None and self._asked is None and (process / "trace.json").exists():
            self._asked = process
            threading.Thread(target=self._explain, args=(process,), name="keepbusy explains", daemon=True).start()
        return self._diagnosis

    def _explain(self, process: Path) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _MODEST)
        with contextlib.suppress(BadInput, OSError):
            self._diagnosis = self._explained(process)
