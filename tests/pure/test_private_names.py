"""Private names of PyTorch and CPython stand in `torch_names` alone, so that a new release is mended there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "keepbusy"
ROOM = SOURCES / "torch_names"
OTHERS = {str(path.relative_to(SOURCES)): path for path in sorted(SOURCES.rglob("*.py")) if ROOM not in path.parents}
REGISTERING = {"register", "look_up", "later", "cuda_only", "place", "attribute", "reader", "in_source"}

# Exceptions. These lists may only shrink.
ANYWHERE = {
    # read at each replay or operator, where a call more would cost; torch_names has probes of them
    *("_version", "_cdata", "_sequence_nr"),
    # documented, or of the standard library's named tuples
    *("_exit", "_getframe", "_current_frames", "_replace", "_asdict", "_thread"),
    *("_indices", "_values"),  # of sparse tensors: methods that are named as their operators
    *("_modules", "_parameters"),  # what every module of PyTorch keeps its parts in; torch_names has probes of them
}
IN_FILE = {
    # the names that the virtual GPU answers to: it sets them, and asks for none
    ("virtual/pytorch/cuda_api.py", "_C"),
    ("virtual/pytorch/cuda_api.py", "_cuda_getCurrentStream"),
    ("virtual/pytorch/cuda_api.py", "_broadcast_coalesced"),
    ("virtual/pytorch/cuda_api.py", "_lazy_call"),
    ("virtual/pytorch/cuda_api.py", "_show_config"),
    ("virtual/pytorch/operators.py", "_foreach_copy_"),  # an operator, by its name
    # ours, and in another file of its room
    ("virtual/clock/engine.py", "_dispatch"),
    ("virtual/clock/engine.py", "_ended_threads"),
    ("__init__.py", "_repr_html_"),  # what notebooks call
    ("virtual/pytorch/tensor_types.py", "_dynamo"),  # imported to have been: nothing of it is used
    ("log/log_timeline.py", "_run_module_as_main"),  # the name of a frame, as stacks of any Python have it
}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _strings(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def _registered() -> set[str]:
    """The private names, without the modules that they are in."""
    found = set[str]()
    for path in ROOM.glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in REGISTERING:
                paths, names = ([*_strings(given)] for given in call.args[:2])
                names += [text.rpartition(":")[2] for text in paths if ":" in text or text.startswith(".")]
                found |= {part for name in names for part in name.split(".") if _is_private(part)}
    return found - {"_C"}


def _own_names(tree: ast.Module) -> set[str]:
    """What the file itself defines."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            found.update(_strings(node.value))
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_ours = isinstance(node, ast.Name) or (
                isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            )
            found |= {node.id if isinstance(node, ast.Name) else node.attr} if is_ours else set()
    return found


def private_names(source: str, registered: set[str]) -> Iterator[tuple[int, str]]:
    """Where a source uses a private name of others, and which."""
    tree = ast.parse(source)
    own = _own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            paths = [f"{module}.{alias.name}" for alias in node.names if not module.startswith("keepbusy")]
            yield from ((node.lineno, part) for path in paths for part in path.split(".") if _is_private(part))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            owner = ast.unparse(node.value)
            is_operator = owner in ("_aten", "torch.ops.aten", "torch.ops.mkldnn")  # named as schemas are
            if not is_operator and (node.attr not in own or owner.startswith("torch")):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and node.value in registered:
            yield node.lineno, str(node.value)


@pytest.mark.parametrize("name", OTHERS)
def test_private_names_of_others_stand_in_their_room(name: str) -> None:
    found = private_names(OTHERS[name].read_text(encoding="utf-8"), _REGISTERED)
    assert [(line, used) for line, used in found if used not in ANYWHERE and (name, used) not in IN_FILE] == []


_REGISTERED = _registered()


@pytest.mark.parametrize(
    ("source", "used"),
    [
        ("from torch.utils._pytree import tree_map", ["_pytree"]),
        ("import torch._dynamo", ["_dynamo"]),
        ("x = tensor._base", ["_base"]),
        ("class A:\n    def f(self):\n        self._x = 1\n        return self._x", []),
        ("_C = 1\nx = torch._C.Generator", ["_C"]),
        ("getattr(loader, '_send_idx')", ["_send_idx"]),
        ("x = torch.ops.aten._softmax.default", []),
        ("from keepbusy.program import _a", []),
    ],
)
def test_the_law_itself(source: str, used: list[str]) -> None:
    assert [name for _, name in private_names(source, _REGISTERED)] == used


def test_no_exception_outlives_its_use() -> None:
    found = {
        (name, used)
        for name, path in OTHERS.items()
        for _, used in private_names(path.read_text(encoding="utf-8"), _REGISTERED)
    }
    assert found >= IN_FILE
    assert {used for _, used in found} >= ANYWHERE
