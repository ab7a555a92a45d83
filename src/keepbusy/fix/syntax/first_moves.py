"""At which lines a batch goes to the device as it came from its loader.

    for step, (x, y) in enumerate(loader):      what holds it; so does `batch = next(batches)`
        meter.update(time.time() - began)       what does not mention it
        print(len(x), y.shape)                  what only asks for its size
        x, y = x.to(device), y.cuda()           the moves, also as {name: one.to(device) for name, one in batch.items()}

A move counts while all that stands before it is of these kinds: nobody else knows a batch that came from another
process, so nothing can have changed it on the way. The first place of any other kind ends that for the turn. What
really is gone through is seen when the program runs: it may be a `map` over the loader.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from keepbusy.fix.syntax.rewriting import scopes_of

TAKEN = "__keepbusy_taken__"
"""The function that is shown what is gone through, and the line: `for x, y in __keepbusy_taken__(loader, 12):`."""
_SIZES = {"shape", "size", "dtype", "ndim", "dim", "numel", "is_pinned"}
_WRAPPERS = {"enumerate": "", "tqdm": "tqdm"}
"""Functions that hand on what they go through, and the packages that they are from."""
_ONE_LINE = (ast.Assign, ast.Expr, ast.Pass, ast.Continue, ast.Break, ast.Assert)
"""Statements that are over before the next begins."""
_BLOCKS = ("body", "orelse", "finalbody")


def first_moves(tree: ast.Module, is_script: bool = True) -> dict[int, frozenset[int]]:
    """Of each line that takes a batch the lines at which that is moved as it came. What is gone through is shown."""
    found: dict[int, frozenset[int]] = {}
    wrappers = _known_wrappers(tree)
    for scope in scopes_of(tree, is_script):
        if not any(isinstance(one, ast.Attribute) and one.attr in ("to", "cuda") for one in scope.own):
            continue
        shared, hides = scope.shared_names(), not scope.is_looked_into()
        for taking in list(_takings(scope.own, wrappers)):
            way = _Way(_stored(taking.target), shared)
            if hides and way.is_hidden():
                way.follow(taking.rest, is_sure=True)
            found[taking.line] = frozenset() if taking.line in found else frozenset(way.lines)
            if found[taking.line]:
                taking.show()
    return found


class _Taking(NamedTuple):
    """Where batches are taken, the names that they get, and what is done then."""

    holder: ast.For | ast.Call  # of what is gone through
    target: ast.expr
    rest: Sequence[ast.stmt]
    line: int

    def show(self) -> None:
        held = self.holder.iter if isinstance(self.holder, ast.For) else self.holder.args[0]
        shown = ast.Call(ast.Name(TAKEN, ast.Load()), [held, ast.Constant(self.line)], [])
        ast.copy_location(shown, held)
        if isinstance(self.holder, ast.For):
            self.holder.iter = shown
        else:
            self.holder.args[0] = shown


def _known_wrappers(tree: ast.Module) -> set[str]:
    """Unless the program has its own of that name."""
    own, from_modules = _stored(tree), dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        if isinstance(node, ast.ImportFrom):
            from_modules |= {one.asname or one.name: (node.module or "").partition(".")[0] for one in node.names}
    return {name for name, module in _WRAPPERS.items() if from_modules.get(name, "") == module} - own


def _takings(nodes: Sequence[ast.AST], wrappers: set[str]) -> Iterator[_Taking]:
    for node in nodes:
        if isinstance(node, ast.For) and node.lineno == node.iter.end_lineno != node.body[0].lineno:
            holder: ast.For | ast.Call = node
            held, target = node.iter, node.target
            while isinstance(held, ast.Call) and held.args and getattr(held.func, "id", "") in wrappers:
                match held.func, target:
                    case ast.Name(id="enumerate"), ast.Tuple(elts=[_, counted]):
                        target = counted
                holder, held = held, held.args[0]
            yield _Taking(holder, target, node.body, node.lineno)
        for block in (getattr(node, name, ()) for name in _BLOCKS):
            for at, one in enumerate(block if isinstance(block, list) else ()):
                match one:
                    case ast.Assign(targets=[target], value=ast.Call(func=ast.Name(id="next"), args=[_]) as holder):
                        yield _Taking(holder, target, block[at + 1 :], one.lineno)


def _stored(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)}


class _Way:
    """From where a batch is taken: statement by statement, as long as nothing but its size is of interest."""

    def __init__(self, names: set[str], shared: set[str]) -> None:
        self._names, self._shared = names, shared
        self.lines: set[int] = set()

    def follow(self, statements: Sequence[ast.stmt], is_sure: bool) -> bool:
        """False where it ends. `is_sure`: the statements are run in any case."""
        return all(self._goes_on(one, is_sure) for one in statements)

    def is_hidden(self) -> bool:
        """Whether no other function sees the names."""
        return not self._names & self._shared

    def _goes_on(self, statement: ast.stmt, is_sure: bool) -> bool:
        match statement:
            case ast.If(test=test, body=body, orelse=otherwise):
                return not self._ends_at(test) and self.follow([*body, *otherwise], False)
            case ast.With(items=items, body=body):
                return not any(self._ends_at(one.context_expr) for one in items) and self.follow(body, False)
            case ast.Assign(targets=[ast.Name() | ast.Tuple() as target], value=value) if self._is_part(value):
                self._names |= _stored(target)  # its parts by other names
                return self.is_hidden()
        if isinstance(statement, _ONE_LINE):
            return self._passes(statement, is_sure)
        # loops, in whose turns a later line may come first, and what is rare
        return not any(isinstance(one, ast.Name) and one.id in self._names for one in ast.walk(statement))

    def _passes(self, statement: ast.stmt, is_sure: bool) -> bool:
        ends = self._ends_at(statement)
        if is_sure and not ends and isinstance(statement, ast.Assign):  # from here on these are other things
            self._names -= {name for one in statement.targets for name in _stored(one)}
        return not ends

    def _ends_at(self, node: ast.stmt | ast.expr) -> bool:
        touches = self._touches(node)
        if touches:
            self.lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
        return touches

    def _touches(self, node: ast.AST) -> bool:
        """Whether it could change a part of the batch or hand it on; where it is moved is noted."""
        match node:
            case ast.Call(func=ast.Attribute(value=part, attr="to" | "cuda")) if self._is_part(part):
                self.lines.add(node.lineno)
                return any(map(self._touches, (*node.args, *node.keywords)))
            case ast.ListComp(elt=made, generators=[ast.comprehension(target=each, iter=whole, ifs=[])]):
                if self._is_part(whole):
                    return self._touches_each(each, made)
            case ast.DictComp(value=made, generators=[ast.comprehension(target=target, iter=items, ifs=[])]):
                match target, items:
                    case ast.Tuple(elts=[_, each]), ast.Call(func=ast.Attribute(value=whole, attr="items"), args=[]):
                        if self._is_part(whole):
                            return self._touches_each(each, made)
            case ast.Attribute(value=part, attr=name) if name in _SIZES and self._is_part(part):
                return False
            case ast.Call(func=ast.Name(id="len"), args=[part]) if self._is_part(part):
                return False
            case ast.Name(id=name, ctx=ast.Load()):
                return name in self._names
        return any(map(self._touches, ast.iter_child_nodes(node)))

    def _touches_each(self, each: ast.expr, made: ast.expr) -> bool:
        names = self._names
        self._names = names | _stored(each)
        touches = self._touches(made)
        self._names = names
        return touches

    def _is_part(self, value: ast.expr) -> bool:
        """`x`, `batch[0]` or `batch["x"]`."""
        if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant):
            return self._is_part(value.value)
        return isinstance(value, ast.Name) and value.id in self._names
