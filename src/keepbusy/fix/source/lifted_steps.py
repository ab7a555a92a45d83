"""The training turn lifted into a function of its own, which `keepbusy.graph` captures and replays.

    for x, y in loader:                        @keepbusy.graph
        x, y = x.cuda(), y.cuda()              def train_step(x, y):
        optimizer.zero_grad()                      optimizer.zero_grad()
        loss = criterion(model(x), y)              loss = criterion(model(x), y)
        loss.backward()                            loss.backward()
        optimizer.step()                           optimizer.step()
        total += loss                              return loss

                                               for x, y in loader:
                                                   x, y = x.cuda(), y.cuda()
                                                   loss = train_step(x, y)
                                                   total += loss

What is lifted are plain statements one after the other, from the first of `zero_grad()` and what `backward()` needs to
the optimizer's `step()`. What changes from turn to turn comes in as arguments, what is read afterwards comes out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import libcst as cst
from libcst import matchers as m
from libcst.metadata import ExpressionContext, ExpressionContextProvider, MetadataWrapper, PositionProvider

NAME = "train_step"
_HOST = {
    "item",
    "cpu",
    "numpy",
    "tolist",
    "to",
    "cuda",
    "print",
    "next",
    "float",
    "int",
    "bool",
    "open",
    "append",
    "log",
}
"""What a graph cannot hold, or need not."""
_CLEARS, _GOES_BACK = (m.Call(func=m.Attribute(attr=m.Name(one))) for one in ("zero_grad", "backward"))
_STEPS = m.Call(
    func=m.Attribute(value=m.MatchIfTrue(lambda one: "opt" in _text(one).lower()), attr=m.Name("step")), args=[]
)


def write_lifted_step(wrapper: MetadataWrapper, lines: frozenset[int]) -> cst.Module | None:
    if m.findall(wrapper.module, m.Name(NAME)):
        return None
    change = _Lifted(lines)
    module = wrapper.visit(change)
    return module if change.done else None


class _Lifted(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (PositionProvider, ExpressionContextProvider)

    def __init__(self, lines: frozenset[int]) -> None:
        super().__init__()
        self._lines, self.done = lines, False
        self._scopes: list[cst.CSTNode] = []
        self._loops: list[cst.CSTNode] = []
        self._function: cst.FunctionDef | None = None  # which stands before the outermost loop of its scope

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Module | cst.FunctionDef):
            self._scopes.append(node)
        if isinstance(node, cst.For | cst.While):
            self._loops.append(self._scopes[-1])
        return super().on_visit(node)

    def on_leave(self, original_node: cst.CSTNode, updated_node: Any) -> Any:
        made: Any = super().on_leave(original_node, updated_node)
        if isinstance(original_node, cst.Module | cst.FunctionDef):
            self._scopes.pop()
        if isinstance(original_node, cst.For | cst.While):
            self._loops.pop()
            if self._function is not None and self._scopes[-1] not in self._loops:
                apart = cst.EmptyLine(indent=False)
                above = [*made.leading_lines] or [apart]
                function, self._function = self._function.with_changes(leading_lines=above), None
                return cst.FlattenSentinel([function, made.with_changes(leading_lines=[apart])])
        return made

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:  # noqa: N802
        place = self.get_metadata(PositionProvider, original_node)
        block = _block(original_node)
        if self.done or not block or not any(place.start.line <= one <= place.end.line for one in self._lines):
            return updated_node
        body, lifted = updated_node.body.body, slice(block.start, block.stop)
        given, made = self._names(original_node, original_node.body.body[lifted])
        if given is None:
            return updated_node
        self.done = True
        taken, results = ", ".join(given), ", ".join(made)
        function = cst.parse_statement(f"@keepbusy.graph\ndef {NAME}({taken}):\n    pass\n")
        inner = [*body[lifted], *([cst.parse_statement(f"return {results}")] if made else [])]
        self._function = cst.ensure_type(function, cst.FunctionDef).with_changes(body=cst.IndentedBlock(inner))
        call = cst.parse_statement(f"{f'{results} = ' if made else ''}{NAME}({taken})")
        return updated_node.with_deep_changes(updated_node.body, body=[*body[: block.start], call, *body[block.stop :]])

    def _names(self, loop: cst.For, block: Sequence[cst.CSTNode]) -> tuple[list[str] | None, list[str]]:
        """What the block is given, and what of it is read elsewhere; None where its names do not allow it."""
        inside = {id(one) for statement in block for one in m.findall(statement, m.Name())}
        stored: list[str] = []
        needed: list[str] = []  # before the block itself stores them
        elsewhere = set[str]()
        for one, name, context in self._uses(self._scopes[-1]):
            if id(one) not in inside:
                if context is ExpressionContext.LOAD:
                    elsewhere.add(name)
            elif context is ExpressionContext.STORE:
                stored.append(name)
            elif context is ExpressionContext.LOAD and name not in stored:
                needed.append(name)
        if set(needed) & set(stored):  # it reads what the turn before left
            return None, []
        of_the_turn = self._stored_beside(loop, block)
        given = [name for name in dict.fromkeys(needed) if name in of_the_turn]
        return given, [name for name in dict.fromkeys(stored) if name in elsewhere]

    def _stored_beside(self, loop: cst.For, block: Sequence[cst.CSTNode]) -> set[str]:
        """The names that a turn stores outside of the block, its own among them."""
        lifted = {id(one) for one in block}
        beside = (loop.target, *(one for one in loop.body.body if id(one) not in lifted))
        return {name for part in beside for _, name, context in self._uses(part) if context is ExpressionContext.STORE}

    def _uses(self, node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, str, object]]:
        """Names in it, and whether each is read or stored."""
        for one in m.findall(node, m.Name()):
            yield one, cst.ensure_type(one, cst.Name).value, self.get_metadata(ExpressionContextProvider, one, None)


def _block(loop: cst.For) -> range:
    """Of the body's statements those that are lifted; empty if there are none."""
    body = loop.body.body if isinstance(loop.body, cst.IndentedBlock) else ()
    ends = [at for at, one in enumerate(body) if m.findall(one, _STEPS)]
    back = [at for at, one in enumerate(body) if m.findall(one, _GOES_BACK)]
    if len(ends) != 1 or len(back) != 1 or not _may_be_lifted(body[ends[0]]):
        return range(0)
    first = end = ends[0]
    while first > 0 and _may_be_lifted(body[first - 1]):
        first -= 1
    while first < back[0] and not _computes(body[first]):
        first += 1
    chosen = range(first, end + 1)
    clears = any(m.findall(body[at], _CLEARS) for at in chosen)
    return chosen if clears and first <= back[0] < end else range(0)


def _may_be_lifted(statement: cst.BaseStatement) -> bool:
    """A plain statement that calls nothing of the host's."""
    if isinstance(statement, cst.With):
        return all(map(_may_be_lifted, statement.body.body))  # type: ignore[arg-type]
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    allowed = all(isinstance(one, cst.Assign | cst.AugAssign | cst.AnnAssign | cst.Expr) for one in statement.body)
    called = {_text(cst.ensure_type(one, cst.Call).func).rpartition(".")[2] for one in m.findall(statement, m.Call())}
    return allowed and bool(called) and not called & _HOST


def _computes(statement: cst.CSTNode) -> bool:
    """Where the turn's own work begins: batches are taken and moved before."""
    return bool(m.findall(statement, m.Call(func=m.Name()))) or bool(m.findall(statement, _CLEARS))


def _text(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)
