"""Try the fixes that a run's plan names, one after the other, and show those that hold as a diff of the source.

Each is run before it is offered, on a virtual GPU: what is computed must be the program's own, to the last bit unless
the fix says how far it differs, and its step must be shorter. Nothing is written without --write.
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
from typing import TYPE_CHECKING

import keepbusy
from keepbusy.cli import (
    add_clocks,
    add_devices,
    add_program,
    handed_on,
    need_pytorch,
    print_parts,
    program_in,
    replacing,
)
from keepbusy.instrument.lines import USER, kind_of
from keepbusy.instrument.processes import make_folder
from keepbusy.report import words
from keepbusy.timeline.figures import duration
from keepbusy.timeline.files import BadInput

if TYPE_CHECKING:
    from keepbusy.explain.diagnosis import Diagnosis, PlannedFix, Where
    from keepbusy.fix.source.proof import RunResults

EXAMPLES = """\
examples:
  keepbusy fix train.py --steps 20
  keepbusy fix --write train.py --steps 20
  keepbusy fix -m package.train --steps 20
  keepbusy fix --ranks 2 train.py --steps 20

The program is run several times, so give it the arguments of a short run. Random numbers of PyTorch,
Python and NumPy begin at the same place in each.
"""
LEAST_GAIN = 0.01
"""Of a step: a fix that gains less is not worth a line. On a measured clock neither is what its noise hides."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", action="store_true", help="write the fixes that hold into the source")
    add_devices(parser, "h200")
    add_clocks(parser)
    add_program(parser, "the program, and its own arguments: a short run will do")


def run(options: argparse.Namespace) -> Sequence[str]:
    """The plan first; then each of its fixes on top of those before it that hold."""
    if find_spec("libcst") is None:
        raise BadInput("keepbusy fix needs LibCST: `pip install libcst`. `keepbusy run --fix` does without.")
    need_pytorch("`keepbusy fix`")
    runs = CandidateRuns(options, make_folder())
    held = _tried(runs, runs.tried({}, "as it is"))
    told = [*_diffs(held)]
    if options.write:
        for file, source in held.items():
            with replacing(Path(file)) as part:
                part.write_bytes(source.encode())
        told.append(f"written: {', '.join(held)}\n" if held else "nothing was written\n")
    elif held:
        told.append("nothing was written; --write does\n")
    return told


@dataclass(frozen=True)
class TrialRun:
    """A run of the program, or of a candidate: what it took, and what it computed."""

    diagnosis: Diagnosis
    length: int
    computed: RunResults

    def time(self, planned: PlannedFix) -> int:
        """Of a step; of the whole run for what does not come in every step."""
        return self.length if planned.every or planned.loop else self.diagnosis.plain_step


def _tried(runs: CandidateRuns, before: TrialRun) -> dict[str, str]:
    """The sources with all fixes that hold; what became of each is shown at once."""
    from keepbusy.fix.source.source_edits import edit_of, ways_of

    plan, last = before.diagnosis.plan, before
    several = f"{len(plan)} {'fix' if len(plan) == 1 else 'fixes'}"
    print_parts([f"{runs.name}: a step takes {duration(before.diagnosis.plain_step)}; the plan has {several}\n"])
    held: dict[str, str] = {}
    vain: list[dict[str, str]] = []
    for planned in plan:
        is_told = False  # what comes of it, and not only of another in its place
        for way in ways_of(planned.fix):
            candidate = held | _edited(planned, way, held)
            if candidate == held or candidate in vain:
                continue
            is_told |= way == planned.fix
            where = _changed_at(held, candidate) or planned.where
            try:
                now = runs.tried(candidate, f"with '{words.fix(way)}'")
                told = runs.proven(planned, way, before, (held, last), now)
            except BadInput as error:
                told = f"left out: {str(error).rstrip('.')}"
                vain.append(candidate)
            else:
                held, last, is_told = candidate, now, True
            print_parts([_told(planned, way, where, told)])
        if not is_told:
            is_foreign = edit_of(planned.fix) and not _edited(planned, planned.fix, held)
            why = ", for it cannot be written at these lines" if is_foreign else ""
            print_parts([_told(planned, planned.fix, planned.where, f"advice{why}: {planned.code or planned.advice}")])
    return held


class CandidateRuns:
    """The program, run with other sources in place of its own."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        script, arguments = program_in(options)
        self._folder, self._count = folder, 0
        self._disagrees: str | None = None
        """In what the program differs from itself, once that is known."""
        self._is_modelled = options.clock == "modelled"
        self.name = f"-m {script}" if options.module else script
        given = handed_on(options, add_arguments, ("gpus", "ranks", "clock", "clocks"))
        self._command = ["--on", options.on, *given, "--quiet", *(["-m"] if options.module else []), script, *arguments]

    def tried(self, sources: dict[str, str], what: str) -> TrialRun:
        """`what`: which run it is, for who looks on. Of a program that differs from itself nothing more is run."""
        from keepbusy.fix.source.proof import RunResults
        from keepbusy.timeline.busy_file import load

        self._refuse_if_it_disagrees()
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        self._run(sources, folder, f"run {self._count} of {self.name}, {what}")
        timeline = load(folder / "run.busy")
        if not timeline.on_device.any():
            raise BadInput(f"{self.name} ran nothing on the GPU.")
        return TrialRun(keepbusy.explain(timeline), int(timeline.spans.end.max()), RunResults.read(folder))

    def proven(
        self, planned: PlannedFix, way: str, own: TrialRun, without: tuple[dict[str, str], TrialRun], after: TrialRun
    ) -> str:
        """What a fix gains and how that is known. Raises BadInput with why it does not hold.

        `without`: the sources with the fixes that hold already, and their run. What rounds differently is held against
        the program's own run. On a measured clock a gain has to come twice: a busy machine is slow at times.
        """
        from keepbusy.fix.source.source_edits import edit_of

        edit = edit_of(way)
        tolerance, why = (edit.tolerance, edit.why) if edit else (0.0, "")
        sources, before = without
        different = (own if tolerance else before).computed.same(after.computed, tolerance)
        if different:
            if self._disagrees is None:
                self._disagrees = own.computed.same(self.tried({}, "as it is, again").computed, 0)
            self._refuse_if_it_disagrees()
            raise BadInput(different)
        was, now = before.time(planned), after.time(planned)
        least = max(round(LEAST_GAIN * was), 0 if self._is_modelled else own.diagnosis.noise)
        if was - now >= least and not self._is_modelled:
            was = min(was, self.tried(sources, f"without '{words.fix(way)}', again").time(planned))
        if was - now < least:
            raise BadInput(f"it gains nothing: {duration(was)} before, {duration(now)} after")
        same = f"weights within {tolerance:g}: {why}" if tolerance else "the same to the last bit"
        if planned.every or planned.loop:
            return f"gains {duration(was - now)} of the run's {duration(was)}; {same}"
        predicted = f", {duration(max(0, planned.gain))} predicted" if way == planned.fix else ""
        return f"gains {duration(was - now)} a step{predicted}; {same}"

    def _refuse_if_it_disagrees(self) -> None:
        if self._disagrees:
            raise BadInput(
                f"this program does not compute the same twice ({self._disagrees}), so nothing can be proven: "
                "give it a seed, and no checkpoint to resume from"
            )

    def _run(self, sources: dict[str, str], folder: Path, what: str) -> None:
        from keepbusy.fix.source.proof import ASKED

        kept, asked = folder / "run.busy", folder / "asked.json"
        resolved = {str(Path(file).resolve()): source for file, source in sources.items()}
        asked.write_text(json.dumps({"sources": resolved, "witness": str(folder)}), encoding="utf-8")
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            child = subprocess.Popen(
                [sys.executable, "-m", "keepbusy", "run", "--save", str(kept), *self._command],
                env={**os.environ, ASKED: str(asked), "PYTHONHASHSEED": "0"},
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            _wait(child, what)
            errors.seek(0)
            said = [line for line in errors.read().splitlines() if line.strip()]
        if child.returncode or not kept.exists():
            its_own = [line for line in said if not line.startswith("keepbusy: ")]
            last = (its_own or said or ["it said nothing"])[-1]
            raise BadInput(f"{self.name} ended with exit code {child.returncode}: {last}")


def _wait(child: subprocess.Popen[bytes], what: str) -> None:
    """Who sits before a terminal sees that something goes on, and for how long."""
    began, seen = time.monotonic(), sys.stderr.isatty()
    try:
        while True:
            try:
                child.wait(1 if seen else None)
                break
            except subprocess.TimeoutExpired:
                sys.stderr.write(f"\rkeepbusy: {what}: {time.monotonic() - began:.0f} s ")
    finally:
        child.kill()
        child.wait()
        if seen:
            sys.stderr.write("\r\x1b[K")


def _edited(planned: PlannedFix, way: str, held: dict[str, str]) -> dict[str, str]:
    """The files that this fix changes, on top of those that are changed already: the user's own, no library's."""
    from keepbusy.fix.source.source_edits import edited, where_now

    files: dict[str, list[int]] = {}
    for where in planned.where:
        if where.file.endswith(".py") and Path(where.file).is_file() and kind_of(where.file) == USER:
            files.setdefault(where.file, []).append(where.line)
    changed: dict[str, str | None] = {}
    for file, lines in files.items():
        try:
            own = _source(file)
        except UnicodeDecodeError:  # it names another encoding, as few do
            continue
        now = held.get(file, own)
        changed[file] = edited(now, way, where_now(own, now, lines))
    return {file: source for file, source in changed.items() if source is not None}


def _source(file: str) -> str:
    """With the ends of its lines as they are, which a diff has to keep."""
    return Path(file).read_bytes().decode()


def _changed_at(held: dict[str, str], candidate: dict[str, str]) -> list[Where]:
    """The places where a candidate changes the sources that hold, as the user's files number their lines."""
    from keepbusy.explain.diagnosis import Where
    from keepbusy.fix.source.source_edits import changed_lines, where_now

    places = []
    for file in (one for one in candidate if candidate[one] != held.get(one)):
        own = _source(file)
        now = held.get(file, own)
        lines = where_now(now, own, changed_lines(now, candidate[file]))
        places += [Where(file=file, line=line) for line in lines]
    return places


def _told(planned: PlannedFix, way: str, where: Sequence[Where], what: str) -> str:
    another = "" if way == planned.fix else f" (in the plan: {words.fix(planned.fix)} at {_listed(planned.where)})"
    return f"\n{words.fix(way)} at {_listed(where)}{another}\n  {what}\n"


def _listed(where: Sequence[Where]) -> str:
    return ", ".join(str(one) for one in where[:3])


def _diffs(held: dict[str, str]) -> Iterator[str]:
    """Named from this folder on, or from one above it that holds all files: `patch` takes no names from above."""
    from keepbusy.fix.source.source_edits import lines_of

    here = Path.cwd()
    whole = {file: Path(os.path.normpath(here / file)) for file in held}
    shared = Path(os.path.commonpath([here, *(one.parent for one in whole.values())]))
    for file, source in held.items():
        name = whole[file].relative_to(shared).as_posix()
        yield "\n"
        for line in difflib.unified_diff(lines_of(_source(file)), lines_of(source), f"a/{name}", f"b/{name}"):
            yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
    if shared != here:
        yield f"\nthe diff names files from {shared} on: `patch -p1 -d {shared}` takes it\n"
