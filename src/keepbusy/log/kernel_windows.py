"""Opens short windows of PyTorch's profiler in a logged program, while it repeats calls that no window has seen."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from keepbusy.log.log_file import ROW, CallFlag
from keepbusy.program.lines import outwards
from keepbusy.program.patches import Function, Patches
from keepbusy.program.processes import deaf_to_signals, uses_gpu

_WINDOWS, _MOST_HELD_UP = 6, 0.003
"""So many windows may open in any run, and further ones while all have taken at most this share of the run."""
_FIRST_CHECK, OPEN_CHECK, _WHILE_IDLE, _RARELY = 25_000_000, 25_000_000, 100_000_000, 2_000_000_000
"""Nanoseconds between two checks of the log: at first, while a window is open, while hardly anything is launched, and
while all is known."""
_LASTS = 60_000_000
"""Nanoseconds for which a program must launch unknown kernels before a window opens."""
_PATIENCE = 500_000_000
"""Nanoseconds after which unknown kernels that do not repeat open a window; doubled by each window."""
_UNKNOWN_SHARE, _FEW = 0.05, 16
"""With a smaller share of unknown commands among recent ones, or with fewer commands, no window opens."""
_OPEN_FOR, _OPEN_AT_MOST, _ROWS_AT_MOST = 50_000_000, 1_000_000_000, 6_000
_ROWS_KEPT, _ROWS_READ = 16_384, 1 << 17
_TIMES, _ALIKE = 3, 0.8
"""Rows repeat if they occur so often, and this share of them equals those of one iteration before."""
_TIMES_ITS_COST = 50
"""The next check of the log comes after so many times the processor time of the last one."""


def in_main_thread(act: Callable[[], object]) -> None:
    """Call it soon in the main thread, except in a traced program before Python 3.12, which might never return."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if sys.version_info >= (3, 12) or all(caller.f_trace is None for caller in outwards(frame)):
        ctypes.pythonapi.Py_AddPendingCall(_QUEUED, ctypes.py_object(act))


def _act(act: Callable[[], object]) -> int:
    with suppress(Exception):  # an error of keepbusy must not reach the program
        act()
    return 0


_QUEUED = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)(_act)


class KernelWindows:
    """Windows of PyTorch's profiler, in all threads, that show how long kernels take and which operators make calls.
    They open while kernels run that no window has seen."""

    def __init__(self, folder: Path) -> None:
        self.windows: list[dict[str, int]] = []
        """When each opened and closed, also by the system's clock."""
        self.gave_way = self.has_ended = False
        self.fault = ""
        self.held_up = self.thread = 0
        self._folder = folder
        self._lock = threading.RLock()
        self._profiler: Any = None
        self._is_wanted = False
        self._pending = self.open_if_wanted  # Python keeps no reference to what is pending
        self._is_opening = False
        self._patches = Patches()
        self._known = np.zeros(0, np.int64)
        self._last_row = self._next_check = self._opened = self._period = 0
        self._unknown_since = self._unknown_until = 0
        self._began = time.perf_counter_ns()
        self._recent = np.zeros(0, ROW)
        self._patience = _PATIENCE
        self._every = _FIRST_CHECK
        self._since_opened: list[np.ndarray] = []

    def begin(self) -> None:
        """Give way to the program's own use of the profiler, because only one can be active."""
        from keepbusy.torch_names.hooks import PROFILER_BEGINS

        for begins in PROFILER_BEGINS:
            self._patches.wrap(*begins, self._give_way)

    @property
    def is_open(self) -> bool:
        return self._profiler is not None

    def end(self) -> None:
        self._close()
        self._patches.undo()

    def think(self) -> None:
        """Check the log, in the observing thread, and open or close a window."""
        now = time.perf_counter_ns()
        if now < self._next_check or self.gave_way or self.has_ended or not uses_gpu():
            return
        self.thread = self.thread or threading.get_native_id()
        wait = self._every
        if self._profiler is None:
            used_before = time.thread_time_ns()
            self._look_for_unknown(now)
            wait = max(self._every, _TIMES_ITS_COST * (time.thread_time_ns() - used_before))
        else:
            self._since_opened.append(self._new_rows())
            if self._has_enough(now):
                self._close()
        if self.is_open or self._is_wanted:
            wait = OPEN_CHECK
        self._next_check = time.perf_counter_ns() + wait

    def _look_for_unknown(self, now: int) -> None:
        if self._skips(now):
            return
        rows = self._new_rows()
        if len(rows):
            self._recent = np.concatenate([self._recent, rows])[-_ROWS_KEPT:]
        may_open = len(self.windows) < _WINDOWS or self.held_up < _MOST_HELD_UP * (now - self._began)
        if self._are_known(rows) or not may_open:
            if len(rows) >= _FEW:
                self._unknown_since = 0
                self._every = min(_RARELY, self._every * 2) if self.windows else _FIRST_CHECK
            return
        self._unknown_since, self._unknown_until = self._unknown_since or now, now
        self._every = _FIRST_CHECK
        self._period = _period(self._recent) if now - self._unknown_since > _LASTS else 0
        if self._period or now - self._unknown_since > self._patience:
            self._open_soon()

    def _has_enough(self, now: int) -> bool:
        """Whether the window has two iterations, or, if it is unknown how long they are, hardly anything new."""
        rows = np.concatenate(self._since_opened)
        open_for = now - self._opened
        if open_for > _OPEN_AT_MOST or len(rows) > _ROWS_AT_MOST:
            return True
        if open_for < _OPEN_FOR or len(rows) < 2 * max(self._period, _FEW):
            return False
        keys = _keys_of(rows)
        repeated = np.isin(keys[len(keys) // 2 :], keys[: len(keys) // 2]).mean()
        return bool(self._period or repeated > 1 - _UNKNOWN_SHARE)

    def _open_soon(self) -> None:
        """Open the first window in the main thread, which imported PyTorch: elsewhere Kineto complains. If no call can
        be queued for that thread, the window opens at its next annotation."""
        if self.windows:
            self._open()
        elif not self._is_wanted:
            self._is_wanted = True
            in_main_thread(self._pending)

    def open_if_wanted(self) -> None:
        if self._is_wanted and not self.windows:
            self._is_wanted = False
            try:
                self._open()
            except Exception as error:  # an error of keepbusy must not reach the program
                self.fault = f"{type(error).__name__}: {error}"

    def _open(self) -> None:
        from torch.autograd import profiler

        from keepbusy.torch_names.hooks import profiler_settings

        with self._lock:
            if self._profiler is not None or self.gave_way:
                return
            began = time.perf_counter_ns()
            self._is_opening = True
            try:
                settings = profiler_settings(profile_all_threads=True)
                opening = profiler.profile(
                    use_cpu=True, use_device="cuda", use_kineto=True, experimental_config=settings
                )
                with deaf_to_signals():  # threads of the profiler must not receive the program's signals
                    opening.__enter__()
            except Exception:
                self.has_ended = True  # it would fail again
                raise
            finally:
                self._is_opening = False
            self._opened = time.perf_counter_ns()
            self._since_opened = []
            self.held_up += self._opened - began
            now = {"wall": time.time_ns(), "clock": time.perf_counter_ns()}
            self.windows.append({**now, "opens": began})
            self._profiler = opening  # last, because the observing thread takes the window for open from now on

    def _close(self) -> None:
        with self._lock:
            if self._profiler is None:
                return
            began = time.perf_counter_ns()
            self._since_opened.append(self._new_rows())  # the profiler does not see calls that are made while it closes
            try:
                self._save()
            finally:
                self._profiler = None
            commands = _commands_in(np.concatenate(self._since_opened))
            self._known = np.union1d(self._known, commands)
            self._since_opened = []
            self._unknown_since = 0
            if len(commands):
                self._patience *= 2
            self.windows[-1] |= {"closes": began, "closed": time.perf_counter_ns()}
            self.held_up += time.perf_counter_ns() - began

    def _save(self) -> None:
        from keepbusy.torch_names.hooks import end_profiler

        end_profiler().save(str(self._folder / f"window{len(self.windows) - 1}.json"))

    def _give_way(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        if not self._is_opening:
            self.gave_way = True
            self._close()
        return original(*args, **kwargs)

    def _skips(self, now: int) -> bool:
        """Whether hardly anything was launched, or nothing unknown. Checked first, because sorting the rows holds the
        GIL, for which the program would wait."""
        rows = self._latest_rows()
        rows = rows[rows["begin"] > self._last_row]
        if len(_commands_in(rows)) < _FEW:
            self._every = _WHILE_IDLE if self.windows else _FIRST_CHECK
            if now - self._unknown_until > self._patience:
                self._unknown_since, self._recent = 0, self._recent[:0]
        elif self._are_known(rows):
            self._last_row, self._unknown_since, self._recent = int(rows["begin"].max()), 0, self._recent[:0]
            self._every = min(_RARELY, self._every * 2)
        else:
            return False
        return True

    def _are_known(self, rows: np.ndarray) -> bool:
        commands = _commands_in(rows)
        return len(commands) < _FEW or bool((~np.isin(commands, self._known)).mean() < _UNKNOWN_SHARE)

    def _latest_rows(self) -> np.ndarray:
        with (self._folder / "rows").open("rb") as file:
            size = file.seek(0, os.SEEK_END) // ROW.itemsize
            first = max(0, size - _ROWS_READ) * ROW.itemsize
            return np.frombuffer(os.pread(file.fileno(), _ROWS_READ * ROW.itemsize, first), ROW)

    def _new_rows(self) -> np.ndarray:
        """Rows since the last call, as far as the latest chunks have them."""
        rows = self._latest_rows()
        rows = rows[rows["begin"] > self._last_row]
        rows = rows[np.argsort(rows["begin"], kind="stable")]
        if len(rows):
            self._last_row = int(rows["begin"][-1])
        return rows


def _commands_in(rows: np.ndarray) -> np.ndarray:
    """What each row runs on the GPU: a call, or a whole graph. Captured calls run nothing."""
    rows = rows[rows["flags"] & CallFlag.CAPTURED == 0]
    is_graph = rows["flags"] & CallFlag.GRAPH != 0
    return np.where(is_graph, -1 - rows["value"].astype(np.int64), rows["call"].astype(np.int64))


def _keys_of(rows: np.ndarray) -> np.ndarray:
    """The call and the stack of each row, as one number."""
    return rows["call"].astype(np.int64) << 32 | rows["stack"]


def _period(rows: np.ndarray) -> int:
    """The number of rows after which they repeat; 0 if they do not. This holds the GIL, so only the rarest of the
    latest repeated rows are tried."""
    keys = _keys_of(rows)[-_ROWS_KEPT // 2 :]
    _, number_of, counts = np.unique(keys, return_inverse=True, return_counts=True)
    is_late = np.isin(np.arange(len(counts)), number_of[-len(keys) // _TIMES :])
    repeated = np.flatnonzero((counts >= _TIMES) & is_late)
    rarest = repeated[np.argsort(counts[repeated], kind="stable")[:_FEW]]
    lengths = {int(np.median(np.diff(np.flatnonzero(number_of == number)))) for number in rarest.tolist()}
    for length in sorted(lengths):
        if _FEW <= length <= len(keys) // _TIMES and (keys[length:] == keys[:-length]).mean() > _ALIKE:
            return length
    return 0
