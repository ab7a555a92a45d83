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
from itertools import chain
from pathlib import Path
from statistics import median
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
from keepbusy.report import labels
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
"""Share of a step: a fix that saves less does not hold. On a measured clock it must also save more than the noise."""
MOST_APART = 0.01
"""How far `capturable=True` alone may move most weights; where it moves them more, nothing is proven."""
AS_FAR = 4
"""A graph may move weights so many times as far: two ways of rounding are not equally far from a third."""
MINUTES = 10
"""No run begins after so many minutes."""


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
    """Run the program as it is, then try each fix of its plan on top of those that hold."""
    if find_spec("libcst") is None:
        raise BadInput("keepbusy fix needs LibCST: `pip install libcst`. `keepbusy run --fix` does without.")
    need_pytorch("`keepbusy fix`")
    runs = CandidateRuns(options, make_folder())
    search = FixSearch(runs, runs.tried({}, "as it is"))
    try:
        search.go()
    except KeyboardInterrupt:
        search.end("Ctrl-C ended the search")
        print_parts([*_diffs(search.sources), "nothing was written\n"])
        raise
    text, sources = [*_diffs(search.sources)], search.sources
    if options.write:
        for file, source in sources.items():
            write_whole(Path(file), source)
        text.append(f"written: {', '.join(sources)}\n" if sources else "nothing was written\n")
    elif sources:
        text.append("nothing was written; `keepbusy fix --write` writes these changes into the source\n")
    return text


@dataclass(frozen=True)
class TrialRun:
    """A run of the program, or of a candidate: its diagnosis, its time, and what it computed."""

    diagnosis: Diagnosis
    length: int
    computed: RunResults
    graphs: tuple[str, ...] = ()
    """The report of each process about its graphs."""

    def time(self, planned: PlannedFix) -> int:
        """The time of a step, or of the whole run for a fix beside the steps."""
        return self.length if planned.is_beside_steps else self.diagnosis.plain_step


class DifferentResults(BadInput):
    """With a fix the program computes something else."""


def _are_as_near(plain: RunResults, capturable: RunResults, graph: RunResults, least: float) -> bool:
    """Whether the graph's results are about as near to the program's own as those of the other optimizers: the furthest
    is held against the furthest, the next against the next."""
    usual, found = plain.distances(capturable), plain.distances(graph)
    return all(
        len(found[name]) <= len(usual[name])
        and all(far <= max(least, AS_FAR * near) for far, near in zip(found[name], usual[name], strict=False))
        for name in found
    )


class Attempt(NamedTuple):
    """A fix of the plan, and the edit that makes it: its own, or an alternative."""

    planned: PlannedFix
    edit: str

    @property
    def is_alternative(self) -> bool:
        return self.edit != self.planned.fix


class FixSearch:
    """Tries each fix on top of those that hold, and reports its outcome at once."""

    def __init__(self, runs: CandidateRuns, plain: TrialRun) -> None:
        """The plan begins with the largest saving. Alternatives come after all of its fixes because their savings are
        not predicted, and those in the steps come before those beside them."""
        from keepbusy.fixes.source.rewriting import edits_for

        self._runs, self._plain, self._last = runs, plain, plain
        self.sources: dict[str, str] = {}
        """The changed files, with all fixes that hold."""
        self._edits_held = set[str]()
        self._failed: list[dict[str, str]] = []
        self._reported: list[PlannedFix] = []  # fixes whose own edit has an outcome
        plan = plain.diagnosis.plan
        self._loops = plain.diagnosis.loop, *(planned.loop for planned in plan if planned.loop)
        self._attempts = [Attempt(planned, edit) for planned in plan for edit in edits_for(planned.fix)]
        self._attempts.sort(key=lambda attempt: attempt.is_alternative and 1 + attempt.planned.is_beside_steps)

    def go(self) -> None:
        plan, count = self._plain.diagnosis.plan, len(self._remaining())
        several = f"{len(plan)} {'fix' if len(plan) == 1 else 'fixes'}"
        step = duration(self._plain.diagnosis.plain_step)
        if not plan:
            print_parts([f"{self._runs.name}: a step takes {step}; the plan has no fix, so there is nothing to try\n"])
            return
        print_parts([f"{self._runs.name}: a step takes {step}; the plan has {several}\n", self._runs.announced(count)])
        tried, why = 0, ""
        while self._attempts and not (why := self._runs.end_of_search()):
            attempt = self._attempts[0]
            if candidate := self._candidate(attempt):
                tried += 1
                self._try(attempt, candidate, f"change {tried} of {max(tried, count)}, '{labels.fix(attempt.edit)}'")
            elif not attempt.is_alternative and self._with(attempt, {}):
                self._reported.append(attempt.planned)  # an earlier attempt made the same change
            del self._attempts[0]
        self.end(why)

    def end(self, why: str) -> None:
        """Report what was not tried, and why, and what has to be done by hand."""
        from keepbusy.causes.places import Where
        from keepbusy.fixes.source.rewriting import edit_of
        from keepbusy.report.source import fix_line

        remaining = self._remaining()
        if remaining:
            print_parts([f"\nnot tried, since {why}:\n", *map(_not_tried, remaining)])
        for planned in self._plain.diagnosis.plan:
            if planned in self._reported or any(attempt[:2] == (planned, planned.fix) for attempt in remaining):
                continue
            why = ", since keepbusy cannot change these lines itself" if edit_of(planned.fix) else ""
            line = fix_line(planned.fix, (planned.where or (Where(),))[0], planned.code or planned.advice)
            print_parts([_result(planned.fix, planned.where, f"by hand{why}: {line}")])

    def _remaining(self) -> list[Attempt]:
        """The attempts that are left, one for each different change."""
        attempts, candidates = list[Attempt](), list[dict[str, str]]()
        for attempt in self._attempts:
            if (candidate := self._candidate(attempt)) and candidate not in candidates:
                attempts.append(attempt)
                candidates.append(candidate)
        return attempts

    def _candidate(self, attempt: Attempt) -> dict[str, str]:
        """The sources with this attempt; {} if it changes nothing, or has failed before."""
        candidate = self._with(attempt, self.sources)
        return {} if candidate == self.sources or candidate in self._failed else candidate

    def _with(self, attempt: Attempt, sources: dict[str, str]) -> dict[str, str]:
        from keepbusy.fix.source.planned_edits import edited_files

        return sources | edited_files(attempt.planned, attempt.edit, sources, self._loops)

    def _try(self, attempt: Attempt, candidate: dict[str, str], what: str) -> None:
        from keepbusy.fix.source.planned_edits import changed_at
        from keepbusy.fixes.source.rewriting import edit_with_same_results

        planned, edit = attempt
        where = changed_at(self.sources, candidate) or planned.where
        try:
            now = self._runs.tried(candidate, what)
            outcome = self._runs.proven(planned, edit, self._plain, (self.sources, self._last), now)
        except BadInput as error:
            outcome = f"left out: {str(error).rstrip('.')}"
            self._failed.append(candidate)
            other = edit_with_same_results(edit) if isinstance(error, DifferentResults) else ""
            if other:
                self._attempts.insert(1, Attempt(planned, other))
        else:
            self.sources, self._last = candidate, now
            self._edits_held.add(edit)
        if not attempt.is_alternative:
            self._reported.append(planned)
        else:
            how = "beside" if planned.fix in self._edits_held else "instead of"
            outcome = f"{how} '{labels.fix(planned.fix)}' at {_listed(planned.where)}\n  {outcome}"
        print_parts([_result(edit, where, outcome)])


class CandidateRuns:
    """Runs the program with changed sources in place of its own."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        script, arguments = program_in(options)
        hint_at_own_options(options, add_arguments)
        self._folder, self._count = folder, 0
        self._began, self._longest, self._minutes = time.monotonic(), 0.0, options.minutes
        self._capturable: RunResults | None = None
        """The program's results with the optimizers that a graph needs."""
        self._unprovable: str | None = None
        """Why nothing can be proven about this program; "" once two runs have computed the same."""
        self._is_modelled, self._computes = options.clock == "modelled", options.values == "real"
        self.name = f"-m {script}" if options.module else script
        given = handed_on(options, add_arguments, ("gpus", "ranks", "clock", "clocks", "values"))
        self._command = ["--on", options.on, *given, "--quiet", *(["-m"] if options.module else []), script, *arguments]

    def tried(self, sources: dict[str, str], what: str, capturable: bool = False) -> TrialRun:
        """`what` names the run for the user. `capturable`: with the optimizers that a graph needs."""
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
        """The line that says how many runs will follow."""
        if not changes:
            return "keepbusy can write none of them into the source\n"
        runs = f"{'a run' if self._is_modelled else 'one or two runs'} of {self._longest:.0f} s"
        if changes == 1:
            return f"1 change of the source is tried, in {runs}\n"
        return f"{changes} changes of the source are tried, each in {runs}, the largest saving first\n"

    def end_of_search(self) -> str:
        """Why no further run begins; "" while there is time."""
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
        self, planned: PlannedFix, edit: str, plain: TrialRun, without: tuple[dict[str, str], TrialRun], after: TrialRun
    ) -> str:
        """What a fix saves, and how its results compare. Raises BadInput with the reason if it does not hold.

        `without`: the sources with the fixes that hold already, and their run. Results that may round differently are
        compared with the plain run. On a measured clock the run without the fix is repeated: it may have been slowed.
        """
        from keepbusy.fix.source.rewritten_run import refusal_of

        known = [line.partition(":")[0] for text in without[1].graphs for line in text.splitlines()]
        if refusal := refusal_of(after.graphs, known):
            raise BadInput(f"no graph was replayed: {refusal}")
        sources, before = without
        same = self._same_results(edit, plain, before, after)
        was, now = before.time(planned), after.time(planned)
        least = max(round(LEAST_GAIN * was), 0 if self._is_modelled else plain.diagnosis.noise)
        if was - now >= least and not self._is_modelled:
            was = min(was, self.tried(sources, f"without '{labels.fix(edit)}', again").time(planned))
        whole = "the run" if planned.is_beside_steps else "a step"
        if was - now < least:
            raise BadInput(f"it saves nothing: {whole} takes {duration(was)} without it and {duration(now)} with it")
        is_predicted = edit == planned.fix and not planned.is_beside_steps
        predicted = f" ({duration(max(0, planned.gain))} predicted)" if is_predicted else ""
        return f"saves {duration(was - now)} of the {duration(was)} that {whole} takes{predicted}; {same}"

    def _same_results(self, edit: str, plain: TrialRun, before: TrialRun, after: TrialRun) -> str:
        """How equal the results are. Raises BadInput if they differ too much."""
        from keepbusy.fixes.source.rewriting import edit_of

        if not self._computes:
            return "results not compared, since nothing is computed with --values none"
        source_edit = edit_of(edit)
        tolerance, why = (source_edit.tolerance, source_edit.why) if source_edit else (0.0, "")
        different, compared = (plain if tolerance else before).computed.same(after.computed, tolerance), ""
        if different:
            if self._unprovable is None:
                difference = plain.computed.same(self.tried({}, "as it is, again").computed, 0)
                self._unprovable = difference and (
                    f"this program does not compute the same twice ({difference}), so nothing can be proven: "
                    "give it a seed, and no checkpoint to resume from"
                )
            if self._unprovable:
                raise BadInput(self._unprovable)
            if edit == "graph":
                different, tolerance, compared = self._against_capturable(different, plain, after, tolerance)
            if different:
                because = f" ({why})" if why and not tolerance else ""
                raise DifferentResults(f"{different.rstrip('.')}{because}")
        if not tolerance:
            return "the same results to the last bit"
        return f"results within {100 * tolerance:.3g}%{compared}, for {why}"

    def _against_capturable(
        self, different: str, plain: TrialRun, after: TrialRun, tolerance: float
    ) -> tuple[str, float, str]:
        """What differs if anything does, the tolerance, and a phrase that names the run compared with. A graph needs
        PyTorch's `capturable` optimizers, whose rounding errors grow in some programs, such as GANs. So its results are
        compared with those of these optimizers, or may differ a few times as much as these alone do."""
        if self._capturable is None:
            try:
                self._capturable = self.tried({}, "as it is, with capturable optimizers", capturable=True).computed
            except BadInput:  # the program cannot use them, for example because its weights are on the CPU
                return different, tolerance, ""
        if not self._capturable.weights:
            return different, tolerance, ""
        if not self._capturable.same(after.computed, tolerance):
            return "", tolerance, " of the program with `capturable=True`"
        apart = plain.computed.distances(self._capturable)["weights"]
        if (
            apart
            and median(apart) <= MOST_APART
            and _are_as_near(plain.computed, self._capturable, after.computed, tolerance)
        ):
            furthest = max(chain(*plain.computed.distances(after.computed).values()))
            return "", furthest, f", at most {AS_FAR} times as far apart as with `capturable=True` alone"
        return different, tolerance, ""

    def _run(self, sources: dict[str, str], folder: Path, what: str, capturable: bool) -> None:
        from keepbusy.fix.source.planned_edits import source_of
        from keepbusy.fix.source.proof import CANDIDATE
        from keepbusy.fixes.source.at_lines import origins_of

        saved, instructions = folder / "run.busy", folder / "asked.json"
        resolved = {str(Path(file).resolve()): source for file, source in sources.items()}
        origins = {file: origins_of(source, source_of(file)) for file, source in resolved.items()}
        content = {"sources": resolved, "origins": origins, "witness": str(folder), "capturable": capturable}
        instructions.write_text(json.dumps(content), encoding="utf-8")
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            child = subprocess.Popen(
                [sys.executable, "-m", "keepbusy", "run", "--save", str(saved), *self._command],
                env={**os.environ, CANDIDATE: str(instructions), "PYTHONHASHSEED": "0"},
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            _wait(child, what, self._longest)
            errors.seek(0)
            lines = [line for line in errors.read().splitlines() if line.strip()]
        if child.returncode or not saved.exists():
            lines_of_program = [line for line in lines if not line.startswith("keepbusy: ")]
            last = (lines_of_program or lines or ["it said nothing"])[-1]
            raise BadInput(f"{self.name} ended with exit code {child.returncode}: {last}")


def _wait(child: subprocess.Popen[bytes], what: str, expected: float) -> None:
    """Wait for the run. A terminal shows the time so far; elsewhere, such as in a CI log, each run has one line."""
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


def _result(fix: str, where: Sequence[Where], outcome: str) -> str:
    return f"\n{labels.fix(fix)} at {_listed(where)}\n  {outcome}\n"


def _not_tried(attempt: Attempt) -> str:
    """An attempt that was not tried, with its predicted saving; that of an alternative is unknown."""
    planned, note = attempt.planned, ""
    gain = planned.run_gain if planned.is_beside_steps else planned.gain
    if attempt.is_alternative:
        note = f", instead of '{labels.fix(planned.fix)}'"
    elif gain > 0:
        note = f", predicted to save {duration(gain)}{'' if planned.is_beside_steps else ' per step'}"
    return f"  {labels.fix(attempt.edit)} at {_listed(planned.where)}{note}\n"


def _listed(where: Sequence[Where]) -> str:
    """The three places that cost most, and how many more there are."""
    more = f" and {len(where) - 3} more" if len(where) > 3 else ""
    return ", ".join(str(place) for place in where[:3]) + more


def _diffs(sources: dict[str, str]) -> Iterator[str]:
    """Diffs relative to this folder, or to one above it that holds all files: `patch` takes no names with `..`."""
    from keepbusy.fix.source.planned_edits import source_of
    from keepbusy.fixes.source.at_lines import lines_of

    current = Path.cwd()
    paths = {file: Path(os.path.normpath(current / file)) for file in sources}
    shared = Path(os.path.commonpath([current, *(path.parent for path in paths.values())]))
    for file, source in sources.items():
        name = paths[file].relative_to(shared).as_posix()
        yield "\n"
        for line in difflib.unified_diff(lines_of(source_of(file)), lines_of(source), f"a/{name}", f"b/{name}"):
            yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
    if shared != current:
        yield f"\nthe diff names files from {shared} on: `patch -p1 -d {shared}` takes it\n"
