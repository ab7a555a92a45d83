"""Try the fixes that a run's plan names, one after the other, and show those that hold as a diff of the source.

Each is run before it is offered: its losses must be the program's own, to the last bit unless the fix says how far it
differs, and its step must be shorter. Nothing is written without --write.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keepbusy.cli.console.output import replacing, show
from keepbusy.timeline.errors import BadInput

if TYPE_CHECKING:
    from keepbusy.explain.diagnosis import Diagnosis, PlannedFix
    from keepbusy.fix.source.proof import Computed

EXAMPLES = """\
examples:
  keepbusy fix train.py --steps 20
  keepbusy fix --write train.py --steps 20
"""
LEAST_GAIN = 0.01
"""Of a step: a fix that gains less is not worth a line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", action="store_true", help="write the fixes that hold into the source")
    parser.add_argument("--on", metavar="DEVICE", default="h200", help="the virtual GPU (default h200)")
    parser.add_argument(
        "--clock",
        choices=("measured", "modelled"),
        default="measured",
        help="whether the host takes the time it really takes, or a modelled one",
    )
    parser.add_argument(
        "program",
        metavar="SCRIPT",
        nargs=argparse.PARSER,
        help="the program, and its own arguments: a short run will do",
    )


def run(options: argparse.Namespace) -> Sequence[str]:
    """The plan first; then each of its fixes on top of those before it that hold."""
    try:
        from keepbusy.fix.source.source_edits import edit_of, edited
    except ModuleNotFoundError as error:
        raise BadInput("keepbusy fix needs LibCST: `pip install libcst`. `keepbusy run --fix` does without.") from error
    program = options.program[options.program[0] == "--" :]
    with tempfile.TemporaryDirectory(prefix="keepbusy-") as folder:
        runs = CandidateRuns(options, program, Path(folder))
        before = runs.explained({})
        show([f"{program[0]}: a step takes {_time(before.plain_step)}; {_several(len(before.plan))}\n"])
        held: dict[str, str] = {}
        step, own = before.plain_step, runs.computed({})
        for planned in before.plan:
            candidate = dict(held)
            for file, lines in _lines_of(planned):
                source = held.get(file) or Path(file).read_text(encoding="utf-8")
                new = edited(source, planned.fix, lines)
                if new is not None:
                    candidate[file] = new
            edit = edit_of(planned.fix)
            if edit is None or candidate == held:
                show([_told(planned, f"advice: {planned.code or planned.advice}")])
                continue
            try:
                why = own.same(runs.computed(candidate), edit.tolerance)
                after = 0 if why else runs.explained(candidate).plain_step
            except BadInput as error:
                why, after = str(error), 0
            if not why and after > (1 - LEAST_GAIN) * step:
                why = f"it gains nothing: {_time(step)} before, {_time(after)} after"
            if why:
                show([_told(planned, f"left out: {why.rstrip('.')}")])
                continue
            same = f"losses within {edit.tolerance:g}: {edit.why}" if edit.tolerance else "the same to the last bit"
            predicted = max(0, planned.gain)
            show([_told(planned, f"gains {_time(step - after)} a step, {_time(predicted)} predicted; {same}")])
            held, step = candidate, after
    told = [*_diffs(held)]
    if options.write:
        for file, source in held.items():
            with replacing(Path(file)) as part:
                part.write_text(source, encoding="utf-8")
        told.append(f"written: {', '.join(held)}\n" if held else "nothing was written\n")
    elif held:
        told.append("nothing was written; --write does\n")
    return told


class CandidateRuns:
    """The program, run with other sources in place of its own."""

    def __init__(self, options: argparse.Namespace, program: Sequence[str], folder: Path) -> None:
        self._options, self._program, self._folder, self._count = options, program, folder, 0

    def explained(self, sources: dict[str, str]) -> Diagnosis:
        from keepbusy.cli.console.explanation import explained
        from keepbusy.timeline.busy_file import load

        return explained(load(self._run(sources, "")))

    def computed(self, sources: dict[str, str]) -> Computed:
        from keepbusy.fix.source.proof import Computed

        witness = self._folder / f"computed{self._count}.json"
        self._run(sources, str(witness))
        if not witness.exists():
            raise BadInput(f"{self._program[0]} left no losses to compare.")
        return Computed.read(witness)

    def _run(self, sources: dict[str, str], witness: str) -> Path:
        from keepbusy.fix.source.proof import ASKED

        self._count += 1
        if sys.stderr.isatty():
            sys.stderr.write(f"keepbusy: run {self._count} of {self._program[0]}\n")
        kept, asked = self._folder / f"run{self._count}.busy", self._folder / f"asked{self._count}.json"
        resolved = {str(Path(file).resolve()): source for file, source in sources.items()}
        asked.write_text(json.dumps({"sources": resolved, "witness": witness}), encoding="utf-8")
        clock = "modelled" if witness else self._options.clock
        command = ["run", "--on", self._options.on, "--clock", clock, "--save", str(kept), "--quiet", *self._program]
        done = subprocess.run(
            [sys.executable, "-m", "keepbusy", *command],
            check=False,
            env={**os.environ, ASKED: str(asked)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode or not kept.exists():
            said = [line for line in done.stderr.splitlines() if line.strip()]
            its_own = [line for line in said if not line.startswith("keepbusy: ")]
            last = (its_own or said or ["it said nothing"])[-1]
            raise BadInput(f"{self._program[0]} ended with exit code {done.returncode}: {last}")
        return kept


def _lines_of(planned: PlannedFix) -> Iterator[tuple[str, list[int]]]:
    """Lines by file: only the user's own files."""
    files: dict[str, list[int]] = {}
    for where in planned.where:
        if where.file.endswith(".py") and Path(where.file).is_file():
            files.setdefault(where.file, []).append(where.line)
    yield from files.items()


def _told(planned: PlannedFix, what: str) -> str:
    places = ", ".join(str(one) for one in planned.where[:3])
    return f"\n{planned.fix} at {places}\n  {what}\n"


def _diffs(held: dict[str, str]) -> Iterator[str]:
    for file, source in held.items():
        before = Path(file).read_text(encoding="utf-8").splitlines(keepends=True)
        yield "\n"
        yield from difflib.unified_diff(before, source.splitlines(keepends=True), f"a/{file}", f"b/{file}")


def _time(time: int) -> str:
    from keepbusy.report.words import duration

    return duration(time)


def _several(count: int) -> str:
    return f"the plan has {count} {'fix' if count == 1 else 'fixes'}"
