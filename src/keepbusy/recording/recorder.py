"""`with keepbusy.record() as run`: a stretch of a program, or of a notebook, looked at from within."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from keepbusy.instrument.children import follow, when_imported
from keepbusy.recording.marks import Marks
from keepbusy.recording.occasions import Occasion, Occasions
from keepbusy.recording.recorded_run import LIVE, write_facts
from keepbusy.recording.window import Others, Window
from keepbusy.timeline.errors import BadInput
from keepbusy.timeline.model import Timeline
from keepbusy.timeline.run_facts import DRIFT

if TYPE_CHECKING:
    pass


# A program on a real GPU, from its first step on: marks throughout, a window once it is warm, and what both leave.
#
# Further windows open where the marks have seen something that the first one could not: see `occasions.py`.

AFTER = 8
"""Steps before the window opens: memory, kernels and states are made in the first ones."""
LATEST = 16
"""A run whose steps are not alike by then is looked at as it is."""
ALIKE = 5
_LEFT_EVERY, _RARELY = 10_000_000_000, 200
"""How long after it was last written down what is known is written again, and so many times as long as that took."""
_QUIET = "99"


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
        self.window = self._first = Window(self.folder)
        self._further: list[tuple[Occasion, Window]] = []
        self.marks = Marks(self._on_step, live=self.folder / LIVE if options.live else None)
        self._occasions = Occasions(self.marks, self.window.clock)
        self.others = Others(self._give_way)
        self._steps = self._opened = self._leave_again = 0
        self._place: tuple[int, int] | None = None  # rank and number of ranks, once the program has said so

    def begin(self) -> None:
        self.is_going_on = True
        os.environ.setdefault("TEARDOWN_CUPTI", "1")  # without it every launch stays slow when the window has closed
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)  # it tells of its beginning and end on standard error
        os.register_at_fork(after_in_child=self._forked)
        when_imported("torch", self._hook_in)

    def _hook_in(self) -> None:
        """PyTorch is there: not before the program itself has imported it, and set what it sets before."""
        if self.is_going_on:
            self.others.begin()
            self.marks.begin()

    def end(self) -> None:
        """Take everything out again, and leave what there is."""
        if os.getpid() != self.process or not self.is_going_on:
            return
        self.is_going_on = False
        self._give_way()
        self.marks.end()
        self.others.end()
        self.leave()

    def timeline(self, **facts: Any) -> Timeline:
        """The run so far."""
        from keepbusy.recording.recorded_run import timeline_in

        return timeline_in(self.folder, facts)

    def leave(self) -> None:
        """Write down what is known by now."""
        began = self.window.clock()
        write_facts(self.folder, self._facts())
        ended = self.window.clock()
        self._leave_again = ended + max(_LEFT_EVERY, _RARELY * (ended - began))

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
        return {
            "folder": window.folder.name,
            "why": occasion.why,
            "about": occasion.about,
            "ticks": window.ticks,
            "cost": window.cost,
            "plain_step": self._plain_step(window),
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
        return AFTER if self.options.after is None else self.options.after

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
        if self.window.is_open:
            with self.others.ourselves():
                self.window.step(count)
            if not self.window.is_open:
                self.marks.look_closely(False)
                self.leave()
        elif not self._opened and self._is_due(count):
            self._opened = count
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
        return told or count >= LATEST or self.marks.steady(ALIKE)

    def _give_way(self) -> None:
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


def start(options: Options) -> Run:
    """Look at this process, and at those it spawns, from now on."""
    run = Run(options)
    run.begin()
    follow(be_child, asdict(options))
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

    def explain(self, mend: Sequence[str] = (), workers: int = 8) -> Any:
        """A `Diagnosis`: why the GPU waits. `print(keepbusy.render(...))` shows it."""
        import keepbusy

        return keepbusy.explain(self.timeline, mend=mend, workers=workers)
