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
from enum import Enum
from itertools import chain, count
from typing import NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper

from keepbusy.fixes.capture import FEWEST_LAUNCHES
from keepbusy.fixes.definition import LIFTED, CapturedLines
from keepbusy.fixes.source.constants import minibatch_indices
from keepbusy.fixes.source.lifted_functions import LiftedLines, LiftRegions
from keepbusy.fixes.source.name_flow import (
    Flow,
    Statement,
    Uses,
    base_name,
    free_names,
    imported_names,
    local_names,
    own_nodes,
    parameters_of,
    shared_names,
    statements_of,
    surely_read,
)

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
_DRAWING = {
    *("rand", "randn", "randint", "randperm", "random", "choice", "permutation", "uniform", "normal", "integers"),
    *("standard_normal", "sample", "shuffle"),
}
"""What draws random numbers of the host, in an order that has to stay."""
_PREPARING = (
    _HARMLESS
    | _DRAWING
    | {
        *("cpu", "pin_memory", "numpy", "long", "half", "float", "item", "tolist", "zeros", "from_numpy", "next"),
        *("tensor", "as_tensor", "asarray", "array", "arange", "empty", "full", "ones", "stack", "cat", "concatenate"),
        *("astype", "copy", "memmap", "int64", "int32", "float32", "float64", "uint16", "join", "bool", "sorted"),
        *("cos", "sin", "tanh", "exp", "log", "sqrt", "pow", "abs", "floor", "ceil", "round"),
    }
)
"""What prepares a batch: it may stand behind captured statements that it stood before, or before those that follow."""
_COLLECTING = _PREPARING | {
    *("append", "extend", "update", "add", "put", "push", "record", "write", "print", "info", "debug", "warning"),
    *("log", "add_scalar", "add_scalars", "set_postfix", "set_description", "format", "sum", "mean", "exp", "round"),
    *("perf_counter", "time", "monotonic"),
}
"""What keeps and shows results: it may stand behind captured statements that it stood before."""
_OF_PYTORCH = {"step", "update", "forward", "backward", "zero_grad", "train", "eval", "to", "append", "add"}
"""Methods that others have, too: `optimizer.step()` is none of a class in the file that has a `step`."""
_OF_MODELS = {"parameters", "named_parameters", "state_dict", "train", "eval"}
_MODES = {"train", "eval"}
_SETS_STAGE = _MODES | {"zero_grad"}
_SETS_UP = {"train", "eval", "zero_grad", "unscale_", "parameters"}
_LOOKS_AT_ITSELF = {"super", "locals", "globals", "vars", "eval", "exec", "__class__"}


_WITHOUT_GRADIENT = {"detach", "item", "tolist", "data", "shape", "size", "dtype", "device"}
_READING = {"item", "tolist", "cpu", "numpy", "float", "int"}
_STAYING = (
    *(ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom),
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.AsyncFor, ast.AsyncWith),
    *(ast.While, ast.Try, ast.Match, ast.Delete, ast.NamedExpr),
)
_JUMPS = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await, ast.Raise, ast.Try, ast.While)
_ACTING = (ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom, ast.Await, ast.Raise, ast.Assert, ast.FunctionDef)


class CapturedSource(NamedTuple):
    """The source with graphs, how much the largest of them holds of an iteration's launches, and which of the lines
    that launch they hold, as they stood before."""

    module: cst.Module
    launches: int
    held: list[int]


def with_captured(wrapper: MetadataWrapper, lines: CapturedLines, loops: Collection[int] = ()) -> CapturedSource | None:
    """The source with these lines captured. `loops`: lines at which loops begin whose iterations are captured one by
    one. None if there is nothing that can be captured."""
    try:
        tree = ast.parse(wrapper.module.code)
    except (SyntaxError, ValueError):
        return None
    function = _function_at(tree, lines, loops) if lines.launching else None  # other fixes may have changed all of them
    regions = function.regions() if function is not None else []
    if function is None or not regions:
        return None
    used_names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used_names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    base = f"{LIFTED}{getattr(function.node, 'name', 'step').strip('_')}"
    free = (name for name in chain([base], (f"{base}_{number}" for number in count(2))) if name not in used_names)
    for region in sorted(regions, key=lambda region: region.captured[0].first):
        region.name = next(free)
    statements = [statement for region in regions for statement in region.captured]
    held = [line for line, _ in lines.launching if any(statement.has([line]) for statement in statements)]
    return CapturedSource(wrapper.visit(LiftRegions(regions)), max(map(function.launches_in, regions)), held)


def refused_lines(source: str, lines: CapturedLines) -> set[int]:
    """Those of the lines that launch which no graph can hold, whoever writes it."""
    try:
        function = _function_at(ast.parse(source), lines, ()) if lines.launching else None
    except (SyntaxError, ValueError):
        return set()
    if function is None:
        return set()
    if function.objects_of_each_call():
        return {line for line, _ in lines.launching}
    nodes = [node for node in own_nodes(function.node) if isinstance(node, ast.stmt) and not hasattr(node, "body")]
    refused = [statement for statement in (Statement([node]) for node in nodes) if function.is_refused(statement)]
    return {line for line, _ in lines.launching if any(statement.has([line]) for statement in refused)}


def _function_at(tree: ast.Module, lines: CapturedLines, loops: Collection[int]) -> _Function | None:
    """The innermost function around the first line; the module itself for lines that stand in none."""
    line, around = lines.launching[0][0], list[ast.FunctionDef]()
    for node in ast.walk(tree):  # outer ones come first
        match node:
            case ast.FunctionDef() if node.lineno < line <= (node.end_lineno or 0):
                around.append(node)
            case ast.AsyncFunctionDef() | ast.Lambda() if node.lineno <= line <= (node.end_lineno or 0):
                return None
    if around:
        _StoredAttributes(around[-1]).visit(around[-1])
    return _Function([tree, *around], lines, loops)


class _StoredAttributes(ast.NodeTransformer):
    """Attributes that a function stores on its parameters are names like others: `self.loss` is one with a dot."""

    def __init__(self, function: ast.FunctionDef) -> None:
        own = own_nodes(function)
        parameters = {parameter.arg for parameter in (*function.args.posonlyargs, *function.args.args)}
        parameters -= {node.id for node in own if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
        self._names = set[str]()
        for node in own:
            match node:
                case ast.Attribute(value=ast.Name(id=base), attr=attribute, ctx=ast.Store()) if base in parameters:
                    self._names.add(f"{base}.{attribute}")

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and f"{node.value.id}.{node.attr}" in self._names:
            return ast.copy_location(ast.Name(f"{node.value.id}.{node.attr}", node.ctx), node)
        return self.generic_visit(node)


class _CaptureKind(Enum):
    """What may become of a statement where graphs are made."""

    CAPTURED = "launches, and a graph can hold it"
    NEUTRAL = "launches nothing, and may stand among captured statements"
    STAYS = "launches nothing, and a graph cannot hold it"
    FIXED = "launches, stays, and keeps its place: it may draw random numbers"
    MIXED = "the same, but of parts: some of them may be captured"


class _Enclosing(NamedTuple):
    """A compound statement around a block, the block that it stands in, and where."""

    statement: ast.stmt
    block: Sequence[ast.stmt]
    place: int

    @property
    def following(self) -> list[Statement]:
        return statements_of(self.block)[self.place + 1 :]


class _File:
    """What is asked of the whole file that a function stands in."""

    def __init__(self, scopes: Sequence[ast.Module | ast.FunctionDef]) -> None:
        """`scopes`: the file, and the functions within one another down to the one that is looked at."""
        self.nodes = nodes = [*ast.walk(scopes[0])]
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        counts = Counter(node.name for node in functions)
        top, visible = ({id(node) for scope in seen for node in scope.body} for seen in (scopes[:-1] or scopes, scopes))
        self.functions = {node.name: node for node in functions if counts[node.name] == 1 and id(node) in visible}
        """Those whose names tell which they are."""
        methods = [node for node in functions if counts[node.name] == 1 and id(node) not in top]
        self.counting = {node.name for node in methods if any(map(_counts, ast.walk(node)))} - _OF_PYTORCH
        """Names of methods that do on the host what no replay does."""
        self._counting_objects = {
            (holder, method)
            for kind in nodes
            if isinstance(kind, ast.ClassDef)
            for method in _counting_methods(kind) & _OF_PYTORCH
            for holder in _held_by(nodes, kind.name)
        }
        """The same of methods that PyTorch's classes have, too, with the name of what holds their object."""
        stored = [
            node for node in nodes if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store)
        ]
        self.stored_attributes = {
            node.attr if isinstance(node, ast.Attribute) else node.id.rpartition(".")[2] for node in stored
        }
        called = [node.func for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        self.models = {_last_name(func.value) for func in called if func.attr in _OF_MODELS}
        """Names of what has parameters, or modes."""
        self.classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        self.imported = {name for node in imports for name in imported_names(node)}
        loops = [node for node in nodes if isinstance(node, _LOOPS)]
        self.calls_in_loops = [(loop, call) for loop in loops for call in ast.walk(loop) if isinstance(call, ast.Call)]
        self.cycles_momentum = any(isinstance(node, ast.Call) and _cycles_momentum(node) for node in nodes)

    def counts(self, statement: Statement) -> bool:
        """Whether it calls what does on the host what no replay does."""
        if not self.counting.isdisjoint(statement.called):
            return True
        return any(
            (_last_name(part.func.value), part.func.attr) in self._counting_objects
            for part in statement.parts
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute)
        )

    def may_call_model(self, name: str, within: frozenset[str] = frozenset()) -> bool:
        """Whether one of the functions calls anything that may be a model. `within`: those that are looked at."""
        no_models = self.imported | {*dir(builtins)} | within
        for part in ast.walk(self.functions[name]):
            match part:
                case ast.Call(func=ast.Name(id=called)) if called in self.functions and called not in within:
                    if self.may_call_model(called, within | {name}):
                        return True
                case ast.Call(func=ast.Name(id=called)) if called not in no_models:
                    return True
                case ast.Call(func=ast.Attribute(attr=method)) if base_name(part.func) not in self.imported:
                    if method not in _PREPARING:
                        return True
        return False


def _cycles_momentum(call: ast.Call) -> bool:
    """Whether a schedule is made that changes more than the learning rate: a graph keeps the momentum."""
    if getattr(call.func, "attr", base_name(call.func)) not in ("OneCycleLR", "CyclicLR"):
        return False
    chosen = {keyword.arg: keyword.value for keyword in call.keywords}.get("cycle_momentum")
    return not (isinstance(chosen, ast.Constant) and chosen.value is False)


class _Function:
    """A function, or the module itself, and the statements in it that graphs can hold."""

    def __init__(
        self, scopes: list[ast.Module | ast.FunctionDef], lines: CapturedLines, loops: Collection[int]
    ) -> None:
        """`scopes`: the file, and the functions within one another down to this one."""
        self.node, self._around = scopes[-1], scopes[:-1] or scopes
        self.file = _File(scopes)
        self._launching, self._loops = dict(lines.launching), loops
        self._own = own_nodes(self.node)
        # they take their time in Python, and are nothing but what a graph does without
        set_up = [node for node in self._own if isinstance(node, ast.Expr) and _only_sets_up(node.value)]
        self._staying = [line for line in lines.staying if not _stands_in(set_up, line)]
        self._ends_before_backward = lines.ends_before_backward
        self._gradless = [part for part in self._own if isinstance(part, ast.With) and _is_without_gradient(part)]
        # what launches counts on the GPU, and is no number
        self._counters = {
            name
            for part in self._own
            for name in _counters_of(part)
            if not (isinstance(part, ast.AugAssign) and part.lineno in self._launching)
        }
        self._growing = {line for part in self._own if isinstance(part, _LOOPS) for line in _growing_in(part)}
        self._local, self._shared = local_names(self.node), shared_names(self._own)

    def regions(self) -> list[LiftedLines]:
        return [*self._regions_in(self.node.body, [])]

    def launches_in(self, region: LiftedLines) -> int:
        """How much of an iteration's launches it holds."""
        captured = region.captured
        return sum(n for line, n in self._launching.items() if any(statement.has([line]) for statement in captured))

    def _regions_in(self, block: Sequence[ast.stmt], path: list[_Enclosing]) -> Iterator[LiftedLines]:
        """`path`: the compound statements around this block."""
        statements = statements_of(block)
        kinds = [self._kind_of(statement) for statement in statements]
        place = 0
        while place < len(statements):
            if kinds[place] == _CaptureKind.CAPTURED:
                growing = _GrowingRegion(self, statements, kinds, place)
                region, place = growing.region, growing.end
                rest, is_worth_it = statements[place:], self.launches_in(region) >= FEWEST_LAUNCHES
                further_out = [statement for outer in reversed(path) for statement in outer.following]
                later = (*region.after, *rest, *further_out)
                if (
                    is_worth_it
                    and self._bind(region, statements, rest, path)
                    and (self._ends_before_backward or not _goes_back(self._with_gradient(region), later))
                ):
                    yield region
                continue
            for node in statements[place].nodes if kinds[place] == _CaptureKind.MIXED else ():
                for inner in (getattr(node, name, []) for name in ("body", "orelse", "finalbody")):
                    if not inner or inner[0].lineno != node.lineno:  # else it stands behind the colon
                        yield from self._regions_in(inner, [*path, _Enclosing(node, block, place)])
            place += 1

    def _with_gradient(self, region: LiftedLines) -> set[str]:
        """What it makes that a backward pass may go through: not what is made under `torch.no_grad()`."""
        nodes = [node for statement in region.captured for node in statement.nodes]
        others = [node for node in nodes if not _stands_in(self._gradless, node.lineno)]
        return {*region.results} & {*Uses(others).stores}

    def _kind_of(self, statement: Statement) -> _CaptureKind:
        stays = self._stays(statement)
        if statement.has(self._launching):
            if not stays:
                return _CaptureKind.CAPTURED
            return _CaptureKind.MIXED if _is_compound(statement) else _CaptureKind.FIXED
        other_classes = {name for name in statement.called if name[:1].isupper() and name not in self.file.classes}
        if stays or not statement.called <= _HARMLESS | other_classes:
            return _CaptureKind.STAYS
        return _CaptureKind.NEUTRAL

    def _stays(self, statement: Statement) -> bool:
        """Whether no graph can hold it."""
        return (
            statement.has(self._staying)
            or any(isinstance(node, _LOOPS) and node.lineno in self._loops for node in statement.nodes)
            or not self._can_move(statement)
            or self.is_refused(statement)
        )

    def is_refused(self, statement: Statement) -> bool:
        """Whether a graph of it, wherever it stands, would not do what it does."""
        return (
            statement.has(self._growing)
            or self.file.counts(statement)
            or (self.file.cycles_momentum and statement.called == {"step"})
            or self._counts_in(statement)
        )

    def _can_move(self, statement: Statement) -> bool:
        """Whether it may stand in a function of its own."""
        of_loops = {id(part) for loop in statement.parts if isinstance(loop, ast.For) for part in ast.walk(loop)}
        for part in statement.parts:
            ends_outer_loop = isinstance(part, ast.Break | ast.Continue) and id(part) not in of_loops
            if ends_outer_loop or isinstance(part, _STAYING) or _names_itself(part):
                return False
        # items of a tensor may be written to in a graph: of a local name, not of `self` or another object that is given
        parameters = {name.arg for name in self.node.args.args} if isinstance(self.node, ast.FunctionDef) else set()
        own = {*statement.uses.stores} | ({*self._local} - parameters)
        return statement.uses.attributes <= own and not self.shows([statement])

    def _counts_in(self, statement: Statement) -> bool:
        """Whether it reads a number that differs from iteration to iteration, or decides by one."""
        if self._counters & ({*statement.uses.loads} - {*statement.uses.stores}):
            return True
        for node in statement.parts:
            for part in ast.walk(node.test) if isinstance(node, ast.If | ast.IfExp) else ():
                compares = isinstance(part, ast.Compare) and not isinstance(part.ops[0], ast.Is | ast.IsNot)
                if (compares or isinstance(part, ast.BinOp)) and self._local.keys() & _bare_names(part):
                    return True
        return False

    def shows(self, statements: Sequence[Statement]) -> bool:
        """Whether what they call may look at an attribute that they store: a method of its object, or who is given that
        object."""
        stores = [name for statement in statements for name in statement.uses.stores]
        bases = {name.partition(".")[0] for name in stores if "." in name}
        if not bases:
            return False
        parts = [part for statement in statements for part in statement.parts]
        looked_into = [part for part in parts if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name)]
        within = {id(part.value) for part in looked_into}
        if any(isinstance(part, ast.Name) and part.id in bases and id(part) not in within for part in parts):
            return True
        called = {id(part.func) for part in parts if isinstance(part, ast.Call)}
        called_attributes = {part.attr for part in looked_into if id(part) in called and base_name(part) in bases}
        return not called_attributes <= self.file.stored_attributes

    def is_independent(self, first: Statement, second: Statement, results_of: Iterable[Statement] = ()) -> bool:
        """Whether the two may change places: neither stores what the other uses, and no object is used by both that
        either might write to. Results of these statements are written to by methods such as `add_` alone."""
        uses, others = Uses(self._with_called(first)), Uses(self._with_called(second))
        if uses.called & _DRAWING and others.called & _DRAWING:
            return False
        written, written_there = uses.all_written() - self.file.imported, others.all_written() - self.file.imported
        if written & ({*others.loads} | written_there) or written_there & {*uses.loads}:
            return False
        results = {name for statement in results_of for name in statement.uses.stores}
        return self._objects(first) & self._objects(second) <= results

    def _with_called(self, statement: Statement) -> list[ast.stmt]:
        """And the functions of the file that it calls, as far as their names tell all that they do."""
        statements, ahead = list[ast.stmt](), [*statement.nodes]
        while ahead:
            statements.append(ahead.pop())
            calls = [part.func for part in ast.walk(statements[-1]) if isinstance(part, ast.Call)]
            called = {part.id for part in calls if isinstance(part, ast.Name)}
            ahead += [self.file.functions[name] for name in called & {*self.file.functions}]
            ahead = [later for later in ahead if later not in statements]
        return statements

    def _objects(self, statement: Statement) -> set[str]:
        """Names that it uses, but for modules, and what only its shape is asked of."""
        names, only_measured = list[ast.Name](), set[int]()
        for node in self._with_called(statement):
            for part in ast.walk(node):
                match part:
                    case ast.Name():
                        names.append(part)
                    case ast.Attribute(value=value, attr="shape" | "size"):
                        only_measured.add(id(value))
                    case ast.Call(func=ast.Name(id="len"), args=[value, *_]):
                        only_measured.add(id(value))
        return {name.id for name in names if id(name) not in only_measured} - self.file.imported - {*dir(builtins)}

    def only_does(self, statement: Statement, harmless: Set[str]) -> bool:
        """Whether it calls nothing that might have an effect on what its names do not tell of."""
        nodes = self._with_called(statement)
        called = Uses(nodes).called
        if called == {"step"} and len(statement.nodes) == 1 and isinstance(statement.nodes[0], ast.Expr):
            return harmless >= _COLLECTING  # of a schedule or a profiler: what stands before it stays before it
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        return called - {function.name for function in functions} <= harmless and all(map(_only_returns, functions))

    def may_follow(self, statement: Statement, passed: Statement, captured: Sequence[Statement]) -> bool:
        """Whether it may come after a statement that it stood before, as far as what it reads has other names."""
        called, steps = statement.called, "step" in passed.called
        if steps and "step" in called:
            return False  # a schedule, between two steps of optimizers
        if not called & _READING:
            shortens = any(isinstance(part, ast.Delete) for part in statement.parts)
            return shortens or not (_writes_into(statement) or "print" in called)
        results = {name for part in captured for name in part.uses.stores}
        read = _read_names(statement)
        if steps and not read <= results:
            return False  # it may read a weight
        in_place = bool(passed.uses.written - self.file.imported or passed.uses.attributes)
        in_place = in_place or any(isinstance(node, ast.AugAssign) for node in passed.nodes)
        fresh = {name for name in results if "_on_gpu" in name}
        return not in_place or read <= fresh  # it may write to what is read by another name

    def _bind(
        self, region: LiftedLines, block: list[Statement], rest: list[Statement], path: Sequence[_Enclosing]
    ) -> bool:
        """Fills in the region's arguments and results. False where its names do not allow that."""
        flow = Flow(node for statement in region.captured for node in statement.nodes)
        if self._is_seen_elsewhere(flow.stored, path):
            return False
        inside = {id(part) for statement in region.captured for part in statement.parts}
        live = self._live([*region.after, *rest], path)
        results = [name for name in flow.stored if name in live or "." in name]
        if self._is_shown_whole(results, inside):
            return False
        local = self._local_around(path, inside) | flow.stored.keys()
        needed = [name for name in flow.needed if name in local]
        has_value = {*flow.defined, *needed}
        if not any(isinstance(outer.statement, _LOOPS) for outer in path):  # else it may have one of the last iteration
            has_value |= _surely_read_first([*region.after, *rest])
        at_times = [name for name in results if name not in has_value]
        before = [statement for statement in block if statement not in (*region.captured, *region.after, *rest)]
        if self._may_lack_value([*at_times, *self._local.keys() & needed], region, before, path):
            return False
        if self._goes_back_further(needed, region) or not self.objects_of_each_call().isdisjoint(needed):
            return False
        order = [*self._local, *needed, *at_times]
        region.arguments, region.results = sorted({*needed, *at_times}, key=order.index), results
        region.values = {name for name in results if self._is_asked_values(name, region, inside)}
        region.indices = {*region.arguments} & minibatch_indices(self._own, self.file.nodes)
        return True

    def _is_shown_whole(self, results: Collection[str], inside: Set[int]) -> bool:
        """Whether `print(loss)` stands outside: it shows how a tensor was made, which no replay tells."""
        outside = (part for part in self._own if id(part) not in inside)
        return any(name in results for part in outside for name in _shown_whole(part))

    def _may_lack_value(
        self, names: Iterable[str], region: LiftedLines, before: Sequence[Statement], path: Sequence[_Enclosing]
    ) -> bool:
        """Whether one of these names may have no value when the region is called; attributes have one. `before`: what
        stands before it in its block."""
        read = {name for statement in region.captured for node in statement.nodes for name in surely_read(node)}
        return any("." not in name for name in {*names} - read - self._with_values(before, path))

    def _goes_back_further(self, needed: Iterable[str], region: LiftedLines) -> bool:
        """Whether a backward pass in the region may go through what was computed outside, where a replay has no part in
        it."""
        first = region.captured[0].first
        return any(_goes_back({name}, region.captured) for name in needed if self._may_ask_gradient(name, first))

    def objects_of_each_call(self) -> set[str]:
        """Functions, modules and optimizers that each call of this function, from a loop of the file, makes or is given
        anew: a graph keeps those that it was captured with."""
        if not isinstance(self.node, ast.FunctionDef):
            return set()
        found, parameters = set[str](), parameters_of(self.node)
        nested = {part.name for part in self._own if isinstance(part, ast.FunctionDef)}
        for loop, call in self.file.calls_in_loops:
            if _last_name(call.func) == self.node.name:
                made = {*Uses(part for part in ast.walk(loop) if _is_made_by_a_call(part)).stores}
                given = [
                    *zip(parameters, call.args, strict=False),
                    *[(word.arg or "", word.value) for word in call.keywords],
                ]
                found |= nested | {name for name, value in given if isinstance(value, ast.Name) and value.id in made}
        return found & {name for part in self._own for name in _objects_called(part)}

    def _is_seen_elsewhere(self, stored: Iterable[str], path: Sequence[_Enclosing]) -> bool:
        """Whether others look at names that the region stores, and would find them as they were: functions that it
        calls, and what handles an error in the middle of it."""
        tries = [outer.statement for outer in path if isinstance(outer.statement, ast.Try)]
        seen = self._shared | {*Uses(handler for statement in tries for handler in statement.handlers).loads}
        if isinstance(self.node, ast.Module):
            functions = [part for part in ast.walk(self.node) if isinstance(part, ast.FunctionDef | ast.Lambda)]
            seen |= {name for function in functions for name in free_names(function)}
        return not seen.isdisjoint(stored)

    def _local_around(self, path: Sequence[_Enclosing], inside: Set[int]) -> set[str]:
        """Names that a function elsewhere has to be given: a function's own, and what loops of the module change."""
        if not isinstance(self.node, ast.Module):
            return {*self._local}.union(*map(local_names, self._around))
        loops = [outer.statement for outer in path if isinstance(outer.statement, _LOOPS)]
        parts = [part for loop in loops for part in ast.walk(loop) if id(part) not in inside]
        return {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}

    def _with_values(self, before: Iterable[Statement], path: Sequence[_Enclosing]) -> set[str]:
        """Names that have a value when the region is called, in any case. `before`: of its block."""
        names = {*parameters_of(self.node)} if isinstance(self.node, ast.FunctionDef) else set[str]()
        blocks = [[*before], *[statements_of(outer.block)[: outer.place] for outer in path]]
        for statements in blocks:
            names |= Flow(node for statement in statements for node in statement.nodes).defined
        for outer in path:
            match outer.statement:
                case ast.For(target=target):
                    names |= {*Uses([target]).stores}
                case ast.With(items=items):
                    names |= {*Uses(item.optional_vars for item in items if item.optional_vars).stores}
        return names

    def _may_ask_gradient(self, name: str, line: int) -> bool:
        """Whether a model, or a function of the program's own, makes it last before this line, at one that launches
        kernels; or what it is made of, or a view of. In which branch it was made last is not known."""
        stores = [part for part in self._own if isinstance(part, ast.Assign) and name in Uses([part]).stores]
        before = [part for part in stores if part.lineno < line]
        begin = max((part.lineno for part in before), default=0)
        for part in self._own:
            if isinstance(part, ast.If) and part.lineno <= begin <= (part.end_lineno or 0) < line:
                begin = part.lineno
        return any(self._asks_gradient(part) for part in before if part.lineno >= begin)

    def _asks_gradient(self, made: ast.Assign) -> bool:
        if _stands_in(self._gradless, made.lineno):
            return False
        calls = [call.func for call in ast.walk(made) if isinstance(call, ast.Call)]
        if any(isinstance(function, ast.Attribute) and function.attr in _WITHOUT_GRADIENT for function in calls[:1]):
            return False
        if Statement([made]).has(self._staying) and any(_last_name(func) in self.file.models for func in calls):
            return True
        if Statement([made]).has(self._launching):  # else it is at most a view of something
            loops = [part for part in self._own if isinstance(part, _LOOPS)]
            values = {stored for loop in loops for stored in Uses([loop]).stores}  # others are there before the loop
            makers = [func for func in calls if isinstance(func, ast.Name) or base_name(func) not in values]
            unknown = {base_name(func) for func in makers} - self.file.imported - {*dir(builtins)} - {""}
            if any(name not in self.file.functions or self.file.may_call_model(name) for name in unknown):
                return True
        return any(self._may_ask_gradient(operand, made.lineno) for operand in _names_with_gradients([made.value]))

    def _live(self, rest: Sequence[Statement], path: Sequence[_Enclosing]) -> set[str]:
        """Names that are read after the region before they are stored again: further on, in the next iteration, or in
        functions within this one."""
        live = {*Flow(node for statement in rest for node in statement.nodes).needed}
        for outer in path:
            around = outer.statement
            if isinstance(around, _LOOPS):
                live |= {*Flow(around.body).needed, *Uses([getattr(around, "test", ast.Pass())]).loads}
            if isinstance(around, (*_LOOPS, ast.Try)):
                live |= {*Flow([*around.orelse, *getattr(around, "finalbody", [])]).needed}
            live |= {*Flow(node for statement in outer.following for node in statement.nodes).needed}
        nested = [part for part in self._own if isinstance(part, ast.FunctionDef | ast.Lambda | ast.ClassDef)]
        return live.union(*map(free_names, nested))

    def _is_asked_values(self, name: str, region: LiftedLines, inside: Set[int]) -> bool:
        """Whether all that stands outside asks for its value, and so for a tensor."""
        for statement in region.captured:
            if "backward" in statement.called and name in statement.uses.loads:
                return False
            if statement.called <= _HARMLESS and name in statement.uses.stores:
                return False  # what launches nothing may be about arrays of the host
        parts = [part for part in ast.walk(self.node) if id(part) not in inside]
        looked_into = {id(part.value): part for part in parts if isinstance(part, ast.Attribute)}
        attributes = set[str]()
        for part in parts:
            if isinstance(part, ast.Name) and part.id == name and isinstance(part.ctx, ast.Load):
                attribute = looked_into.get(id(part))
                if attribute is not None and attribute.attr == "data":
                    attribute = looked_into.get(id(attribute), attribute)  # what follows it
                attributes.add("" if attribute is None else attribute.attr)
        return attributes <= _WITHOUT_GRADIENT and bool(attributes & {"item", "detach", "tolist"})


class _GrowingRegion:
    """The longest region that begins at a statement: what follows is taken in, or moves in front of it or behind it."""

    def __init__(self, function: _Function, statements: list[Statement], kinds: list[_CaptureKind], begin: int) -> None:
        self.region, self.end = LiftedLines([statements[begin]]), begin + 1
        """And where the block goes on behind it."""
        self._function, self._statements, self._kinds = function, statements, kinds
        self._waiting: list[Statement] = []
        """Neutral ones since the last that is captured."""
        self._before, self._after = list[Statement](), list[Statement]()
        first = begin
        while first > 0 and kinds[first - 1] == _CaptureKind.NEUTRAL and statements[first - 1].called & _SETS_STAGE:
            first -= 1
        self._begins_with_mode = any(statement.called & _MODES for statement in statements[first:begin])
        place = begin + 1
        while place < len(statements) and self._take(place):
            place += 1
        sets_modes = any(statement.called & _MODES for statement in self.region.captured)
        wanted = _SETS_STAGE if sets_modes else _SETS_STAGE - _MODES
        asks = any(map(_asks_gradients, self.region.captured))  # weights are left as they were found only then
        changed = {name for statement in self.region.captured for name in _changed_objects(statement)}
        while begin > 0 and kinds[begin - 1] == _CaptureKind.NEUTRAL:
            before = statements[begin - 1]
            makes = _makes_lists(before) and bool(changed & {*before.uses.stores})  # they would be filled once
            if not (before.called & wanted or makes or (asks and _asks_gradients(before))):
                break
            begin -= 1
            self.region.captured.insert(0, before)

    def _take(self, place: int) -> bool:
        """Whether the region may go on behind this statement."""
        statement, kind = self._statements[place], self._kinds[place]
        if kind == _CaptureKind.CAPTURED:
            return self._capture(statement, place)
        if kind == _CaptureKind.NEUTRAL:
            if _computes_numbers(statement):
                if self._may_come_first(statement):
                    self._before.append(statement)
                    return True
                if self._after and not _is_arithmetic(statement):
                    return False  # it may look at what those statements change, by another name
            if self._serves(statement, place):
                self._waiting.append(statement)
                return True
        if kind == _CaptureKind.FIXED or not _moves(statement):
            return False
        if kind == _CaptureKind.MIXED and (len(statement.nodes) > 1 or not _comes_at_times(statement)):
            return False
        if self._function.only_does(statement, _PREPARING) and self._may_come_first(statement):
            self._before.append(statement)
        elif self._function.only_does(statement, _COLLECTING):
            self._after.append(statement)
        else:
            return False
        return True

    def _capture(self, statement: Statement, place: int) -> bool:
        passed, added = [*self.region.captured, *self._waiting], [*self._waiting, statement]
        for late in self._after:
            for earlier in added:
                if not self._function.is_independent(late, earlier, passed):
                    return False
                if not self._function.may_follow(late, earlier, self.region.captured):
                    return False
        if self._function.shows([*passed, statement]):
            return False
        self.region.captured += added
        self.region.before, self.region.after, self._waiting = [*self._before], [*self._after], []
        self.end = place + 1
        return True

    def _may_come_first(self, statement: Statement) -> bool:
        if not _moves(statement) or _writes_into(statement) or (self._after and not _is_arithmetic(statement)):
            return False
        passed = (*self.region.captured, *self._waiting, *self._after)
        return all(self._function.is_independent(statement, other) for other in passed)

    def _serves(self, statement: Statement, place: int) -> bool:
        """Whether captured statements need it: they read what it stores, or it clears gradients or sets a mode. That it
        may where the region has set one before: else modules would be in another mode behind it."""
        if statement.called & _MODES and not self._begins_with_mode:
            return False
        following = zip(self._statements[place:], self._kinds[place:], strict=True)
        read = {name for late, kind in following if kind == _CaptureKind.CAPTURED for name in late.uses.loads}
        return bool(statement.called & _SETS_UP or {*statement.uses.stores} & read)


# What is asked of a statement, or of a part of one


def _is_compound(statement: Statement) -> bool:
    return any(hasattr(node, "body") for node in statement.nodes)


def _comes_at_times(statement: Statement) -> bool:
    """Whether it is what some iterations do, and draws no random numbers, which a GPU has in an order of its own."""
    return isinstance(statement.nodes[0], ast.If) and not statement.called & _DRAWING


def _only_sets_up(value: ast.expr) -> bool:
    """`optimizer.zero_grad()`; not `policy.train(replay_buffer, 256)`."""
    calls = [part for part in ast.walk(value) if isinstance(part, ast.Call)]
    return bool(calls) and Uses([value]).called <= _SETS_UP and all(len(call.args) <= 1 for call in calls)


def _stands_in(nodes: Iterable[ast.stmt], line: int) -> bool:
    return any(Statement([node]).has([line]) for node in nodes)


def _is_without_gradient(block: ast.With) -> bool:
    called = Uses([item.context_expr for item in block.items]).called
    return bool(called & {"no_grad", "inference_mode"})


def _names_itself(node: ast.AST) -> bool:
    """What moves to another function would mean something else there."""
    if isinstance(node, ast.Attribute):
        return node.attr.startswith("__") and not node.attr.endswith("__")
    return isinstance(node, ast.Name) and node.id in _LOOKS_AT_ITSELF


def _moves(statement: Statement) -> bool:
    """Whether the statements around it may run before it, or after it."""
    return not any(isinstance(part, _JUMPS) for part in statement.parts)


def _makes_lists(statement: Statement) -> bool:
    """`losses, values = [], {}`"""
    values = [node.value for node in statement.nodes if isinstance(node, ast.Assign)]
    parts = [part for value in values for part in (value.elts if isinstance(value, ast.Tuple) else [value])]
    lists = (ast.List, ast.ListComp, ast.Dict, ast.DictComp)
    return bool(parts) and len(values) == len(statement.nodes) and all(isinstance(part, lists) for part in parts)


def _asks_gradients(statement: Statement) -> bool:
    """Whether it says of weights that they gather gradients, or that they do not."""
    stores = (part for part in statement.parts if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store))
    return "requires_grad_" in statement.called or any(part.attr == "requires_grad" for part in stores)


def _changed_objects(statement: Statement) -> Iterator[str]:
    """Names of objects whose items or attributes it stores, or that it fills by a method."""
    yield from statement.uses.attributes
    for part in statement.parts:
        match part:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append" | "extend" | "insert" | "update")):
                yield name


def _surely_read_first(statements: Iterable[Statement]) -> set[str]:
    """Names that these read in any case before they store them: where they have no value, there is an error."""
    read, stored = set[str](), set[str]()
    for statement in statements:
        read |= {name for node in statement.nodes for name in surely_read(node)} - stored
        stored |= {*statement.uses.stores}
        if not _moves(statement):
            break
    return read


def _writes_into(statement: Statement) -> bool:
    """Whether it stores attributes or items, which others may hold by other names."""
    return bool(statement.uses.attributes or statement.uses.written)


def _computes_numbers(statement: Statement) -> bool:
    """Whether it launches nothing and computes: what comes of it may be another number at each call. A list is none: it
    may be filled."""
    return not _makes_lists(statement) and all(
        isinstance(node, ast.Assign) and any(isinstance(part, ast.BinOp | ast.Compare) for part in ast.walk(node.value))
        for node in statement.nodes
    )


def _is_arithmetic(statement: Statement) -> bool:
    """Whether it looks into no object."""
    lookups = (ast.Attribute, ast.Subscript, ast.Starred)
    numbers = {"min", "max", "abs", "round", "int", "float", "pow"}
    return statement.called <= numbers and not any(isinstance(part, lookups) for part in statement.parts)


def _read_names(statement: Statement) -> set[str]:
    """The names of what it reads of the device; "." for what has none of its own, as an attribute."""
    names = set[str]()
    for part in statement.parts:
        match part:
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in _READING:
                pass
            case ast.Call(func=ast.Name(id="float" | "int"), args=[value]):
                pass
            case _:
                continue
        if not (isinstance(value, ast.Call) and getattr(value.func, "attr", "") in _READING):
            names.add(value.id if isinstance(value, ast.Name) else ".")  # else `loss.item()` within `float(...)`
    return names


def _counters_of(node: ast.AST) -> Iterable[str]:
    """Names of numbers that differ in each iteration."""
    match node:
        case ast.For(target=target, iter=ast.Call() as numbers) if _is_range(numbers):
            return Uses([target]).stores
        case ast.For(target=ast.Tuple(elts=[first, *_])) if "enumerate" in Uses([node.iter]).called:
            return Uses([first]).stores
        case ast.AugAssign(target=ast.Name(id=name), value=ast.Constant()):
            return [name]
    return []


def _is_range(node: ast.AST) -> bool:
    """Also `reversed(range(1000))` and `tqdm(range(1000))`."""
    match node:
        case ast.Call(func=ast.Name(id="range" | "trange")):
            return True
        case ast.Call(func=ast.Name(id="reversed" | "tqdm" | "list" | "iter"), args=[first, *_]):
            return _is_range(first)
    return False


def _growing_in(loop: ast.For | ast.While) -> Iterator[int]:
    """Lines of `tokens = torch.cat([tokens, new])`, which is longer in each iteration."""
    carried = Flow(loop.body).needed
    for part in ast.walk(loop):
        match part:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Attribute(attr="cat" | "concat"))):
                if name in carried and name in Uses([part.value]).loads:
                    yield part.lineno


def _objects_called(part: ast.AST) -> Iterator[str]:
    """`model` of `model(x)`, `optimizer` of `optimizer.step()`: no tensor is called so."""
    match part:
        case ast.Call(func=ast.Name(id=name)):
            yield name
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="step" | "zero_grad")):
            yield name


def _is_made_by_a_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)


def _counting_methods(kind: ast.ClassDef) -> set[str]:
    methods = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
    return {method.name for method in methods if any(map(_counts, ast.walk(method)))}


def _held_by(nodes: Sequence[ast.AST], kind: str) -> set[str]:
    """The last names of what objects of this class are assigned to: `ema` of `self.ema = EMA(model)`."""
    made = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    of_kind = [node for node in made if isinstance(node.value, ast.Call) and base_name(node.value.func) == kind]
    return {_last_name(target) for node in of_kind for target in node.targets}


def _last_name(node: ast.AST) -> str:
    """`ema` of `self.ema`, which stands as one name where the function stores it."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name.rpartition(".")[2]
    return ""


def _counts(part: ast.AST) -> bool:
    """`self.steps += 1`."""
    match part:
        case ast.AugAssign(target=ast.Attribute(value=ast.Name(id="self")), value=ast.Constant()):
            return True
    return False


def _bare_names(node: ast.AST) -> set[str]:
    """Names that are not only looked into, as `args` is in `args.cuda`."""
    behind = {id(part.value) for part in ast.walk(node) if isinstance(part, ast.Attribute)}
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and id(part) not in behind}


def _shown_whole(node: ast.AST) -> Iterable[str]:
    """Names whose values become text as they are, or are asked how they were made."""
    match node:
        case ast.Call(func=ast.Name(id="print" | "str" | "repr"), args=given):
            return [argument.id for argument in given if isinstance(argument, ast.Name)]
        case ast.FormattedValue(value=ast.Name(id=name), format_spec=None):
            return [name]
        case ast.Attribute(value=ast.Name(id=name), attr="grad_fn" | "requires_grad" | "is_leaf"):
            return [name]
    return []


def _only_returns(function: ast.FunctionDef) -> bool:
    """Whether all that a call does is what it returns: it writes to nothing that it was given or finds."""
    body = Statement(function.body)
    acts = any(isinstance(part, _ACTING) for part in body.parts)
    return not function.decorator_list and not acts and not _writes_into(body)


def _names_with_gradients(nodes: Iterable[ast.AST]) -> set[str]:
    """Those that more is asked of than a value, a size or a type."""
    parts = [part for node in nodes for part in ast.walk(node)]
    ends = [part.value for part in parts if isinstance(part, ast.Attribute) and part.attr in _WITHOUT_GRADIENT]
    looked_into = {id(inner) for end in ends for inner in ast.walk(end)}
    return {part.id for part in parts if isinstance(part, ast.Name) and id(part) not in looked_into}


def _goes_back(results: Set[str], statements: Iterable[Statement]) -> bool:
    """Whether a backward pass in these statements may begin at what comes of these results: the graph of gradients ends
    with a replay."""
    of_results = {*results}
    for statement in statements:
        if _names_with_gradients(statement.nodes) & of_results:
            if "backward" in statement.called:
                return True
            of_results |= {*statement.uses.stores}
    return False
