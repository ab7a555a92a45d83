"""All fixes of a running program: begun before it, reported after it."""

from __future__ import annotations

import ast
import atexit
import builtins
import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from statistics import median
from types import CodeType
from typing import TYPE_CHECKING, Any

from keepbusy.fix import ASKED, WHILE_IT_RUNS
from keepbusy.fix.syntax.loop_turns import FOREACH, MARK, MOVED, join_loops, join_moves, mark_last_turns, moved_singly
from keepbusy.fix.syntax.rewriting import NAME, ReadsAtOnce, rewritten
from keepbusy.instrument import script
from keepbusy.instrument.lines import USER, kind_of
from keepbusy.instrument.patches import Function, Patches, admit_scripts, run_plainly, when_imported
from keepbusy.timeline.figures import change, duration, share, transition
from keepbusy.timeline.files import BadInput

if TYPE_CHECKING:
    from keepbusy.explain.diagnosis import PlannedFix
    from keepbusy.fix.live.switch import FixSwitch, Place
    from keepbusy.fix.live.trial import FixTrial, InferenceTurns, TrialResult

SAFE = ("copies", "late_numbers", "draws", "workers", "foreach", "graph", "syncs", "cache", "garbage")
_READING = {"copies", "late_numbers", "foreach", "gradients"}
"""Those that know the program's source."""
_BY_THEMSELVES = ("workers", "gradients")
"""Those that cannot be switched by turns: what workers gain is seen before and after; ranks must all do the same."""
NOISE = 0.02
"""Of a turn: who gains less is switched off."""
_SHOWN = 4


def chosen(without: Sequence[str] = (), also: Sequence[str] = ()) -> tuple[str, ...]:
    """The fixes to be done."""
    for name in (*without, *also):
        if name not in (*SAFE, *ASKED):
            raise BadInput(f"Unknown fix {name!r}. Known fixes: {', '.join((*SAFE, *ASKED))}.")
    return tuple(name for name in (*SAFE, *also) if name not in without)


def be_rank(names: Sequence[str], left: str) -> None:
    """In a process that the program spawned: what was done there is told where the program itself is told of."""
    fixes = LiveFixes(names)
    fixes.begin(is_spawned=True)

    def leave() -> None:
        if any(one.done for one in fixes.switches):
            Path(left, f"fixed{os.getpid():08}.txt").write_text(fixes.told(), encoding="utf-8")

    atexit.register(leave)


class LiveFixes:
    """What `keepbusy run --fix` does to a program."""

    def __init__(self, names: Sequence[str], tried: bool = True) -> None:
        """`tried`: whether turns with and without them are compared; else they are simply done."""
        self._names, self._tried = names, tried
        self._patches = Patches()
        self.switches: list[FixSwitch] = []
        self.trial: FixTrial | None = None
        self.result: TrialResult | None = None
        self._inference: InferenceTurns | None = None
        self._given_up: list[FixSwitch] = []
        self._stepped: set[int] = set()
        """Optimizers, in this turn: it ends where one of them steps again."""

    def begin(self, is_spawned: bool = False) -> None:
        """Before the program: its source is read with other eyes, and PyTorch is met once the program imports it.

        `is_spawned`: one that the program spawned meets it once it joins others, as no loader's worker does.
        """
        if _READING & {*self._names}:
            script.COMPILE.append(self.compile)
            self._patches.later(script.COMPILE.pop)
            self._patches.replace(SourceFileLoader, "get_code", self._reading)
            plainly = {NAME: ReadsAtOnce(), MARK: lambda *_: None, MOVED: moved_singly}
            plainly[FOREACH] = lambda _, remake, __, *held: remake(*held)
            for name, plain in plainly.items():
                setattr(builtins, name, plain)
                self._patches.later(partial(delattr, builtins, name))
        when_imported("torch", self._await_ranks if is_spawned else self._meet_torch)

    def end(self) -> None:
        """Everything is put back; what was done is remembered."""
        self._patches.undo()

    def compile(self, source: bytes, path: str, is_script: bool = True) -> CodeType:
        """The program as it is to run."""
        with suppress(SyntaxError, ValueError, RecursionError):  # Python will say what is wrong with it
            tree = ast.parse(source)
            marked = mark_last_turns(tree) if "gradients" in self._names else 0
            lines = rewritten(tree, is_script)[1] if "late_numbers" in self._names else []
            joint = ("copies" in self._names and join_moves(tree)) | ("foreach" in self._names and join_loops(tree))
            if lines or marked or joint:
                return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
        return script.COMPILE[0](source, path)

    def _reading(self, plain: Function) -> Function:
        """Modules of the user's own are compiled anew; what Python has kept of them was not rewritten."""

        def get_code(loader: Any, name: str) -> CodeType | None:
            path = loader.get_filename(name)
            if kind_of(path) != USER:
                return plain(loader, name)
            return self.compile(loader.get_data(path), path, name == "__main__")

        return get_code

    def _await_ranks(self) -> None:
        import torch.distributed as dist

        def joining(plain: Function) -> Function:
            def join(*args: Any, **kwargs: Any) -> None:
                plain(*args, **kwargs)
                if self.trial is None:
                    self._meet_torch()

            return join

        if dist.is_available():
            for owner in (dist, dist.distributed_c10d):
                self._patches.replace(owner, "init_process_group", joining)

    def _meet_torch(self) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        if torch.version.cuda is None:  # the driver itself is not woken here: the program may yet choose its devices
            return
        from keepbusy.fix.graph.graphed_modules import GraphedModules
        from keepbusy.fix.live.host_numbers import DrawsAhead, LateNumbers
        from keepbusy.fix.live.host_waits import DeferredCopies, KeptCache, QuickCollection, SkippedWaits
        from keepbusy.fix.live.joint_launches import ForeachLoops, FusedOptimizers
        from keepbusy.fix.live.late_gradients import LateGradients
        from keepbusy.fix.live.more_workers import MoreWorkers
        from keepbusy.fix.live.trial import FixTrial, InferenceTurns

        trial = self.trial = FixTrial()
        self._inference = InferenceTurns(trial.turn)
        copies = DeferredCopies()
        late = LateNumbers(self._inference.passed, lambda: copies.own_streams)
        gradients, foreach = LateGradients(), ForeachLoops()
        for name, called in {
            MARK: gradients.mark,
            MOVED: copies.moved,
            FOREACH: foreach.left,
        }.items():
            setattr(builtins, name, called)
            run_plainly(called)
        setattr(builtins, NAME, late)
        for method in (late.add, late.add_at, late.keep, late.bring, late.append, type(late).__call__):
            run_plainly(method)
        fixes: dict[str, Any] = {
            "copies": copies,
            "foreach": foreach,
            "graph": GraphedModules(trial.begin_again),
            "late_numbers": late,
            "draws": DrawsAhead(),
            "workers": MoreWorkers(trial.begin_again),
            "syncs": SkippedWaits(copies, lambda: trial.turns),
            "cache": KeptCache(lambda: trial.turns),
            "garbage": QuickCollection(lambda: trial.turns),
            "fused": FusedOptimizers(),
            "gradients": gradients,
        }
        admit_scripts(self._patches)
        os.register_at_fork(after_in_child=gc.freeze)  # no worker can free what of its parent's is on the GPU
        copies.patch(self._patches)  # in any case: it sees what the others have to know of the program
        for name in self._names:
            fix = fixes[name]
            self.switches.append(fix.switch)
            if fix is not copies:
                fix.patch(self._patches)
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: self._trained(optimizer))
        self._patches.later(hook.remove)
        self._switch(self.switches, True)
        if self._tried:
            trial.compare(partial(self._switch, self.switches), self._judge)
            self._inference.begin()
            self._patches.later(self._inference.end)

    def _trained(self, optimizer: Any) -> None:
        """An optimizer has stepped. What was tried before, of a model that was only looked at, says nothing of this."""
        assert self.trial is not None
        if self._inference is not None:
            self._inference.end()
            self._inference = None
            if self.trial.turns and self._tried:
                for one in self._given_up:
                    one.off_because = ""
                self.result, self.trial.turns = None, 0
                self.trial.begin_again()
                self.trial.compare(partial(self._switch, self.switches), self._judge)
                self._switch(self.switches, True)
        if not self._stepped or id(optimizer) in self._stepped:
            self._stepped.clear()
            self.trial.turn()
        self._stepped.add(id(optimizer))

    def _give_up(self, switch: FixSwitch, why: str) -> None:
        switch.stop(why)
        self._given_up.append(switch)

    def _switch(self, switches: Sequence[FixSwitch], on: bool) -> None:
        for one in switches:
            one.on = (on or one.name in _BY_THEMSELVES) and not one.off_because

    def _judge(self, result: TrialResult) -> None:
        """What gains nothing here is left to the program as it is; the others are tried one by one."""
        self.result = result
        self._untried = [one for one in self.switches if one.done and one.name not in _BY_THEMSELVES]
        if len(self._untried) == 1:
            self._untried[0].saved = result.saved
        if _within_noise(result):
            for one in self._untried:
                together = len(self._untried) > 1
                self._give_up(one, "together they saved nothing here" if together else "it saved nothing here")
        elif len(self._untried) > 1:
            self._try_next()

    def _try_next(self) -> None:
        """The next fix: turns with all that are left, and turns with all but this one."""
        while self._untried and self.trial is not None:
            switch = self._untried.pop()
            if switch.on:
                self.trial.compare(partial(self._switch, [switch]), partial(self._judge_alone, switch))
                return

    def _judge_alone(self, switch: FixSwitch, result: TrialResult) -> None:
        plain, fixed = round(median(result.plain)), round(median(result.fixed))
        switch.saved = result.saved
        if result.gain < NOISE / 2 or not result.stands_out:
            unsure = ", which may be chance" if result.gain >= NOISE / 2 else ""
            self._give_up(
                switch, f"an iteration took {duration(plain)} without it and {duration(fixed)} with it{unsure}"
            )
        else:
            switch.notes.append(f"alone it saves {share(plain - fixed, plain)} of an iteration")
        self._try_next()

    def told(self, plan: Sequence[PlannedFix] = ()) -> str:
        """What was done, how often, and what it gained; beside it what a plan of the program without fixes foretold."""
        if self.trial is None:
            return ""
        lines = ["keepbusy --fix", ""]
        for one in self.switches:
            lines += [*_about(one), *_beside(one, foretold(plan, one))]
        if self.result is not None:
            lines += ["", *_measured(self.result)]
        else:
            lines += ["", f"saved         not measured: {self._why_unmeasured(self.trial)}"]
        whole = foretold(plan, *self.switches)
        if self.result is not None and whole:
            came = _came(self.result.saved, _within_noise(self.result))
            lines.append(f"              predicted {duration(whole)} per iteration in total, {came}")
        if not any(one.done and not one.off_because for one in self.switches):
            lines += _left_to_the_author(plan, self.switches)
        return "\n".join(lines)

    def _why_unmeasured(self, trial: FixTrial) -> str:
        if not any(one.done for one in self.switches):
            return "no fix was made"
        if not trial.turns:
            return "no iteration was seen, neither of an optimizer nor of a line that reads a result"
        more = f"a comparison needs {trial.to_come} more"
        return f"{trial.turns} iteration{' is' if trial.turns == 1 else 's are'} too few; {more}"


def foretold(plan: Sequence[PlannedFix], *switches: FixSwitch) -> int | None:
    """What these fixes gain a turn by the plan, at the lines where they were made; None if it names none of them.

    What two of them are for counts once: a tensor that is made on the host is drawn there, and copied.
    """
    gains = [one.gain for one in plan if any(_stands_for(switch, one) for switch in switches)]
    return sum(gains) if gains else None


def _stands_for(switch: FixSwitch, planned: PlannedFix) -> bool:
    if planned.fix.partition("=")[0] not in WHILE_IT_RUNS.get(switch.name, ()):
        return False
    done = {_place(*one) for one in switch.done}
    return switch.name == "workers" or any(_place(where.file, where.line) in done for where in planned.where)


def _place(file: str, line: int) -> Place:
    return (str(Path(file).resolve()) if file else ""), line


def _left_to_the_author(plan: Sequence[PlannedFix], switches: Sequence[FixSwitch]) -> Iterator[str]:
    """Where nothing helped: what else there is changes the program, and that is not ours to decide."""
    yield "no fix that helps here is safe to apply while the program runs"
    rest = [one for one in plan if not any(_stands_for(switch, one) for switch in switches)]
    if rest:
        yield f"first fix to make by hand: {rest[0].named}: {rest[0].code or rest[0].advice}"
    else:
        yield "`keepbusy run` lists the fixes to make by hand"


def _measured(result: TrialResult) -> Iterator[str]:
    plain, fixed = round(median(result.plain)), round(median(result.fixed))
    if plain > fixed and _within_noise(result):
        yield f"saved         nothing above the noise: {transition(plain, fixed)} per iteration"
    else:
        yield f"saved         {transition(plain, fixed)} per iteration, {change(plain, fixed)}"
    yield f"              without {_range(result.plain)}, with {_range(result.fixed)}, alternately"


def _beside(switch: FixSwitch, predicted: int | None) -> Iterator[str]:
    """What was foretold of it, and what came."""
    if predicted is not None and switch.done:
        measured = _came(switch.saved, bool(switch.off_because))
        yield f"              predicted {duration(predicted)} per iteration, {measured}"


def _came(saved: int | None, within_noise: bool) -> str:
    if saved is None:
        return "not measured"
    if saved <= 0:
        return "measured nothing"
    return "measured nothing above the noise" if within_noise else f"measured {duration(saved)}"


def _within_noise(result: TrialResult) -> bool:
    """Whether this is no gain: too little of a turn, or no more than turns of one kind differ by."""
    return result.gain < NOISE or not result.stands_out


def _range(times: Sequence[int]) -> str:
    return f"{duration(min(times))} to {duration(max(times))}"


def _about(switch: FixSwitch) -> Iterator[str]:
    times = switch.done.total()
    checked = f"; {switch.checked} done both ways, all the same" if switch.checked and not switch.off_because else ""
    yield f"{switch.name:<13} {times} {switch.about}{checked}" if times else f"{switch.name:<13} nothing to do"
    for place, count in switch.places[:_SHOWN]:
        yield f"              {count} at {place}"
    if switch.tolerance and times:
        yield f"              {switch.tolerance}"
    for note in dict.fromkeys(switch.notes):
        yield f"              {note}"
    if switch.off_because:
        yield f"              switched off: {switch.off_because}"
