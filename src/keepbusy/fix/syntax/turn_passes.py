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

from keepbusy.fix.syntax.rewriting import own_nodes, scopes_of

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
    *("norm", "clone", "abs", "mean", "sum", "max", "min", "pow", "item"),
    *("zero_", "mul_", "div_", "add_", "sub_", "lerp_", "clamp_"),
}
"""What leaves nobody with a gradient's own memory."""
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_REFUSED = (ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr, ast.Lambda, ast.JoinedStr)


def lift_passes(tree: ast.Module, is_script: bool = True) -> bool:
    """Whether there are any. Not where somebody keeps gradients, which would be overwritten a turn later."""
    if not any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in ast.walk(tree)):
        return False
    if _keeps_gradients(tree):
        return False
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    done = False
    for scope in scopes_of(tree, is_script):
        for block in [] if scope.is_looked_into() else list(_blocks(scope.own)):
            for end in [one for one in block if _roots(one)]:
                chosen = _chosen(block, block.index(end), functions)
                passes = _Passes(scope.node, tree, is_script, block[chosen.start : chosen.stop])
                if len(chosen) > 1 and passes.may_leave():
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
    parents = _parents(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Load):
            match parents[id(node)]:
                case ast.Attribute(attr=name) if name in _UNSHARED:
                    continue
                case ast.Compare(comparators=[ast.Constant(value=None)]) | ast.BinOp():
                    continue
                case ast.Call(func=called) if called is node:  # torch.autograd.grad(...)
                    continue
                case ast.Call(func=ast.Attribute(attr=name)) if name in _UNSHARED:
                    continue
            return True
    return False


def _parents(tree: ast.AST) -> dict[int, ast.AST]:
    return {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _chosen(block: Sequence[ast.stmt], end: int, functions: set[str]) -> range:
    """Of a block the statements that lead to one that goes back. `functions`: those that the source defines."""
    first, last, roots = end, end, _roots(block[end])
    while first > 0 and _may_be_lifted(block[first - 1]) and not _roots(block[first - 1]):
        first -= 1
    while first < end and not _computes(block[first], functions | _LOOKERS) and not _stored(block[first]) & roots:
        first += 1
    while last + 1 < len(block) and _calls(block[last + 1]) & _CLIPS and _may_be_lifted(block[last + 1]):
        last += 1
    makes = set[str]().union(*map(_stored, block[first:end]))
    return range(first, last + 1) if makes & roots else range(0)


def _roots(statement: ast.stmt) -> set[str]:
    """The names that `loss.backward()` or `scaler.scale(loss).backward()` goes back from, if that is what it is."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=root, attr="backward"), args=[], keywords=[])):
            return _loaded(root) if _may_be_lifted(statement) else set()
    return set()


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
    return {one.id for one in _names_in(node) if isinstance(one.ctx, ast.Load)}


def _stored(node: ast.AST) -> set[str]:
    return {one.id for one in _names_in(node) if isinstance(one.ctx, ast.Store)}


def _names_in(node: ast.AST, hidden: Set[str] = frozenset(), below: bool = False) -> Iterator[ast.Name]:
    """The names of a scope; those of comprehensions are their own. `below`: also in functions that stand in it."""
    if isinstance(node, ast.Name) and node.id not in hidden:
        yield node
    if isinstance(node, _COMPREHENSIONS):
        hidden = hidden | {
            one.id for part in node.generators for one in ast.walk(part.target) if isinstance(one, ast.Name)
        }
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            if below:
                yield from _names_in(child, hidden | _locals(child), below)
        elif below or not isinstance(child, ast.ClassDef):
            yield from _names_in(child, hidden, below)


def _locals(scope: ast.AST) -> set[str]:
    """What is stored in a function or a script itself, and what a function is given."""
    given = getattr(scope, "args", None)
    own = set[str]() if given is None else {one.arg for one in ast.walk(given) if isinstance(one, ast.arg)}
    declared = {name for node in own_nodes(scope) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    return (own | _stored(scope)) - declared


class _Passes:
    """The statements, and what goes in and comes out."""

    def __init__(self, scope: ast.AST, tree: ast.Module, is_script: bool, statements: Sequence[ast.stmt]) -> None:
        self._statements, self._scope, self._tree, self._is_script = statements, scope, tree, is_script
        self._parents = _parents(tree)
        inside = {id(node) for one in statements for node in ast.walk(one)}
        needed: dict[str, None] = {}
        stored: dict[str, None] = {}
        for statement in _flat(statements):
            read = _loaded(statement) | (_stored(statement) if isinstance(statement, ast.AugAssign) else set())
            needed |= dict.fromkeys(sorted(read - stored.keys()))
            stored |= dict.fromkeys(sorted(_stored(statement)))
        self._is_own = stored.keys() <= _locals(scope)
        known = set[str]().union(*map(_locals, self._around(scope)))
        self._given = [name for name in needed if name in known]
        loads = [one for one in _names_in(scope, below=True) if isinstance(one.ctx, ast.Load) and id(one) not in inside]
        self._made = [name for name in stored if name in needed or any(one.id == name for one in loads)]
        self._loads = [one for one in loads if one.id in stored]

    def _around(self, scope: ast.AST) -> Iterator[ast.AST]:
        """The scope and the functions around it; of a script itself that."""
        while scope is not self._tree:
            if isinstance(scope, ast.FunctionDef):
                yield scope
            scope = self._parents[id(scope)]
        if self._scope is self._tree:
            yield self._tree

    def may_leave(self) -> bool:
        """Whether what comes out is only looked at."""
        return self._is_own and all(map(self._only_looks, self._loads))

    def _only_looks(self, node: ast.expr) -> bool:
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
            case ast.Return():
                return self._callers_only_look()
        return False

    def _is_place(self, call: ast.AST) -> bool:
        match self._parents[id(call)]:
            case ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id="_"), _])]):
                return True
        return False

    def _callers_only_look(self) -> bool:
        """Who calls the function: known where it stands within another, or in the script itself."""
        scope = self._scope
        around = self._parents.get(id(scope))
        if not isinstance(scope, ast.FunctionDef) or scope.decorator_list or isinstance(around, ast.ClassDef):
            return False
        if around is self._tree and not self._is_script:
            return False
        for one in ast.walk(self._tree):
            if isinstance(one, ast.Name) and one.id == scope.name:
                call = self._parents[id(one)]
                if not isinstance(call, ast.Call) or call.func is not one or not self._result_is_looked_at(call):
                    return False
        return True

    def _result_is_looked_at(self, call: ast.Call) -> bool:
        match self._parents[id(call)]:
            case ast.Expr():
                return True
            case ast.Assign(targets=[ast.Name(id=name)]) as statement:
                scope = self._parents[id(statement)]
                while not isinstance(scope, ast.FunctionDef | ast.Module | ast.ClassDef):
                    scope = self._parents[id(scope)]
                loads = [
                    one for one in _names_in(scope, below=True) if one.id == name and isinstance(one.ctx, ast.Load)
                ]
                return scope is not self._scope and all(map(self._only_looks_at_result, loads))
        return self._only_looks_at_result(call)

    def _only_looks_at_result(self, node: ast.expr) -> bool:
        return not isinstance(self._parents[id(node)], ast.Return) and self._only_looks(node)

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


def _flat(statements: Iterable[ast.stmt]) -> Iterator[ast.AST]:
    """In the order in which they are run."""
    for one in statements:
        if isinstance(one, ast.With):
            yield from (item.context_expr for item in one.items)
            yield from _flat(one.body)
        else:
            yield one
