"""What the documents say: each command is one that keepbusy takes, each name one that it has, each link leads on.

Whether commands do what stands there is for the tests of those pages: tutorials, course, ci.md, examples.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import pytest

import keepbusy
from keepbusy.cli import _parser

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"(?ms)^```(\w*)\n(.*?)^```$")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)")
VARIABLE = re.compile(r"^\w+=\S+ ")


def commands() -> list[tuple[str, str]]:
    """Lines of a shell that begin with `keepbusy`, of each page, without what stands for something else."""
    found = []
    for page in PAGES:
        for language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
            if language in ("sh", "bash"):
                lines = [VARIABLE.sub("", line) for line in text.replace("\\\n", " ").splitlines()]
                found += [(str(page.relative_to(ROOT)), line) for line in lines if line.startswith("keepbusy ")]
    return found


@pytest.mark.parametrize(("page", "command"), commands())
def test_keepbusy_takes_the_command(page: str, command: str) -> None:
    words = shlex.split(re.split(r" (?:\||>>?) ", command)[0], comments=True)[1:]
    assert _parser(words).parse_args(words), page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"(?s)```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"))
    targets = [target for target in LINK.findall(text) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_of_keepbusy_are_there(page: Path) -> None:
    for language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        parts = re.split(r"(?m)^\.\.\.\n", text) if language == "python" else ()
        for node in [node for part in parts for node in ast.walk(ast.parse(dedent(part)))]:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keepbusy.integrations."):
                assert (ROOT / "src" / f"{node.module.replace('.', '/')}.py").exists()  # its library may not be there
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keepbusy"):
                if ".runtime" in str(node.module):
                    pytest.importorskip("torch.distributed")  # a folder of tests is called torch, too
                assert all(hasattr(import_module(str(node.module)), one.name) for one in node.names)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "keepbusy":
                assert node.attr in keepbusy.__all__, node.attr


def test_tables_say_what_the_sources_say() -> None:
    sys.path.append(str(ROOT / "docs"))
    tables = import_module("tables")
    made = [path for path in (ROOT / "docs").rglob("*.md") if "<!-- table " in path.read_text(encoding="utf-8")]
    assert len(made) == 3
    assert [
        path for path in made if tables.as_written(path.read_text(encoding="utf-8")) != path.read_text("utf-8")
    ] == []
