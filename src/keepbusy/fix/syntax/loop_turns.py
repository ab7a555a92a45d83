"""What the turns of a loop are to each other: whether all can be made at once, and which of them is the last.

Loops that do the same to each of many tensors may do it to all of them at once:

    columns = [column.to("cuda") for column in batch.values()]
    batch = {name: one.to(device, non_blocking=True) for name, one in batch.items()}
    for p, q in zip(model.parameters(), average.parameters()):
        q.mul_(0.999).add_(p, alpha=0.001)

What stands in such a loop becomes a function. That of a move is asked where it would move to. That of a loop is run
with all of `p` in place of one, and all of `q`: so it tells what it does to them, before any of it is done.

Of loops over micro-batches it is known as a turn begins whether an optimizer steps after it:

    for i, (x, y) in enumerate(loader):
        loss = model(x, y) / 4
        loss.backward()                  # once in each turn, whatever happens
        total += loss.item()             # what looks at no gradient
        if (i + 1) % 4 == 0:             # the condition
            optimizer.step()
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

from keepbusy.fix.syntax.rewriting import scopes_of

MOVED = "__keepbusy_moved__"
"""`__keepbusy_moved__(lambda column: column.to("cuda"), batch.values(), False)`: what they become, in a list."""
FOREACH = "__keepbusy_foreach__"
"""`for p, q in __keepbusy_foreach__(turn, lambda s0, s1: zip(s0, s1), False, a, b):` goes through what is left."""
MARK = "__keepbusy_last_turn__"
"""The function that is told of each turn: `__keepbusy_last_turn__(lambda: (i + 1) % 4 == 0, first_line, last_line)`."""
_TURN, _ITEM, _FREE, _PART = (f"__keepbusy_{name}__" for name in ("turn", "item", "free", "part"))
METHODS = {
    *("mul", "mul_", "add", "add_", "sub", "sub_", "div", "neg", "neg_", "sqrt", "sqrt_", "lerp", "lerp_", "zero_"),
    *("addcmul", "addcmul_", "addcdiv", "addcdiv_", "clamp", "clamp_", "copy_", "detach", "is_floating_point"),
}
"""Of a tensor: they make of each element what becomes of it, whatever the others are, or compute nothing."""
_CHANGING = {name for name in METHODS if name.endswith("_")}
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_KNOWN = (ast.Pass, ast.If, ast.Expr, ast.Constant, ast.UnaryOp, ast.unaryop, ast.BoolOp, ast.boolop)
_MARKS = (ast.operator, ast.expr_context)
_BLIND = {"print", "len", "float", "int", "str", "item", "detach", "append", "update", "format", "time", "perf_counter"}
"""Calls that look at no gradient."""
_PLAIN = (ast.Name, ast.Constant, ast.Compare, ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Attribute)


def moved_singly(move: Any, held: Any, is_named: bool) -> Any:
    """As it is written."""
    return {name: move(one) for name, one in held.items()} if is_named else [move(one) for one in held]


def join_moves(tree: ast.Module) -> bool:
    """Whether there are any."""
    change = _JointMoves()
    change.visit(tree)
    return change.done


def join_loops(tree: ast.Module) -> bool:
    """Whether there are any."""
    change = _JointLoops(tree)
    change.visit(tree)
    return change.done


class _JointLoops(ast.NodeTransformer):
    def __init__(self, tree: ast.Module) -> None:
        """A loop stays as it is where its scope's names may be asked for: one comes in."""
        self._stays = {id(node) for scope in scopes_of(tree, True) if scope.is_looked_into() for node in scope.own}
        self.done = False

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.stmt:
        """Functions in it see none of its names, so loops of its own stay as they are."""
        node.body = [self.visit(one) if isinstance(one, ast.FunctionDef | ast.ClassDef) else one for one in node.body]
        return node

    def visit_For(self, node: ast.For) -> Any:
        self.generic_visit(node)
        sources, remade = _sources(copy.deepcopy(node.iter))
        targets, made = _stored([node.target]), _stored(node.body)
        changes = any(
            isinstance(one, ast.AugAssign) or getattr(one, "attr", "") in _CHANGING for one in _nodes(node.body)
        )
        if not changes or id(node) in self._stays or any(isinstance(one, ast.Starred) for one in sources):
            return node
        try:
            turn = _TurnOfAll(targets | made)
            body = [turn.visit(copy.deepcopy(one)) for one in node.body]
        except LookupError:
            return node
        self.done = True
        taken = ast.Assign([copy.deepcopy(node.target)], ast.Name(_ITEM, ast.Load()))
        function = ast.FunctionDef(
            name=_TURN,
            args=_parameters(_ITEM, _FREE, _PART),
            body=[taken, *body],
            decorator_list=[],
            lineno=node.lineno,
        )
        setattr(function, "type_params", [])  # noqa: B010 -- Python 3.11 knows none
        leaves = ast.Constant(not made <= targets)
        remake = ast.Lambda(_parameters(*(f"s{at}" for at, _ in enumerate(sources))), remade)
        node.iter = ast.copy_location(
            _call(FOREACH, [ast.Name(_TURN, ast.Load()), remake, leaves, *sources]), node.iter
        )
        for one in ast.walk(function):
            if not hasattr(one, "lineno"):
                ast.copy_location(one, node)
        return [ast.copy_location(function, node), node]


def _sources(held: ast.expr) -> tuple[list[ast.expr], ast.expr]:
    """What is gone through, side by side or counted, and how: with `s0`, `s1` in their places."""
    match held:
        case ast.Call(func=ast.Name(id="zip" | "enumerate"), args=[_, *_], keywords=given) if all(
            isinstance(one.value, ast.Constant) for one in given
        ):
            first = held.args[0]
            if isinstance(first, ast.Call) and len(held.args) == 1:
                sources, held.args[0] = _sources(first)
            else:
                sources, held.args = held.args, [ast.Name(f"s{at}", ast.Load()) for at, _ in enumerate(held.args)]
            return sources, held
    return [held], ast.Name("s0", ast.Load())


class _TurnOfAll(ast.NodeTransformer):
    """One turn, in which names of its own may hold many; what it is given from outside is looked at first."""

    def __init__(self, own: Set[str]) -> None:
        self._own = own

    def generic_visit(self, node: ast.AST) -> Any:
        """What nobody below knows may do anything."""
        if not isinstance(node, (*_KNOWN, *_MARKS)):
            raise LookupError
        return super().generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> ast.AST:
        return ast.copy_location(ast.Return(None), node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return node if node.id in self._own else self._free(node, [])

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        names, held = [node.attr], node.value
        while isinstance(held, ast.Attribute):
            names, held = [held.attr, *names], held.value
        is_read = isinstance(node.ctx, ast.Load)
        if is_read and isinstance(held, ast.Name) and held.id not in self._own:
            return self._free(held, names)
        return self._known(node, is_read or node.attr in ("data", "grad"))

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        return self._known(node, len(node.targets) == 1 and isinstance(node.targets[0], ast.Name))

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        return self._known(node, isinstance(node.op, _ARITHMETIC) and not isinstance(node.target, ast.Subscript))

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        return self._known(node, isinstance(node.op, _ARITHMETIC))

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        match node:
            case ast.Compare(ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
                node.left = self.visit(node.left)
                return node
        raise LookupError

    def visit_Call(self, node: ast.Call) -> ast.AST:
        method = node.func
        if not isinstance(method, ast.Attribute) or method.attr not in METHODS or not self._is_own(method.value):
            raise LookupError
        method.value = self.visit(method.value)
        node.args = [self.visit(one) for one in node.args]
        for one in node.keywords:
            one.value = self.visit(one.value)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if not isinstance(node.ctx, ast.Load):
            raise LookupError
        return ast.copy_location(_call(_PART, [self.visit(node.value), self.visit(node.slice)]), node)

    def _known(self, node: ast.AST, is_known: bool) -> ast.AST:
        """With its parts, if it does nothing else."""
        if not is_known:
            raise LookupError
        return ast.NodeTransformer.generic_visit(self, node)

    def _free(self, root: ast.Name, names: list[str]) -> ast.expr:
        return ast.copy_location(_call(_FREE, [root, *map(ast.Constant, names)]), root)

    def _is_own(self, node: ast.AST) -> bool:
        return any(isinstance(one, ast.Name) and one.id in self._own for one in ast.walk(node))


def _nodes(parts: Sequence[ast.AST]) -> Iterator[ast.AST]:
    return (one for part in parts for one in ast.walk(part))


def _stored(parts: Sequence[ast.AST]) -> set[str]:
    return {one.id for one in _nodes(parts) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def _parameters(*names: str) -> ast.arguments:
    return ast.arguments([], [ast.arg(one) for one in names], None, [], [], None, [])


def _call(name: str, given: Iterable[ast.expr]) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [*given], [])


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
        moving = ast.Lambda(_parameters(each), move)
        return ast.copy_location(_call(MOVED, [moving, self.visit(held), ast.Constant(is_named)]), node)


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
