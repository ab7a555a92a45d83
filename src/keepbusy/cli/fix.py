"""Try the fixes of a program's plan one after the other, and show those that hold as a diff of the source.

Each fix runs on a virtual GPU before it is offered. Its results must equal the program's own to the last bit, unless
it states a tolerance, and its step must be shorter. The largest saving is tried first. After ten minutes no further
run begins, and the fixes that were not tried are named. Nothing is written without --write.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import keepbusy
from keepbusy.cli import (
    add_machine,
    add_program,
    handed_on,
    hint_at_own_options,
    need_pytorch,
    print_parts,
    program_in,
    whole_number,
)
from keepbusy.program.processes import make_folder
from keepbusy.report import words
from keepbusy.timeline.figures import duration
from keepbusy.timeline.files import BadInput, write_whole
from keepbusy.timeline.run_facts import ran_nothing

if TYPE_CHECKING:
    from keepbusy.causes.places import Where
    from keepbusy.explain.diagnosis import Diagnosis, PlannedFix
    from keepbusy.fix.source.proof import RunResults

EXAMPLES = """\
examples:
  keepbusy fix train.py --steps 20
  keepbusy fix --write train.py --steps 20
  keepbusy fix -m package.train --steps 20
  keepbusy fix --ranks 2 train.py --steps 20

The program is run several times, so give it the arguments of a short run. Random numbers of PyTorch,
Python and NumPy begin at the same place in each. Ctrl-C ends the search, and shows what was found until then.
"""
LEAST_GAIN = 0.01
"""Of a step: a fix that gains less is not worth a line. On a measured clock neither is what its noise hides."""
MOST_APART = 0.01
"""As far as `capturable=True` may be from a program by itself: of one that it changes by more nothing is known."""
MINUTES = 10
"""After so many no further run is begun."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", action="store_true", help="write the fixes that hold into the source")
    parser.add_argument(
        "--minutes",
        type=whole_number("minutes", 1 << 20, 0),
        metavar="N",
        default=MINUTES,
        help=f"begin no run that would end later (default {MINUTES}; 0: try everything)",
    )
    add_machine(parser, "h200")
    add_program(parser, "the program, and its own arguments: a short run will do")


def run(options: argparse.Namespace) -> Sequence[str]:
    """The plan first; then each of its fixes on top of those before it that hold."""
    if find_spec("libcst") is None:
        raise BadInput("keepbusy fix needs LibCST: `pip install libcst`. `keepbusy run --fix` does without.")
    need_pytorch("`keepbusy fix`")
    runs = CandidateRuns(options, make_folder())
    search = FixSearch(runs, runs.tried({}, "as it is"))
    try:
        search.go()
    except KeyboardInterrupt:
        search.end("Ctrl-C ended the search")
        print_parts([*_diffs(search.held), "nothing was written\n"])
        raise
    told, held = [*_diffs(search.held)], search.held
    if options.write:
        for file, source in held.items():
            write_whole(Path(file), source)
        told.append(f"written: {', '.join(held)}\n" if held else "nothing was written\n")
    elif held:
        told.append("nothing was written; `keepbusy fix --write` writes these changes into the source\n")
    return told


@dataclass(frozen=True)
class TrialRun:
    """A run of the program, or of a candidate: what it took, and what it computed."""

    diagnosis: Diagnosis
    length: int
    computed: RunResults
    graphs: tuple[str, ...] = ()
    """What its graphs say of themselves, of each process."""

    def time(self, planned: PlannedFix) -> int:
        """Of a step; of the whole run for what does not come in every step."""
        return self.length if planned.is_beside_steps else self.diagnosis.plain_step


class DifferentResults(BadInput):
    """With a fix the program computes something else."""


class Attempt(NamedTuple):
    """A fix of the plan, and the edit that is to serve it: its own, or another one in its place."""

    planned: PlannedFix
    way: str
    loops: tuple[str, ...]
    """Those whose iterations are explained."""

    def on_top_of(self, held: dict[str, str]) -> dict[str, str]:
        """The sources that hold, with this one."""
        from keepbusy.fix.source.planned_edits import edited_files

        return held | edited_files(self.planned, self.way, held, self.loops)


class FixSearch:
    """Each fix is tried on top of those that hold, and what became of it is told at once."""

    def __init__(self, runs: CandidateRuns, own: TrialRun) -> None:
        """The plan begins with what gains most. What may serve in the place of one of its fixes comes after all of
        them, for of that nothing is foretold; first of those in every step, for what gains there counts by the step."""
        from keepbusy.fixes.source.rewriting import ways_of

        self._runs, self._own, self._last = runs, own, own
        self.held: dict[str, str] = {}
        """The sources with all fixes that hold."""
        self._kept = set[str]()
        """Edits that hold somewhere."""
        self._vain: list[dict[str, str]] = []
        self._told: list[PlannedFix] = []  # of which it was said what came of them, not only of another in their place
        loops = own.diagnosis.loop, *(one.loop for one in own.diagnosis.plan if one.loop)
        attempts = [Attempt(planned, way, loops) for planned in own.diagnosis.plan for way in ways_of(planned.fix)]
        self._left = sorted(attempts, key=lambda one: one.way != one.planned.fix and 1 + one.planned.is_beside_steps)

    def go(self) -> None:
        plan, count = self._own.diagnosis.plan, len(self._to_come())
        several = f"{len(plan)} {'fix' if len(plan) == 1 else 'fixes'}"
        step = duration(self._own.diagnosis.plain_step)
        if not plan:
            print_parts([f"{self._runs.name}: a step takes {step}; the plan has no fix, so there is nothing to try\n"])
            return
        print_parts([f"{self._runs.name}: a step takes {step}; the plan has {several}\n", self._runs.announced(count)])
        done, why = 0, ""
        while self._left and not (why := self._runs.end_of_search()):
            attempt = self._left[0]
            if candidate := self._candidate(attempt):
                done += 1
                self._try(attempt, candidate, f"change {done} of {max(done, count)}, '{words.fix(attempt.way)}'")
            elif attempt.way == attempt.planned.fix and attempt.on_top_of({}):
                self._told.append(attempt.planned)  # one that was tried before it changes the same
            del self._left[0]
        self.end(why)

    def end(self, why: str) -> None:
        """What was not tried, and why; and what is left for a person to do."""
        from keepbusy.causes.places import Where
        from keepbusy.fixes.source.rewriting import edit_of
        from keepbusy.report.source import fix_line

        rest = self._to_come()
        if rest:
            named = [f"  {words.fix(one.way)} at {_listed(one.planned.where)}{_foretold(one)}\n" for one in rest]
            print_parts([f"\nnot tried, since {why}:\n", *named])
        for planned in self._own.diagnosis.plan:
            if planned in self._told or any(one[:2] == (planned, planned.fix) for one in rest):
                continue
            why = ", since keepbusy cannot change these lines itself" if edit_of(planned.fix) else ""
            line = fix_line(planned.fix, (planned.where or (Where(),))[0], planned.code or planned.advice)
            print_parts([_told(planned.fix, planned.where, f"by hand{why}: {line}")])

    def _to_come(self) -> list[Attempt]:
        """Each change once."""
        candidates = [(self._candidate(one), one) for one in self._left]
        changes = [candidate for candidate, _ in candidates]
        return [one for at, (candidate, one) in enumerate(candidates) if candidate and candidate not in changes[:at]]

    def _candidate(self, attempt: Attempt) -> dict[str, str]:
        """The sources that hold with this one; {} if that changes nothing, or was tried in vain."""
        candidate = attempt.on_top_of(self.held)
        return {} if candidate == self.held or candidate in self._vain else candidate

    def _try(self, attempt: Attempt, candidate: dict[str, str], what: str) -> None:
        from keepbusy.fix.source.planned_edits import changed_at
        from keepbusy.fixes.source.rewriting import where_results_differ

        planned, way, loops = attempt
        where = changed_at(self.held, candidate) or planned.where
        try:
            now = self._runs.tried(candidate, what)
            told = self._runs.proven(planned, way, self._own, (self.held, self._last), now)
        except BadInput as error:
            told = f"left out: {str(error).rstrip('.')}"
            self._vain.append(candidate)
            other = where_results_differ(way) if isinstance(error, DifferentResults) else ""
            if other:
                self._left.insert(1, Attempt(planned, other, loops))
        else:
            self.held, self._last = candidate, now
            self._kept.add(way)
        if way == planned.fix:
            self._told.append(planned)
        else:
            how = "beside" if planned.fix in self._kept else "instead of"
            told = f"{how} '{words.fix(planned.fix)}' at {_listed(planned.where)}\n  {told}"
        print_parts([_told(way, where, told)])


class CandidateRuns:
    """The program, run with other sources in place of its own."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        script, arguments = program_in(options)
        hint_at_own_options(options, add_arguments)
        self._folder, self._count = folder, 0
        self._began, self._longest, self._minutes = time.monotonic(), 0.0, options.minutes
        self._capturable: RunResults | None = None
        """What the program computes with the optimizers that a graph needs."""
        self._unprovable: str | None = None
        """Why nothing can be proven of this program; "" once it is known to compute the same twice."""
        self._is_modelled, self._computes = options.clock == "modelled", options.values == "real"
        self.name = f"-m {script}" if options.module else script
        given = handed_on(options, add_arguments, ("gpus", "ranks", "clock", "clocks", "values"))
        self._command = ["--on", options.on, *given, "--quiet", *(["-m"] if options.module else []), script, *arguments]

    def tried(self, sources: dict[str, str], what: str, capturable: bool = False) -> TrialRun:
        """`what`: which run it is, for who looks on. `capturable`: with the optimizers that a graph needs."""
        from keepbusy.fix.source.proof import RunResults
        from keepbusy.fix.source.rewritten_run import graphs_of
        from keepbusy.timeline.busy_file import load

        self._count += 1
        folder, began = self._folder / str(self._count), time.monotonic()
        folder.mkdir()
        self._run(sources, folder, f"run {self._count} of {self.name}, {what}", capturable)
        self._longest = max(self._longest, time.monotonic() - began)
        timeline = load(folder / "run.busy")
        if not timeline.on_device.any():
            raise BadInput(ran_nothing(self.name, timeline.has_operators))
        computed, graphs = RunResults.read(folder), tuple(graphs_of(folder))
        return TrialRun(keepbusy.explain(timeline), int(timeline.spans.end.max()), computed, graphs)

    def announced(self, changes: int) -> str:
        """What is to come, for who waits for it."""
        if not changes:
            return "keepbusy can write none of them into the source\n"
        runs = f"{'a run' if self._is_modelled else 'one or two runs'} of {self._longest:.0f} s"
        if changes == 1:
            return f"1 change of the source is tried, in {runs}\n"
        return f"{changes} changes of the source are tried, each in {runs}, the largest saving first\n"

    def end_of_search(self) -> str:
        """Why nothing more is tried; "" while there is time."""
        if self._unprovable:
            return self._unprovable
        needed = self._longest * (1 if self._is_modelled else 2)
        if not self._minutes or time.monotonic() - self._began + needed <= 60 * self._minutes:
            return ""
        return (
            f"that would end after more than {self._minutes} {'minute' if self._minutes == 1 else 'minutes'}, with "
            f"{self._longest:.0f} s a run: give the program less to do, or `--minutes 0` to try everything"
        )

    def proven(
        self, planned: PlannedFix, way: str, own: TrialRun, without: tuple[dict[str, str], TrialRun], after: TrialRun
    ) -> str:
        """What a fix gains and how that is known. Raises BadInput with why it does not hold.

        `without`: the sources with the fixes that hold already, and their run. What rounds differently is held against
        the program's own run. On a measured clock a gain has to come twice: a busy machine is slow at times.
        """
        from keepbusy.fix.source.rewritten_run import refusal_of

        known = [line.partition(":")[0] for text in without[1].graphs for line in text.splitlines()]
        if refusal := refusal_of(after.graphs, known):
            raise BadInput(f"no graph was replayed: {refusal}")
        sources, before = without
        same = self._same_results(way, own, before, after)
        was, now = before.time(planned), after.time(planned)
        least = max(round(LEAST_GAIN * was), 0 if self._is_modelled else own.diagnosis.noise)
        if was - now >= least and not self._is_modelled:
            was = min(was, self.tried(sources, f"without '{words.fix(way)}', again").time(planned))
        what = "the run" if planned.is_beside_steps else "a step"
        if was - now < least:
            raise BadInput(f"it saves nothing: {what} takes {duration(was)} without it and {duration(now)} with it")
        predicted = f" ({duration(max(0, planned.gain))} predicted)" if way == planned.fix and what == "a step" else ""
        return f"saves {duration(was - now)} of the {duration(was)} that {what} takes{predicted}; {same}"

    def _same_results(self, way: str, own: TrialRun, before: TrialRun, after: TrialRun) -> str:
        """How far the results are the same. Raises BadInput where they are not."""
        from keepbusy.fixes.source.rewriting import edit_of

        if not self._computes:
            return "results not compared, since nothing is computed with --values none"
        edit = edit_of(way)
        tolerance, why = (edit.tolerance, edit.why) if edit else (0.0, "")
        different, of_whom = (own if tolerance else before).computed.same(after.computed, tolerance), ""
        if different:
            if self._unprovable is None:
                again = own.computed.same(self.tried({}, "as it is, again").computed, 0)
                self._unprovable = again and (
                    f"this program does not compute the same twice ({again}), so nothing can be proven: "
                    "give it a seed, and no checkpoint to resume from"
                )
            if self._unprovable:
                raise BadInput(self._unprovable)
            if way == "graph":
                different, tolerance, of_whom = self._against_capturable(different, own, after, tolerance)
            if different:
                because = f" ({why})" if why and not tolerance else ""
                raise DifferentResults(f"{different.rstrip('.')}{because}")
        return (
            f"results within {100 * tolerance:.3g}%{of_whom}, for {why}"
            if tolerance
            else "the same results to the last bit"
        )

    def _against_capturable(
        self, different: str, own: TrialRun, after: TrialRun, tolerance: float
    ) -> tuple[str, float, str]:
        """What differs, else the tolerance, and of whom the results are. A graph needs PyTorch's `capturable`
        optimizers, whose rounding grows in some programs, as GANs: what the graph itself changes shows against a run
        with these, or is no more than they change."""
        if self._capturable is None:
            try:
                self._capturable = self.tried({}, "as it is, with capturable optimizers", capturable=True).computed
            except BadInput:  # they are not for it, as with weights on the CPU
                return different, tolerance, ""
        if not self._capturable.weights:
            return different, tolerance, ""
        if not self._capturable.same(after.computed, tolerance):
            return "", tolerance, " of the program with `capturable=True`"
        by_themselves = max(own.computed.distances(self._capturable).values())
        if tolerance < by_themselves <= MOST_APART and not own.computed.same(after.computed, by_themselves):
            return "", by_themselves, ", as with `capturable=True` alone"
        return different, tolerance, ""

    def _run(self, sources: dict[str, str], folder: Path, what: str, capturable: bool) -> None:
        from keepbusy.fix.source.planned_edits import source_of
        from keepbusy.fix.source.proof import ASKED
        from keepbusy.fixes.source.graphs import origins_of

        kept, asked = folder / "run.busy", folder / "asked.json"
        whole = {str(Path(file).resolve()): source for file, source in sources.items()}
        origins = {file: origins_of(source, source_of(file)) for file, source in whole.items()}
        told = {"sources": whole, "origins": origins, "witness": str(folder), "capturable": capturable}
        asked.write_text(json.dumps(told), encoding="utf-8")
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            child = subprocess.Popen(
                [sys.executable, "-m", "keepbusy", "run", "--save", str(kept), *self._command],
                env={**os.environ, ASKED: str(asked), "PYTHONHASHSEED": "0"},
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            _wait(child, what, self._longest)
            errors.seek(0)
            said = [line for line in errors.read().splitlines() if line.strip()]
        if child.returncode or not kept.exists():
            its_own = [line for line in said if not line.startswith("keepbusy: ")]
            last = (its_own or said or ["it said nothing"])[-1]
            raise BadInput(f"{self.name} ended with exit code {child.returncode}: {last}")


def _wait(child: subprocess.Popen[bytes], what: str, expected: float) -> None:
    """A terminal shows how long it has taken so far; elsewhere, as in the log of CI, each run is a line."""
    began, is_terminal = time.monotonic(), sys.stderr.isatty()
    if not is_terminal:
        about = f", about {expected:.0f} s" if expected else ""
        sys.stderr.write(f"keepbusy: {what}{about}\n")
    try:
        while True:
            try:
                child.wait(1 if is_terminal else None)
                break
            except subprocess.TimeoutExpired:
                about = f" of about {expected:.0f} s" if expected else ""
                sys.stderr.write(f"\rkeepbusy: {what}: {time.monotonic() - began:.0f} s{about} ")
    finally:
        child.kill()
        child.wait()
        if is_terminal:
            sys.stderr.write("\r\x1b[K")


def _told(fix: str, where: Sequence[Where], what: str) -> str:
    return f"\n{words.fix(fix)} at {_listed(where)}\n  {what}\n"


def _foretold(attempt: Attempt) -> str:
    """What the plan says that it would gain; of another edit in its place that is unknown."""
    planned, way, _ = attempt
    if way != planned.fix:
        return f", instead of '{words.fix(planned.fix)}'"
    gain = planned.run_gain if planned.is_beside_steps else planned.gain
    return f", predicted to save {duration(gain)}{'' if planned.is_beside_steps else ' per step'}" if gain > 0 else ""


def _listed(where: Sequence[Where]) -> str:
    """The lines that cost most."""
    more = f" and {len(where) - 3} more" if len(where) > 3 else ""
    return ", ".join(str(one) for one in where[:3]) + more


def _diffs(held: dict[str, str]) -> Iterator[str]:
    """Named from this folder on, or from one above it that holds all files: `patch` takes no names from above."""
    from keepbusy.fix.source.planned_edits import source_of
    from keepbusy.fixes.source.rewriting import lines_of

    here = Path.cwd()
    whole = {file: Path(os.path.normpath(here / file)) for file in held}
    shared = Path(os.path.commonpath([here, *(one.parent for one in whole.values())]))
    for file, source in held.items():
        name = whole[file].relative_to(shared).as_posix()
        yield "\n"
        for line in difflib.unified_diff(lines_of(source_of(file)), lines_of(source), f"a/{name}", f"b/{name}"):
            yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
    if shared != here:
        yield f"\nthe diff names files from {shared} on: `patch -p1 -d {shared}` takes it\n"
