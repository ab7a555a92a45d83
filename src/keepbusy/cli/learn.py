"""Read the course: how GPUs work and wait, in six chapters of programs that run on a machine without one."""

from __future__ import annotations

import argparse
import io
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from keepbusy.cli import Screen, screen
from keepbusy.timeline.files import BadInput

EXAMPLES = """\
examples:
  keepbusy learn                    the chapters
  keepbusy learn 1 | less -R        the first one, here
  keepbusy learn 1 --copy .         and its programs, into a folder chapter1
"""
PACKAGE = Path(__file__).resolve().parents[1]
PLACES = (PACKAGE / "course", PACKAGE.parents[1] / "docs" / "course")
"""The course in a wheel, and in a checkout."""
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
PICTURE = re.compile(r"!\[(.*?)\]\((.*?)\)")
INNER_LINK = re.compile(r"\[([^\]]*)\]\((?:\d-[\w-]+\.md)?#[\w-]*\)")
"""A link to a place within a chapter, which a terminal cannot follow."""
PROGRAM = re.compile(r"(?ms)^```(\w*)\n(.*?)^```$")
DETAILS_TAG = re.compile(r"</?details>|<summary>(.*?)</summary>")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("chapter", nargs="?", type=int, metavar="CHAPTER", help="its number; without it: the list")
    parser.add_argument("--copy", metavar="FOLDER", type=Path, help="copy the chapter's programs there")


def run(options: argparse.Namespace) -> Iterable[str]:
    course = next((place for place in PLACES if place.is_dir()), None)
    if course is None:
        raise BadInput("the course is not part of this installation; it stands in docs/course of the sources.")
    chapters = {int(page.name[0]): page for page in sorted(course.glob("[0-9]-*.md"))}
    if options.chapter is None:
        if options.copy:
            raise BadInput("--copy needs the number of a chapter: keepbusy learn 1 --copy .")
        titles = [page.read_text(encoding="utf-8").partition("\n")[0] for page in chapters.values()]
        return [
            *(f"{title.removeprefix('# ')}\n" for title in titles),
            "\nkeepbusy learn 1             reads it here\nkeepbusy learn 1 --copy .    copies its programs\n",
        ]
    page = chapters.get(options.chapter)
    if page is None:
        raise BadInput(f"there is no chapter {options.chapter}; there are {', '.join(map(str, chapters))}.")
    if options.copy:
        return _copied(course / f"chapter{options.chapter}", options.copy)
    return [shown(page, screen())]


def _copied(programs: Path, folder: Path) -> Iterator[str]:
    target = folder / programs.name
    if target.exists():
        raise BadInput(f"{target} is there already; nothing was copied.")
    try:
        shutil.copytree(programs, target, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise BadInput(f"{target}: {error.strerror or error}.") from None
    number = programs.name.removeprefix("chapter")
    yield f"{len(list(target.glob('*.py')))} programs in {target}; `keepbusy learn {number}` says how to run them\n"


def shown(page: Path, where: Screen) -> str:
    """A page for the terminal: without comments, with answers open, and with the paths of pictures. Lines of programs
    are not broken, so that they can be copied."""
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.syntax import Syntax

    text = COMMENT.sub("", page.read_text(encoding="utf-8"))
    text = PICTURE.sub(lambda match: f"*{match[1]}:* `{page.parent / match[2]}`", text)
    text = INNER_LINK.sub(r"\1", text)
    text = DETAILS_TAG.sub(lambda match: f"**{match[1]}.**" if match[1] else "", text)
    out = io.StringIO()
    colour = {"force_terminal": True, "color_system": "truecolor"} if where.colour else {"color_system": None}
    console = Console(file=out, width=where.width, **colour)
    prose, *programs = PROGRAM.split(text)
    console.print(Markdown(prose, hyperlinks=False))
    for language, program, after in zip(programs[::3], programs[1::3], programs[2::3], strict=True):
        console.print("", Syntax("", language).highlight(program), sep="\n", soft_wrap=True)
        console.print(Markdown(after, hyperlinks=False))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
