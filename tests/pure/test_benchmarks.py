"""What the benchmarks take from the package is there: no test runs most of them, for they need a GPU."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "benchmarks").rglob("*.py"))}


def asked_for(tree: ast.AST) -> Iterator[str]:
    """Dotted names of ours: imports, attributes of imported modules, and the same in text that is a program."""
    modules = defaultdict[str, set[str]](set)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name
                top = name.name.partition(".")[0]
                modules[name.asname or top].add(name.name if name.asname else top)
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                yield f"{node.module}.{name.name}"
                modules[name.asname or name.name].add(f"{node.module}.{name.name}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "keepbusy" in node.value:
            with suppress(SyntaxError, ValueError):
                yield from asked_for(ast.parse(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, dot, rest = ast.unparse(node.value).partition(".")
            held = [module for one in modules[first] if module_file(module := one + dot + rest) is not None]
            if len(held) == 1:  # two functions may each call theirs by this name
                yield f"{held[0]}.{node.attr}"


def module_file(name: str) -> Path | None:
    """Of a module of ours."""
    path = ROOT / "src" / name.replace(".", "/")
    files = (path / "__init__.py", path.with_name(f"{path.name}.py")) if name.partition(".")[0] == "keepbusy" else ()
    return next((one for one in files if one.is_file()), None)


@cache
def names_in(path: Path) -> frozenset[str]:
    """At the top of a file, also under `if`; of the package, whose names come when they are asked for, `__all__`."""
    found = set[str]()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        for one in ast.walk(node) if isinstance(node, ast.If | ast.Try) else [node]:
            match one:
                case ast.FunctionDef() | ast.ClassDef():
                    found.add(one.name)
                case ast.Import() | ast.ImportFrom():
                    found |= {name.asname or name.name for name in one.names}
                case ast.Assign() | ast.AnnAssign():
                    found |= {name.id for name in ast.walk(one) if isinstance(name, ast.Name)}
    if "__all__" in found:
        found |= {one.value for one in ast.walk(tree) if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return frozenset(found)


def is_there(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    if module_file(name) is not None:
        return True
    path = module_file(module)
    return path is not None and (attribute in names_in(path) or attribute.startswith("__"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_benchmark_takes_from_the_package_is_there(script: str) -> None:
    names = set(asked_for(ast.parse(SCRIPTS[script].read_text(encoding="utf-8"))))
    assert {name for name in names if name.partition(".")[0] == "keepbusy" and not is_there(name)} == set()


@pytest.mark.parametrize(
    ("program", "missing"),
    [
        ("from keepbusy.timeline.replay import replay", set()),
        ("from keepbusy.timeline.replay import rewind", {"keepbusy.timeline.replay.rewind"}),
        ("import keepbusy\nkeepbusy.readback", set()),
        ("import keepbusy\nkeepbusy.nonsense", {"keepbusy.nonsense"}),
        ("import keepbusy.cli.nowhere as module", {"keepbusy.cli.nowhere"}),
        ("TEXT = 'from keepbusy import nonsense'", {"keepbusy.nonsense"}),
    ],
)
def test_what_is_not_there_is_found(program: str, missing: set[str]) -> None:
    assert {name for name in asked_for(ast.parse(program)) if not is_there(name)} == missing
