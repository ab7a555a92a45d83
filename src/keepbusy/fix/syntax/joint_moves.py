"""Tensors that one expression moves to the device, one after the other: they may travel as one.

columns = [column.to("cuda") for column in batch.values()]
batch = {name: one.to(device, non_blocking=True) for name, one in batch.items()}
"""

from __future__ import annotations

import ast
from typing import Any

MOVED = "__keepbusy_moved__"
"""`__keepbusy_moved__(lambda column: column.to("cuda"), batch.values(), False)`: what they become, in a list."""


def moved_singly(move: Any, held: Any, is_named: bool) -> Any:
    """As it is written."""
    return {name: move(one) for name, one in held.items()} if is_named else [move(one) for one in held]


def join_moves(tree: ast.Module) -> bool:
    """Whether there are any."""
    change = _JointMoves()
    change.visit(tree)
    return change.done


class _JointMoves(ast.NodeTransformer):
    done = False

    def visit_ListComp(self, node: ast.ListComp) -> ast.expr:
        match node:
            case ast.ListComp(
                elt=ast.Call() as move,
                generators=[ast.comprehension(target=ast.Name(id=each), iter=held, ifs=[], is_async=0)],
            ) if _moves(move, each):
                return self._joint(node, move, each, held, False)
        self.generic_visit(node)
        return node

    def visit_DictComp(self, node: ast.DictComp) -> ast.expr:
        match node:
            case ast.DictComp(
                key=ast.Name(id=key),
                value=ast.Call() as move,
                generators=[
                    ast.comprehension(
                        target=ast.Tuple(elts=[ast.Name(id=name), ast.Name(id=each)]),
                        iter=ast.Call(func=ast.Attribute(value=held, attr="items"), args=[], keywords=[]),
                        ifs=[],
                        is_async=0,
                    )
                ],
            ) if key == name != each and _moves(move, each):
                return self._joint(node, move, each, held, True)
        self.generic_visit(node)
        return node

    def _joint(self, node: ast.expr, move: ast.expr, each: str, held: ast.expr, is_named: bool) -> ast.expr:
        self.done = True
        moving = ast.Lambda(ast.arguments([], [ast.arg(each)], None, [], [], None, []), move)
        joint = ast.Call(ast.Name(MOVED, ast.Load()), [moving, self.visit(held), ast.Constant(is_named)], [])
        return ast.copy_location(joint, node)


def _moves(call: ast.Call, each: str) -> bool:
    """Whether it is `each.to(...)`, and to the same place whichever it is."""
    match call.func:
        case ast.Attribute(value=ast.Name(id=name), attr="to" | "cuda") if name == each:
            given = [*call.args, *(one.value for one in call.keywords)]
            parts = [part for one in given for part in ast.walk(one) if isinstance(part, ast.expr)]
            return all(
                isinstance(one, ast.Constant | ast.Attribute) or (isinstance(one, ast.Name) and one.id != each)
                for one in parts
            )
    return False
