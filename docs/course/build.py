"""Writes into the chapters what their programs are, print and look like: `make course`. Prose is left alone.

A chapter names a program between two comments, and what stands between them is made anew:

    <!-- source queue -->                        its text
    <!-- output queue -->                        what it prints
    <!-- report half_idle -->                    that, and keepbusy's report
    <!-- picture overlap PINNED=False -->        its timeline, with that constant changed
    <!-- measured chapter -->                    what they all printed here, and on a real H200 (h200.json)

    python docs/course/build.py [--to FOLDER] [chapter…]    # the pages are left alone then, and written there

One process imports PyTorch; each program runs in a fork of it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from picture import drawn

import keepbusy

COURSE = Path(__file__).resolve().parent
BLOCK = re.compile(r"<!-- (source|output|report|picture|measured) (.*?) -->\n.*?<!-- end -->", re.DOTALL)
COMMAND = re.compile(r"(?m)^keepbusy run (.*) chapter\d/")
"""As the page tells its readers to run them: so they are run here."""
NEEDED = ("keepbusy.cli.run", "keepbusy.virtual.bring_up", "keepbusy.virtual.virtual_run", "sympy", "torch._dynamo")
"""What every fork would import."""
MEASURED = COURSE / "h200.json"


def chapters() -> list[Path]:
    return sorted(COURSE.glob("[1-6]-*.md"))


def build(chapter: Path, pictures: Path) -> str:
    """The chapter's text as its programs make it; pictures are written into that folder."""
    text = chapter.read_text(encoding="utf-8")
    runs = runs_of(chapter)
    for what, asked in BLOCK.findall(text):
        if what == "picture":
            runs[asked].pictured = True

    def made(found: re.Match[str]) -> str:
        what, asked = found[1], found[2]
        shown = compared(chapter, runs, pictures) if what == "measured" else runs[asked].shown(what, pictures)
        return f"<!-- {what} {asked} -->\n{shown}\n<!-- end -->"

    for module in NEEDED:
        import_module(module)
    gc.freeze()
    return BLOCK.sub(made, text)


def runs_of(chapter: Path) -> dict[str, Run]:
    """All that the page asks for, by what stands in its comments."""
    folder = COURSE / f"chapter{chapter.name[0]}"
    text = chapter.read_text(encoding="utf-8")
    command = COMMAND.search(text)
    if not command:
        raise SystemExit(f"{chapter.name} does not say how to run its programs")
    runs = dict[str, Run]()
    for what, asked in BLOCK.findall(text):
        if what != "measured" and asked not in runs:
            runs[asked] = Run(folder / f"{asked.split()[0]}.py", asked.split()[1:], command[1].split())
    return runs


def compared(chapter: Path, runs: dict[str, Run], pictures: Path) -> str:
    """A table of what the programs printed here and on a real GPU, and which printed the same."""
    if not MEASURED.exists():
        return "These programs have not been measured on a real H200 yet."
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    rows, same, missing = list[str](), list[str](), list[str]()
    for asked, run in runs.items():
        real = measured["runs"].get(f"{chapter.name[0]} {asked}")
        virtual = run.printed(pictures).splitlines()
        told = f"`{run.program.name}`" + "".join(f", {change.replace('=', ' = ')}" for change in run.changes)
        if real is None:
            missing.append(told)
        elif real == virtual:
            same.append(told)
        else:
            rows += rows_of(told, virtual, real)
    parts = [
        "\n".join(["| program | virtual H200 | real H200 |", "|---|---|---|", *rows]) if rows else "",
        f"The same on both: {'; '.join(same)}." if same else "",
        f"Not measured: {'; '.join(missing)}." if missing else "",
        f"Measured with {measured['machine']}; every `assert` held.",
    ]
    return "\n\n".join(filter(None, parts))


def rows_of(told: str, virtual: list[str], real: list[str]) -> list[str]:
    if len(virtual) != len(real):
        raise SystemExit(f"{told} printed {len(virtual)} lines here and {len(real)} on a real GPU")
    columns = ([" ".join(line.split()).replace("|", "\\|") for line in lines] for lines in (virtual, real))
    names = [told, *[""] * len(real)]
    return [f"| {name} | {ours} | {theirs} |" for name, ours, theirs in zip(names, *columns, strict=False)]


class Run:
    """A program, perhaps with constants changed as an experiment asks, and what its run gave."""

    def __init__(self, program: Path, changes: list[str], options: list[str]) -> None:
        self.program, self.changes, self.options = program, changes, options
        self.told, self.pictured = "", False

    def shown(self, what: str, pictures: Path) -> str:
        if what == "source":
            return f"```python\n{self.text().rstrip()}\n```"
        printed = self.printed(pictures)
        if what == "output":
            return f"```\n{printed}\n```"
        if what == "report":
            return f"```\n{printed}\n\nkeepbusy · {self.told.partition(REPORT)[2].rstrip()}\n```"
        return f"![The timeline of {self.name}]({pictures.name}/{self.name}.svg)"

    def printed(self, pictures: Path) -> str:
        """By the program itself. Ranks print beside each other: their lines are put in order here."""
        self.run(pictures)
        return "\n".join(in_order(self.told.partition(REPORT)[0].rstrip().splitlines()))

    @property
    def name(self) -> str:
        return re.sub(r"\W+", "-", "-".join([self.program.stem, *self.changes])).lower()

    @property
    def ranks(self) -> int:
        found = re.search(r"(?m)^RANKS = (\d+)", self.text())
        return int(found[1]) if found else 1

    def text(self) -> str:
        source = self.program.read_text(encoding="utf-8")
        for change in self.changes:
            constant, _, value = change.partition("=")
            source, found = re.subn(rf"(?m)^{constant} = [^#\n]*?(?=  #|$)", f"{constant} = {value}", source)
            if found != 1:
                raise SystemExit(f"{self.program.name} has no constant {constant}")
        return source

    def run(self, pictures: Path) -> None:
        """In a fork, which ends as a program does: the report comes with its end."""
        if self.told:
            return
        place = Path(tempfile.mkdtemp())  # not as a context: the child's end would take it away
        script, kept, told = place / self.program.name, place / "run.busy", place / "told.txt"
        script.write_text(self.text(), encoding="utf-8")
        ranks = ["--ranks", str(self.ranks)] if self.ranks > 1 and "--ranks" not in self.options else []
        command = ["run", *ranks, *self.options, "--save", str(kept), script.name]
        child = os.fork()
        if not child:
            _report(command, told)
        code = os.waitpid(child, 0)[1]
        self.told = told.read_text(encoding="utf-8").replace(f"{place}/", "").replace(" --save run.busy", "")
        if code:
            raise SystemExit(f"{self.program.name} failed:\n{self.told}")
        if self.pictured:
            pictures.mkdir(exist_ok=True)
            (pictures / f"{self.name}.svg").write_text(drawn(keepbusy.load(kept)), encoding="utf-8")
        shutil.rmtree(place)


REPORT = "\nkeepbusy · "


def in_order(lines: list[str]) -> list[str]:
    """Those of rank 0, then those of rank 1; others stay in front."""
    found = {line: re.match(r"rank (\d+)", line) for line in lines}
    return sorted(lines, key=lambda line: int(found[line][1]) if found[line] else -1)  # type: ignore[index]


def _report(command: list[str], told: Path) -> NoReturn:
    from keepbusy.cli import main

    os.chdir(told.parent)
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    with told.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main(command))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", type=Path, default=COURSE)
    parser.add_argument("chapters", nargs="*")
    options = parser.parse_args()
    for chapter in chapters():
        if not options.chapters or chapter.name[0] in options.chapters:
            (options.to / chapter.name).write_text(build(chapter, options.to / "pictures"), encoding="utf-8")


if __name__ == "__main__":
    main()
