"""Logs a process that uses a real GPU, from before its first call of the driver to its end.

In the program's own thread there is the log (`hostlog.c`), a note where PyTorch annotates what it does, and Python's
count of the turns of loops. A thread beside it looks where the program is, and runs PyTorch's profiler for a moment
whenever kernels repeat whose durations are not known yet.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from keepbusy.instrument import ENDED
from keepbusy.instrument.lines import TEXTS, outwards, program_path
from keepbusy.instrument.loader_uses import Loaders
from keepbusy.instrument.loop_counts import LoopCounts
from keepbusy.instrument.loops import LoopWatch
from keepbusy.instrument.patches import Function, Patches, called_plainly, left_alone, when_imported
from keepbusy.instrument.processes import follow
from keepbusy.log import hostlog
from keepbusy.log.log_file import ROW
from keepbusy.timeline.files import write_whole
from keepbusy.timeline.frame_roles import OWN_STEP
from keepbusy.timeline.run_facts import CutShort, allocator_settings
from keepbusy.timeline.steps import repetition

FACTS, LOOKS = "facts.json", "looks.npz"
"""What a process leaves in its folder beside the log, the profiler's windows and `COUNTS`."""
BACKWARD_PASS = "backward"
LEAVES = 0
"""The note that ends what was noted last."""
_DEVICE = "cuda"
_QUIET, _LETS_GO = "99", "TEARDOWN_CUPTI"
_ALMOST = 2 << 20
"""Bytes of its log that a program may still fill before somebody else goes on."""
_MOST_WINDOWS = 6
_WRITES_EVERY = 20_000_000_000
_FIRST_CHECK, _RARELY = 25_000_000, 2_000_000_000
_LASTS = 60_000_000
"""Kernels of which the program launches unknown ones for so long are worth a window."""
_PATIENCE = 500_000_000
"""Kernels that do not repeat are recorded after so long, and after twice as long each further time."""
_UNKNOWN_SHARE, _FEW = 0.05, 16
"""Of recent launches: with fewer unknown ones, or of so few launches, no window opens."""
_OPEN_FOR, _OPEN_AT_MOST, _ROWS_AT_MOST = 50_000_000, 1_000_000_000, 20_000
_ROWS_KEPT, _ROWS_READ = 16_384, 1 << 17


class ProgramLog:
    """One process that is logged."""

    def __init__(self, folder: Path, full: Callable[[], object] | None = None) -> None:
        """`full` is called in the program's own thread, once its log holds no more."""
        self.folder = folder / str(os.getpid())
        self.folder.mkdir(parents=True)
        self._process = os.getpid()
        self._loops = LoopWatch(counts_turns=False)
        self._counts = LoopCounts(time.perf_counter_ns)
        self._loaders, self._patches = Loaders(), Patches()
        self._windows = KernelWindows(self.folder)
        self._notes = _Notes(self._windows.open_if_wanted)
        self._began = self._loops.looks.began
        self._faults: list[str] = []
        self._is_going_on = False
        self._write_at = self._began + _WRITES_EVERY
        self._full, self._going_on = full, full

    def begin(self) -> str:
        """Returns why it cannot, or an empty string."""
        if why := hostlog.build():
            return why
        if not hostlog.reads_stacks():
            return f"the stacks of Python {sys.version_info.major}.{sys.version_info.minor} cannot be read"
        if why := hostlog.start(self.folder):
            return why
        self._is_going_on = True
        os.environ.setdefault(_LETS_GO, "1")  # without it every launch stays slow when the window has closed
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
        os.register_at_fork(after_in_child=self._forked)
        self._counts.begin()
        when_imported("torch", self._hook_in)
        self._loops.meanwhile = self._meanwhile
        self._loops.begin()
        return ""

    def _meanwhile(self) -> None:
        """In the thread that looks on. A process that is killed says no more than what was written by then."""
        closed = len(self._windows.closed)
        self._windows.think()
        now = time.perf_counter_ns()
        if len(self._windows.closed) != closed or now > self._write_at:
            self._write_at = now + _WRITES_EVERY
            self._leave()
        if self._full is not None and (self.folder / "rows").stat().st_size > hostlog.MOST_BYTES - _ALMOST:
            self._going_on, self._full = self._full, None  # Python keeps no reference to what is pending
            _in_main_thread(self._going_on)

    def _hook_in(self) -> None:
        """Whatever goes wrong here is ours, and no business of the program's."""
        try:
            self._notes.begin()
            self._windows.begin()
            self._loaders.begin()
            from torch.utils.data import dataloader

            self._patches.replace(dataloader._BaseDataLoaderIter, "__next__", self._taking_batch)
        except Exception as error:
            self._faults.append(f"{type(error).__name__}: {error}")

    def _taking_batch(self, original: Function) -> Function:
        def next_batch(iterator: Any) -> Any:
            before = time.perf_counter_ns()
            batch = original(iterator)
            with suppress(Exception):  # what goes wrong here is ours, and no business of the program's
                self._loaders.came(iterator, before, time.perf_counter_ns())
            return batch

        return called_plainly(next_batch)

    def _forked(self) -> None:
        self._loops.forget()
        self._counts.end()
        self._is_going_on = False

    def end(self, cut_short: CutShort | None = None) -> None:
        """Take everything out again, and leave what there is, with what ended the program before its own end."""
        if os.getpid() != self._process or not self._is_going_on:
            return
        self._is_going_on = False
        stopped = hostlog.stop()
        last = (
            *(self._loops.end, self._counts.end, self._windows.end, self._notes.end, self._patches.undo),
            *(self._loaders.end, self._leave_looks),
        )
        for act in last:
            try:
                act()
            except Exception as error:
                self._faults.append(f"{type(error).__name__}: {error}")
        self._leave(
            stopped=stopped,
            ended=self._loops.looks.ended or time.perf_counter_ns(),
            cut_short=cut_short and asdict(cut_short),
            loaders=[asdict(one) for one in self._loaders.used()],
        )

    def _leave(self, **more: Any) -> None:
        rank, world = _rank_and_world()
        facts = {
            "rank": rank,
            "world": world,
            "began": self._began,
            "faults": [*self._faults, *filter(None, [self._windows.fault, self._loops.fault])],
            "notes": self._notes.names,
            "windows": self._windows.closed,
            "profiled": self._windows.gave_way,
            "held_up": self._windows.held_up,
            "own_thread": self._windows.thread,
            "allocator": allocator_settings(),
            "torch": getattr(sys.modules.get("torch"), "__version__", ""),
            "device": _device(),
            "texts": dict(TEXTS),
            "program": program_path(),
        }
        write_whole(self.folder / FACTS, json.dumps(facts | more), durable=False)

    def _leave_looks(self) -> None:
        looks = self._loops.looks
        codes = [[code.co_filename, code.co_qualname, code.co_firstlineno] for code in looks.codes]
        chains = [[[line.code, line.line] for line in chain] for chain in looks.known_chains]
        count = min(len(looks.times), len(looks.chains))
        text = np.frombuffer(json.dumps({"codes": codes, "chains": chains}).encode(), np.uint8)
        times, numbers = np.array(looks.times[:count], np.int64), np.array(looks.chains[:count], np.int64)
        np.savez(self.folder / LOOKS, times=times, chains=numbers, names=text)
        self._counts.save(self.folder)


def start(folder: Path, full: Callable[[], object] | None = None) -> tuple[ProgramLog | None, str]:
    """Log this process, and those it spawns, from now on; or say why that cannot be. `full` is called once the log of
    this process holds no more."""
    log = ProgramLog(folder, full)
    if why := log.begin():
        shutil.rmtree(log.folder, ignore_errors=True)
        return None, why
    follow(be_child, {"folder": str(folder)})
    return log, ""


def be_child(folder: str) -> None:
    """A process that the program spawned is logged, too."""
    import atexit

    log, _ = start(Path(folder))
    if log is not None:
        atexit.register(log.end)


def _rank_and_world() -> tuple[int, int]:
    distributed: Any = sys.modules.get("torch.distributed")
    with suppress(Exception):
        if distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _device() -> str:
    cuda: Any = sys.modules.get("torch.cuda")
    with suppress(Exception):
        if cuda.is_initialized():
            return str(cuda.get_device_name())
    return ""


class _Notes:
    """What PyTorch annotates, as it does for its profiler: optimizers, loaders; also backward passes, whose calls come
    from threads of PyTorch's own, and steps that the program announces."""

    def __init__(self, passed: Callable[[], object]) -> None:
        """`passed` is called wherever something begins."""
        self.names: list[str] = [""]
        self._passed = passed
        self._numbers: dict[str, int] = {}
        self._patches = Patches()

    def begin(self) -> None:
        import torch

        for ours in (_Notes._says, _Notes._leaves, _Notes._step):  # whatever PyTorch compiles around it
            left_alone(ours)
        record_function = torch.autograd.profiler.record_function
        self._patches.replace(record_function, "__enter__", self._entering)
        self._patches.replace(record_function, "__exit__", self._leaving)
        for module in (torch.autograd.graph, torch.autograd):
            self._patches.replace(module, "_engine_run_backward", self._running_backward)
        ENDED.append(self._step)
        self._patches.later(lambda: ENDED.remove(self._step))

    def end(self) -> None:
        self._patches.undo()

    def _says(self, name: str) -> None:
        self._passed()
        number = self._numbers.get(name)
        if number is None:
            self.names.append(name)
            number = self._numbers[name] = len(self.names) - 1
        hostlog.note(number)

    def _leaves(self) -> None:
        hostlog.note(LEAVES)

    def _entering(self, original: Function) -> Function:
        def enter(annotation: Any) -> Any:
            self._says(annotation.name)
            return original(annotation)

        return called_plainly(enter)

    def _leaving(self, original: Function) -> Function:
        def leave(annotation: Any, *error: Any) -> Any:
            self._leaves()
            return original(annotation, *error)

        return called_plainly(leave)

    def _running_backward(self, original: Function) -> Function:
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            self._says(BACKWARD_PASS)
            try:
                return original(*args, **kwargs)
            finally:
                self._leaves()

        return called_plainly(run_backward)

    def _step(self) -> None:
        self._says(OWN_STEP)
        self._leaves()


class KernelWindows:
    """Moments in which PyTorch's profiler looks on, in all threads, to learn how long kernels take, and in which
    operators calls are made. They open while kernels run that were in none of them."""

    def __init__(self, folder: Path) -> None:
        self.closed: list[dict[str, int]] = []
        self.gave_way = self.has_ended = False
        self.fault = ""
        self.held_up = self.thread = 0
        self._folder = folder
        self._lock = threading.RLock()
        self._profiler: Any = None
        self._is_wanted = False
        self._pending = self.open_if_wanted  # Python keeps no reference to what is pending
        self._is_ours = False
        self._patches = Patches()
        self._known: set[int] = set()
        self._last_row = self._next_check = self._unknown_since = self._opened = self._period = 0
        self._recent = np.zeros(0, ROW)
        self._patience = _PATIENCE
        self._every = _FIRST_CHECK
        self._since_opened: list[np.ndarray] = []

    def begin(self) -> None:
        """The program's own use of the profiler goes first: there is room for one."""
        from torch.autograd import profiler

        for name in ("_prepare_profiler", "_enable_profiler"):
            self._patches.wrap(profiler, name, self._give_way)

    def end(self) -> None:
        self._close()
        self._patches.undo()

    def think(self) -> None:
        """In the thread that looks on."""
        now = time.perf_counter_ns()
        if now < self._next_check or self.gave_way or self.has_ended or not self._uses_gpu():
            return
        self.thread = self.thread or threading.get_native_id()
        rows = self._new_rows()
        if self._profiler is not None:
            self._since_opened.append(rows)
            if self._has_seen_enough(now):
                self._close()
        else:
            self._look_for_unknown(rows, now)
        self._next_check = time.perf_counter_ns() + (_FIRST_CHECK if self._profiler is not None else self._every)

    @staticmethod
    def _uses_gpu() -> bool:
        is_initialized = getattr(sys.modules.get("torch.cuda"), "is_initialized", None)
        return is_initialized is not None and bool(is_initialized())

    def _look_for_unknown(self, rows: np.ndarray, now: int) -> None:
        if len(rows):
            self._recent = np.concatenate([self._recent, rows])[-_ROWS_KEPT:]
        unknown = ~np.isin(rows["call"], list(self._known))
        if len(rows) < _FEW or unknown.mean() < _UNKNOWN_SHARE or len(self.closed) >= _MOST_WINDOWS:
            if len(rows) >= _FEW:
                self._unknown_since = 0
                self._every = min(_RARELY, self._every * 2) if self.closed else _FIRST_CHECK
            return
        self._unknown_since = self._unknown_since or now
        self._every = _FIRST_CHECK
        self._period = _period(self._recent) if now - self._unknown_since > _LASTS else 0
        if self._period or now - self._unknown_since > self._patience:
            self._open_soon()

    def _has_seen_enough(self, now: int) -> bool:
        """Two iterations, where it is known how long one is; else little that is new, for as long as there was much."""
        rows = np.concatenate(self._since_opened)
        open_for = now - self._opened
        if open_for > _OPEN_AT_MOST or len(rows) > _ROWS_AT_MOST:
            return True
        if open_for < _OPEN_FOR or len(rows) < 2 * max(self._period, _FEW):
            return False
        keys = _keys_of(rows)
        again = np.isin(keys[len(keys) // 2 :], keys[: len(keys) // 2]).mean()
        return bool(self._period or again > 1 - _UNKNOWN_SHARE)

    def _open_soon(self) -> None:
        """The first time in the program's own thread, where PyTorch was imported: elsewhere Kineto complains. Where
        nothing can be queued for that thread, its next annotation is waited for."""
        if self.closed:
            self._open()
        elif not self._is_wanted:
            self._is_wanted = True
            _in_main_thread(self._pending)

    def open_if_wanted(self) -> None:
        if self._is_wanted and not self.closed:
            self._is_wanted = False
            try:
                self._open()
            except Exception as error:  # it is ours, and no business of the program's
                self.fault = f"{type(error).__name__}: {error}"

    def _open(self) -> None:
        from torch.autograd import profiler

        with self._lock:
            if self._profiler is not None or self.gave_way:
                return
            began = time.perf_counter_ns()
            self._is_ours = True
            try:
                self._profiler = profiler.profile(
                    use_cpu=True, use_device=_DEVICE, use_kineto=True, experimental_config=_in_all_threads()
                )
                self._profiler.__enter__()
            except Exception:
                self._profiler, self.has_ended = None, True  # it would fail again
                raise
            finally:
                self._is_ours = False
            self._opened = time.perf_counter_ns()
            self._since_opened = []
            self.held_up += self._opened - began
            now = {"wall": time.time_ns(), "clock": time.perf_counter_ns()}
            self.closed.append({**now, "opens": began})

    def _close(self) -> None:
        with self._lock:
            if self._profiler is None:
                return
            began = time.perf_counter_ns()
            self._is_ours = True
            try:
                from torch.autograd import profiler

                results = profiler._disable_profiler()
                results.save(str(self._folder / f"window{len(self.closed) - 1}.json"))
            finally:
                self._is_ours = False
                self._profiler = None
            self._since_opened.append(self._new_rows())
            self._known |= {*np.unique(np.concatenate(self._since_opened)["call"]).tolist()}
            self._since_opened = []
            self._unknown_since = 0
            self._patience *= 2
            self.closed[-1]["closed"] = time.perf_counter_ns()
            self.held_up += time.perf_counter_ns() - began

    def _give_way(self, native: Function, *args: Any, **kwargs: Any) -> Any:
        if not self._is_ours:
            self.gave_way = True
            self._close()
        return native(*args, **kwargs)

    def _new_rows(self) -> np.ndarray:
        """Since this was asked last, as far as they stand in the latest chunks."""
        path = self._folder / "rows"
        size = path.stat().st_size // ROW.itemsize
        first = max(0, size - _ROWS_READ)
        rows = np.fromfile(path, ROW, size - first, offset=first * ROW.itemsize)
        rows = rows[rows["begin"] > self._last_row]
        rows = rows[np.argsort(rows["begin"], kind="stable")]
        if len(rows):
            self._last_row = int(rows["begin"][-1])
        return rows


def _in_main_thread(act: Callable[[], object]) -> None:
    """Soon. Not in a program that is traced before Python 3.12, which may never come back from what was queued."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if sys.version_info >= (3, 12) or all(one.f_trace is None for one in outwards(frame)):
        ctypes.pythonapi.Py_AddPendingCall(_QUEUED, ctypes.py_object(act))


def _act(act: Callable[[], object]) -> int:
    with suppress(Exception):  # what goes wrong here is ours, and no business of the program's
        act()
    return 0


_QUEUED = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)(_act)


def _keys_of(rows: np.ndarray) -> np.ndarray:
    """What was called, and from where."""
    return rows["call"].astype(np.int64) << 32 | rows["stack"]


def _period(rows: np.ndarray) -> int:
    """After how many rows they repeat; 0 if they do not."""
    if len(rows) < 3 * _FEW:
        return 0
    recent = _keys_of(rows)[-_ROWS_KEPT // 2 :]
    length = repetition(np.unique(recent, return_inverse=True)[1])
    return length if 3 * length <= len(recent) else 0


def _in_all_threads() -> Any:
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=True)
