"""A program on a real GPU, from its first step on: the run is watched throughout, and a few turns are recorded closely.

What is dear is done in a thread beside the program: it looks at the stack, reads what the driver knows, plans further
windows (`windows.py`) and writes down what is known by now. `Session` does the same from within a program.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from keepbusy.instrument.lines import PROGRAM_CODE, program_lines
from keepbusy.instrument.loader_uses import Loaders
from keepbusy.instrument.loop_tree import (
    BusyLoop,
    BusyUntil,
    innermost_loops,
    jumps_of,
    loop_of_steps,
    loops_beside,
    read_source,
    tree_of,
    turns_at,
    worth_a_look,
)
from keepbusy.instrument.loops import COUNTS_TURNS, LOOKS_IN_ONE_FRAME, LoopWatch
from keepbusy.instrument.patches import when_imported
from keepbusy.instrument.processes import follow, make_folder, rank_and_world, uses_gpu
from keepbusy.instrument.source_loops import SourceLoops
from keepbusy.recording.run_counters import GpuShare
from keepbusy.recording.step_clock import Marks
from keepbusy.recording.turn_times import mean, step_looks, trimmed
from keepbusy.recording.windows import (
    LONGEST_OPEN,
    SETTLES_WITHIN,
    TURNS_KNOWN,
    Occasion,
    OtherProfilers,
    SharedWindows,
    Window,
    WindowPlan,
    is_granted,
    whole_step,
)
from keepbusy.timeline.files import BadInput, write_whole
from keepbusy.timeline.model import NONE, Timeline
from keepbusy.timeline.run_facts import DRIFT, SCRIPT, CutShort, Part, allocator_settings

FACTS, LIVE, TREE = "facts.json", "live", "tree.json"
"""What a process leaves in its folder, beside what its windows saw; the latter two while somebody looks on."""
STEPS_BEFORE_WINDOW, STEPS_DDP_TIMES, LATEST_BEGIN = 8, 11, 16
"""Steps before the window opens: memory, kernels and states are made in the first ones. A run whose steps are not alike
by the latter is looked at as it is."""
ALIKE_STEPS = 5
STEPS_TO_LET_GO = 3
"""Once a window has closed, CUPTI lets go at one of the program's calls; so many steps later it may open afresh."""
_THINKS_EVERY, _FIRST_THOUGHT = 1_000_000_000, 3_000_000_000
_READS_EVERY = 10_000_000_000
"""The driver keeps twenty seconds of samples."""
_WRITES_EVERY, _SHARE_OF_WRITING = 20_000_000_000, 4_000
"""What is known is written down again after so long, and after so many times as long as that took."""
_AT_WORK_FOR, _SCRIPT_AT_MOST = 1_000_000_000, 30_000_000_000
"""A program that has used its GPU for so long and has no loop ahead is a script; a window is open for so long there."""
_SHOWS_EVERY, _GROWS_EVERY, _SHARE_OF_SHOWING = 200_000_000, 1_000_000_000, 200
"""To those who look on: the figures of the steps, and the tree, and that no sooner than so many times as it took."""
_QUIET = "99"
_LETS_GO = "TEARDOWN_CUPTI"


@dataclass(frozen=True)
class RunOptions:
    """How to look at a program."""

    folder: str = ""  # where each process leaves what it saw, in a folder of its own
    shared: str = ""  # where ranks find each other's word, if not in that one
    after: int | None = None  # steps before the window opens
    live: bool = False  # whether somebody looks on, so that figures are left a few times a second
    memory: bool = False  # whether what takes the device's memory is noted, too


class Run:
    """One process that is looked at."""

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self.folder = Path(options.folder or make_folder()) / str(os.getpid())
        self.folder.mkdir(parents=True)
        self.process = os.getpid()
        self.is_going_on = False
        self._has_left = False  # all that there is
        self.notes: list[str] = []
        self.window = self._first = Window(
            self.folder, brief=True, closed=self._closed, memory=self.options.memory, guarded=self._guarded
        )
        self._earlier = self._first  # what there is until another first one has seen something
        self.marks = Marks(self._on_step, live=self.folder / LIVE if options.live else None)
        self.others = OtherProfilers(self._make_way)
        self.loops = LoopWatch()
        self.share = GpuShare()
        self.loaders = Loaders()
        self.marks.pauses.came = self._on_batch
        self.clock = self.window.clock
        self._sources = SourceLoops(read_source)
        self._plan = WindowPlan(self.marks, self.clock, lambda: step_looks(self.loops.looks), self._unseen_loops)
        self._shared = SharedWindows(Path(options.shared or self.folder.parent), self.clock, _collectives_so_far)
        self._further: list[tuple[Occasion, Window]] = []
        self._open_spans: list[tuple[int, int]] = []  # from when to when each window was open
        self._stepped_at: list[tuple[CodeType, int]] = []  # where the first window opened, from the inside out
        self._loop = ""  # whose turns the steps are: its place
        self._followed: Occasion | None = None  # whose loop's turns are told now
        self._jumps = self._around = frozenset[tuple[int, int]]()  # turns of that one, and of the loops around it
        self._begun = 0  # how often it may have begun from the start
        self._turns = self._steps = self._opened = self._window_opened = 0
        self._blind = 0  # the step at which the first window had seen nothing of the GPU
        self._marks_facts: dict[str, Any] = {}
        self._writing = threading.RLock()  # both threads do; a signal may come while this one does
        self._think_at = self._write_at = self._show_at = self._grow_at = self._read_at = 0
        self._first_use = 0  # when the program was first seen to use its GPU
        self.unfollow: Callable[[], None] = lambda: None

    def begin(self) -> None:
        self.is_going_on = True
        os.environ.setdefault(_LETS_GO, "1")  # without it every launch stays slow when the window has closed
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)  # it tells of its beginning and end on standard error
        os.register_at_fork(after_in_child=self._forked)
        when_imported("torch", lambda: self._guarded(self._hook_in))
        self._think_at = self.clock() + _FIRST_THOUGHT
        self.loops.meanwhile = self._meanwhile
        self.loops.begin()

    def _hook_in(self) -> None:
        """PyTorch is there: not before the program itself has imported it, and set what it sets before."""
        if self.is_going_on:
            self.others.begin()
            self.marks.begin()
            self.loaders.begin()

    def end(self, cut_short: CutShort | None = None) -> None:
        """Take everything out again, and leave what there is, with what ended the program before its own end."""
        if os.getpid() != self.process or not self.is_going_on:
            return
        self.is_going_on = False
        told: dict[str, Any] = {"loaders": [], "run": None, "cut_short": cut_short and asdict(cut_short)}
        last = (
            self.unfollow, self.loops.end, self.share.read, self._give_way, self.window.forget, self.marks.end,
            self.others.end, self.loaders.end, self._know_marks, self._know_turns,
            lambda: told.update(run=asdict(self._tree())),
            lambda: told.update(loaders=[asdict(one) for one in self.loaders.used()]), lambda: self.leave(**told),
        )  # fmt: skip
        for each in last:
            self._guarded(each)  # what goes wrong here is no end of the program's

    def _tree(self) -> Part:
        whole = tree_of(self.loops.looks, self._busy_until, sources=self._sources)
        return _without_catching_up(whole, self._loop, self._marks_facts.get("lead", NONE))

    @property
    def _busy_until(self) -> BusyUntil | None:
        return self.share.busy_until if self.share else None

    def timeline(self, source: str) -> Timeline:
        """The run so far; its tree alone where no turn was recorded, with the reason."""
        from keepbusy.recording.recorded_run import timeline_in, together, without_turns

        try:
            return together([timeline_in(self.folder, {"source": source})])
        except BadInput as why:
            return without_turns(self.folder, {"source": source, "notes": (str(why),)})

    # in the thread beside the program

    def _meanwhile(self) -> None:
        """After each look; most of them are followed by nothing."""
        now = self.clock()
        if self.options.live and now >= self._show_at:
            self._show_at = now + _SHOWS_EVERY
            self._show(now)
        if now < self._think_at:
            return
        self._think_at = now + _THINKS_EVERY
        if now >= self._read_at:
            self._read_at = now + _READS_EVERY
            self.share.read()
        if self.window.is_open or self.others.at_work:
            return
        if not self._steps and not self._further and self._is_script(now):
            self.loops.at_next_line(lambda: self._guarded(self._open_script))
        if self._may_look_again():
            self._plan_windows(now)
        if self._steps and now >= self._write_at:
            self._know_marks()
            self.leave()
            self._write_at = now + max(_WRITES_EVERY, _SHARE_OF_WRITING * (self.clock() - now))

    def _show(self, now: int) -> None:
        self.marks.leave_figures()
        if now >= self._grow_at:
            self.loops.looks.ended = now
            write_whole(self.folder / TREE, json.dumps(asdict(self._tree())), durable=False)
            self._grow_at = now + max(_GROWS_EVERY, _SHARE_OF_SHOWING * (self.clock() - now))

    def _plan_windows(self, now: int) -> None:
        self.loops.looks.ended = now
        rank, world = rank_and_world()
        if rank == 0 or world == 1:
            passed = now - self.loops.looks.began
            longest = self._first.open_for() if self._first.was_open else LONGEST_OPEN
            self._plan.shared = self._shared if world > 1 else None
            self._plan.think(passed, self._spent(), self._first.cost, longest, self._followed is None)
        elif (told := self._shared.heard()) is not None:
            self._plan.follow(told)
        if (occasion := self._plan.take_loop()) is not None and occasion.loop is not None:
            self._jumps, self._around = jumps_of(occasion.loop, self.loops.looks, self._sources)
            self._followed = occasion
            self.loops.follow(self._jumps, self._on_turn)

    def _is_script(self, now: int) -> bool:
        """It has worked on its GPU for a while, and where it stands now it is in no loop and none is to come."""
        if not uses_gpu():
            return False
        self._first_use = self._first_use or now
        if now - self._first_use < _AT_WORK_FOR or self.marks.replays_graphs:
            return False
        looks, here = self.loops.looks, False
        for one in self.loops.here:
            code = looks.codes[one.code]
            is_own = looks.kinds[one.code] in PROGRAM_CODE
            stays = looks.longest_stay.get(one.code, 0) >= LOOKS_IN_ONE_FRAME  # as within an optimizer of PyTorch's
            if any(
                loop.last >= one.line and (is_own or loop.first <= one.line)
                for loop in self._sources.of(code)
                if is_own or stays
            ):
                return False
            here |= is_own
        return here

    def _spent(self) -> int:
        """For how long windows have held the program up so far."""
        return self._first.cost + sum(window.cost for _, window in self._further)

    def _may_look_again(self) -> bool:
        """PyTorch's sources warn of crashes where CUPTI comes back to a process that replays CUDA graphs."""
        has_looked = self._opened > 0 or self._steps < self._after
        return has_looked and not self.others.seen and not self.marks.replays_graphs

    def _unseen_loops(self) -> list[BusyLoop]:
        loops = [one for one in self._know_loops() if one.jumps]
        if self._steps or self._further:
            return [one for one in worth_a_look(loops) if self._is_unseen(one)]
        step = whole_step(loops)
        return [step] if step is not None else []

    def _is_unseen(self, one: BusyLoop) -> bool:
        """It did not turn while a window was open, nor did the first one open in it: turns are counted only once a loop
        has been noticed, which may be later."""
        if any(((one.ends > a) & (one.ends < b)).sum() > 1 for a, b in self._open_spans):
            return False
        around = ((code, self._sources.around(code, line)) for code, line in self._stepped_at)
        within, loops = next((each for each in around if each[1]), (None, []))
        jumps = ((self.loops.looks.codes[code], target) for code, target in one.jumps)
        return not any(code is within and self._sources.of_jump(code, target) in loops for code, target in jumps)

    def _know_loops(self) -> list[BusyLoop]:
        """All that turn; and which of them the steps are turns of, and which turn beside it."""
        loops = innermost_loops(self.loops.looks, self._busy_until, self._sources)
        numbers = {id(code): number for number, code in enumerate(self.loops.looks.codes)}
        lines = [(code, line) for code, line in reversed(self._stepped_at) if id(code) in numbers]
        around = [(numbers[id(code)], loop.first) for code, line in lines for loop in self._sources.around(code, line)]
        trains = loop_of_steps(self.marks.table.host(), around, loops)
        if trains is not None:
            self._loop, self.marks.others = trains.place, [one.ends for one in loops_beside(trains, loops)]
        return loops

    def _know_marks(self) -> None:
        if self._steps:
            self._know_loops()
            self._marks_facts = asdict(self.marks.run(step_looks(self.loops.looks)))

    def _know_turns(self) -> None:
        """What turns of the loops with windows took in the whole run: at first a host is ahead of its GPU."""
        looks = self.loops.looks
        for row, (one, window) in enumerate(self._further):
            if one.loop and len(took := turns_at(one.loop, looks, self._sources)) >= TURNS_KNOWN:
                self._further[row] = one._replace(usual=mean(trimmed(took))), window

    # in the program's own thread

    def _on_step(self, count: int) -> None:
        """Called by the marks. Whatever goes wrong here is ours, and no business of the program's."""
        self._steps = count
        if not COUNTS_TURNS:
            self.loops.passed(sys._getframe(1))
        is_due = self.window.is_open or self._plan.planned is not None or self._opened <= self.marks.since
        if is_due and not self._sees_a_loop():  # of most steps there is nothing else to do
            self._guarded(self._step, count)

    def _on_batch(self, iterator: Any, before: int, after: int) -> None:
        self.loaders.came(iterator, before, after)
        if not COUNTS_TURNS:
            self.loops.passed(sys._getframe(2))

    def _on_turn(self) -> None:
        """At each turn of the loop that is to be looked at."""
        if self._followed is not None:
            self._guarded(self._turn)

    def _guarded(self, act: Callable[..., object], *arguments: object) -> None:
        try:
            act(*arguments)
        except Exception as error:
            self.notes.append(f"Recording failed ({type(error).__name__}: {error}), so it was given up.")
            self.loops.follow(frozenset(), None)
            with suppress(Exception):
                self.window.forget()
            self._opened = self._opened or -1
            self.marks.look_closely(False)

    def _step(self, count: int) -> None:
        if 0 < self._opened <= self.marks.since and not self.window.is_open and self._may_look_again():
            self._look_afresh()  # what it saw came before the program began to train
        if self.window.is_open and self._sees_script():
            self.window.cut()
            if not self.window.is_open:
                self._closed()
        if self.window.is_open:
            self._advance(count)
        elif not self._opened:
            if self._is_due(count) and not self._opened:  # a step in another thread may have come first
                self._opened, self.window = count, self._first
                self.window.usual = self.marks.plain_step() or 0
                self._stepped_at = [*program_lines(sys._getframe())]
                self._open(count)
        elif self._may_look_again() and (occasion := self._plan.due(count)) is not None:
            self._add_window(occasion, brief=occasion.why == DRIFT)
            self._open(count)

    def _turn(self) -> None:
        self._turns += 1
        if self._sees_a_loop():
            if self._begins_anew():
                self.window.beside.add(self._turns)
            self._advance(self._turns)
        elif (one := self._followed) is not None and not self.window.is_open and self._is_loop_due(one):
            self._turns = 0
            self._begins_anew()
            self._add_window(one, brief=True)
            self._open(self._turns)

    def _is_loop_due(self, one: Occasion) -> bool:
        is_time = self._shared.collectives() >= one.meets if one.meets else self.clock() >= one.not_before
        return is_time and not self.others.at_work

    def _begins_anew(self) -> bool:
        """Whether the loop may have begun from the start since this was asked last: what lay in between is no turn."""
        looks, before = self.loops.looks, self._begun
        self._begun = sum(len(looks.entries.get(code, ())) for code in {code for code, _ in self._jumps})
        self._begun += sum(len(looks.turns.get(jump, ())) for jump in self._around)
        return self._begun != before

    def _open_script(self) -> None:
        if self._steps or self.window.is_open or self.others.at_work:
            return
        since = self.clock() - self.loops.looks.began
        self._add_window(Occasion(SCRIPT, 0, 1, {"since": since}), brief=False)
        self.window.usual, self.window.at_most = max(since, SETTLES_WITHIN), _SCRIPT_AT_MOST
        self._open(0)

    def _open_for(self) -> Occasion | None:
        """Why the window is open that is; of the first one there is nothing to say."""
        occasion, its = self._further[-1] if self._further else (None, None)
        return occasion if self.window.is_open and its is self.window else None

    def _sees_script(self) -> bool:
        occasion = self._open_for()
        return occasion is not None and occasion.why == SCRIPT

    def _sees_a_loop(self) -> bool:
        """Whether the turns in the open window are those of the loop that is followed."""
        return self._followed is not None and self._open_for() is self._followed

    def _add_window(self, occasion: Occasion, brief: bool) -> None:
        folder = self.folder / str(2 + len(self._further))
        folder.mkdir()
        self.window = Window(
            folder, occasion.turns, self.clock, brief, self._closed, self.options.memory, guarded=self._guarded
        )
        self.window.usual = occasion.usual
        if self._first.was_open:
            self.window.longest = self._first.open_for()
        self._further.append((occasion, self.window))

    def _open(self, count: int) -> None:
        self.leave()  # what ends the program within the window may be what it was run for
        self.marks.look_closely(True)
        self._window_opened = self.clock()
        with self.others.ourselves():
            self.window.open(count)

    def _advance(self, count: int) -> None:
        with self.others.ourselves():
            self.window.step(count)
        if not self.window.is_open:
            self._closed()

    def _closed(self) -> None:
        self._open_spans.append((self._window_opened, self.clock()))
        if self._further and self._further[-1][0] is self._followed:
            self.loops.follow(frozenset(), None)
            self._followed = None
        self.marks.look_closely(False)
        if self.window is self._first and not self._blind and self._may_look_again() and self._saw_no_step():
            self._look_afresh()
        self.leave()

    def _saw_no_step(self) -> bool:
        """The first window saw nothing, or one rank's saw none but turns that take far longer than usual, as those in
        which an epoch begins, or made the first turn so long, by a library's lines, that it saw a part of it alone."""
        passed, alone = self.clock() - self.loops.looks.began, rank_and_world()[1] == 1
        if not alone or not is_granted(passed, self._spent(), self._first.cost):
            return self._first.is_blind
        return self._first.is_blind or self._first.saw_others or self._first.is_slow or not self._first.ticks

    def _look_afresh(self) -> None:
        """What an earlier profile of this process has left of CUPTI told nothing. It lets go now, and the next window
        finds it new."""
        libraries = not self._first.is_slow
        window = Window(
            self.folder,
            brief=True,
            closed=self._closed,
            memory=self.options.memory,
            libraries=libraries,
            guarded=self._guarded,
        )
        window.cost = self._first.cost
        self._earlier = self._first if self._first.ticks else self._earlier
        self.window = self._first = window
        self._opened, self._blind = 0, self._steps

    def _is_due(self, count: int) -> bool:
        """Ranks open theirs at the same step, and cannot ask each other; a single one waits until it is steady."""
        after = max(self.marks.since + self._after, self._blind and self._blind + STEPS_TO_LET_GO)
        if self.others.at_work or count < after:
            return False
        told = rank_and_world()[1] > 1 or self.options.after is not None
        return told or count >= self.marks.since + LATEST_BEGIN or self.marks.are_steady(ALIKE_STEPS)

    @property
    def _after(self) -> int:
        """DDP waits for the device in its first ten steps, to read its own timers; no other step is like these."""
        several = rank_and_world()[1] > 1
        usual = STEPS_DDP_TIMES if several else STEPS_BEFORE_WINDOW
        return usual if self.options.after is None else self.options.after

    def _make_way(self) -> None:
        """For the program's own profiler: CUPTI would else let go in the middle of what that one records."""
        lets_go = os.environ.get(_LETS_GO, "0")
        os.environ[_LETS_GO] = "0"
        self._guarded(self._give_way)
        os.environ[_LETS_GO] = lets_go

    def _give_way(self) -> None:
        self.loops.follow(frozenset(), None)
        self._followed = None
        if self.window.is_open:
            self.marks.look_closely(False)
            with self.others.ourselves():
                (self.window.cut if self._sees_script() else self.window.close)()

    def _forked(self) -> None:
        """A child that is forked is none of ours."""
        self.window.forget()
        self.loops.forget()

    # what is left in the folder

    def leave(self, **more: Any) -> None:
        """Write down what is known by now. What both threads write stands in the order in which they knew it."""
        with self._writing:
            if self._has_left:
                return  # the last word is not taken back
            self._has_left = "run" in more
            facts = self._known() | more
            write_whole(self.folder / FACTS, json.dumps(facts, default=str), durable=False)

    def _known(self) -> dict[str, Any]:
        rank, world = rank_and_world()
        first = self._first if self._first.ticks and not self._first.is_open else self._earlier
        return {
            "rank": rank,
            "world": world,
            "steps": self._steps,
            "opened": self._opened,
            "blind": first.is_blind,
            "closed": bool(first.ticks) and not first.is_open,
            **self._about(first),
            "further": [
                {
                    **self._about(window),
                    "folder": window.folder.name,
                    "why": one.why,
                    "about": one.about | ({"share": self._plan.share_since(one)} if one.why == DRIFT else {}),
                }
                for one, window in self._further
                if one.why == SCRIPT or not window.is_cut
            ],
            "held_up": self._spent(),
            "loop": self._loop,
            "marks": self._marks_facts,
            "uses_gpu": uses_gpu(),
            "after": self._after,
            "allocator": allocator_settings(),
            "notes": [*self.notes, *self._notes_of_looks()],
        }

    def _about(self, window: Window) -> dict[str, Any]:
        turn = next((one.usual for one, its in self._further if its is window and one.loop is not None), None)
        plain = self._plain_step(window) if turn is None else turn
        no_step = window.beside if turn is not None else self.marks.beside() if window.ticks else set()
        return {
            "beside": [row for row, tick in enumerate(window.ticks[1:]) if tick.number in no_step],
            "ticks": window.ticks,
            "cut": window.is_cut,
            "part": window.is_part,
            "cost": window.cost,
            "plain_step": plain,
        }

    def _plain_step(self, window: Window) -> int | None:
        """Of the steps around the window, on its side of a lasting change."""
        if not self._steps:
            return None
        near = window.ticks[-1].number if window.ticks else self._steps
        began = next((one.about["began"] for one, _ in self._further if one.why == DRIFT), None)
        if began is None:
            return self.marks.plain_step(near)
        return self.marks.plain_step(near, began) if near >= began else self.marks.plain_step(near, until=began)

    def _notes_of_looks(self) -> list[str]:
        said = []
        if self.loops.fault:
            said.append(f"Looking at the run failed at times ({self.loops.fault}); what passed then stands elsewhere.")
        if self._first.no_lines:
            said.append(f"Places are operators, not lines: {self._first.no_lines}.")
        if self.others.seen and not self._opened:
            said.append("The program runs PyTorch's profiler itself, so keepbusy's window stayed closed.")
        return said


def _collectives_so_far() -> int:
    """Of all ranks together, as PyTorch counts them in each; 0 where it does not."""
    with suppress(Exception):
        return int(sys.modules["torch.distributed"].group.WORLD._get_sequence_number_for_group())
    return 0


CATCHES_UP = 1.25
"""Times the host's lead, the longest that it may take for its GPU to come to where it is."""


def _without_catching_up(part: Part, loop: str, lead: int) -> Part:
    """A host that is ahead of its GPU waits for it now and then, as where it prints a loss: that holds nothing up."""
    kinds = part.kinds if part.named != loop else tuple(one for one in part.kinds if one.longer > CATCHES_UP * lead)
    return replace(part, kinds=kinds, parts=tuple(_without_catching_up(one, loop, lead) for one in part.parts))


def start(options: RunOptions) -> Run:
    """Look at this process, and at those it spawns, from now on."""
    run = Run(options)
    run.begin()
    run.unfollow = follow(be_child, asdict(options))
    return run


def be_child(**options: Any) -> None:
    """A process that the program spawned is looked at, too."""
    import atexit

    atexit.register(start(RunOptions(**options)).end)


class Session:
    """What happens within the `with` block is recorded; afterwards it can be explained, again and again."""

    def __init__(self, after: int | None, memory: bool = False) -> None:
        self._options = RunOptions(after=after, memory=memory)
        self._run: Run | None = None
        self._timeline: Timeline | None = None

    def __enter__(self) -> Session:
        self._timeline = None
        self._run = Run(self._options)
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
            shutil.rmtree(self._run.folder.parent, ignore_errors=True)
        return self._timeline

    def explain(self, what_if: Sequence[str] = (), workers: int | None = None) -> Any:
        """A `Diagnosis`: why the GPU waits. `print(keepbusy.render(...))` shows it."""
        import keepbusy

        return keepbusy.explain(self.timeline, what_if=what_if, workers=workers)
