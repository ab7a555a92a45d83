"""A step that cannot be captured whole is captured in parts: its function is rewritten as `keepbusy fix` writes a graph
into a source, and what stands between the parts runs as it is written."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import count
from types import CodeType, FunctionType, MethodType
from typing import Any, ParamSpec, TypeVar

from keepbusy.runtime.graph import graphed_step
from keepbusy.runtime.graph.bound_step import BoundStep
from keepbusy.runtime.graph.user_lines import LaunchedLines

P = ParamSpec("P")
R = TypeVar("R")
_numbers = count(1)


def graph(step: Callable[P, R]) -> graphed_step.Graphed[P, R]:
    """The step, captured as a CUDA graph and replayed: one launch in place of many. Where it cannot be captured whole,
    parts of it are. Without CUDA, the step itself."""
    graphed = graphed_step.graph(step)
    graphed.divide = divided
    return graphed


def divided(step: Callable[..., Any], lines: LaunchedLines) -> graphed_step.DividedStep | None:
    """The step with parts of it captured. None where its source is not at hand, or nothing in it is worth a graph."""
    if isinstance(step, BoundStep):
        inner = divided(step.__wrapped__, lines)
        return inner and graphed_step.DividedStep(step.of(inner.run), inner.graphed)
    function: Any = getattr(step, "__func__", step)
    if not isinstance(function, FunctionType) or find_spec("libcst") is None:
        return None
    code = function.__code__
    source = "".join(linecache.getlines(code.co_filename, function.__globals__))
    if not _is_of(source, code):
        return None
    rewritten = _rewritten(source, code, lines)
    if rewritten is None:
        return None
    new, parts = rewritten
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    if not cells.keys() >= {*new.co_freevars}:
        return None
    graphed = []
    for number, part in enumerate(parts, 1):
        graphed_part = graphed_step.graph(FunctionType(part, function.__globals__))
        graphed_part.name = f"part {number} of {function.__qualname__}"
        function.__globals__[part.co_name] = graphed_part
        graphed.append(graphed_part)
    closure = tuple(cells[name] for name in new.co_freevars)
    run: Any = FunctionType(new, function.__globals__, function.__name__, function.__defaults__, closure)
    run.__kwdefaults__ = function.__kwdefaults__
    return graphed_step.DividedStep(MethodType(run, step.__self__) if isinstance(step, MethodType) else run, graphed)


def _is_of(source: str, code: CodeType) -> bool:
    """Whether the function was made of this source, which somebody may have changed since."""
    try:
        return _code_named(compile(source, code.co_filename, "exec", dont_inherit=True), code) == code
    except (SyntaxError, ValueError):
        return False


def _rewritten(source: str, code: CodeType, lines: LaunchedLines) -> tuple[CodeType, list[CodeType]] | None:
    """The new code of the function, and that of its parts. What rewrites a source is imported when a step needs it."""
    from keepbusy.fix.source.in_memory import give_lines
    from keepbusy.fixes.definition import CapturedLines
    from keepbusy.fixes.source.at_lines import origins_of
    from keepbusy.fixes.source.rewriting import edited

    launching = tuple(sorted((line, launches) for line, launches in lines.launching.items() if line))
    staying = tuple(sorted(lines.staying))
    captured = CapturedLines(code.co_filename, code.co_name, launching, staying, ends_before_backward=True)
    new = edited(source, "graph", [], captured) if launching else None
    if new is None:
        return None
    tree = ast.parse(new)
    own_names = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    lifted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name not in own_names]
    names = {node.name: f"{node.name} of {code.co_qualname} {next(_numbers)}" for node in lifted}
    for node in lifted:  # no name that the program could have
        node.name = names[node.name]
    for called in ast.walk(tree):
        if isinstance(called, ast.Name) and called.id in names:
            called.id = names[called.id]
    give_lines(tree, new, source.encode(), origins_of(new, source))
    module = compile(tree, code.co_filename, "exec", dont_inherit=True)
    parts = [part for part in _all_codes(module) if part.co_name in names.values()]
    new_code = _code_named(module, code)
    return None if new_code is None else (new_code, parts)


def _all_codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _all_codes(constant)


def _code_named(module: CodeType, code: CodeType) -> CodeType | None:
    """The code of the same function in this module; None if it is not certain which one that is."""
    candidates = [candidate for candidate in _all_codes(module) if candidate.co_qualname == code.co_qualname]
    if len(candidates) > 1:
        candidates = [candidate for candidate in candidates if candidate.co_firstlineno == code.co_firstlineno]
    return candidates[0] if len(candidates) == 1 else None
