"""Writes into the chapters what their programs are, print and look like: `make course`. Prose is left alone.

A chapter names a program between two comments, and what stands between them is made anew:

    <!-- source queue -->                        how to run it, and its text
    <!-- output queue -->                        what it prints
    <!-- report half_idle -->                    that, and keepbusy's report
    <!-- picture overlap PINNED=False -->        its timeline, with that constant changed
    <!-- measured chapter -->                    what they all printed here, and on a real H200 (h200.json)

Each chapter's notebook, in the folder of its programs, has the same prose, and each program as a cell of `%%keepbusy`.

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
import socket
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from picture import drawn

import keepbusy
from keepbusy import virtual
from keepbusy.timeline import last_run

COURSE = Path(__file__).resolve().parent
BLOCK = re.compile(r"<!-- (source|output|report|picture|measured) (.*?) -->\n.*?<!-- end -->", re.DOTALL)
COMMAND = re.compile(r"(?m)^keepbusy run (.*?) chapter\d/(\w+)\.py")
"""As the page tells its readers to run them, so they are run here: those that it does not name like the first one. How
many GPUs and ranks a program wants stands in itself."""
REPORT = re.compile(r"\n(?=Data race: |keepbusy · )")
"""Where it begins: behind what the program printed."""
OURS = re.compile(r"(?m)^keepbusy: .*\n")
"""Said on standard error, of a program that has nothing to report: that is not the program's."""
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

    programs = "".join(run.text() for run in runs.values())
    for module in {"keepbusy.cli.run", *virtual.IMPORTED, *re.findall(r"(?m)^from (torch[\w.]+) import", programs)}:
        import_module(module)
    gc.freeze()
    return BLOCK.sub(made, text)


def runs_of(chapter: Path) -> dict[str, Run]:
    """All that the page asks for, by what stands in its comments."""
    folder = COURSE / f"chapter{chapter.name[0]}"
    text = chapter.read_text(encoding="utf-8")
    said = {name: re.sub(r"--(ranks|gpus) \d+", "", options).split() for options, name in COMMAND.findall(text)}
    if not said:
        raise SystemExit(f"{chapter.name} does not say how to run its programs")
    usual = next(iter(said.values()))
    runs = dict[str, Run]()
    for what, asked in BLOCK.findall(text):
        if what != "measured" and asked not in runs:
            name, *changes = asked.split()
            runs[asked] = Run(folder / f"{name}.py", changes, said.get(name, usual))
    return runs


def notebook(chapter: Path) -> str:
    """What a program prints and looks like is not in it: its cell shows that, once somebody runs it."""
    runs, cells, at = runs_of(chapter), [_cell("code", "%load_ext keepbusy")], 0
    text = chapter.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        what, asked = found[1], found[2]
        if what == "source":
            cells += [_cell("markdown", text[at : found.start()]), _cell("code", runs[asked].as_cell())]
            at = found.end()
        elif what == "picture" or (what in ("output", "report") and not runs[asked].changes):
            text = text[: found.start()] + " " * (found.end() - found.start()) + text[found.end() :]
    cells = [one for one in [*cells, _cell("markdown", text[at:])] if one["source"]]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    whole = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _cell(kind: str, text: str) -> dict[str, object]:
    """Of markdown without the comments, and with links that lead out of the folder of the programs."""
    of_code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    if kind == "markdown":
        text = re.sub(r"<!-- .*? -->\n?", "", text)
        text = re.sub(r"\]\((\d-[\w-]+\.md)", r"](../\1", text)
        text = re.sub(r"\n\s*\n", "\n\n", text)
    return {"cell_type": kind, "metadata": {}, **of_code, "source": text.strip()}


def compared(chapter: Path, runs: dict[str, Run], pictures: Path) -> str:
    """A table of what the programs printed here and on a real GPU, and which printed the same."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {"runs": {}}
    rows, same, missing = list[str](), list[str](), list[str]()
    for asked, run in runs.items():
        real = measured["runs"].get(f"{chapter.name[0]} {asked}")
        run.run(pictures)
        virtual = run.printed.splitlines()
        told = f"`{run.program.name}`" + "".join(f", {change.replace('=', ' = ')}" for change in run.changes)
        if real is None:
            missing.append(told)
        elif real == virtual:
            same.append(told)
        else:
            rows += rows_of(told, virtual, real)
    if not rows and not same:
        return "These programs have not been measured on a real H200 yet."
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
        self.printed, self.report, self.pictured = "", "", False

    def shown(self, what: str, pictures: Path) -> str:
        if what == "source":
            command = " ".join(["keepbusy run", *self.asked, f"{self.program.parent.name}/{self.program.name}"])
            return f"`{command}`\n\n```python\n{self.text().rstrip()}\n```"
        self.run(pictures)
        if what == "output":
            return f"```\n{self.printed}\n```"
        if what == "report":
            return f"```\n{self.printed}\n\n{self.report.rstrip()}\n```"
        return f"![The timeline of {self.name}]({pictures.name}/{self.name}.svg)"

    @property
    def name(self) -> str:
        return re.sub(r"\W+", "-", "-".join([self.program.stem, *self.changes])).lower()

    @property
    def asked(self) -> list[str]:
        """What a reader gives `keepbusy run` for it."""
        gpus = ["--gpus", str(self.gpus)] if self.gpus > 1 else []
        return [*self.options, *gpus, *(["--ranks", str(self.ranks)] if self.ranks > 1 else [])]

    @property
    def ranks(self) -> int:
        return self.constant("RANKS")

    @property
    def gpus(self) -> int:
        """In one process."""
        return self.constant("GPUS")

    def constant(self, name: str) -> int:
        found = re.search(rf"(?m)^{name} = (\d+)", self.text())
        return int(found[1]) if found else 1

    def text(self) -> str:
        source = self.program.read_text(encoding="utf-8")
        for change in self.changes:
            constant, _, value = change.partition("=")
            source, found = re.subn(rf"(?m)^{constant} = [^#\n]*?(?=  #|$)", f"{constant} = {value}", source)
            if found != 1:
                raise SystemExit(f"{self.program.name} has no constant {constant}")
        return source

    def as_cell(self) -> str:
        """Run beside the program's data; a cell is no file."""
        text = self.text().rstrip().replace('Path(__file__).with_name("', 'Path("')
        return " ".join(["%%keepbusy", *self.asked]) + f"\n{text}"

    def run(self, pictures: Path) -> None:
        """Each rank in a fork, which ends as a program does: the report comes with its end, on the first of them."""
        if self.printed:
            return
        place = Path(tempfile.mkdtemp())  # not as a context: the child's end would take it away
        script = place / self.program.name
        script.write_text(self.text(), encoding="utf-8")
        for data in self.program.parent.glob("*.json"):
            shutil.copy(data, place)
        command = ["run", *self.options, "--gpus", str(self.gpus), script.name]
        told = [place / f"rank{rank}.txt" for rank in range(self.ranks)]
        children = []
        for out, variables in zip(told, variables_of(self.ranks), strict=True):
            children.append(os.fork())
            if not children[-1]:
                _report(command, out, variables)
        codes = [os.waitpid(child, 0)[1] for child in children]
        texts = [OURS.sub("", out.read_text(encoding="utf-8").replace(f"{place}/", "")) for out in told]
        if any(codes):
            raise SystemExit("\n".join([f"{self.program.name} failed:", *texts]))
        self.printed = "\n".join(filter(None, (REPORT.split(text, maxsplit=1)[0].rstrip() for text in texts)))
        self.report = "".join(REPORT.split(texts[0], maxsplit=1)[1:])
        if self.pictured:
            pictures.mkdir(exist_ok=True)
            (pictures / f"{self.name}.svg").write_text(drawn(keepbusy.load(last_run.path())), encoding="utf-8")
        shutil.rmtree(place)


def variables_of(ranks: int) -> list[dict[str, str]]:
    """What torchrun tells each rank of a run, in its environment."""
    if ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    size = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **size, **meeting} for rank in range(ranks)]


def _report(command: list[str], told: Path, variables: dict[str, str]) -> NoReturn:
    from keepbusy.cli import main

    os.chdir(told.parent)
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", **variables}
    with told.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main(command))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", type=Path, default=COURSE)
    parser.add_argument("chapters", nargs="*")
    options = parser.parse_args()
    cache = tempfile.mkdtemp()  # not as a context: the end of a fork would take it away
    os.environ["XDG_CACHE_HOME"] = cache
    for chapter in chapters():
        if not options.chapters or chapter.name[0] in options.chapters:
            (options.to / chapter.name).write_text(build(chapter, options.to / "pictures"), encoding="utf-8")
            kept = options.to / f"chapter{chapter.name[0]}" / f"chapter{chapter.name[0]}.ipynb"
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(notebook(chapter), encoding="utf-8")
    shutil.rmtree(cache)


if __name__ == "__main__":
    main()
