"""Loops over micro-batches: after which of their turns an optimizer steps, known as the turn begins.

for i, (x, y) in enumerate(loader):
    loss = model(x, y) / 4
    loss.backward()                  # once in each turn, whatever happens
    total += loss.item()             # what looks at no gradient
    if (i + 1) % 4 == 0:             # the condition
        optimizer.step()
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

MARK = "__keepbusy_last_turn__"
"""The function that is told of each turn: `__keepbusy_last_turn__(lambda: (i + 1) % 4 == 0, first_line, last_line)`."""
_BLIND = {"print", "len", "float", "int", "str", "item", "detach", "append", "update", "format", "time", "perf_counter"}
"""Calls that look at no gradient."""
_PLAIN = (ast.Name, ast.Constant, ast.Compare, ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Attribute)


def last_turn(loop: ast.For) -> ast.expr | None:
    """A condition that is true when an optimizer steps after this turn; None if the loop does not tell."""
    for one in loop.body:
        if isinstance(one, ast.If) and not one.orelse and _calls(one.body, "step"):
            return None if _names(one.test, ast.Load) & _names(ast.Module(loop.body, []), ast.Store) else one.test
    if _calls(loop.body, "step"):
        return None
    text = ""
    match loop.target, loop.iter:
        case ast.Name(id=turn), ast.Call(func=ast.Name(id="range"), args=[count]):
            text = f"{turn} == {ast.unparse(count)} - 1"
        case ast.Tuple(elts=[ast.Name(id=turn), *_]), ast.Call(
            func=ast.Name(id="enumerate"), args=[ast.Name(id=several)]
        ):
            text = f"{turn} == len({several}) - 1"
    return ast.parse(text, mode="eval").body if text else None


def mark_last_turns(tree: ast.Module) -> int:
    """Each such loop tells as its turn begins whether that is the last; where it is certain. How many they are."""
    loops = [one for one in ast.walk(tree) if isinstance(one, ast.For)]
    found = [(loop, condition) for loop in loops if (condition := last_turn(loop)) and _is_certain(loop, condition)]
    for loop, condition in found:
        told = ast.parse(f"{MARK}(lambda: {ast.unparse(condition)}, {loop.lineno}, {loop.end_lineno})").body[0]
        for node in ast.walk(told):
            ast.copy_location(node, loop.body[0])
        loop.body.insert(0, told)
    return len(found)


def _is_certain(loop: ast.For, condition: ast.expr) -> bool:
    """Whether every turn goes back once, and nobody looks at gradients from there until the optimizer does."""
    steps = [one for one in loop.body if isinstance(one, ast.If) and _calls(one.body, "step")]
    others = [one for one in loop.body if one not in steps]
    known = all(isinstance(one, _PLAIN) or _is_length(one) for one in ast.walk(condition) if isinstance(one, ast.expr))
    return len(steps) <= 1 and not _calls(others, "step") and known and _goes_back_unseen(loop, others)


def _goes_back_unseen(loop: ast.For, others: Sequence[ast.stmt]) -> bool:
    """Of the statements before the step: one goes back, and those behind it call nothing that might see a gradient."""
    back = [at for at, one in enumerate(others) if isinstance(one, ast.Expr) and _calls([one], "backward")]
    if len(back) != 1 or len(_calls(loop.body, "backward")) != 1:
        return False
    behind = ast.walk(ast.Module([*others[back[0] + 1 :]], []))
    named = {one.attr for one in ast.walk(loop) if isinstance(one, ast.Attribute)}
    return {_called(one) for one in behind if isinstance(one, ast.Call)} <= _BLIND and not named & {"grad", "no_sync"}


def _is_length(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and _called(value) == "len"


def _calls(body: Sequence[ast.AST], name: str) -> list[ast.Call]:
    nodes = [node for one in body for node in ast.walk(one)]
    return [one for one in nodes if isinstance(one, ast.Call) and _called(one) == name]


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, context)}
