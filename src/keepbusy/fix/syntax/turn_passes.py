"""Where a turn goes forward and backward: plain statements one after the other, lifted into a function of their own.

    x, y = x.cuda(), y.cuda()               x, y = x.cuda(), y.cuda()
    optimizer.zero_grad()                   def passes(optimizer, criterion, model, x, y):
    loss = criterion(model(x), y)               optimizer.zero_grad()
    loss.backward()                             loss = criterion(model(x), y)
    optimizer.step()                            loss.backward()
    total += loss.item()                        return (loss,)
                                            loss, = __keepbusy_passes__(passes, optimizer, criterion, model, x, y)
                                            optimizer.step()
                                            total += loss.item()

What it reads of its scope comes in as arguments, so the function is the same in each turn; what is read elsewhere comes
out. That does not know how it was made: nobody can go back through it, and printed it would look otherwise. So it must
only be looked at, as by `loss.item()`. Lines keep their numbers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence, Set

from keepbusy.fix.syntax.rewriting import Scope, own_nodes, scopes_of

PASSES = "__keepbusy_passes__"
_FUNCTION = "__keepbusy_turn__"
_BLOCKS = ("body", "orelse", "finalbody")
_ON_HOST = {
    *("item", "cpu", "numpy", "tolist", "to", "cuda", "print", "next", "float", "int", "bool", "open", "append", "log"),
    *("step", "update", "unscale_", "synchronize", "locals", "globals", "vars", "eval", "exec", "setattr"),
}
"""Calls that a graph cannot hold, or need not; in one, an optimizer's step rounds otherwise."""
_CLIPS = {"clip_grad_norm_", "clip_grad_value_"}
_LOOKS = {"item", "detach", "data", "tolist", "argmax", "shape", "size", "dim", "dtype", "device", "numel", "ndim"}
"""What is asked of a tensor, and tells nothing of how that was made."""
_LOOKERS = {"float", "int", "bool", "len", "isnan", "isfinite", "isinf"}
_LARGEST = {"max", "min", "topk"}
"""In `_, at = out.max(1)` and `_, at = torch.max(out, 1)`: where they are."""
_UNSHARED = {
    "norm",
    "clone",
    "abs",
    "mean",
    "sum",
    "max",
    "min",
    "zero_",
    "mul_",
    "div_",
    "add_",
    "clamp_",
    "pow",
    "item",
}
"""What leaves nobody with a gradient's own memory."""
_REFUSED = (ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr, ast.Lambda, ast.JoinedStr)


def lift_passes(tree: ast.Module, is_script: bool = True) -> bool:
    """Whether there are any. Not where somebody keeps gradients, which would be overwritten a turn later."""
    if _keeps_gradients(tree):
        return False
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    done = False
    for scope in scopes_of(tree, is_script):
        for block in [] if scope.is_looked_into() else list(_blocks(scope.own)):
            chosen = _chosen(block, own)
            passes = _Passes(scope, tree, block[chosen.start : chosen.stop]) if len(chosen) > 1 else None
            if passes is not None and passes.may_leave():
                block[chosen.start : chosen.stop] = passes.lifted()
                done = True
    return done


def _blocks(nodes: Iterable[ast.AST]) -> Iterator[list[ast.stmt]]:
    for node in nodes:
        for held in (getattr(node, name, None) for name in _BLOCKS):
            if isinstance(held, list) and not isinstance(node, ast.ClassDef):
                yield held


def _keeps_gradients(tree: ast.Module) -> bool:
    """Whether the source looks at any `.grad` in a way that may keep it beyond the turn."""
    parents = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Load):
            match parents[id(node)]:
                case ast.Attribute(attr=name) if name in _UNSHARED:
                    continue
                case ast.Compare(comparators=[ast.Constant(value=None)]) | ast.BinOp():
                    continue
                case ast.Call(func=called) if called is node:  # torch.autograd.grad(...)
                    continue
            return True
    return False


def _chosen(block: Sequence[ast.stmt], own: set[str]) -> range:
    """Of a block the statements that are lifted; empty if there are none. `own`: functions that the source defines."""
    ends = [at for at, one in enumerate(block) if _roots(one)]
    if len(ends) != 1 or sum(map(_times_back, block)) != 1:
        return range(0)
    first, last = ends[0], ends[0]
    while first > 0 and _may_be_lifted(block[first - 1]):
        first -= 1
    while (
        first < ends[0]
        and not _computes(block[first], own | _LOOKERS)
        and not _stored(block[first]) & _roots(block[ends[0]])
    ):
        first += 1
    while last + 1 < len(block) and _calls(block[last + 1]) & _CLIPS and _may_be_lifted(block[last + 1]):
        last += 1
    return range(first, last + 1) if first < ends[0] else range(0)


def _roots(statement: ast.stmt) -> set[str]:
    """The names that `loss.backward()` or `scaler.scale(loss).backward()` goes back from, if that is what it is."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=root, attr="backward"), args=[], keywords=[])):
            return _loaded(root) if _may_be_lifted(statement) else set()
    return set()


def _times_back(statement: ast.stmt) -> int:
    return sum(isinstance(node, ast.Attribute) and node.attr == "backward" for node in ast.walk(statement))


def _may_be_lifted(statement: ast.stmt) -> bool:
    """A plain statement that calls nothing of the host's and stores nothing but names."""
    match statement:
        case ast.With(body=body, items=items):
            if any(one.optional_vars for one in items) or not all(map(_may_be_lifted, body)):
                return False
        case ast.Assign(targets=targets):
            if not all(map(_is_name, targets)):
                return False
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            if not _is_name(target):
                return False
        case ast.Expr():
            pass
        case _:
            return False
    names = _loaded(statement) | _stored(statement)
    refused = any(isinstance(one, _REFUSED) for one in ast.walk(statement))
    return not refused and not _calls(statement) & _ON_HOST and not any(one.startswith("__keepbusy") for one in names)


def _is_name(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) or (isinstance(target, ast.Tuple) and all(map(_is_name, target.elts)))


def _computes(statement: ast.stmt, own: set[str]) -> bool:
    """Where the passes begin: what only takes a batch, or calls only functions of the source itself, comes before."""
    called = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return any(not isinstance(one, ast.Name) or one.id not in own for one in called)


def _calls(statement: ast.AST) -> set[str]:
    """What it calls, without what stands before the last dot."""
    called = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return {getattr(one, "attr", getattr(one, "id", "")) for one in called}


def _loaded(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}


def _stored(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


class _Passes:
    """The statements, and what goes in and comes out."""

    def __init__(self, scope: Scope, tree: ast.Module, statements: Sequence[ast.stmt]) -> None:
        self._statements, self._scope = statements, scope.node
        self._parents = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self._inside = {id(node) for one in statements for node in ast.walk(one)}
        own = _locals(scope.node)
        declared = {name for node in scope.own if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
        inner = {
            name
            for one in statements
            for node in ast.walk(one)
            if isinstance(node, ast.comprehension)
            for name in _stored(node.target)
        }
        self._is_clear = not declared & {name for one in statements for name in _stored(one)}
        self._is_clear &= not inner & {
            node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in self._inside
        }
        needed: dict[str, None] = {}
        stored: dict[str, None] = {}
        for statement in _flat(statements):
            read = _loaded(statement) | (_stored(statement) if isinstance(statement, ast.AugAssign) else set())
            needed |= dict.fromkeys(sorted(read - stored.keys() - inner))
            stored |= dict.fromkeys(sorted(_stored(statement) - inner))
        self._given = [name for name in needed if name in own]
        elsewhere = {node.id for node in self._loads_elsewhere()}
        self._made = [name for name in stored if name in elsewhere or name in needed]

    def _loads_elsewhere(self, node: ast.AST | None = None, hidden: Set[str] = frozenset()) -> Iterator[ast.Name]:
        """Where the scope's names are read, also by functions within it that have none of that name."""
        for child in ast.iter_child_nodes(node or self._scope):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from self._loads_elsewhere(child, hidden | _locals(child))
            elif id(child) not in self._inside:
                if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load) and child.id not in hidden:
                    yield child
                yield from self._loads_elsewhere(child, hidden)

    def may_leave(self) -> bool:
        """Whether all that comes out is only looked at."""
        return self._is_clear and all(self._only_looks(one) for one in self._loads_elsewhere() if one.id in self._made)

    def _only_looks(self, node: ast.Name) -> bool:
        parent = self._parents[id(node)]
        match parent:
            case ast.Attribute(attr=name) if name in _LARGEST:
                return self._is_place(self._parents[id(parent)])
            case ast.Attribute(attr=name):
                return name in _LOOKS
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), args=[first, *_]) if (
                name in _LARGEST
            ):
                return first is node and self._is_place(parent)
            case ast.Call(func=called) if called is not node:
                return getattr(called, "attr", getattr(called, "id", "")) in _LOOKERS
            case ast.Compare() | ast.FormattedValue(conversion=-1):
                return True
        return False

    def _is_place(self, call: ast.AST) -> bool:
        match self._parents[id(call)]:
            case ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id="_"), _])]):
                return True
        return False

    def lifted(self) -> list[ast.stmt]:
        """The function, and its call."""
        first, last = self._statements[0], self._statements[-1]
        made = ast.Tuple([ast.Name(name, ast.Load()) for name in self._made], ast.Load())
        parameters = ast.arguments(
            posonlyargs=[], args=[ast.arg(one) for one in self._given], kwonlyargs=[], kw_defaults=[], defaults=[]
        )
        body = [*self._statements, ast.copy_location(ast.Return(made), last)]
        function = ast.FunctionDef(_FUNCTION, parameters, body, [])
        setattr(function, "type_params", [])  # noqa: B010 -- Python 3.11 knows none
        given = [ast.Name(one, ast.Load()) for one in (_FUNCTION, *self._given)]
        call = ast.Call(ast.Name(PASSES, ast.Load()), [*given], [])
        results = ast.Tuple([ast.Name(name, ast.Store()) for name in self._made], ast.Store())
        taken = ast.Assign([results], call) if self._made else ast.Expr(call)
        return [ast.fix_missing_locations(ast.copy_location(one, first)) for one in (function, taken)]


def _locals(scope: ast.AST) -> set[str]:
    """What is stored in a function or a script itself, and what a function is given."""
    given = getattr(scope, "args", None)
    own = set[str]() if given is None else {one.arg for one in ast.walk(given) if isinstance(one, ast.arg)}
    nodes = list(own_nodes(scope))
    declared = {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    return (own | {one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}) - declared


def _flat(statements: Iterable[ast.stmt]) -> Iterator[ast.AST]:
    """In the order in which they are run."""
    for one in statements:
        if isinstance(one, ast.With):
            yield from (item.context_expr for item in one.items)
            yield from _flat(one.body)
        else:
            yield one
