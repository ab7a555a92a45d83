"""Statements that compute on the GPU and copy to it or read from it as well, split in two: so that what computes can be
captured, and the copy can be made in front of the graph, or the read behind it.

    loss = model(x.to(device))

    x_on_gpu = x.to(device)
    loss = model(x_on_gpu)

where it may be a function of the program that copies what it is given, and

    accuracy = (out.argmax(1) == y).float().mean().item()

    accuracy_on_gpu = (out.argmax(1) == y).float().mean()
    accuracy = accuracy_on_gpu.item()
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from itertools import chain, count
from typing import NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from keepbusy.fixes.definition import CapturedLines
from keepbusy.fixes.source.at_lines import lines_of, moved_lines
from keepbusy.fixes.source.name_flow import Uses

_READS = {"item", "tolist", "cpu"}
_WITHOUT_EFFECT = {
    *("mean", "sum", "max", "min", "amax", "amin", "abs", "norm", "argmax", "argmin", "std", "var", "median", "topk"),
    *("eq", "ne", "gt", "ge", "lt", "le", "isfinite", "isnan", "any", "all", "where", "clamp", "round", "stack", "cat"),
    *("exp", "log", "log10", "sqrt", "square", "pow", "sigmoid", "softmax", "log_softmax", "relu", "tanh", "cosine"),
    *("clone", "size", "numel", "len", "mse_loss", "cross_entropy"),
}
"""Of functions on tensors, and of methods: those that do nothing but compute something new."""
_MAY_SHARE = {
    *("float", "double", "half", "long", "int", "bool", "type_as", "detach", "view", "view_as", "reshape", "squeeze"),
    *("unsqueeze", "flatten", "expand_as", "t"),
}
"""Methods whose result may share its memory with the tensor: what follows might write to it before it is read."""


class SplitReads(NamedTuple):
    """The source with reads split, where the captured lines are now, and where its lines stood before."""

    module: cst.Module
    lines: CapturedLines
    loops: list[int]
    origins: dict[int, int]


def with_split_reads(wrapper: MetadataWrapper, lines: CapturedLines, loops: Collection[int] = ()) -> SplitReads | None:
    """None if nothing can be split."""
    if not lines.staying:
        return None
    own = wrapper.module.code
    tree = ast.parse(own)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    split = _Split(lines, names, _copying_functions(tree) if lines.fed else {})
    module = wrapper.visit(split)
    if not split.read and not split.copied:
        return None
    moved = moved_lines(own, module.code)
    origins = {new: old for old, new in moved.items()}
    launching = {moved[line]: launches for line, launches in lines.launching if line in moved}
    staying = {moved[line] for line in lines.staying if line in moved}
    for line, text in enumerate(lines_of(module.code), 1):
        for values, is_copied in ((split.read, False), (split.copied, True)):
            name = next((name for name in values if re.search(rf"\b{name}\b", text)), None)
            if name is None:
                continue
            is_origin = text.strip().startswith(f"{name} = ")
            if is_origin == is_copied:  # the copy to the GPU, or the read
                staying.add(line)
            else:  # what computes with the copy, or what is read
                launching[line], origins[line] = values[name].launches, values[name].line
    lines = lines._replace(launching=tuple(sorted(launching.items())), staying=tuple(sorted(staying)))
    return SplitReads(module, lines, [moved[line] for line in loops if line in moved], origins)


class _NamedValue(NamedTuple):
    """A part of a statement that got a name."""

    line: int
    """Of that statement."""
    launches: int
    """How much the rest of it launches; 0 for what is read."""


class _Split(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(
        self, lines: CapturedLines, names: Sequence[ast.Name], copying: Mapping[str, _CopyingFunction]
    ) -> None:
        """`names`: all of the source; `copying`: functions that copy what they are given."""
        super().__init__()
        self._staying, self._launching, self._fed = {*lines.staying}, dict(lines.launching), {*lines.fed}
        self._copying, self._used_names = copying, {name.id for name in names}
        stored = [name for name in names if isinstance(name.ctx, ast.Store)]
        self._computed = {name.id for name in stored} - {
            name.id for name in stored if name.lineno not in self._launching
        }
        """Names of what only statements that launch have stored; others may be arrays of the host."""
        self.copied: dict[str, _NamedValue] = {}
        """By their names, what is copied to the GPU in front of its statement."""
        self.read: dict[str, _NamedValue] = {}
        """By their names, what is computed for a read."""

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> bool:  # noqa: N802, ARG002
        return False  # there are no blocks in it

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> cst.BaseSuite:  # noqa: N802
        body = list[cst.BaseStatement]()
        for original, updated in zip(original_node.body, updated_node.body, strict=True):
            place = self.get_metadata(PositionProvider, original)
            if isinstance(updated, cst.SimpleStatementLine):
                body += self._all_parts(updated, place.start.line) if place.start.line in self._staying else [updated]
            elif any(place.start.line < line <= place.end.line for line in self._staying):
                body += _each_by_itself(updated)
            else:
                body.append(updated)
        return updated_node.with_changes(body=body)

    def _all_parts(self, statement: cst.SimpleStatementLine, line: int) -> Sequence[cst.BaseStatement]:
        if line not in self._launching or len(statement.body) != 1 or not _is_in_any_case(statement):
            return self._parts(statement, line)
        copies = _Copies(self._free_name, self._copying if line in self._fed else {})
        fed = cst.ensure_type(statement.visit(copies), cst.SimpleStatementLine)
        if not copies.found:
            return self._parts(statement, line)
        self.copied |= dict.fromkeys(copies.found, _NamedValue(line, self._launching[line]))
        first = _assignments(copies.found, statement)
        return [*first, *self._parts(fed.with_changes(leading_lines=[]), line)]

    def _parts(self, statement: cst.SimpleStatementLine, line: int) -> Sequence[cst.BaseStatement]:
        if not _is_in_any_case(statement):
            return [statement]
        reads = _Reads(self._computed)
        read = cst.ensure_type(statement.visit(reads), cst.SimpleStatementLine)
        is_plain = len(statement.body) == 1 and isinstance(
            statement.body[0], cst.Assign | cst.AugAssign | cst.Expr | cst.AnnAssign
        )
        if not reads.found or not is_plain:
            return [statement]
        names = [self._free_name(_target(statement)) for _ in reads.found]
        self.read |= dict.fromkeys(names, _NamedValue(line, 0))
        read = cst.ensure_type(read.visit(_Named(names)), cst.SimpleStatementLine)
        values = _assignments(dict(zip(names, reads.found, strict=True)), statement)
        return [*values, read.with_changes(leading_lines=[])]

    def _free_name(self, base: str) -> str:
        name, number = f"{base}_on_gpu", 1
        while name in self._used_names:
            number += 1
            name = f"{base}_on_gpu_{number}"
        self._used_names.add(name)
        return name


def _assignments(
    values: Mapping[str, cst.BaseExpression], statement: cst.SimpleStatementLine
) -> list[cst.SimpleStatementLine]:
    """These values by their names, in front of a statement whose comments they take."""
    lines = [
        cst.SimpleStatementLine([cst.Assign([cst.AssignTarget(cst.Name(name))], value)])
        for name, value in values.items()
    ]
    lines[0] = lines[0].with_changes(leading_lines=statement.leading_lines)
    return lines


def _each_by_itself(statement: cst.BaseStatement) -> Sequence[cst.BaseStatement]:
    """The statements of `with torch.no_grad():`, each in one of its own: some of them may move."""
    match statement:
        case cst.With(items=[cst.WithItem(item=cst.Call() as call, asname=None)], body=cst.IndentedBlock(body=body)):
            if _calls_of(call) <= {"no_grad", "inference_mode"}:
                first, *others = [statement.with_changes(body=cst.IndentedBlock([inner])) for inner in body]
                return [first, *(inner.with_changes(leading_lines=[]) for inner in others)]
    return [statement]


_PLACE = "_keepbusy_read_"


class _CopyingFunction(NamedTuple):
    """A function that begins with copies of what it is given to the GPU."""

    parameters: list[str]
    copies: dict[str, ast.expr]
    """Of a parameter, how it is copied."""
    free: set[str]
    """Names in these calls that are no parameters."""


def _copying_functions(tree: ast.Module) -> dict[str, _CopyingFunction]:
    """Those whose names tell which function is meant. They may use only names that no function stores: these mean the
    same in the whole file."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    counts = Counter(node.name for node in functions)
    parameters = {part.arg for node in functions for part in ast.walk(node.args) if isinstance(part, ast.arg)}
    stored = parameters | {*Uses(functions).stores}
    candidates = {node.name: _copying_function(node) for node in functions if counts[node.name] == 1}
    return {
        name: function for name, function in candidates.items() if function is not None and not function.free & stored
    }


def _copying_function(node: ast.FunctionDef) -> _CopyingFunction | None:
    """None if it copies no parameter at its beginning, or copies it by what it has computed itself."""
    parameters, copies, rebound = [argument.arg for argument in node.args.args], dict[str, ast.expr](), set[str]()
    used = Counter(part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load))
    for statement in node.body:
        if not isinstance(statement, ast.Assign | ast.Expr):
            break
        for name, copy in filter(None, map(_copy_in, ast.walk(statement))):
            is_whole = isinstance(copy, ast.Call) or used[name] == 1 or name in Uses([statement]).stores
            if name in parameters and name not in rebound and is_whole:
                copies.setdefault(name, copy)
        rebound |= {*Uses([statement]).stores}
    named = {name for copy in copies.values() for name in _named_in(copy)}
    if not copies or named & rebound - copies.keys():
        return None
    return _CopyingFunction(parameters, copies, named - {*parameters})


def _copy_in(part: ast.AST) -> tuple[str, ast.expr] | None:
    """`x.to(device)`, or all that is in a batch: `(t.to(device) for t in batch)`, `{k: v.to(device) for k, v in
    batch.items()}`; with the name of what is copied."""
    match part:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="to" | "cuda")):
            return name, part
        case (
            ast.GeneratorExp(elt=value, generators=[ast.comprehension(target, ast.Name(id=name), ifs=[]) as each])
            | ast.ListComp(elt=value, generators=[ast.comprehension(target, ast.Name(id=name), ifs=[]) as each])
        ):
            inner = _copy_in(value)
            is_copy = isinstance(target, ast.Name) and inner is not None and inner[0] == target.id
            return (name, ast.ListComp(value, [each])) if is_copy else None
        case ast.DictComp(
            value=value,
            generators=[
                ast.comprehension(
                    ast.Tuple(elts=[_, ast.Name(id=target_name)]),
                    ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="items")),
                    ifs=[],
                )
            ],
        ):
            inner = _copy_in(value)
            return (name, part) if inner is not None and inner[0] == target_name else None
    return None


def _named_in(copy: ast.expr) -> set[str]:
    """Names that mean something outside of it."""
    names = [part for part in ast.walk(copy) if isinstance(part, ast.Name)]
    return {name.id for name in names} - {name.id for name in names if isinstance(name.ctx, ast.Store)}


class _Copies(cst.CSTTransformer):
    """Finds what is copied to the GPU within a call, or by the function that is called, and puts a name in its
    place."""

    def __init__(self, free_name: Callable[[str], str], copying: Mapping[str, _CopyingFunction]) -> None:
        super().__init__()
        self._free_name, self._copying = free_name, copying
        self.found: dict[str, cst.BaseExpression] = {}

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:  # noqa: ARG002, N802
        match updated_node.value:
            case cst.Call(func=cst.Attribute(value=value, attr=cst.Name(value="to" | "cuda"))) as copy:
                if _is_plain(value):
                    return updated_node.with_changes(value=self._name_of(copy, value))
        return updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: ARG002, N802
        match updated_node.func:
            case cst.Name(value=name):
                receiver = list[str]()
            case cst.Attribute(value=cst.Name(value="self"), attr=cst.Name(value=name)):
                receiver = ["self"]
            case _:
                return updated_node
        called, arguments = self._copying.get(name), updated_node.args
        if called is None or any(argument.star for argument in arguments):
            return updated_node
        if (called.parameters[:1] == ["self"]) != bool(receiver):
            return updated_node
        positional = chain(called.parameters[len(receiver) :], map(str, count()))  # numbers are those of `*others`
        given = {
            argument.keyword.value if argument.keyword else next(positional): argument.value for argument in arguments
        }
        words = {name: cst.Module([]).code_for_node(value) for name, value in given.items() if _is_plain(value)}
        words |= {name: name for name in (*receiver, *called.free)}
        for parameter, copy in called.copies.items():
            if _named_in(copy) <= words.keys():
                written = cst.parse_expression(ast.unparse(_Renamed(words).visit(deepcopy(copy))))
                given[parameter] = self._name_of(written, given[parameter])
        replaced = zip(arguments, given.values(), strict=True)
        return updated_node.with_changes(args=[argument.with_changes(value=value) for argument, value in replaced])

    def _name_of(self, copy: cst.BaseExpression, copied: cst.BaseExpression) -> cst.Name:
        name = self._free_name(copied.value if isinstance(copied, cst.Name) else "value")
        self.found[name] = copy
        return cst.Name(name)


class _Renamed(ast.NodeTransformer):
    def __init__(self, words: Mapping[str, str]) -> None:
        self._words = words

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.parse(self._words[node.id], mode="eval").body if node.id in self._words else node


def _is_plain(value: cst.BaseExpression) -> bool:
    """A name, an attribute or an item, which may stand twice."""
    return isinstance(value, cst.Name | cst.Attribute | cst.Subscript) and not _calls_of(value)


class _Reads(cst.CSTTransformer):
    """Finds what is read, outermost first, and puts a name in its place."""

    def __init__(self, computed: set[str]) -> None:
        super().__init__()
        self._computed = computed
        self.found: list[cst.BaseExpression] = []

    def visit_Call(self, node: cst.Call) -> bool:  # noqa: N802
        return self._read_by(node) is None

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        value = self._read_by(original_node)
        if value is None:
            return updated_node
        self.found.append(value)
        place = cst.Name(_PLACE)
        if isinstance(original_node.func, cst.Attribute):
            return original_node.with_changes(func=original_node.func.with_changes(value=place))
        return original_node.with_changes(args=[original_node.args[0].with_changes(value=place)])

    def _read_by(self, node: cst.Call) -> cst.BaseExpression | None:
        match node.func, list(node.args):
            case cst.Attribute(value=value, attr=cst.Name(value=name)), [] if name in _READS:
                return value if self._may_be_kept(value) else None
            case cst.Name(value="float" | "int"), [cst.Arg(value=value, keyword=None, star="")]:
                computed = isinstance(value, cst.Call | cst.BinaryOperation)
                return value if computed and _calls_of(value) and self._may_be_kept(value) else None
        return None

    def _may_be_kept(self, value: cst.BaseExpression) -> bool:
        """Whether it is computed anew, of what was computed on the GPU."""
        match value:
            case cst.Call(func=cst.Attribute(attr=cst.Name(value=name))) if name in _MAY_SHARE:
                return False
        calls = _calls_of(value)
        return bool(calls) and calls <= _WITHOUT_EFFECT | _MAY_SHARE and bool(_names_in(value) & self._computed)


class _Named(cst.CSTTransformer):
    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = iter(names)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:  # noqa: N802
        return cst.Name(next(self._names)) if original_node.value == _PLACE else updated_node


def _calls_of(value: cst.CSTNode) -> set[str]:
    """The functions and methods that it calls, by their last names; "" for one without a name."""
    found = set[str]()
    match value:
        case cst.Call(func=cst.Attribute(attr=cst.Name(value=name))) | cst.Call(func=cst.Name(value=name)):
            found.add(name)
        case cst.Call() | cst.Await() | cst.Yield() | cst.NamedExpr() | cst.Lambda():
            found.add("")
    for part in value.children:
        found |= _calls_of(part)
    return found


def _names_in(value: cst.CSTNode) -> set[str]:
    own = {value.value} if isinstance(value, cst.Name) else set[str]()
    return own.union(*map(_names_in, value.children))


def _is_in_any_case(statement: cst.CSTNode) -> bool:
    """Whether all that stands in it is computed once, and in any case."""
    kinds = (cst.Lambda, cst.BaseComp, cst.IfExp, cst.BooleanOperation, cst.NamedExpr, cst.Await, cst.Yield)
    return not isinstance(statement, kinds) and all(map(_is_in_any_case, statement.children))


def _target(statement: cst.SimpleStatementLine) -> str:
    match statement.body[0]:
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))]):
            return name
        case cst.AugAssign(target=cst.Name(value=name)) | cst.AnnAssign(target=cst.Name(value=name)):
            return name
    return "value"
