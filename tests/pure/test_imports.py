"""The rooms: who may import whom, and what does not belong here. The design's table, enforced."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "keepbusy"
FILES = sorted(SOURCES.rglob("*.py"))
MODULES = {str(path.relative_to(SOURCES)): path for path in FILES}

# a room's own modules, the rooms it may import, and the packages from outside that it may use
ROOMS = {
    "timeline": (set(), {"numpy"}),
    "traces": ({"timeline"}, {"numpy", "msgspec", "isal"}),
    "torch_names": (set(), {"torch"}),
    "program": ({"timeline", "torch_names"}, {"numpy", "torch"}),
    "log": ({"timeline", "program", "traces.kineto_names", "torch_names"}, {"numpy", "torch"}),
    "virtual": ({"timeline", "program", "torch_names"}, {"numpy", "torch"}),
    "causes": ({"timeline"}, {"numpy"}),
    "fixes": ({"timeline", "causes"}, {"numpy", "libcst"}),
    "explain": ({"timeline", "causes", "fixes"}, {"numpy"}),
    "hang": (
        {"timeline.files", "timeline.figures", "timeline.frame_roles", "report.labels", "torch_names.cpython"},
        set(),
    ),
    "report": (
        {"timeline", "causes", "fixes.BY_NAME", "fixes.source.rewriting", "explain.diagnosis", "explain.comparison"},
        {"numpy", "rich"},
    ),
    "fix": (
        {
            *("program", "runtime", "timeline", "causes", "fixes", "explain", "torch_names"),
            *("report.source", "report.exports", "report.race_words"),
        },
        {"torch", "numpy"},
    ),
    "runtime": ({"timeline.files", "torch_names"}, {"torch"}),
    "integrations": (
        {
            *(
                "timeline",
                "program.processes",
                "program.ENDED",
                "log.program_log",
                "log.logged_run",
                "traces.trace_file",
            ),
            *("virtual.virtual_run", "causes", "explain.diagnosis", "report"),
        },
        {"torch", "transformers", "lightning", "pytorch_lightning", "accelerate", "wandb", "mlflow", "IPython", "ray"},
    ),
    "cli": (
        {
            *(
                "timeline",
                "program",
                "traces",
                "log",
                "virtual",
                "causes",
                "fixes",
                "explain",
                "report",
                "fix",
                "hang",
            ),
            *("runtime", "integrations.ray", "torch_names", "cli"),
        },
        {"rich", "torch"},
    ),
}
FORBIDDEN_NAMES = {"utils", "util", "common", "core", "helpers", "helper", "misc"}
FORBIDDEN_CLASSES = ("Manager", "Handler", "Analyzer")


class Parsed(NamedTuple):
    """What the tests here ask of a file: parsed once, for that is most of what they take."""

    imports: list[ast.Import | ast.ImportFrom]
    at_import: list[ast.ImportFrom]  # of these, what is neither inside functions nor for the type checker alone
    classes: list[ast.ClassDef]
    functions: list[ast.FunctionDef]


@cache
def parsed(path: Path) -> Parsed:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    found = Parsed([], top, [], [])
    for node in list(ast.walk(tree)):
        for kinds, these in (
            ((ast.Import, ast.ImportFrom), found.imports),
            (ast.ClassDef, found.classes),
            (ast.FunctionDef, found.functions),
        ):
            if isinstance(node, kinds):
                these.append(node)
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            node.body = []  # it is not asked for again
    return found


def imports_of(path: Path) -> Iterator[str]:
    """Every module that the file imports, wherever in it."""
    for node in parsed(path).imports:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the room they come from"
            yield node.module or ""
            yield from (f"{node.module}.{name.name}" for name in node.names if node.module in _ROOM_PACKAGES)


_ROOM_PACKAGES = {"keepbusy", *(f"keepbusy.{room}" for room in ROOMS)}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCES).parts[0].removesuffix(".py")


def may_import(room: str, module: str) -> bool:
    rooms, outside = ROOMS[room]
    top, _, rest = module.partition(".")
    if top != "keepbusy":
        return top in outside or top in sys.stdlib_module_names
    if module in ("keepbusy", f"keepbusy.{room}") or module == "keepbusy.__version__":
        return True
    # `from keepbusy.explain import diagnosis` names the package on its way to the module
    on_the_way = any(one.startswith(f"{rest}.") for one in rooms)
    return rest.startswith(f"{room}.") or on_the_way or any(rest == one or rest.startswith(f"{one}.") for one in rooms)


@pytest.mark.parametrize("name", [name for name in MODULES if room_of(MODULES[name]) in ROOMS])
def test_every_room_imports_only_what_the_table_allows(name: str) -> None:
    path = MODULES[name]
    assert [module for module in imports_of(path) if not may_import(room_of(path), module)] == []


def test_every_folder_is_a_room() -> None:
    assert {path.name for path in SOURCES.iterdir() if path.is_dir() and path.name != "__pycache__"} <= set(ROOMS)


@pytest.mark.parametrize(
    ("room", "module", "allowed"),
    [
        ("timeline", "keepbusy.explain", False),
        ("report", "keepbusy.explain.diagnosis", True),
        ("report", "keepbusy.explain.gaps", False),
        ("report", "keepbusy.traces", False),
        ("log", "keepbusy.virtual", False),
        ("explain", "rich", False),
        ("cli", "keepbusy.traces", True),
        ("runtime", "keepbusy.timeline.model", False),
        ("runtime", "keepbusy.timeline.files", True),
    ],
)
def test_the_table_itself(room: str, module: str, allowed: bool) -> None:
    assert may_import(room, module) is allowed


def test_there_is_no_import_cycle() -> None:
    edges = {_module(path): set(_at_import(path)) for path in FILES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for other in edges.get(module, ()):
                visit(other, (*path, module))
            done.add(module)

    for module in edges:
        visit(module, ())


MOST_FILES = 12
"""In a folder, besides __init__."""
LINES = {
    "hang": 684,
    "timeline": 3286,
    "traces": 2361,
    "program": 3371,
    "torch_names": 687,
    "log": 3243,
    "virtual": 10061,
    "causes": 1621,
    "fixes": 5832,
    "explain": 2533,
    "report": 3300,
    "runtime": 8241,
    "cli": 3937,
    "fix": 1558,
}
"""What a room may weigh. A number goes down with its room; it goes up only with a capability that is worth it."""


def _classes() -> list[ast.ClassDef]:
    return [node for path in FILES for node in parsed(path).classes]


def test_a_folder_holds_few_files() -> None:
    held = Counter(str(path.parent.relative_to(SOURCES)) for path in FILES if path.name != "__init__.py")
    assert {name: files for name, files in held.items() if files > MOST_FILES} == {}


def test_no_class_and_no_module_has_the_name_of_another() -> None:
    classes = Counter(node.name for node in _classes())
    modules = Counter(path.stem for path in FILES if path.name != "__init__.py")
    assert {name for names in (classes, modules) for name, times in names.items() if times > 1} == set()


def test_no_class_of_ours_inherits_from_one_that_inherits() -> None:
    bases = {
        node.name: {part.id for base in node.bases for part in ast.walk(base) if isinstance(part, ast.Name)}
        for node in _classes()
    }
    chains = {
        (name, base, further)
        for name, direct in bases.items()
        for base in direct & bases.keys() - {name}
        for further in bases[base] & bases.keys() - {base}
    }
    assert chains == set()


def test_the_house_does_not_grow() -> None:
    lines = Counter[str]()
    for path in FILES:
        lines[room_of(path)] += len(path.read_text(encoding="utf-8").splitlines())
    assert {room: held for room, held in lines.items() if room in LINES and held > LINES[room]} == {}


def _module(path: Path) -> str:
    parts = ("keepbusy", *path.relative_to(SOURCES).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {_module(path) for path in FILES}


def _at_import(path: Path) -> Iterator[str]:
    """Modules of ours imported when the file is: not inside functions, nor for the type checker alone."""
    for node in parsed(path).at_import:
        named = [f"{node.module}.{name.name}" for name in node.names]
        yield from {one if one in NAMES else str(node.module) for one in named} & NAMES - {_module(path)}


@pytest.mark.parametrize("module", ["torch", "rich", "numpy", "msgspec"])
def test_importing_the_package_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, keepbusy; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_explaining_needs_no_pytorch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import keepbusy.cli, keepbusy.traces, keepbusy.explain; "
        "import keepbusy.report.terminal, keepbusy.fix.gate.tally"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "name", ["prefetch", "readback", "graph", "accumulate", "agree", "save_later", "spread", "guard"]
)
def test_what_needs_pytorch_says_so_in_one_sentence(name: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import keepbusy\n"
        f"try: keepbusy.{name}\n"
        "except ImportError as error: print(type(error).__name__, error, error.__suppress_context__)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert finished.stdout == (
        f"ImportError keepbusy.{name} needs PyTorch, which {sys.executable} does not have; install it with "
        f"`{sys.executable} -m pip install 'torch>=2.9'`. True\n"
    )


def test_public_names_are_few_and_resolve() -> None:
    pytest.importorskip("torch.distributed")  # a folder of tests is called torch, too
    import keepbusy

    assert len(keepbusy.__all__) <= 18
    assert [name for name in keepbusy.__all__ if not hasattr(keepbusy, name)] == []
    with pytest.raises(AttributeError, match="nonsense"):
        keepbusy.nonsense  # noqa: B018


@pytest.mark.parametrize("first", ["keepbusy.explain.diagnosis", "keepbusy.report.terminal", "keepbusy.cli"])
def test_the_verb_explain_works_whatever_was_imported_before(first: str) -> None:
    """`keepbusy.explain` is a room and a verb: importing the room must not hide the verb."""
    code = f"import sys, {first}, keepbusy; sys.exit(not callable(keepbusy.explain))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_nothing_is_named_after_a_drawer() -> None:
    parts = {part.removesuffix(".py") for path in FILES for part in path.relative_to(SOURCES).parts}
    assert parts & FORBIDDEN_NAMES == set()
    assert [node.name for node in _classes() if node.name.endswith(FORBIDDEN_CLASSES)] == []


@pytest.mark.parametrize("name", MODULES)
def test_no_function_is_left_without_types(name: str) -> None:
    for node in parsed(MODULES[name]).functions:
        given = [one for one in (*node.args.args, *node.args.kwonlyargs) if one.arg not in ("self", "cls")]
        assert node.returns is not None, f"{name}:{node.lineno} {node.name}"
        assert all(one.annotation for one in given), f"{name}:{node.lineno} {node.name}"


def test_a_recorder_imports_pytorch_no_sooner_than_the_program_does() -> None:
    code = "import sys; sys.modules['torch'] = None; import keepbusy.log.program_log"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
