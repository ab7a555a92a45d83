"""The line to write for a cause, in the program's own words where its source is at hand.

Whatever does not fit what stands there stays as general as the remedy is. It is a suggestion for a person to read:
no file is changed here.
"""

from __future__ import annotations

import ast
import re

from keepbusy.explain.diagnosis import Cause
from keepbusy.report.source import function_at, source_of, text_of, without_inner_functions
from keepbusy.report.words import tame

_READERS = {"item", "tolist", "cpu", "numpy"}
_CASTS = {"float", "int", "bool"}
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
    match cause.api:
        case "keepbusy.readback":
            written = _readback(standing, source.line, large=cause.fix == "copy_back_later")
        case "keepbusy.prefetch":
            written = _prefetch(function, standing, source.line)
        case "torch.utils.data.DataLoader":
            written = _more_workers(tree, function, source.line, cause.remedy)
        case "torch.randn":
            written = _on_the_device(standing)
        case _:
            written = ""
    return written if len(written) <= _LONGEST else ""


def _stands_at(node: ast.AST, line: int) -> bool:
    first = getattr(node, "lineno", 0)
    return bool(first <= line <= (getattr(node, "end_lineno", 0) or 0))


def _readback(standing: list[ast.AST], line: int, large: bool = False) -> str:
    """Of `loss.item()`, `float(loss)` or `print(loss)` the tensor that is read."""
    read: ast.AST | None = None
    for node in standing:
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr in _READERS and not node.args:
            read = node.func.value
            break
        if _name_of(node) in {*_CASTS, "print"} and len(node.args) == 1 and isinstance(node.args[0], _TENSORS):
            read = read or node.args[0]
    if read is None:
        return ""
    if large:
        return f"copy = keepbusy.readback({ast.unparse(read)})  # copy.tensor once the next step is launched"
    decides = any(isinstance(node, ast.If | ast.While) and _stands_at(node.test, line) for node in standing)
    later = "decide by it" if decides else "read it"
    return f"value = keepbusy.readback({ast.unparse(read)})  # {later} once the next step is launched: float(value)"


def _prefetch(function: ast.AST, standing: list[ast.AST], line: int) -> str:
    """The innermost loop around the copy that goes over something else than numbers, if what is copied comes of it."""
    loops = [
        node
        for node in without_inner_functions(function)
        if isinstance(node, ast.For) and _stands_at(node, line) and not _counts(node)
    ]
    calls = [one for one in standing if isinstance(one, ast.Call)]
    copied = {node.id for one in calls for node in ast.walk(one) if isinstance(node, ast.Name)}
    for loop in sorted(loops, key=lambda node: -node.lineno):
        drawn = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
        if drawn & copied or loop.lineno == line:
            over, target = loop.iter, _bare(loop.target)
            if isinstance(over, ast.Call) and _name_of(over) == "enumerate" and over.args:
                return f"for {target} in enumerate(keepbusy.prefetch({ast.unparse(over.args[0])})):"
            return f"for {target} in keepbusy.prefetch({ast.unparse(over)}):"
    moved = next((ast.unparse(one.func.value) for one in standing if _is_move(one)), "")  # type: ignore[attr-defined]
    return f'{moved}.pin_memory().to("cuda", non_blocking=True)  # pinned a step ahead' if moved else ""


def _bare(target: ast.expr) -> str:
    """A tuple as a loop writes it: `x, y` for `(x, y)`."""
    return ", ".join(map(ast.unparse, target.elts)) if isinstance(target, ast.Tuple) else ast.unparse(target)


def _is_move(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in {"to", "cuda"}


def _counts(loop: ast.For) -> bool:
    return isinstance(loop.iter, ast.Call) and _name_of(loop.iter) == "range"


def _name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _more_workers(tree: ast.AST, function: ast.AST, line: int, remedy: str) -> str:
    """The call that makes the loop's loader, with the workers that the remedy wants."""
    wanted = re.search(r"num_workers=(\d+|min\(.*?\)\)|[^,]+)", remedy)
    loops = [one for one in without_inner_functions(function) if isinstance(one, ast.For) and _stands_at(one, line)]
    names = {node.id for loop in loops for node in ast.walk(loop.iter) if isinstance(node, ast.Name)}
    made = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and "DataLoader" in _name_of(node.value)
    ]
    mine = [node for node in made if names & {one.id for one in node.targets if isinstance(one, ast.Name)}]
    if len(mine or made) != 1 or not wanted:
        return ""
    assignment = (mine or made)[0]
    call = assignment.value
    assert isinstance(call, ast.Call)
    today = next((ast.unparse(one.value) for one in call.keywords if one.arg == "num_workers"), "0")
    kept = [*map(ast.unparse, call.args)]
    kept += [ast.unparse(one) for one in call.keywords if one.arg not in ("num_workers", "persistent_workers")]
    workers = wanted[1].replace("today", today)
    written = f"{ast.unparse(call.func)}({', '.join([*kept, f'num_workers={workers}', 'persistent_workers=True'])})"
    return f"{ast.unparse(assignment.targets[0])} = {written}  # line {assignment.lineno}; num_workers is {today} there"


def _on_the_device(standing: list[ast.AST]) -> str:
    """`torch.randn(4).to(device)` as `torch.randn(4, device=device)`."""
    for node in standing:
        if not _is_move(node):
            continue
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Attribute)
        made = node.func.value
        if isinstance(made, ast.Call) and _MAKERS.fullmatch(ast.unparse(made.func)) and len(node.args) <= 1:
            device = ast.unparse(node.args[0]) if node.args else '"cuda"'
            kept = [ast.unparse(one) for one in (*made.args, *made.keywords) if getattr(one, "arg", "") != "device"]
            return f"{ast.unparse(made.func)}({', '.join([*kept, f'device={device}'])})"
    return ""
