"""The program's own source: the line that a place speaks of, and the line to write for a cause, if the file is there.

A profiler's trace knows the function, not the line. Where that function calls what was seen in one line only, that line
is offered as the likely one, and said to be no more than that. What is to be written is a suggestion for a person to
read, as general as the remedy is wherever it does not fit what stands there: no file is changed here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

from keepbusy.causes.places import Where
from keepbusy.explain.diagnosis import Cause
from keepbusy.report.words import tame

_LARGEST = 4_000_000
_MOVES = {"to", "cuda", "cpu", "copy_"}
_CALLS = {
    "item": {"item", "tolist", "float", "int", "bool"},
    "_local_scalar_dense": {"item", "tolist", "float", "int", "bool"},
    "to": _MOVES,
    "_to_copy": _MOVES,
    "copy_": _MOVES,
    "cudaDeviceSynchronize": {"synchronize"},
    "cudaStreamSynchronize": {"synchronize"},
    "cudaEventSynchronize": {"synchronize"},
}
"""What a program may have written where the trace shows this operator; of others, their own name."""
_BUILTIN = re.compile(r"<built-in (?:function|method) (\w+)")
_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Source(NamedTuple):
    """A line of the program."""

    line: int
    text: str
    likely: bool  # found by reading the function, not recorded


def source_of(where: Where) -> Source | None:
    """The line itself, or none. A trace may name any file: only Python sources are opened."""
    text = text_of(where)
    line = where.line if where.exact else _likely_line(text, where)
    lines = text.splitlines()
    shown = tame(lines[line - 1].strip()) if 0 < line <= len(lines) else ""
    return Source(line, shown, not where.exact) if shown else None


def text_of(where: Where) -> str:
    """The whole file, if it is there and a Python source."""
    try:
        path = Path(where.file)
        fits = path.suffix == ".py" and path.is_file() and path.stat().st_size <= _LARGEST
        return path.read_text(encoding="utf-8", errors="replace") if fits else ""
    except (OSError, ValueError):
        return ""


def _likely_line(text: str, where: Where) -> int:
    """The only line of the function that may call the operator, or 0."""
    try:
        function = function_at(ast.parse(text), where, where.line)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0
    if function is None:
        return 0
    found = _lines_calling(_loop_around(function, where.line) or function, where.operator)
    return found.pop() if len(found) == 1 else 0


def _loop_around(function: ast.AST, line: int) -> ast.AST | None:
    """A function that was running when recording began is known by the line it stood at: what recurs is in its loop."""
    loops = [node for node in without_inner_functions(function) if isinstance(node, ast.For | ast.While)]
    around = [loop for loop in loops if loop.lineno <= line <= (loop.end_lineno or 0)]
    return max(around, key=lambda loop: loop.lineno, default=None)


def _lines_calling(node: ast.AST, operator: str) -> set[int]:
    if operator.startswith("enumerate(DataLoader)"):
        inside = (node, *without_inner_functions(node))
        return {one.lineno for one in inside if isinstance(one, ast.For) and not _counts(one)}
    builtin = _BUILTIN.match(operator)
    name = builtin[1] if builtin else operator.rpartition("::")[2]
    calls = [
        one
        for one in without_inner_functions(node)
        if isinstance(one, ast.Call) and _name_of(one) in _CALLS.get(name, {name})
    ]
    return {call.end_lineno or 0 for call in calls}


def _counts(loop: ast.For) -> bool:
    return isinstance(loop.iter, ast.Call) and _name_of(loop.iter) == "range"


def function_at(tree: ast.Module, where: Where, line: int) -> _Function | ast.Module | None:
    """The innermost function of that name around that line; none where the file is another one by now."""
    if where.function == "<module>":
        return tree
    name = where.function.rpartition(".")[2]
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, _Function) and node.name == name and _first_line(node) <= line <= (node.end_lineno or 0)
    ]
    return max(around, key=_first_line, default=None)


def _first_line(function: _Function) -> int:
    """A decorated function begins with its decorators, for Python as for us."""
    return min([function.lineno, *(one.lineno for one in function.decorator_list)])


def without_inner_functions(node: ast.AST) -> Iterator[ast.AST]:
    """What stands in it, without the functions defined inside it: they have frames of their own."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from without_inner_functions(child)


def _name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _options(call: ast.Call) -> dict[str | None, str]:
    return {one.arg: ast.unparse(one.value) for one in call.keywords}


# the line to write

_READERS = {"item", "tolist", "cpu", "numpy"}
_PRINTS = {"float", "int", "bool", "print"}
_MOVES_IN = {"to", "cuda"}
_TENSORS = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)
_LONGEST = 160
_MAKERS = re.compile(r"torch\.(arange|empty|eye|full|linspace|normal|ones|rand|randint|randn|randperm|tensor|zeros)")
"""What makes a tensor of nothing but its arguments, and takes a device."""


def fix_line(cause: Cause) -> str:
    """One line, made safe to print; empty where no line can be given."""
    return tame(_in_their_words(cause) or cause.remedy)


def _in_their_words(cause: Cause) -> str:
    source = source_of(cause.where)
    if source is None:
        return ""
    try:
        tree = ast.parse(text_of(cause.where))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    function = function_at(tree, cause.where, source.line) or tree
    standing = [node for node in without_inner_functions(function) if _stands_at(node, source.line)]
    written = ""
    if cause.cause == "made_on_host":
        written = _on_the_device(standing)
    elif cause.api == "keepbusy.readback":
        written = _readback(standing, cause)
    elif cause.api == "keepbusy.prefetch":
        written = _prefetch(function, standing, source.line)
    elif cause.api == "torch.utils.data.DataLoader":
        written = _more_workers(tree, function, source.line, cause.remedy)
    return written if len(written) <= _LONGEST else ""


def _stands_at(node: ast.AST, line: int) -> bool:
    first = getattr(node, "lineno", 0)
    return bool(first <= line <= (getattr(node, "end_lineno", 0) or 0))


def _calls(standing: list[ast.AST]) -> list[ast.Call]:
    return [one for one in standing if isinstance(one, ast.Call)]


def _loops_at(function: ast.AST, line: int) -> list[ast.For]:
    return [one for one in without_inner_functions(function) if isinstance(one, ast.For) and _stands_at(one, line)]


def _names_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _readback(standing: list[ast.AST], cause: Cause) -> str:
    """Of `loss.item()`, `float(loss)` or `print(loss)` the tensor that is read."""
    calls = _calls(standing)
    asked = [read for one in calls if not one.args and (read := _receiver(one, _READERS))]
    given = [one.args[0] for one in calls if _name_of(one) in _PRINTS and len(one.args) == 1]
    tensors = [*asked, *(one for one in given if isinstance(one, _TENSORS) and not _is_number(one))]
    if not tensors:
        return ""
    tensor = ast.unparse(tensors[0])
    if cause.fix == "print_copy":
        return (
            f"copy = keepbusy.readback({tensor})  # print(copy.tensor) later; or, with one wait: print({tensor}.cpu())"
        )
    if cause.cause == "blocking_copy":
        return f"copy = keepbusy.readback({tensor})  # copy.tensor once the next step is launched"
    tests = [node.test for node in standing if isinstance(node, ast.If | ast.While)]
    decides = any(tensors[0] in ast.walk(test) for test in tests)
    later = "decide by it" if decides else "read it"
    return f"value = keepbusy.readback({tensor})  # {later} once the next step is launched: float(value)"


def _is_number(node: ast.expr) -> bool:
    """Whether it is read already, as in `print(float(loss))`."""
    return isinstance(node, ast.Call) and _name_of(node) in _PRINTS | _READERS


def _prefetch(function: ast.AST, standing: list[ast.AST], line: int) -> str:
    """The innermost loop around the copy that goes over something else than numbers, if what is copied comes of it."""
    copied = set[str]().union(*map(_names_in, _calls(standing)))
    for loop in sorted(_loops_at(function, line), key=lambda node: -node.lineno):
        if not _counts(loop) and (_names_in(loop.target) & copied or loop.lineno == line):
            return _over_prefetched(loop)
    moved = next((ast.unparse(one) for call in standing if (one := _receiver(call, _MOVES_IN))), "")
    return f'{moved}.pin_memory().to("cuda", non_blocking=True)  # pinned a step ahead' if moved else ""


def _over_prefetched(loop: ast.For) -> str:
    over, target = loop.iter, ast.unparse(loop.target)
    if isinstance(loop.target, ast.Tuple):  # `x, y`, as a loop writes it
        target = ", ".join(map(ast.unparse, loop.target.elts))
    if isinstance(over, ast.Call) and _name_of(over) == "enumerate" and over.args:
        return f"for {target} in enumerate(keepbusy.prefetch({ast.unparse(over.args[0])})):"
    return f"for {target} in keepbusy.prefetch({ast.unparse(over)}):"


def _more_workers(tree: ast.AST, function: ast.AST, line: int, remedy: str) -> str:
    """The call that makes the loop's loader, with the workers that the remedy wants."""
    wanted = re.search(r"num_workers=(\d+|min\(.*?\)\)|[^,]+)", remedy)
    names = set[str]().union(*(_names_in(loop.iter) for loop in _loops_at(function, line)))
    assigned = [one for one in ast.walk(tree) if isinstance(one, ast.Assign)]
    made = [(one, one.value) for one in assigned if isinstance(one.value, ast.Call)]
    made = [(one, call) for one, call in made if _name_of(call) == "DataLoader" or "num_workers" in _options(call)]
    made = [(one, call) for one, call in made if names & set[str]().union(*map(_names_in, one.targets))] or made
    if len(made) != 1 or not wanted:
        return ""
    [(assignment, call)] = made
    today = _options(call).get("num_workers", "0")
    kept = [*map(ast.unparse, call.args)]
    kept += [ast.unparse(one) for one in call.keywords if one.arg not in ("num_workers", "persistent_workers")]
    workers = wanted[1].replace("today", today)
    written = f"{ast.unparse(call.func)}({', '.join([*kept, f'num_workers={workers}', 'persistent_workers=True'])})"
    return f"{ast.unparse(assignment.targets[0])} = {written}  # line {assignment.lineno}; num_workers is {today} there"


def _on_the_device(standing: list[ast.AST]) -> str:
    """Of `(2 * torch.rand(4)).to(device)` what is made: `torch.rand(4, device=device)`."""
    made = [one for one in _calls(standing) if _MAKERS.fullmatch(ast.unparse(one.func))]
    if len(made) != 1:
        return ""
    moves = [one for one in _calls(standing) if _receiver(one, _MOVES_IN)]
    moved_to = [ast.unparse(one.args[0]) for one in moves if len(one.args) == 1]
    device = next((to for to in moved_to if not to.startswith("torch.") or "device" in to), '"cuda"')  # else a dtype
    kept = [ast.unparse(one) for one in (*made[0].args, *made[0].keywords) if getattr(one, "arg", "") != "device"]
    return f"{ast.unparse(made[0].func)}({', '.join([*kept, f'device={device}'])})"


def _receiver(node: ast.AST, methods: set[str]) -> ast.expr | None:
    """What one of these methods is called on; None where it is another call, or none."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods:
        return node.func.value
    return None
