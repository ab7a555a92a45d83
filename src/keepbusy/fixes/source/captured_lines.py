"""Statements that become a function of their own, which `keepbusy.graph` captures and replays.

    for x, y in loader:                        @keepbusy.graph
        x, y = x.cuda(), y.cuda()              def captured_train(optimizer, criterion, model, x, y):
        optimizer.zero_grad()                      optimizer.zero_grad()
        loss = criterion(model(x), y)              loss = criterion(model(x), y)
        loss.backward()                            loss.backward()
        total += loss.item()                       optimizer.step()
        optimizer.step()                           return loss
                                               ...
                                               for x, y in loader:
                                                   x, y = x.cuda(), y.cuda()
                                                   loss = captured_train(optimizer, criterion, model, x, y)
                                                   total += loss.item()

Which lines launch into graphs, and at which something has to stay on the host, is known from a run (`fixes.capture`).
What stands between captured statements and has to stay moves in front of them or behind them where that changes
nothing, and otherwise ends the graph: then there are several.
"""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from keepbusy.fixes.definition import LIFTED, CapturedLines

FEWEST_LAUNCHES = 8
"""As many as `fixes.capture` asks for."""
_BLOCKS = ("body", "orelse", "finalbody")
_LOOPS = (ast.For, ast.While)
_HARMLESS = {
    *("len", "range", "zip", "enumerate", "reversed", "isinstance", "hasattr", "getattr", "list", "tuple", "dict"),
    *("int", "float", "bool", "min", "max", "train", "eval", "zero_grad", "requires_grad_", "set_grad_enabled"),
    *("no_grad", "enable_grad", "autocast", "parameters", "named_parameters", "children", "modules", "buffers"),
    *("items", "keys", "values", "size", "dim", "numel", "detach", "view", "reshape", "view_as", "expand", "expand_as"),
    *("unsqueeze", "squeeze", "transpose", "permute", "flatten", "chunk", "split", "unbind", "narrow", "select"),
    *("to", "cuda", "data_ptr", "contiguous", "type", "get_device", "is_floating_point", "unscale_"),
}
"""Functions and methods without any effect that a replay would have to repeat, as long as they launch nothing."""
_ARRIVING = _HARMLESS | {
    *("cpu", "pin_memory", "numpy", "long", "half", "float", "item", "tolist", "zeros", "from_numpy", "next"),
}
"""What brings values to the device or home: it may stand before the captured statements that follow, or behind them."""
_DRAWING = {
    *("rand", "randn", "randint", "randperm", "random", "choice", "permutation", "uniform", "normal", "integers"),
    *("standard_normal", "sample", "shuffle"),
}
"""What draws random numbers of the host, in an order that has to stay."""
_PREPARING = (
    _ARRIVING
    | _DRAWING
    | {
        *("tensor", "as_tensor", "asarray", "array", "arange", "empty", "full", "ones", "stack", "cat", "concatenate"),
        *("astype", "copy", "memmap", "int64", "int32", "float32", "float64", "uint16", "join", "bool", "sorted"),
        *("cos", "sin", "tanh", "exp", "log", "sqrt", "pow", "abs", "floor", "ceil", "round"),
    }
)
"""What prepares a batch: it may stand behind captured statements that it stood before, or before those that follow."""
_COLLECTING = _PREPARING | {
    *("append", "extend", "update", "add", "put", "push", "record", "write", "print", "info", "debug", "warning"),
    *("log", "add_scalar", "set_postfix", "set_description", "format", "sum", "mean", "exp", "round", "perf_counter"),
}
"""What keeps and shows results: it may stand behind captured statements that it stood before."""
_SETS_UP = {"train", "eval", "zero_grad", "unscale_", "parameters"}
_LOOKS_AT_ITSELF = {"super", "locals", "globals", "vars", "eval", "exec", "__class__"}


class Statement(NamedTuple):
    """A line's statement, or the statements that share a line."""

    nodes: tuple[ast.stmt, ...]

    @property
    def first(self) -> int:
        return self.nodes[0].lineno

    @property
    def last(self) -> int:
        return max(node.end_lineno or node.lineno for node in self.nodes)

    def has(self, lines: Iterable[int]) -> bool:
        return any(self.first <= line <= self.last for line in lines)


@dataclass
class LiftedLines:
    """Statements of one block, one after the other, that are captured; and those between them that move."""

    captured: list[Statement]
    before: list[Statement] = field(default_factory=list)
    after: list[Statement] = field(default_factory=list)
    given: list[str] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    values: set[str] = field(default_factory=set)
    """Of what is made, tensors of which only values are asked: through them nothing goes back."""
    name: str = ""

    @property
    def lines(self) -> set[int]:
        return {one.first for one in (*self.captured, *self.before, *self.after)}


class CapturedSource(NamedTuple):
    """The source with graphs, and how much the largest of them holds of an iteration's launches."""

    module: cst.Module
    launches: int


def with_captured(wrapper: MetadataWrapper, lines: CapturedLines, loops: Collection[int] = ()) -> CapturedSource | None:
    """The source with these lines captured. `loops`: lines at which loops begin whose iterations are captured one by
    one. None if there is nothing that can be captured."""
    try:
        tree = ast.parse(wrapper.module.code)
    except (SyntaxError, ValueError):
        return None
    function = _function_at(tree, lines) if lines.launching else None  # other fixes may have changed all of them
    if function is None:
        return None
    regions = sorted(function.regions(lines, loops), key=lambda one: one.captured[0].first)
    if not regions:
        return None
    taken = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    taken |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for region in regions:
        base = name = f"{LIFTED}{getattr(function.node, 'name', 'step').strip('_')}"
        number = 1
        while name in taken:
            number += 1
            name = f"{base}_{number}"
        taken.add(name)
        region.name = name
    held = [sum(n for line, n in lines.launching if any(st.has([line]) for st in one.captured)) for one in regions]
    return CapturedSource(wrapper.visit(_Lift(regions)), max(held))


def _names_itself(node: ast.AST) -> bool:
    """What moves to another function would mean something else there."""
    if isinstance(node, ast.Attribute):
        return node.attr.startswith("__") and not node.attr.endswith("__")
    return isinstance(node, ast.Name) and node.id in _LOOKS_AT_ITSELF


def _function_at(tree: ast.Module, lines: CapturedLines) -> _Function | None:
    """The innermost function around the first line; the module itself for lines that stand in none."""
    line, around = lines.launching[0][0], list[ast.FunctionDef]()
    for node in ast.walk(tree):  # outer ones come first
        match node:
            case ast.FunctionDef() if node.lineno < line <= (node.end_lineno or 0):
                around.append(node)
            case ast.AsyncFunctionDef() | ast.Lambda() if node.lineno <= line <= (node.end_lineno or 0):
                return None
    if not around:
        return _Function(tree, [tree])
    _StoredAttributes(around[-1]).visit(around[-1])
    return _Function(around[-1], [tree, *around[:-1]])


class _StoredAttributes(ast.NodeTransformer):
    """Attributes that a function stores on what it is given are names like others: `self.loss` is one with a dot."""

    def __init__(self, function: ast.FunctionDef) -> None:
        own = [one for part in ast.iter_child_nodes(function) for one in _own_nodes(part)]
        given = {one.arg for one in (*function.args.posonlyargs, *function.args.args)}
        given -= {one.id for one in own if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)}
        self._names = set[str]()
        for one in own:
            match one:
                case ast.Attribute(value=ast.Name(id=base), attr=attribute, ctx=ast.Store()) if base in given:
                    self._names.add(f"{base}.{attribute}")

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and f"{node.value.id}.{node.attr}" in self._names:
            return ast.copy_location(ast.Name(f"{node.value.id}.{node.attr}", node.ctx), node)
        return self.generic_visit(node)


class _Uses:
    """Names that code reads and stores, attributes among them: `self.rate`."""

    def __init__(self, nodes: Iterable[ast.AST]) -> None:
        self.loads: dict[str, None] = {}
        self.stores: dict[str, None] = {}
        self.called: set[str] = set()
        self.attributes: set[str] = set()
        """The first names of attributes and items that are stored."""
        self.written: set[str] = set()
        """The first names of what a method such as `add_` writes to."""
        for node in nodes:
            self._visit(node, frozenset())

    def _visit(self, node: ast.AST, bound: Set[str]) -> None:
        match node:
            case ast.Name(id=name):
                if name in bound:
                    return
                if not isinstance(node.ctx, ast.Load):
                    self.stores[name] = None
                else:
                    self.loads[name] = None
            case ast.Attribute() | ast.Subscript():
                if not isinstance(node.ctx, ast.Load):
                    self.attributes.add(_base(node))
                self._visit_parts(node, bound)
            case ast.AugAssign(target=ast.Name(id=name)):
                self.loads[name] = self.stores[name] = None
                self._visit(node.value, bound)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                targets = [one for part in node.generators for one in ast.walk(part.target)]
                inner = {one.id for one in targets if isinstance(one, ast.Name)}
                self._visit_parts(node, bound | inner)
            case ast.Lambda(args=args):
                inner = {one.arg for one in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
                self._visit(node.body, bound | inner)
            case ast.Call(func=func):
                self.called.add(func.attr if isinstance(func, ast.Attribute) else _base(func))
                if isinstance(func, ast.Attribute) and func.attr.endswith("_"):
                    self.written.add(_base(func))
                self._visit_parts(node, bound)
            case _:
                self._visit_parts(node, bound)

    def all_written(self) -> set[str]:
        """Names that are stored, and those of objects that are written to."""
        return {*self.stores} | self.attributes | self.written | {name.partition(".")[0] for name in self.stores}

    def _visit_parts(self, node: ast.AST, bound: Set[str]) -> None:
        for part in ast.iter_child_nodes(node):
            self._visit(part, bound)


def _free_names(function: ast.AST) -> set[str]:
    """Names that it reads of the code around it."""
    parts = [*ast.walk(function)]
    given = {one.arg for one in parts if isinstance(one, ast.arg)}
    shared = {name for one in parts if isinstance(one, ast.Global | ast.Nonlocal) for name in one.names}
    uses = _Uses([function])
    return {*uses.loads} - given - ({*uses.stores} - shared)


def _base(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call | ast.Starred):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


class _Flow:
    """What statements need from before, and what they store, in the order in which they run."""

    def __init__(self, nodes: Iterable[ast.stmt], defined: Iterable[str] = ()) -> None:
        self.needed: dict[str, None] = {}
        self.stored: dict[str, None] = {}
        self.defined = set(defined)
        """Names that are stored in any case."""
        self._go(nodes)

    def _go(self, nodes: Iterable[ast.stmt]) -> None:
        for node in nodes:
            match node:
                case ast.If(test=test, body=body, orelse=orelse):
                    self._read([test])
                    before = set(self.defined)
                    self._go(body)
                    after, self.defined = self.defined, before
                    self._go(orelse)
                    self.defined &= after
                case ast.For(target=target, iter=iterated, body=body, orelse=orelse):
                    self._read([iterated])
                    before = set(self.defined)
                    self._write(_Uses([target]).stores)
                    self._read([target])
                    self._go(body)
                    self.defined = before
                    self._go(orelse)
                    self.defined = before
                case ast.With(items=items, body=body):
                    self._read([item.context_expr for item in items])
                    self._write(_Uses([item.optional_vars for item in items if item.optional_vars]).stores)
                    self._go(body)
                case ast.While() | ast.Try() | ast.Match() | ast.FunctionDef() | ast.ClassDef():
                    before = set(self.defined)
                    self._read([node])
                    self.stored |= _Uses([node]).stores
                    self.defined = before
                case _:
                    self._read([node])
                    self._write(_Uses([node]).stores)

    def _read(self, nodes: Iterable[ast.AST]) -> None:
        self.needed |= {name: None for name in _Uses(nodes).loads if name not in self.defined}

    def _write(self, names: Iterable[str]) -> None:
        self.stored |= dict.fromkeys(names)
        self.defined |= set(names)


class _Function:
    """A function, or the module itself, and the statements in it that graphs can hold."""

    def __init__(self, node: ast.Module | ast.FunctionDef, around: Sequence[ast.AST]) -> None:
        self.node, self._around = node, around
        self.own = [one for part in ast.iter_child_nodes(node) for one in _own_nodes(part)]
        self._counters = {name for one in self.own for name in _counts(one)}
        self._local = self._locals_of(node, self.own)
        self._shared = {name for one in self.own if isinstance(one, ast.Global | ast.Nonlocal) for name in one.names}
        defined = [one for one in ast.walk(around[0]) if isinstance(one, ast.FunctionDef)]
        counts = Counter(one.name for one in defined)
        top = {id(one) for part in around for one in getattr(part, "body", ())}
        self._functions = {one.name: one for one in defined if counts[one.name] == 1 and id(one) in top}
        imports = [one for one in ast.walk(around[0]) if isinstance(one, ast.Import | ast.ImportFrom)]
        of_objects = [one for one in ast.walk(around[0]) if isinstance(one, ast.Attribute | ast.Name)]
        stored = [one for one in of_objects if isinstance(one.ctx, ast.Store)]
        self._attributes = {one.attr if isinstance(one, ast.Attribute) else one.id.rpartition(".")[2] for one in stored}
        self._classes = {one.name for one in ast.walk(around[0]) if isinstance(one, ast.ClassDef)}
        self._cycles_momentum = any(map(_cycles_momentum, ast.walk(around[0])))
        self._imported = {(name.asname or name.name).partition(".")[0] for one in imports for name in one.names}

    @staticmethod
    def _locals_of(node: ast.AST, own: Iterable[ast.AST]) -> dict[str, None]:
        if not isinstance(node, ast.FunctionDef):
            return {}
        known = node.args
        given = [*known.posonlyargs, *known.args, *known.kwonlyargs, known.vararg, known.kwarg]
        names = {one.arg: None for one in given if one is not None}
        names |= {name: None for one in own for name in _bound_by(one)}
        shared = {name for one in own if isinstance(one, ast.Global | ast.Nonlocal) for name in one.names}
        return {name: None for name in names if name not in shared}

    def regions(self, lines: CapturedLines, loops: Collection[int]) -> list[LiftedLines]:
        return [*self._in_block(self.node.body, dict(lines.launching), lines.staying, loops, [])]

    def _in_block(
        self,
        block: Sequence[ast.stmt],
        launching: dict[int, int],
        staying: Sequence[int],
        loops: Collection[int],
        path: list[tuple[ast.stmt, Sequence[ast.stmt], int]],
    ) -> Iterator[LiftedLines]:
        """`path`: the compound statements around this block, each with the block that it stands in, and where."""
        statements = _statements(block)
        kinds = [self._kind(one, launching, staying, loops) for one in statements]
        at = 0
        while at < len(statements):
            if kinds[at] != "captured":
                if kinds[at] == "mixed":
                    for node in statements[at].nodes:
                        for name in _BLOCKS:
                            inner = getattr(node, name, [])
                            if inner and inner[0].lineno == node.lineno:
                                continue  # it stands behind the colon
                            yield from self._in_block(inner, launching, staying, loops, [*path, (node, block, at)])
                at += 1
                continue
            region, following = self._from(statements, kinds, at)
            launches = sum(
                count for line, count in launching.items() if any(one.has([line]) for one in region.captured)
            )
            rest = statements[following:]
            if launches >= FEWEST_LAUNCHES and self._names(region, rest, path) and not _goes_back(region, rest, path):
                yield region
            at = following

    def _kind(
        self, statement: Statement, launching: Iterable[int], staying: Iterable[int], loops: Collection[int]
    ) -> str:
        """captured, neutral (may stand among those), or one that stays. Parts of such a one may be captured (mixed).
        One that launches itself keeps its place (fixed): it may draw random numbers."""
        is_compound = any(hasattr(node, "body") for node in statement.nodes)
        launches = statement.has(launching)
        is_loop = any(isinstance(node, _LOOPS) and node.lineno in loops for node in statement.nodes)
        called = _Uses(statement.nodes).called
        # takes its time in Python, and is nothing but what a graph does without
        stays = statement.has(staying) and not (called and called <= _SETS_UP and not is_compound)
        stays = stays or (self._cycles_momentum and called == {"step"})
        stays = stays or is_loop or not self._can_move(statement) or self._counts_in(statement)
        if launches and stays:
            return "mixed" if is_compound else "fixed"
        if launches:
            return "captured"
        acts = any(name not in _HARMLESS and (not name[:1].isupper() or name in self._classes) for name in called)
        return "stays" if stays or acts else "neutral"

    def _can_move(self, statement: Statement) -> bool:
        """Whether it may stand in a function of its own."""
        parts = [one for node in statement.nodes for one in ast.walk(node)]
        of_loops = {id(one) for loop in parts if isinstance(loop, ast.For) for one in ast.walk(loop)}
        for part in parts:
            leaves = isinstance(part, ast.Break | ast.Continue) and id(part) not in of_loops
            if leaves or isinstance(part, _STAYING) or _names_itself(part):
                return False
        uses = _Uses(statement.nodes)
        # items of a tensor may be written to in a graph: of a local name, not of `self` or another object that is given
        given = {one.arg for one in self.node.args.args} if isinstance(self.node, ast.FunctionDef) else set()
        return not self._shows([statement]) and all(
            name in uses.stores or (name in self._local and name not in given) for name in uses.attributes
        )

    def _counts_in(self, statement: Statement) -> bool:
        """Whether it reads a number that differs from iteration to iteration, or decides by one."""
        uses = _Uses(statement.nodes)
        if self._counters & (set(uses.loads) - set(uses.stores)):
            return True
        for node in (one for top in statement.nodes for one in ast.walk(top) if isinstance(one, ast.If | ast.IfExp)):
            for part in ast.walk(node.test):
                compares = isinstance(part, ast.Compare) and not isinstance(part.ops[0], ast.Is | ast.IsNot)
                if (compares or isinstance(part, ast.BinOp)) and self._local.keys() & _bare_names(part):
                    return True
        return False

    def _from(self, statements: list[Statement], kinds: list[str], begin: int) -> tuple[LiftedLines, int]:
        """The longest region that begins here, and where the block goes on behind it."""
        region, end = LiftedLines([statements[begin]]), begin + 1
        waiting: list[Statement] = []  # neutral ones since the last that is captured
        before, after = list[Statement](), list[Statement]()
        for place in range(begin + 1, len(statements)):
            one = statements[place]
            passed = [*region.captured, *waiting]
            following = [
                late for late, kind in zip(statements[place:], kinds[place:], strict=True) if kind == "captured"
            ]
            comes_first = _moves(one) and not _writes_into(one) and (not after or _is_arithmetic(one))
            comes_first = comes_first and all(self._independent(one, other, []) for other in (*passed, *after))
            if kinds[place] == "neutral" and _computes_numbers(one) and comes_first:
                before.append(one)
            elif kinds[place] == "neutral" and after and _computes_numbers(one) and not _is_arithmetic(one):
                break  # it may look at what those statements change, by another name
            elif kinds[place] == "neutral" and _serves(one, following):
                waiting.append(one)
            elif kinds[place] == "captured":
                alone = all(
                    self._independent(other, late, passed) and self._may_follow(other, late, region.captured)
                    for other in after
                    for late in (*waiting, one)
                )
                if not alone or self._shows([*passed, one]):
                    break
                region.captured += [*waiting, one]
                region.before, region.after, waiting, end = [*before], [*after], [], place + 1
            elif kinds[place] in ("mixed", "fixed") or not _moves(one):
                break
            elif self._is_known(one, _PREPARING) and comes_first:
                before.append(one)
            elif self._is_known(one, _COLLECTING):
                after.append(one)
            else:
                break
        sets_modes = any(_Uses(one.nodes).called & {"train", "eval"} for one in region.captured)
        wanted = {"zero_grad", *({"train", "eval"} if sets_modes else ())}
        while begin > 0 and kinds[begin - 1] == "neutral" and _Uses(statements[begin - 1].nodes).called & wanted:
            begin -= 1
            region.captured.insert(0, statements[begin])
        return region, end

    def _independent(self, one: Statement, other: Statement, results_of: Iterable[Statement]) -> bool:
        """Whether the two may change places: neither stores what the other uses, and no object is used by both that
        either might write to. Results of these statements are written to by methods such as `add_` alone."""
        mine, others = _Uses(self._with_called(one)), _Uses(self._with_called(other))
        if mine.called & _DRAWING and others.called & _DRAWING:
            return False
        written, written_there = (uses.all_written() - self._imported for uses in (mine, others))
        if written & ({*others.loads} | written_there) or written_there & {*mine.loads}:
            return False
        results = {name for part in results_of for name in _Uses(part.nodes).stores}
        return not (self._objects(one) & self._objects(other)) - results

    def _with_called(self, statement: Statement) -> list[ast.stmt]:
        """And the functions of the file that it calls, as far as their names tell all that they do."""
        found, ahead = list[ast.stmt](), list[ast.stmt](statement.nodes)
        while ahead:
            one = ahead.pop()
            found.append(one)
            functions = [part.func for part in ast.walk(one) if isinstance(part, ast.Call)]
            called = {part.id for part in functions if isinstance(part, ast.Name)}
            ahead += [self._functions[name] for name in called & {*self._functions}]
            ahead = [later for later in ahead if later not in found]
        return found

    def _is_known(self, statement: Statement, harmless: Set[str]) -> bool:
        """Whether it calls nothing that might have an effect on what its names do not tell of."""
        nodes = self._with_called(statement)
        called = _Uses(nodes).called
        steps = [node for node in statement.nodes if isinstance(node, ast.Expr) and "step" in _Uses([node]).called]
        if "step" in called and len(steps) == len(statement.nodes) == 1 and called == {"step"}:
            return harmless >= _COLLECTING  # of a schedule or a profiler: what stands before it stays before it
        functions = [one for one in nodes if isinstance(one, ast.FunctionDef)]
        return called - {one.name for one in functions} <= harmless and all(map(_only_returns, functions))

    def _may_follow(self, one: Statement, passed: Statement, captured: Sequence[Statement]) -> bool:
        """Whether this statement may come after one that it stood before, as far as what it reads has other names."""
        uses = _Uses(passed.nodes)
        is_read = bool(_Uses(one.nodes).called & _READING)
        if "step" in uses.called and "step" in _Uses(one.nodes).called:
            return False  # a schedule, between two steps of optimizers
        if not is_read:
            shortens = any(isinstance(part, ast.Delete) for node in one.nodes for part in ast.walk(node))
            return shortens or not (_writes_into(one) or "print" in _Uses(one.nodes).called)
        made = {name for part in captured for name in _Uses(part.nodes).stores}
        fresh = {name for name in made if "_on_gpu" in name}
        read = _read_names(one)
        if "step" in uses.called and not read <= made:
            return False  # it may read a weight
        in_place = bool(uses.written - self._imported or uses.attributes)
        in_place = in_place or any(isinstance(node, ast.AugAssign) for node in passed.nodes)
        return not in_place or read <= fresh  # it may write to what is read by another name

    def _objects(self, statement: Statement) -> set[str]:
        """Names that it uses, but for modules, and what only its shape is asked of."""
        parts = [part for top in self._with_called(statement) for part in ast.walk(top)]
        shapes = [part.value for part in parts if isinstance(part, ast.Attribute) and part.attr in ("shape", "size")]
        shapes += [part.args[0] for part in parts if isinstance(part, ast.Call) and _is_len(part) and part.args]
        asked = {id(one) for one in shapes}
        names = {part.id for part in parts if isinstance(part, ast.Name) and id(part) not in asked}
        return names - self._imported - {*dir(builtins)}

    def _names(
        self,
        region: LiftedLines,
        rest: Sequence[Statement],
        path: list[tuple[ast.stmt, Sequence[ast.stmt], int]],
    ) -> bool:
        """What the region is given and what is read of it later. False where its names do not allow it."""
        flow = _Flow(node for one in region.captured for node in one.nodes)
        needed, stored = flow.needed, flow.stored
        live = self._live([*region.after, *rest], path) | {name for name in stored if "." in name}
        handlers = [one for around, _, _ in path if isinstance(around, ast.Try) for one in around.handlers]
        if set(stored) & (self._shared | {*_Uses(handlers).loads}):
            return False  # after an error in the middle of them, or to whom they call, they would be what they were
        maybe = set(stored) - flow.defined
        made = [name for name in stored if name in live]
        inside = {id(part) for one in region.captured for node in one.nodes for part in ast.walk(node)}
        outside = [one for one in self.own if id(one) not in inside]
        if {*made} & {name for one in outside for name in _shown_whole(one)}:
            return False  # `print(loss)` shows how it was made, which no replay tells
        known = {one.id for one in outside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        known |= {name for name in (*needed, *stored) if "." in name}
        if isinstance(self.node, ast.Module):
            changing = {
                one.id
                for loop, _, _ in path
                if isinstance(loop, _LOOPS)
                for one in ast.walk(loop)
                if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store) and id(one) not in inside
            }
            local = changing | set(stored)
            functions = [one for one in ast.walk(self.node) if isinstance(one, ast.FunctionDef | ast.Lambda)]
            if set(stored) & {name for one in functions for name in _free_names(one)}:
                return False  # what is called from here may look at them
        else:
            known |= {*self._locals_of(self.node, [])}
            local = set(self._local)
            for outer in self._around:
                parts = [one for part in ast.iter_child_nodes(outer) for one in _own_nodes(part)]
                local |= {*self._locals_of(outer, parts)}
        given = [name for name in needed if name in local]
        lacking = [name for name in made if name in maybe and name not in given]
        if any(name not in known for name in (*lacking, *(name for name in needed if name in stored))):
            return False  # it may have no value yet
        order = [*self._local, *given, *lacking]
        region.given, region.made = sorted({*given, *lacking}, key=order.index), made
        going_back = [one for one in region.captured if "backward" in _Uses(one.nodes).called]
        gone_back = {name for one in going_back for name in _Uses(one.nodes).loads}
        plain = {name for one in region.captured for name in _Uses(one.nodes).stores if _is_plain(one)}
        region.values = {name for name in {*made} - gone_back - plain if self._is_asked_values(name, inside)}
        return True

    def _is_asked_values(self, name: str, inside: Set[int]) -> bool:
        """Whether all that stands outside asks for its value, and so for a tensor."""
        parts = [part for part in ast.walk(self.node) if id(part) not in inside]
        looked_into = {id(part.value): part for part in parts if isinstance(part, ast.Attribute)}
        asked = set[str]()
        for one in parts:
            if isinstance(one, ast.Name) and one.id == name and _is_load(one):
                look = looked_into.get(id(one))
                if look is not None and look.attr == "data":
                    look = looked_into.get(id(look), look)  # what follows it
                asked.add("" if look is None else look.attr)
        return asked <= _WITHOUT_GRADIENT and bool(asked & {"item", "detach", "tolist"})

    def _shows(self, statements: Iterable[Statement]) -> bool:
        """Whether what they call may look at an attribute that they store: a method of its object, or who is given that
        object."""
        nodes = [node for one in statements for node in one.nodes]
        bases = {name.partition(".")[0] for name in _Uses(nodes).stores if "." in name}
        if not bases:
            return False
        parts = [part for node in nodes for part in ast.walk(node)]
        looked_into = [part for part in parts if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name)]
        within = {id(one.value) for one in looked_into}
        if any(isinstance(part, ast.Name) and part.id in bases and id(part) not in within for part in parts):
            return True
        called = {id(part.func) for part in parts if isinstance(part, ast.Call)}
        asked = [one.attr for one in looked_into if id(one) in called and _base(one) in bases]
        return not self._attributes.issuperset(asked)

    def _live(
        self,
        rest: Sequence[Statement],
        path: list[tuple[ast.stmt, Sequence[ast.stmt], int]],
    ) -> set[str]:
        """Names that are read after the region before they are stored again: further on, in the next iteration, or in
        functions within this one."""
        live = set(_Flow(node for one in rest for node in one.nodes).needed)
        for around, outer, at in reversed(path):
            if isinstance(around, _LOOPS):
                live |= set(_Flow(around.body).needed) | set(_Uses([getattr(around, "test", ast.Pass())]).loads)
            if isinstance(around, (*_LOOPS, ast.Try)):
                live |= set(_Flow([*around.orelse, *getattr(around, "finalbody", [])]).needed)
            live |= set(_Flow(node for one in _statements(outer)[at + 1 :] for node in one.nodes).needed)
        nested = [one for one in self.own if isinstance(one, ast.FunctionDef | ast.Lambda | ast.ClassDef)]
        return live | {name for one in nested for name in _free_names(one)}


_STAYING = (
    *(ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom),
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.AsyncFor, ast.AsyncWith),
    *(ast.While, ast.Try, ast.Match, ast.Delete, ast.Raise, ast.NamedExpr),
)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """This node and those below it, without what stands in other functions, but with these functions."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
        for part in ast.iter_child_nodes(node):
            yield from _own_nodes(part)


def _bound_by(node: ast.AST) -> Iterator[str]:
    """Names that it gives a value, in the function that it stands in."""
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import() | ast.ImportFrom():
            yield from ((one.asname or one.name).partition(".")[0] for one in node.names)
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name
        case ast.MatchMapping(rest=str(name)):
            yield name


def _shown_whole(node: ast.AST) -> Iterator[str]:
    """Names whose values become text as they are, or are asked how they were made."""
    match node:
        case ast.Call(func=ast.Name(id="print" | "str" | "repr"), args=given):
            yield from (one.id for one in given if isinstance(one, ast.Name))
        case ast.FormattedValue(value=ast.Name(id=name), format_spec=None):
            yield name
        case ast.Attribute(value=ast.Name(id=name), attr="grad_fn" | "requires_grad" | "is_leaf"):
            yield name


_WITHOUT_GRADIENT = {"detach", "item", "tolist", "data", "shape", "size", "dtype", "device"}


def _goes_back(
    region: LiftedLines, rest: Iterable[Statement], path: Sequence[tuple[ast.stmt, Sequence[ast.stmt], int]]
) -> bool:
    """Whether a backward pass that comes later may begin at what the region makes: the graph of gradients ends with a
    replay."""
    following = [*region.after, *rest]
    for _, outer, at in reversed(path):
        following += _statements(outer)[at + 1 :]
    of_results = {*region.made}
    for one in following:
        parts = [part for node in one.nodes for part in ast.walk(node)]
        attributes = [part for part in parts if isinstance(part, ast.Attribute)]
        ends = [part.value for part in attributes if part.attr in _WITHOUT_GRADIENT]
        looked_into = {id(inner) for end in ends for inner in ast.walk(end)}
        read = {part.id for part in parts if isinstance(part, ast.Name) and id(part) not in looked_into}
        if read & of_results:
            uses = _Uses(one.nodes)
            if "backward" in uses.called:
                return True
            of_results |= {*uses.stores}
    return False


def _is_plain(statement: Statement) -> bool:
    """Whether it launches nothing of itself, and so may be about arrays of the host."""
    return _Uses(statement.nodes).called <= _HARMLESS


def _is_load(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _statements(block: Sequence[ast.stmt]) -> list[Statement]:
    found: list[Statement] = []
    for node in block:
        if found and found[-1].nodes[-1].lineno == node.lineno:
            found[-1] = Statement((*found[-1].nodes, node))
        else:
            found.append(Statement((node,)))
    return found


def _counts(node: ast.AST) -> Iterator[str]:
    """Names of numbers that differ in each iteration."""
    match node:
        case ast.For(target=target, iter=ast.Call(func=ast.Name(id="range" | "trange"))):
            yield from _Uses([target]).stores
        case ast.For(target=ast.Tuple(elts=[first, *_])) if "enumerate" in _Uses([node.iter]).called:
            yield from _Uses([first]).stores
        case ast.AugAssign(target=ast.Name(id=name), value=ast.Constant()):
            yield name


def _cycles_momentum(node: ast.AST) -> bool:
    """Whether a schedule is made that changes more than the learning rate: a graph keeps the momentum."""
    if not isinstance(node, ast.Call):
        return False
    if getattr(node.func, "attr", _base(node.func)) not in ("OneCycleLR", "CyclicLR"):
        return False
    known = {one.arg: one.value for one in node.keywords}
    chosen = known.get("cycle_momentum")
    return not (isinstance(chosen, ast.Constant) and chosen.value is False)


def _bare_names(node: ast.AST) -> set[str]:
    """Names that are not only looked into, as `args` is in `args.cuda`."""
    behind = {id(one.value) for one in ast.walk(node) if isinstance(one, ast.Attribute)}
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and id(one) not in behind}


def _serves(one: Statement, following: Iterable[Statement]) -> bool:
    """Whether captured statements need it: they read what it stores, or it clears gradients or sets a mode."""
    uses = _Uses(one.nodes)
    read = {name for late in following for name in _Uses(late.nodes).loads}
    return bool(uses.called & _SETS_UP) or bool({*uses.stores} & read)


def _only_returns(function: ast.FunctionDef) -> bool:
    """Whether all that a call does is what it returns: it writes to nothing that it was given or finds."""
    own = [one for part in function.body for one in ast.walk(part)]
    uses = _Uses(function.body)
    acts = (ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom, ast.Await, ast.Raise, ast.Assert, ast.FunctionDef)
    writes = uses.attributes | uses.written
    return not function.decorator_list and not writes and not any(isinstance(one, acts) for one in own)


def _computes_numbers(statement: Statement) -> bool:
    """Whether it launches nothing and computes: what comes of it may be another number at each call."""
    return all(
        isinstance(node, ast.Assign) and any(isinstance(part, ast.BinOp | ast.Compare) for part in ast.walk(node.value))
        for node in statement.nodes
    )


_READING = {"item", "tolist", "cpu", "numpy", "float", "int"}


def _read_names(statement: Statement) -> set[str]:
    """The names of what it reads of the device; "." for what has none of its own, as an attribute."""
    found = set[str]()
    for call in (part for node in statement.nodes for part in ast.walk(node) if isinstance(part, ast.Call)):
        match call:
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in _READING:
                pass
            case ast.Call(func=ast.Name(id="float" | "int"), args=[value]):
                pass
            case _:
                continue
        if isinstance(value, ast.Call) and getattr(value.func, "attr", "") in _READING:
            continue  # `loss.item()` within `float(...)`
        found.add(value.id if isinstance(value, ast.Name) else ".")
    return found


def _writes_into(statement: Statement) -> bool:
    """Whether it stores attributes or items, which others may hold by other names."""
    uses = _Uses(statement.nodes)
    return bool(uses.attributes or uses.written)


def _is_arithmetic(statement: Statement) -> bool:
    """Whether it looks into no object."""
    looks = (ast.Attribute, ast.Subscript, ast.Starred)
    numbers = {"min", "max", "abs", "round", "int", "float", "pow"}
    parts = [part for node in statement.nodes for part in ast.walk(node)]
    return _Uses(statement.nodes).called <= numbers and not any(isinstance(part, looks) for part in parts)


def _moves(statement: Statement) -> bool:
    """Whether the statements around it may run before it, or after it."""
    jumps = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await, ast.Raise, ast.Try, ast.While)
    return not any(isinstance(node, jumps) for top in statement.nodes for node in ast.walk(top))


def _is_len(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "len"


class _Lift(cst.CSTTransformer):
    """Moves regions into functions of their own, in front of the module's statement that they stand in."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, regions: Sequence[LiftedLines]) -> None:
        super().__init__()
        self._regions = {line: one for one in regions for line in one.lines}
        self._functions: list[tuple[LiftedLines, cst.FunctionDef]] = []

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> Any:  # noqa: N802
        return updated_node.with_changes(body=self._lifted(original_node.body, updated_node.body))

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:  # noqa: N802
        body: list[Any] = []
        for original, statement in zip(original_node.body, updated_node.body, strict=True):
            place = self.get_metadata(PositionProvider, original)
            inside = {id(one) for line, one in self._regions.items() if place.start.line <= line <= place.end.line}
            apart = cst.EmptyLine(indent=False)
            for region, function in sorted(self._functions, key=lambda one: one[0].captured[0].first):
                if id(region) in inside:
                    body.append(function.with_changes(leading_lines=[apart, apart] if body else []))
            moved = any(id(region) in inside for region, _ in self._functions)
            lines = [apart, apart, *_without_blank(statement.leading_lines)] if moved else statement.leading_lines
            body.append(statement.with_changes(leading_lines=lines))
        return updated_node.with_changes(body=body)

    def _line(self, node: cst.CSTNode) -> int:
        return int(self.get_metadata(PositionProvider, node).start.line)

    def _lifted(self, originals: Sequence[Any], updated: Sequence[Any]) -> list[Any]:
        """A block with its regions called."""
        by_line = {self._line(one): statement for one, statement in zip(originals, updated, strict=True)}
        body: list[Any] = []
        done: set[int] = set()
        for line, statement in by_line.items():
            region = self._regions.get(line)
            if region is None:
                body.append(statement)
            elif id(region) not in done:
                done.add(id(region))
                body += self._called(region, by_line)
        return body

    def _called(self, region: LiftedLines, by_line: dict[int, Any]) -> list[Any]:
        first, *others = [by_line[one.first] for one in region.captured]
        given, made = ", ".join(region.given), ", ".join(region.made)
        names = _Unattributed(region)
        inner = [one.visit(names) for one in (first.with_changes(leading_lines=[]), *others)]
        inner += [cst.parse_statement(f"return {names.of(region.made, region.values)}")] if made else []
        function = cst.parse_statement(f"@keepbusy.graph\ndef {region.name}({names.of(region.given)}):\n    pass\n")
        body = cst.IndentedBlock(inner)
        self._functions.append((region, cst.ensure_type(function, cst.FunctionDef).with_changes(body=body)))
        call = cst.parse_statement(f"{f'{made} = ' if made else ''}{region.name}({given})")
        call = cst.ensure_type(call, cst.SimpleStatementLine).with_changes(leading_lines=first.leading_lines)
        moved = [[by_line[one.first] for one in part] for part in (region.before, region.after)]
        return [*moved[0], call, *moved[1]]


class _Unattributed(cst.CSTTransformer):
    """Within a captured function a name such as `self.loss` is one without a dot."""

    def __init__(self, region: LiftedLines) -> None:
        super().__init__()
        parts = [part for one in region.captured for node in one.nodes for part in ast.walk(node)]
        taken = {part.id for part in parts if isinstance(part, ast.Name)} | {*region.given}
        self._names: dict[str, str] = {}
        for name in dict.fromkeys((*region.given, *region.made)):
            base, _, attribute = name.rpartition(".")
            self._names[name] = f"{base}_{attribute}" if base and attribute in taken else attribute
            taken.add(self._names[name])

    def of(self, names: Iterable[str], detached: Set[str] = frozenset()) -> str:
        return ", ".join(f"{self._names[name]}.detach()" if name in detached else self._names[name] for name in names)

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:  # noqa: N802
        match original_node:
            case cst.Attribute(value=cst.Name(value=base), attr=cst.Name(value=attribute)):
                name = self._names.get(f"{base}.{attribute}")
                return updated_node if name is None else cst.Name(name)
        return updated_node


def _without_blank(lines: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    """Comments right above a statement, and what stands between them."""
    kept = [*lines]
    while kept and kept[0].comment is None:
        del kept[0]
    return kept
