"""For each fix of the plan, how it is written: a change of the lines that it names, and of nothing else.

An edit gives the new source, or None where what stands at these lines is not what it knows how to change. Formatting
and comments stay as they are, and what has been changed once is not changed again.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import libcst as cst
from libcst import matchers as m
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from keepbusy.fix.source.late_reads import write_late_reads
from keepbusy.fix.source.lifted_steps import write_lifted_step
from keepbusy.fix.syntax.last_turns import last_turn

_WRAPPERS = {"enumerate", "tqdm", "track"}
_SAME_ANYWHERE = {f"torch.{name}" for name in ("zeros", "ones", "full", "arange", "eye", "empty")}
"""What torch makes the same on every device."""
_SAME_SHAPED = {
    *("unsqueeze", "squeeze", "repeat", "expand", "view", "reshape", "flatten", "t", "transpose", "permute"),
    *("contiguous", "long", "int", "float", "bool", "half", "double", "bfloat16", "tril", "triu"),
}
"""Methods and functions that move values, or change their types, alike on every device."""
_FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}
_DDP = m.OneOf(*(m.Name(name) for name in ("DDP", "DistributedDataParallel")))
_WRAPS = m.Call(func=m.OneOf(_DDP, m.Attribute(attr=_DDP)))
_SYNC_SETTINGS = m.OneOf(m.Name("require_backward_grad_sync"), m.Name("no_sync"))


@dataclass(frozen=True)
class SourceEdit:
    """How a fix is written, and how far its losses may differ from the program's own; 0: not in a bit."""

    write: Callable[[MetadataWrapper, frozenset[int]], cst.Module | None]
    tolerance: float = 0.0
    why: str = ""  # they may differ


def edited(source: str, fix: str, lines: Sequence[int]) -> str | None:
    """The source with this fix at these lines."""
    edit = edit_of(fix)
    if edit is None:
        return None
    try:
        module = edit.write(MetadataWrapper(cst.parse_module(source)), frozenset(lines))
    except (cst.ParserSyntaxError, RecursionError):
        return None
    if module is None or module.code == source:
        return None
    if m.findall(module, m.Attribute(value=m.Name("keepbusy"))):
        context = CodemodContext()
        AddImportsVisitor.add_needed_import(context, "keepbusy")
        module = AddImportsVisitor(context).transform_module(module)
    return module.code


def where_now(source: str, changed: str, lines: Iterable[int]) -> list[int]:
    """The same lines once other fixes have moved them; those that were changed themselves are no longer there."""
    same = SequenceMatcher(None, source.splitlines(), changed.splitlines(), autojunk=False).get_matching_blocks()
    return [line - one.a + one.b for line in lines for one in same if one.a < line <= one.a + one.size]


def edit_of(fix: str) -> SourceEdit | None:
    """How a fix of the plan is written, if it can be; `num_workers=8` says itself how many."""
    name, _, count = fix.partition("=")
    if name == "num_workers" and count.isdecimal():
        return SourceEdit(_visiting(_Loaders, num_workers=count, persistent_workers="True"))
    return EDITS.get(fix)


def ways_of(fix: str) -> tuple[str, ...]:
    """The names of edits that serve a fix of the plan."""
    return WAYS.get(fix, (fix,))


def dotted(node: cst.BaseExpression) -> str:
    """`torch.cuda.empty_cache` of an expression that is names and dots."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr.value}" if before else ""
    return ""


def keyword(call: cst.Call, name: str) -> cst.Arg | None:
    return next((one for one in call.args if one.keyword is not None and one.keyword.value == name), None)


def with_keyword(call: cst.Call, name: str, value: str) -> cst.Call:
    """One more argument, written as the others are."""
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    made = cst.Arg(cst.parse_expression(value), keyword=cst.Name(name), equal=equal)
    if not call.args:
        return call.with_changes(args=[made])
    last = call.args[-1]
    if isinstance(last.comma, cst.Comma) and isinstance(last.comma.whitespace_after, cst.ParenthesizedWhitespace):
        ending = last.comma.whitespace_after  # one argument a line, and a comma after the last; a comment stays with it
        others = call.args[-2].comma if len(call.args) > 1 else None
        above = others.whitespace_after if isinstance(others, cst.Comma) else call.whitespace_before_args
        indent = above.last_line if isinstance(above, cst.ParenthesizedWhitespace) else ending.last_line
        last = last.with_changes(comma=cst.Comma(whitespace_after=ending.with_changes(last_line=indent)))
        bare = ending.with_changes(first_line=cst.TrailingWhitespace(), empty_lines=[])
        return call.with_changes(
            args=[*call.args[:-1], last, made.with_changes(comma=cst.Comma(whitespace_after=bare))]
        )
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    return call.with_changes(args=[*call.args[:-1], last.with_changes(comma=comma), made])


class _AtLines(cst.CSTTransformer):
    """Knows where each node stands."""

    METADATA_DEPENDENCIES = (PositionProvider, ParentNodeProvider)

    def __init__(self, lines: frozenset[int]) -> None:
        super().__init__()
        self.lines = lines

    def stands(self, node: cst.CSTNode) -> bool:
        """Whether one of the lines is its own."""
        place = self.get_metadata(PositionProvider, node)
        return any(place.start.line <= line <= place.end.line for line in self.lines)

    def line(self, node: cst.CSTNode) -> int:
        return int(self.get_metadata(PositionProvider, node).start.line)


class _Prefetch(_AtLines):
    """`for x, y in loader:` becomes `for x, y in keepbusy.prefetch(loader):`."""

    def __init__(self, lines: frozenset[int]) -> None:
        super().__init__(lines)
        self.done = False

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:  # noqa: N802
        if self.done or not self.stands(original_node):
            return updated_node
        wrapped = _wrapped(updated_node.iter)
        if wrapped is None:
            return updated_node
        self.done = True  # the innermost loop comes first
        return updated_node.with_changes(iter=wrapped)


def _wrapped(iterated: cst.BaseExpression) -> cst.BaseExpression | None:
    if isinstance(iterated, cst.Name | cst.Attribute):
        return cst.Call(cst.parse_expression("keepbusy.prefetch"), [cst.Arg(iterated)])
    if isinstance(iterated, cst.Call) and iterated.args and dotted(iterated.func).rpartition(".")[2] in _WRAPPERS:
        inner = _wrapped(iterated.args[0].value)
        if inner is not None:
            return iterated.with_changes(args=[iterated.args[0].with_changes(value=inner), *iterated.args[1:]])
    return None


def _write_prefetch(wrapper: MetadataWrapper, lines: frozenset[int]) -> cst.Module | None:
    """And the loader pins what it gives, so that the copies need no other memory in between."""
    change = _Prefetch(lines)
    module = wrapper.visit(change)
    if not change.done:
        return None
    return MetadataWrapper(module).visit(_Loaders(lines, pin_memory="True"))


class _Loaders(_AtLines):
    """Arguments for `DataLoader(...)`: of the only one of the file, else of those that the loops here go through."""

    def __init__(self, lines: frozenset[int], **arguments: str) -> None:
        super().__init__(lines)
        self._arguments = arguments

    def visit_Module(self, node: cst.Module) -> None:  # noqa: N802
        loops = [cst.ensure_type(one, cst.For) for one in m.findall(node, m.For()) if self.stands(one)]
        self._iterated = {name for one in loops for name in _names_in(one.iter)}
        self._is_only_one = sum(map(_is_loader, m.findall(node, m.Call()))) == 1

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802
        if not _is_loader(original_node) or any(one.star for one in original_node.args):
            return updated_node
        parent = self.get_metadata(ParentNodeProvider, original_node)
        name = ""
        if isinstance(parent, cst.Assign) and len(parent.targets) == 1:
            name = dotted(parent.targets[0].target)
        if not self._is_only_one and name not in self._iterated:
            return updated_node
        workers = keyword(updated_node, "num_workers")
        if "num_workers" in self._arguments and (workers is not None or len(updated_node.args) > 5):
            if workers is None or cst.Module([]).code_for_node(workers.value) != "0":
                return updated_node  # somebody has thought about it
            count = cst.parse_expression(self._arguments["num_workers"])
            updated_node = updated_node.with_deep_changes(workers, value=count)
        for argument, value in self._arguments.items():
            if keyword(updated_node, argument) is None:
                updated_node = with_keyword(updated_node, argument, value)
        return updated_node


def _names_in(node: cst.BaseExpression) -> list[str]:
    if isinstance(node, cst.Call):
        return [name for one in node.args for name in _names_in(one.value)]
    return [dotted(node)] if dotted(node) else []


def _is_loader(node: cst.CSTNode) -> bool:
    return dotted(cst.ensure_type(node, cst.Call).func).rpartition(".")[2] == "DataLoader"


class _WithoutCall(_AtLines):
    """Statements that only call one function are taken out."""

    def __init__(self, lines: frozenset[int], name: str) -> None:
        super().__init__(lines)
        self._name = name

    def leave_SimpleStatementLine(  # noqa: N802
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        if len(original_node.body) != 1 or self.line(original_node) not in self.lines:
            return updated_node
        statement = original_node.body[0]
        match statement:
            case cst.Expr(value=cst.Call(func=func)) if dotted(func) == self._name:
                return cst.RemoveFromParent()
        return updated_node


class _MadeThere(_AtLines):
    """`torch.zeros(n).to("cuda")` becomes `torch.zeros(n, device="cuda")`."""

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        func = updated_node.func
        if self.line(original_node) not in self.lines or not isinstance(func, cst.Attribute):
            return updated_node
        device = _device_of(func.attr.value, updated_node)
        made = None if device is None else _made_on(func.value, device)
        return updated_node if made is None else made


def _made_on(value: cst.BaseExpression, device: str) -> cst.BaseExpression | None:
    """`torch.arange(n).unsqueeze(0)`, made on the device."""
    if not isinstance(value, cst.Call):
        return None
    name = dotted(value.func)
    if name in _SAME_ANYWHERE:
        chosen = any(keyword(value, one) is not None for one in ("device", "pin_memory", "out"))
        return None if chosen else with_keyword(value, "device", device)
    if name.rpartition(".")[0] == "torch" and name[6:] in _SAME_SHAPED and value.args:
        inner = _made_on(value.args[0].value, device)
        first = value.args[0].with_changes(value=inner)
        return None if inner is None else value.with_changes(args=[first, *value.args[1:]])
    if isinstance(value.func, cst.Attribute) and value.func.attr.value in _SAME_SHAPED:
        inner = _made_on(value.func.value, device)
        return None if inner is None else value.with_changes(func=value.func.with_changes(value=inner))
    return None


def _device_of(method: str, call: cst.Call) -> str | None:
    """Where `.to(device)` or `.cuda()` takes it, if that is all that it does."""
    if method == "cuda" and not call.args:
        return '"cuda"'
    if method != "to" or len(call.args) != 1 or call.args[0].keyword is not None:
        return None
    given = cst.Module([]).code_for_node(call.args[0].value)
    return given if "dtype" not in given and not given.startswith("torch.float") else None


class _Fused(_AtLines):
    """`fused=True` for optimizers that chose no implementation."""

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802, ARG002
        called = dotted(updated_node.func)
        chosen = any(keyword(updated_node, one) is not None for one in ("fused", "foreach", "differentiable"))
        if called.rpartition(".")[2] not in _FUSED or "optim" not in called or chosen or not updated_node.args:
            return updated_node
        return with_keyword(updated_node, "fused", "True")


class _SavedLater(_AtLines):
    """`torch.save(state, path)` becomes `keepbusy.save_later(state, path)`."""

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802
        if dotted(updated_node.func) != "torch.save" or not self.stands(original_node) or len(updated_node.args) != 2:
            return updated_node
        return updated_node.with_changes(func=cst.parse_expression("keepbusy.save_later"))


class _MaskedSums(_AtLines):
    """`x[mask].sum()` becomes `torch.where(mask, x, 0).sum()`, whose shape the host knows; so does `.mean()`."""

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        if self.line(original_node) not in self.lines:
            return updated_node
        match updated_node:
            case cst.Call(
                func=cst.Attribute(
                    value=cst.Subscript(
                        value=cst.Name(value=of),
                        slice=[cst.SubscriptElement(slice=cst.Index(value=cst.Name(value=mask)))],
                    ),
                    attr=cst.Name(value="sum" | "mean" as method),
                ),
                args=[],
            ):
                count = f" / {mask}.sum()" if method == "mean" else ""
                made = cst.parse_expression(f"torch.where({mask}, {of}, 0).sum(){count}")
                is_whole = isinstance(self.get_metadata(ParentNodeProvider, original_node), cst.Assign | cst.AugAssign)
                return (
                    made if is_whole or not count else cst.parse_expression(f"({cst.Module([]).code_for_node(made)})")
                )
        return updated_node


class _LastTravels(_AtLines):
    """`model.require_backward_grad_sync = (i + 1) % 4 == 0`, DDP's own switch, at the top of a loop."""

    def __init__(self, lines: frozenset[int]) -> None:
        super().__init__(lines)
        self._models = set[str]()
        self._last_turns: dict[int, str] = {}  # of each loop, by its line, which is the last before an optimizer steps

    def visit_Module(self, node: cst.Module) -> None:  # noqa: N802
        wraps = m.findall(node, m.Assign(targets=[m.AssignTarget(target=m.Name())], value=_WRAPS))
        self._models = {dotted(cst.ensure_type(one, cst.Assign).targets[0].target) for one in wraps}
        loops = [one for one in ast.walk(ast.parse(node.code)) if isinstance(one, ast.For)]
        self._last_turns = {one.lineno: ast.unparse(last) for one in loops if (last := last_turn(one))}

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:  # noqa: N802
        if not self._models or not self.stands(original_node) or m.findall(original_node, _SYNC_SETTINGS):
            return updated_node
        models = sorted(
            {dotted(cst.ensure_type(one, cst.Call).func) for one in m.findall(original_node, m.Call())} & self._models
        )
        last = self._last_turns.get(self.line(original_node), "")
        if len(models) != 1 or not last or not isinstance(updated_node.body, cst.IndentedBlock):
            return updated_node
        self._models.clear()  # the innermost loop comes first, and is the only one
        line = cst.parse_statement(f"{models[0]}.require_backward_grad_sync = {last}")
        return updated_node.with_deep_changes(updated_node.body, body=[line, *updated_node.body.body])


def _visiting(change: type[_AtLines], **settings: str) -> Callable[[MetadataWrapper, frozenset[int]], cst.Module]:
    return lambda wrapper, lines: wrapper.visit(change(lines, **settings))


EDITS: dict[str, SourceEdit] = {
    "prefetch": SourceEdit(_write_prefetch),
    "pin_memory": SourceEdit(_visiting(_Loaders, pin_memory="True")),
    "prepare_in_workers": SourceEdit(
        _visiting(_Loaders, num_workers="4", pin_memory="True", persistent_workers="True")
    ),
    "keep_memory": SourceEdit(_visiting(_WithoutCall, name="torch.cuda.empty_cache")),
    "drop_sync": SourceEdit(_visiting(_WithoutCall, name="torch.cuda.synchronize")),
    "make_on_device": SourceEdit(_visiting(_MadeThere)),
    "keep_on_device": SourceEdit(_visiting(_MadeThere)),
    "readback": SourceEdit(write_late_reads),
    "fuse_optimizer": SourceEdit(_visiting(_Fused), 1e-4, "fused steps round differently"),
    "save_later": SourceEdit(_visiting(_SavedLater)),
    "accumulate": SourceEdit(
        _visiting(_LastTravels), 1e-4, "gradients of ranks and micro-batches are added in another order"
    ),
    "graph": SourceEdit(write_lifted_step, 1e-4, "Adam and its kin round differently in a graph"),
    "keep_shapes": SourceEdit(_visiting(_MaskedSums), 1e-5, "sums are rounded in another order"),
}
"""By the name of the plan's fix. What is not here is advice for a person."""
WAYS = {
    "prefetch": ("prefetch", "make_on_device"),
    "readback": ("readback", "save_later", "keep_shapes"),
    "graph": ("graph", "fuse_optimizer"),
    "compile": ("fuse_optimizer",),
}
"""Of a fix of the plan the edits that serve it, where it is not the one of its name."""
