"""Logs a process that uses a real GPU, from before its first call of the driver to its end.

The program's own thread writes the log (`hostlog.c`), notes at PyTorch's annotations, and counts of iterations. An
observing thread samples the program's stack, and opens windows of PyTorch's profiler (`kernel_windows`).
"""

from __future__ import annotations

import atexit
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

from keepbusy.log import hostlog, memory_history
from keepbusy.log.kernel_windows import OPEN_CHECK, KernelWindows
from keepbusy.program import ENDED
from keepbusy.program.lines import TEXTS, program_path
from keepbusy.program.loader_uses import Loaders
from keepbusy.program.loops.iteration_counts import IS_COUNTED, IterationCounter
from keepbusy.program.loops.stack_samples import StackSampler
from keepbusy.program.patches import Function, Patches, called_plainly, left_alone, when_imported
from keepbusy.program.processes import follow, rank_and_world
from keepbusy.timeline.files import write_whole
from keepbusy.timeline.frame_roles import OWN_STEP
from keepbusy.timeline.run_facts import CutShort, allocator_settings

FACTS, SAMPLES = "facts.json", "samples.npz"
"""Files in the folder of a process, beside the log, the profiler's windows and `COUNTS`."""
BACKWARD_PASS = "backward"
LEAVES = 0
"""The note that ends the last open annotation."""
_QUIET, _LETS_GO = "99", "TEARDOWN_CUPTI"
_WRITES_EVERY = 20_000_000_000
_WHOLE_BYTES, _PORTION_BYTES, _LATER = 16 << 20, 2 << 20, 1.4
"""The beginning of the run is written up to so many bytes of rows (half a million calls), then portions of 65,536 calls
each, the next one when the run has lasted so many times as long. So the log of hours can be explained in half a minute.
"""


class ProgramLog:
    """The log of one process."""

    def __init__(self, folder: Path, memory: bool = False) -> None:
        """`memory`: record the allocator's history, too."""
        self.folder = folder / str(os.getpid())
        self.folder.mkdir(parents=True)
        self._process = os.getpid()
        self._sampler = StackSampler(meanwhile=self._meanwhile)
        self._counter = IterationCounter(time.perf_counter_ns)
        self._loaders, self._patches = Loaders(), Patches()
        self._windows = KernelWindows(self.folder)
        self._notes = _Notes(self._windows.open_if_wanted)
        self._began = self._sampler.samples.began
        self._faults: list[str] = []
        self.is_going_on = False
        self._write_at = self._began + _WRITES_EVERY
        self._notes_memory = memory

    def begin(self) -> str:
        """Begin to log. Return why that failed, or ""."""
        if why := hostlog.build():
            return why
        if not hostlog.reads_stacks():
            return f"the stacks of Python {sys.version_info.major}.{sys.version_info.minor} cannot be read"
        if why := hostlog.start(self.folder):
            return why
        self._portions = LogPortions((self.folder / "rows").stat().st_size)
        self.is_going_on = True
        os.environ.setdefault(_LETS_GO, "1")  # without it every launch stays slow when the window has closed
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
        os.register_at_fork(after_in_child=self._forked)
        self._counter.begin()
        when_imported("torch", self._hook_in)
        self._sampler.begin()
        return ""

    def _meanwhile(self) -> int | None:
        """Called in the observing thread; returns when to call it again. It writes the facts at times, because a
        process that is killed leaves only what was written before."""
        was_open = self._windows.is_open
        self._windows.think()
        now = time.perf_counter_ns()
        self._thin(now)
        if (was_open and not self._windows.is_open) or now > self._write_at:
            self._write_at = now + _WRITES_EVERY
            self._write_facts()
        return OPEN_CHECK if self._windows.is_open else None

    def _thin(self, now: int) -> None:
        """Leave out calls of a long run if its iterations are counted, but not with several ranks, whose logs must have
        the same collectives. It begins neither within an annotation, whose begin and end belong together, nor while a
        window is open."""
        may = IS_COUNTED and rank_and_world()[1] == 1 and not self._windows.is_open
        if may and self._notes.none_is_open():
            bytes_so_far = (self.folder / "rows").stat().st_size
            hostlog.thin(not self._portions.are_written(now - self._began, bytes_so_far))

    def _hook_in(self) -> None:
        try:  # an error of keepbusy must not reach the program
            self._notes.begin()
            self._windows.begin()
            self._loaders.begin()
            if self._notes_memory:
                memory_history.begin()
            from keepbusy.torch_names.hooks import NEXT_BATCH

            self._patches.replace(*NEXT_BATCH, self._taking_batch)
        except Exception as error:
            self._faults.append(f"{type(error).__name__}: {error}")

    def _taking_batch(self, original: Function) -> Function:
        def next_batch(iterator: Any) -> Any:
            before = time.perf_counter_ns()
            batch = original(iterator)
            with suppress(Exception):  # an error of keepbusy must not reach the program
                self._loaders.batch_taken(iterator, before, time.perf_counter_ns())
            return batch

        return called_plainly(next_batch)

    def _forked(self) -> None:
        self._sampler.forget()
        self._counter.end()
        self.is_going_on = False

    def end(self, cut_short: CutShort | None = None) -> None:
        """Undo all patches and write everything, with what cut the program short."""
        if os.getpid() != self._process or not self.is_going_on:
            return
        self.is_going_on = False
        stopped = hostlog.stop()
        steps = (
            *(self._sampler.end, self._counter.end, self._windows.end, self._notes.end, self._patches.undo),
            *(self._loaders.end, self._write_samples, self._write_memory),
        )
        for act in steps:
            try:
                act()
            except Exception as error:
                self._faults.append(f"{type(error).__name__}: {error}")
        self._write_facts(
            stopped=stopped,
            ended=self._sampler.samples.ended or time.perf_counter_ns(),
            cut_short=cut_short and asdict(cut_short),
            loaders=[asdict(loader) for loader in self._loaders.used()],
        )

    def _write_facts(self, **more: Any) -> None:
        rank, world = rank_and_world()
        facts = {
            "rank": rank,
            "world": world,
            "began": self._began,
            "faults": [*self._faults, *filter(None, [self._windows.fault, self._sampler.fault])],
            "notes": self._notes.names,
            "windows": self._windows.windows,
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

    def _write_samples(self) -> None:
        samples = self._sampler.samples
        count = min(len(samples.times), len(samples.chains))
        names = {
            "codes": [[code.co_filename, code.co_qualname, code.co_firstlineno] for code in samples.codes.objects],
            "chains": samples.known_chains,
            "beside": [[*line, time] for line, time in samples.beside.items()],
            "ran": samples.ran,
        }
        np.savez(
            self.folder / SAMPLES,
            times=np.array(samples.times[:count], np.int64),
            chains=np.array(samples.chains[:count], np.int64),
            names=np.frombuffer(json.dumps(names).encode(), np.uint8),
        )
        if self._counter.counted is not None:
            self._counter.counted.save(self.folder)

    def _write_memory(self) -> None:
        if self._notes_memory:
            memory_history.save(self.folder)


def start(folder: Path, memory: bool = False, with_children: bool = False) -> tuple[ProgramLog | None, str]:
    """Log this process from now on, or return why that failed. `with_children`: also the processes that it spawns."""
    log = ProgramLog(folder, memory)
    if why := log.begin():
        shutil.rmtree(log.folder, ignore_errors=True)
        return None, why
    if with_children:
        follow(be_child, {"folder": str(folder), "memory": memory})
    return log, ""


def be_child(folder: str, memory: bool) -> None:
    """Log a process that the program spawned."""
    log, _ = start(Path(folder), memory, with_children=True)
    if log is not None:
        atexit.register(log.end)


def _device() -> str:
    cuda: Any = sys.modules.get("torch.cuda")
    with suppress(Exception):
        if cuda.is_initialized():
            return str(cuda.get_device_name())
    return ""


class LogPortions:
    """Decides which parts of a long run are written: its beginning, and portions of it ever more rarely."""

    def __init__(self, before: int = 0, most_bytes: int = hostlog.MOST_BYTES) -> None:
        """`before`: bytes that an earlier log of this process has written into the same file."""
        self._most = most_bytes - 2 * _PORTION_BYTES
        self._until = min(before + _WHOLE_BYTES, self._most)
        self._next = 0

    def are_written(self, time: int, so_far: int) -> bool:
        """`time` counts from the beginning; `so_far` is the number of bytes written."""
        if self._next:
            if time < self._next or so_far >= self._most:
                return False
            self._until, self._next = so_far + _PORTION_BYTES, 0
        elif so_far >= self._until:
            self._next = round(_LATER * time)
            return False
        return True


class _Notes:
    """Notes the annotations that PyTorch makes for its profiler (optimizers, loaders), backward passes, whose calls
    come from PyTorch's own threads, and steps that the program announces."""

    def __init__(self, at_begin: Callable[[], object]) -> None:
        """`at_begin` is called whenever an annotation begins."""
        self.names: list[str] = [""]
        self._at_begin = at_begin
        self._numbers: dict[str, int] = {}
        self._open: dict[int, int] = {}
        """The number of open annotations of each thread."""
        self._patches = Patches()

    def none_is_open(self) -> bool:
        return not any([*self._open.values()])

    def begin(self) -> None:
        import torch

        from keepbusy.torch_names.hooks import RUN_BACKWARD

        for function in (_Notes._begin_note, _Notes._end_note, _Notes._step):  # PyTorch must not compile these
            left_alone(function)
        record_function = torch.autograd.profiler.record_function
        self._patches.replace(record_function, "__enter__", self._entering)
        self._patches.replace(record_function, "__exit__", self._leaving)
        for run_backward in RUN_BACKWARD:
            self._patches.replace(*run_backward, self._running_backward)
        ENDED.append(self._step)
        self._patches.later(lambda: ENDED.remove(self._step))

    def end(self) -> None:
        self._patches.undo()

    def _begin_note(self, name: str) -> None:
        self._at_begin()
        number = self._numbers.get(name)
        if number is None:
            self.names.append(name)
            number = self._numbers[name] = len(self.names) - 1
        thread = threading.get_ident()
        self._open[thread] = self._open.get(thread, 0) + 1
        hostlog.note(number)

    def _end_note(self) -> None:
        hostlog.note(LEAVES)
        thread = threading.get_ident()
        self._open[thread] = max(0, self._open.get(thread, 0) - 1)  # the annotation may have begun before the log

    def _entering(self, original: Function) -> Function:
        def enter(annotation: Any) -> Any:
            self._begin_note(annotation.name)
            return original(annotation)

        return called_plainly(enter)

    def _leaving(self, original: Function) -> Function:
        def leave(annotation: Any, *error: Any) -> Any:
            self._end_note()
            return original(annotation, *error)

        return called_plainly(leave)

    def _running_backward(self, original: Function) -> Function:
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            self._begin_note(BACKWARD_PASS)
            try:
                return original(*args, **kwargs)
            finally:
                self._end_note()

        return called_plainly(run_backward)

    def _step(self) -> None:
        self._begin_note(OWN_STEP)
        self._end_note()
