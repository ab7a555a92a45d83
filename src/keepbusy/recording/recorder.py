"""A program on a real GPU, from its first step on: the run is watched throughout, and a few turns are recorded closely.

Further windows open where the first one could not see what makes the GPU wait: in a loop that takes no step, around a
step that is rare, and once steps have changed for good (`occasions.py`). `Session` does the same from within.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from keepbusy.instrument.children import follow, when_imported
from keepbusy.instrument.loops import LoopWatch
from keepbusy.recording.gpu_share import GpuShare
from keepbusy.recording.loaders import Loaders
from keepbusy.recording.loop_tree import BusyLoop, innermost_loops, tree_of
from keepbusy.recording.marks import Marks
from keepbusy.recording.occasions import Occasion, Occasions
from keepbusy.recording.recorded_run import LIVE, write_facts
from keepbusy.recording.window import RECORDED, SPENT, Others, Window
from keepbusy.timeline.errors import BadInput
from keepbusy.timeline.model import Timeline
from keepbusy.timeline.run_facts import DRIFT, LOOP

STEPS_BEFORE_WINDOW = 8
"""Steps before the window opens: memory, kernels and states are made in the first ones."""
STEPS_BEFORE_WINDOW_AT_MOST = 16
"""A run whose steps are not alike by then is looked at as it is."""
STEADY_STEPS = 5
_WRITTEN_EVERY, _TIMES_ITS_COST = 10_000_000_000, 200
"""Facts are written down again after so many seconds, and after so many times as long as writing them took."""
_QUIET = "99"
FIRST_ASKED, ASKED_AGAIN = 3_000_000_000, 1.5
"""How long after the run's beginning it is asked which loops were not looked at, and again after so many times that."""
WORTH_A_LOOK, TURNS_SEEN, LONGEST_TURN, MOST_LOOPS = 0.1, 16, 300_000_000, 3
"""Of the run so far the GPU waited for so much in a loop; so many turns are known; none takes too long to record."""


@dataclass(frozen=True)
class Options:
    """How to look at a program."""

    folder: str = ""  # where each process leaves what it saw, in a folder of its own
    after: int | None = None  # steps before the window opens
    live: bool = False  # whether somebody looks on, so that figures are left a few times a second


class Run:
    """One process that is looked at."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.folder = Path(options.folder or tempfile.mkdtemp(prefix="keepbusy-")) / str(os.getpid())
        self.folder.mkdir(parents=True)
        self.process = os.getpid()
        self.is_going_on = False
        self.notes: list[str] = []
        self.window = self._first = Window(self.folder, brief=True)
        self._further: list[tuple[Occasion, Window]] = []
        self.marks = Marks(self._on_step, live=self.folder / LIVE if options.live else None)
        self._occasions = Occasions(self.marks, self.window.clock)
        self.others = Others(self._give_way)
        self.loops = LoopWatch()
        self.share = GpuShare()
        self.loaders = Loaders()
        self._ask_loops, self._turns = FIRST_ASKED, 0
        self._windows: list[tuple[int, int]] = []  # from when to when each was open
        self._loop_window: Window | None = None
        self._looked_at: list[str] = []
        self._window_opened = 0
        self._steps = self._opened = self._leave_again = 0
        self.unfollow: Callable[[], None] = lambda: None
        self._place: tuple[int, int] | None = None  # rank and number of ranks, once the program has said so

    def begin(self) -> None:
        self.is_going_on = True
        os.environ.setdefault("TEARDOWN_CUPTI", "1")  # without it every launch stays slow when the window has closed
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)  # it tells of its beginning and end on standard error
        os.register_at_fork(after_in_child=self._forked)
        when_imported("torch", self._hook_in)
        self.loops.meanwhile = self._meanwhile
        self.loops.begin()

    def _hook_in(self) -> None:
        """PyTorch is there: not before the program itself has imported it, and set what it sets before."""
        if self.is_going_on:
            self.others.begin()
            self.marks.begin()
            self.loaders.begin()

    def _meanwhile(self) -> None:
        """In the looking thread, about once a second: where may a further look be worth its cost?"""
        self.share.read()
        now = self.window.clock()
        if now - self.loops.looks.began < self._ask_loops:
            return
        self._ask_loops = round(ASKED_AGAIN * (now - self.loops.looks.began))
        if self.window.is_open or not self._may_look_at_loops():
            return
        self.loops.looks.ended = now
        run = now - self.loops.looks.began
        for one in innermost_loops(self.loops.looks, self.share.busy_until if self.share else None):
            if one.waits < WORTH_A_LOOK * run or len(one.ends) < TURNS_SEEN or self._has_seen(one):
                continue
            if float(np.median(np.diff(one.ends[-TURNS_SEEN:]))) <= LONGEST_TURN:
                self._looked_at.append(one.place)
                self.loops.follow(one.jumps, partial(self._on_turn, one))
                return

    def _may_look_at_loops(self) -> bool:
        """Ranks cannot agree on a loop, as they do on a step."""
        settled = self._opened > 0 or self._steps < self._after
        few = len(self._looked_at) < MOST_LOOPS and not self.marks.replays_graphs
        return settled and few and self._rank_and_world()[1] == 1 and not self.others.seen and not self.others.at_work

    def _has_seen(self, loop: BusyLoop) -> bool:
        """Whether it turned while a window was open, the program's steps or this loop's own."""
        turned = [((loop.ends > opened) & (loop.ends < closed)).sum() > 1 for opened, closed in self._windows]
        return any(turned) or loop.place in self._looked_at

    def _on_turn(self, loop: BusyLoop) -> None:
        """In the program's own thread, at each turn of the loop that is to be looked at."""
        if os.getpid() != self.process:
            return
        try:
            self._turn(loop)
        except Exception as error:
            self.loops.follow(frozenset(), None)
            self._failed(error)

    def _turn(self, loop: BusyLoop) -> None:
        self._turns += 1
        if self._loop_window is None:
            if self.window.is_open or self.others.at_work:
                return
            folder = self.folder / str(2 + len(self._further))
            folder.mkdir()
            steps = max(RECORDED, min(64, round(SPENT / max(1.0, float(np.median(np.diff(loop.ends)))))))
            self.window = self._loop_window = Window(folder, steps, self.window.clock, brief=True)
            self._further.append(
                (Occasion(LOOP, self._turns, steps, {"place": loop.place, "ends": loop.ends}), self.window)
            )
            self._open()
            return
        if self._loop_window.is_open:
            with self.others.ourselves():
                self._loop_window.step(self._turns)
        if not self._loop_window.is_open:
            self.loops.follow(frozenset(), None)
            self._loop_window = None
            self._closed()

    def _closed(self) -> None:
        self._windows.append((self._window_opened, self.window.clock()))
        self.marks.look_closely(False)
        self.leave()

    def end(self) -> None:
        """Take everything out again, and leave what there is."""
        if os.getpid() != self.process or not self.is_going_on:
            return
        self.is_going_on = False
        self.unfollow()
        self.loops.end()
        self.share.read()
        self._give_way()
        self.marks.end()
        self.others.end()
        self.loaders.end()
        self.leave(over=True)

    def timeline(self, **facts: Any) -> Timeline:
        """The run so far."""
        from keepbusy.recording.recorded_run import timeline_in

        return timeline_in(self.folder, facts)

    def leave(self, over: bool = False) -> None:
        """Write down what is known by now; once the program is over, also the tree of its run."""
        began = self.window.clock()
        facts = self._facts()
        if over:
            busy = self.share.busy_until if self.share else None
            facts["loaders"] = [asdict(one) for one in self.loaders.used()]
            facts["run"] = asdict(tree_of(self.loops.looks, busy))
        write_facts(self.folder, facts)
        ended = self.window.clock()
        self._leave_again = ended + max(_WRITTEN_EVERY, _TIMES_ITS_COST * (ended - began))

    def _facts(self) -> dict[str, Any]:
        rank, world = self._rank_and_world()
        return {
            "rank": rank,
            "world": world,
            "steps": self._steps,
            "opened": self._opened,
            "closed": bool(self._first.ticks) and not self._first.is_open,
            "ticks": self._first.ticks,
            "cost": self._first.cost,
            "plain_step": self._plain_step(self._first) if self._steps else None,
            "further": [self._about(*one) for one in self._further],
            "marks": self.marks.facts() if self._steps else {},
            "after": self._after,
            "notes": [*self.notes, *self._seen()],
        }

    def _about(self, occasion: Occasion, window: Window) -> dict[str, Any]:
        about, plain = dict(occasion.about), None
        if occasion.why == LOOP:
            ends = about.pop("ends")
            plain = int(np.median(np.diff(ends)))
        else:
            plain = self._plain_step(window)
        return {
            "folder": window.folder.name,
            "why": occasion.why,
            "about": about,
            "ticks": window.ticks,
            "cost": window.cost,
            "plain_step": plain,
        }

    def _rank_and_world(self) -> tuple[int, int]:
        """As PyTorch knows them or has known them, or else the launcher."""
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            self._place = distributed.get_rank(), distributed.get_world_size()
        return self._place or (int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))

    def _plain_step(self, window: Window) -> int | None:
        """Of the steps around the window, on its side of a lasting change."""
        near = window.ticks[-1].number if window.ticks else self._steps
        began = next((one.about["began"] for one, _ in self._further if one.why == DRIFT), None)
        if began is None:
            return self.marks.plain_step(near)
        return self.marks.plain_step(near, began) if near >= began else self.marks.plain_step(near, until=began)

    def _seen(self) -> list[str]:
        said = []
        if self._first.no_lines:
            said.append(f"Places are operators, not lines: {self._first.no_lines}.")
        if self.others.seen and not self._opened:
            said.append("The program runs PyTorch's profiler itself, so keepbusy's window stayed closed.")
        return said

    @property
    def _after(self) -> int:
        return STEPS_BEFORE_WINDOW if self.options.after is None else self.options.after

    def _on_step(self, count: int) -> None:
        """Called by the marks. Whatever goes wrong here is ours, and no business of the program's."""
        if os.getpid() != self.process:
            return
        self._steps = count
        try:
            self._step(count)
        except Exception as error:
            self._failed(error)

    def _step(self, count: int) -> None:
        if self._loop_window is not None:
            return  # its turns are those of a loop
        if self.window.is_open:
            with self.others.ourselves():
                self.window.step(count)
            if not self.window.is_open:
                self._closed()
        elif not self._opened and self._is_due(count):
            self._opened = count
            self.window.usual = self.marks.plain_step() or 0
            self._open()
        elif self._may_look_again() and (occasion := self._occasions.due(count)) is not None:
            folder = self.folder / str(2 + len(self._further))
            folder.mkdir()
            self.window = Window(folder, occasion.steps, self.window.clock)
            self._further.append((occasion, self.window))
            self._open()
        elif self.window.clock() > self._leave_again:
            self.leave()

    def _open(self) -> None:
        self.leave()  # what ends the program within the window may be what it was run for
        self.marks.look_closely(True)
        self._window_opened = self.window.clock()
        with self.others.ourselves():
            self.window.open()

    def _may_look_again(self) -> bool:
        """PyTorch's sources warn of crashes where CUPTI comes back to a process that replays CUDA graphs."""
        return self._opened > 0 and not self.others.seen and not self.marks.replays_graphs

    def _is_due(self, count: int) -> bool:
        """Ranks open theirs at the same step, and cannot ask each other; a single one waits until it is steady."""
        if self.others.at_work or count < self._after:
            return False
        told = self._rank_and_world()[1] > 1 or self.options.after is not None
        return told or count >= STEPS_BEFORE_WINDOW_AT_MOST or self.marks.steady(STEADY_STEPS)

    def _give_way(self) -> None:
        self.loops.follow(frozenset(), None)
        if self.window.is_open:
            self.marks.look_closely(False)
            with self.others.ourselves():
                self.window.close()

    def _failed(self, error: Exception) -> None:
        self.notes.append(f"Recording failed ({type(error).__name__}: {error}), so it was given up.")
        self.window.is_open = False
        self._opened = self._opened or -1
        self.marks.look_closely(False)

    def _forked(self) -> None:
        """A child that is forked is none of ours."""
        self.window.forget()
        self.loops.forget()


def start(options: Options) -> Run:
    """Look at this process, and at those it spawns, from now on."""
    run = Run(options)
    run.begin()
    run.unfollow = follow(be_child, asdict(options))
    return run


def be_child(**options: Any) -> None:
    """A process that the program spawned is looked at, too."""
    import atexit

    atexit.register(start(Options(**options)).end)


class Session:
    """What happens within the `with` block is recorded; afterwards it can be explained, again and again."""

    def __init__(self, after: int | None) -> None:
        self._after = after
        self._run: Run | None = None
        self._timeline: Timeline | None = None

    def __enter__(self) -> Session:

        self._timeline = None
        self._run = Run(Options(after=self._after))
        self._run.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._run is not None:
            self._run.end()

    @property
    def timeline(self) -> Timeline:
        """The recorded steps, for `keepbusy.save` and whoever likes to look himself."""
        if self._timeline is None:
            if self._run is None or self._run.is_going_on:
                raise BadInput("there is nothing to explain yet; leave the `with keepbusy.record()` block first.")
            self._timeline = self._run.timeline(source="this session")
            shutil.rmtree(self._run.folder, ignore_errors=True)
        return self._timeline

    def explain(self, what_if: Sequence[str] = (), workers: int = 8) -> Any:
        """A `Diagnosis`: why the GPU waits. `print(keepbusy.render(...))` shows it."""
        import keepbusy

        return keepbusy.explain(self.timeline, what_if=what_if, workers=workers)
