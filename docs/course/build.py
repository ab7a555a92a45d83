"""Writes into the chapters what their programs are, print and look like: `make course`. Prose is left alone.

A chapter names a program between two comments, and what stands between them is made anew:

    <!-- source queue -->                        its text
    <!-- output queue -->                        what it prints
    <!-- report half_idle -->                    that, and keepbusy's report
    <!-- picture overlap PINNED=False -->        its timeline, with that constant changed

One process imports PyTorch; each program runs in a fork of it.
"""

from __future__ import annotations

import gc
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
BLOCK = re.compile(r"<!-- (source|output|report|picture) (.*?) -->\n.*?<!-- end -->", re.DOTALL)
NEEDED = ("keepbusy.cli.run", "keepbusy.virtual.bring_up", "keepbusy.virtual.virtual_run", "sympy", "torch._dynamo")
"""What every fork would import."""
OPTIONS = ["--clock", "modelled", "--values", "none"]


def chapters() -> list[Path]:
    return sorted(COURSE.glob("[1-6]-*.md"))


def build(chapter: Path, pictures: Path) -> str:
    """The chapter's text as its programs make it; pictures are written into that folder."""
    folder = COURSE / f"chapter{chapter.name[0]}"
    text, runs = chapter.read_text(encoding="utf-8"), dict[str, Run]()
    for what, asked in BLOCK.findall(text):
        run = runs.setdefault(asked, Run(folder / f"{asked.split()[0]}.py", asked.split()[1:]))
        run.pictured |= what == "picture"

    def made(found: re.Match[str]) -> str:
        what, asked = found[1], found[2]
        return f"<!-- {what} {asked} -->\n{runs[asked].shown(what, pictures)}\n<!-- end -->"

    for module in NEEDED:
        import_module(module)
    gc.freeze()
    return BLOCK.sub(made, text)


class Run:
    """A program, perhaps with constants changed as an experiment asks, and what its run gave."""

    def __init__(self, program: Path, changes: list[str]) -> None:
        self.program, self.changes = program, changes
        self.told, self.pictured = "", False

    def shown(self, what: str, pictures: Path) -> str:
        if what == "source":
            return f"```python\n{self.text().rstrip()}\n```"
        self.run(pictures)
        printed, _, report = self.told.partition("\nkeepbusy · ")
        if what == "output":
            return f"```\n{printed.rstrip()}\n```"
        if what == "report":
            return f"```\n{printed.rstrip()}\n\nkeepbusy · {report.rstrip()}\n```"
        return f"![The timeline of {self.name}]({pictures.name}/{self.name}.svg)"

    @property
    def name(self) -> str:
        return re.sub(r"\W+", "-", "-".join([self.program.stem, *self.changes])).lower()

    def text(self) -> str:
        source = self.program.read_text(encoding="utf-8")
        for change in self.changes:
            constant, _, value = change.partition("=")
            source, found = re.subn(rf"(?m)^{constant} = .*$", f"{constant} = {value}", source)
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
        ranks = re.search(r"(?m)^RANKS = (\d+)", self.text())
        command = ["run", *(["--ranks", ranks[1]] if ranks else []), *OPTIONS, "--save", str(kept), script.name]
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


def _report(command: list[str], told: Path) -> NoReturn:
    from keepbusy.cli import main

    os.chdir(told.parent)
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    with told.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main(command))


def main() -> None:
    for chapter in chapters():
        chapter.write_text(build(chapter, COURSE / "pictures"), encoding="utf-8")


if __name__ == "__main__":
    main()
