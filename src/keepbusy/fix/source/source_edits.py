"""For each fix of the plan, how it is written: a change of the lines that it names, and of nothing else.

An edit gives the new source, or None where what stands at these lines is not what it knows how to change. Formatting
and comments stay as they are, and what has been changed once is not changed again.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from io import StringIO

import libcst as cst
from libcst import matchers as m
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor
from libcst.metadata import (
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
)

from keepbusy.explain.diagnosis import CapturedLines
from keepbusy.fix import IN_THE_SOURCE
from keepbusy.fix.source.captured_lines import with_captured
from keepbusy.fix.source.late_reads import write_late_reads
from keepbusy.fix.source.split_reads import with_split_reads

_BOM = "\ufeff"
"""With which files of some editors begin; LibCST drops it."""
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
_BACKWARD = m.Call(func=m.Attribute(attr=m.Name("backward")))
_EACH_EPOCH = " without persistent_workers"
_DRAW_ONCE = "persistent workers draw their seed once, others in each epoch"


@dataclass(frozen=True)
class SourceEdit:
    """How a fix is written, and how far its losses may differ from the program's own; 0: not in a bit. `why`: they may,
    or do in some programs."""

    write: Callable[[MetadataWrapper, frozenset[int]], cst.Module | None]
    tolerance: float = 0.0
    why: str = ""


def edited(
    source: str, fix: str, lines: Sequence[int], captured: CapturedLines | None = None, loops: Collection[int] = ()
) -> str | None:
    """The source with this fix at these lines. `captured`: those of a graph; `loops`: see `with_captured`."""
    edit = edit_of(fix)
    if edit is None:
        return None
    try:
        wrapper = _parsed(source)
        module = _captured(wrapper, captured, loops) if captured else edit.write(wrapper, frozenset(lines))
    except (cst.ParserSyntaxError, RecursionError):
        return None
    if module is None or module.code == source.removeprefix(_BOM):
        return None
    if m.findall(module, m.Attribute(value=m.Name("keepbusy"))):
        context = CodemodContext()
        AddImportsVisitor.add_needed_import(context, "keepbusy")
        module = AddImportsVisitor(context).transform_module(module)
    return f"{source[: source.startswith(_BOM)]}{module.code}"


@lru_cache(maxsize=4)
def _parsed(source: str) -> MetadataWrapper:
    """The same for each fix that is tried on a source: to find where its nodes stand takes most of the time."""
    return MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)


def _captured(wrapper: MetadataWrapper, lines: CapturedLines, loops: Collection[int]) -> cst.Module | None:
    """With reads split from what they read where graphs hold more then."""
    plain, split = with_captured(wrapper, lines, loops), with_split_reads(wrapper, lines, loops)
    if split is None:
        return plain and plain.module
    parted = with_captured(_parsed(split.module.code), split.lines, split.loops)
    is_more = parted is not None and (plain is None or parted.launches > plain.launches)
    best = parted if is_more else plain
    return best and best.module


def lines_of(source: str) -> list[str]:
    """As Python numbers them, each with its end: `splitlines` would end one at a form feed, too."""
    return StringIO(source).readlines()


def moved_lines(source: str, changed: str) -> dict[int, int]:
    """Where each line stands once other fixes have moved it; those that were changed themselves are no longer there."""
    same = SequenceMatcher(None, lines_of(source), lines_of(changed), autojunk=False).get_matching_blocks()
    return {one.a + at: one.b + at for one in same for at in range(1, one.size + 1)}


def changed_lines(source: str, changed: str) -> list[int]:
    """The lines of the source that another one changes; where it only puts lines in, those that they stand before."""
    steps = SequenceMatcher(None, lines_of(source), lines_of(changed), autojunk=False).get_opcodes()
    put_in = [begin + 1 for what, begin, *_ in steps if what == "insert"]
    return [at + 1 for what, *span, _, _ in steps if what in ("replace", "delete") for at in range(*span)] or put_in


def edit_of(fix: str) -> SourceEdit | None:
    """How a fix of the plan is written, if it can be; `num_workers=8` says itself how many."""
    name, _, count = fix.removesuffix(_EACH_EPOCH).partition("=")
    if name != "num_workers" or not count.isdecimal():
        return EDITS.get(fix)
    if fix.endswith(_EACH_EPOCH):
        return SourceEdit(_visiting(_Loaders, num_workers=count))
    return SourceEdit(_visiting(_Loaders, num_workers=count, persistent_workers="True"), why=_DRAW_ONCE)


def where_results_differ(way: str) -> str:
    """The name of the edit to try where the results of this one differ; "" for none."""
    loads = way.partition("=")[0] in ("num_workers", "prepare_in_workers") and not way.endswith(_EACH_EPOCH)
    return f"{way}{_EACH_EPOCH}" if loads else ""


def ways_of(fix: str) -> tuple[str, ...]:
    """The names of edits that serve a fix of the plan; of `num_workers=8`, that name."""
    name = fix.partition("=")[0]
    return tuple(fix if way == name else way for way in IN_THE_SOURCE.get(name, (fix,)))


def _dotted(node: cst.BaseExpression) -> str:
    """`torch.cuda.empty_cache` of an expression that is names and dots."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr.value}" if before else ""
    return ""


def _keyword(call: cst.Call, name: str) -> cst.Arg | None:
    return next((one for one in call.args if one.keyword is not None and one.keyword.value == name), None)


def _with_keyword(call: cst.Call, name: str, value: str) -> cst.Call:
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
    if isinstance(iterated, cst.Call) and iterated.args and _dotted(iterated.func).rpartition(".")[2] in _WRAPPERS:
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
            name = _dotted(parent.targets[0].target)
        if not self._is_only_one and name not in self._iterated:
            return updated_node
        workers = _keyword(updated_node, "num_workers")
        if "num_workers" in self._arguments and len(updated_node.args) > 5 and workers is None:
            return updated_node  # it is given by position
        if "num_workers" in self._arguments and workers is not None:
            now, meant = _text(workers.value), self._arguments["num_workers"]
            if not now.isdecimal() or int(now) >= int(meant):
                return updated_node  # somebody has thought about it
            count = cst.parse_expression(meant)
            updated_node = updated_node.with_deep_changes(workers, value=count)
        for argument, value in self._arguments.items():
            if _keyword(updated_node, argument) is None:
                updated_node = _with_keyword(updated_node, argument, value)
        return updated_node


def _names_in(node: cst.BaseExpression) -> list[str]:
    if isinstance(node, cst.Call):
        return [name for one in node.args for name in _names_in(one.value)]
    return [_dotted(node)] if _dotted(node) else []


def _is_loader(node: cst.CSTNode) -> bool:
    return _dotted(cst.ensure_type(node, cst.Call).func).rpartition(".")[2] == "DataLoader"


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
            case cst.Expr(value=cst.Call(func=func)) if _dotted(func) == self._name:
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
    name = _dotted(value.func)
    if name in _SAME_ANYWHERE:
        chosen = any(_keyword(value, one) is not None for one in ("device", "pin_memory", "out"))
        return None if chosen else _with_keyword(value, "device", device)
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
    given = _text(call.args[0].value)
    return given if "dtype" not in given and not given.startswith("torch.float") else None


class _Fused(_AtLines):
    """`fused=True` for optimizers that chose no implementation; what comes in a dictionary may choose one."""

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802, ARG002
        called = _dotted(updated_node.func)
        chosen = any(_keyword(updated_node, one) is not None for one in ("fused", "foreach", "differentiable"))
        chosen = chosen or any(one.star == "**" for one in updated_node.args)
        if called.rpartition(".")[2] not in _FUSED or "optim" not in called or chosen or not updated_node.args:
            return updated_node
        return _with_keyword(updated_node, "fused", "True")


class _SavedLater(_AtLines):
    """`torch.save(state, path)` becomes `keepbusy.save_later(state, path)`."""

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802
        if _dotted(updated_node.func) != "torch.save" or not self.stands(original_node) or len(updated_node.args) != 2:
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
                return made if is_whole or not count else cst.parse_expression(f"({_text(made)})")
        return updated_node


class _LastTravels(_AtLines):
    """`model.require_backward_grad_sync = (i + 1) % 4 == 0`, DDP's own switch, at the top of a loop."""

    def __init__(self, lines: frozenset[int]) -> None:
        super().__init__(lines)
        self._models = set[str]()
        self._last_ones: dict[int, str] = {}  # of each loop, by its line, which is the last before an optimizer steps

    def visit_Module(self, node: cst.Module) -> None:  # noqa: N802
        wraps = m.findall(node, m.Assign(targets=[m.AssignTarget(target=m.Name())], value=_WRAPS))
        self._models = {_dotted(cst.ensure_type(one, cst.Assign).targets[0].target) for one in wraps}
        loops = [one for one in ast.walk(ast.parse(node.code)) if isinstance(one, ast.For)]
        self._last_ones = {one.lineno: ast.unparse(last) for one in loops if (last := _last_one(one))}

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:  # noqa: N802
        trains = bool(m.findall(original_node, _BACKWARD)) and not m.findall(original_node, _SYNC_SETTINGS)
        if not self._models or not self.stands(original_node) or not trains:
            return updated_node
        models = sorted(
            {_dotted(cst.ensure_type(one, cst.Call).func) for one in m.findall(original_node, m.Call())} & self._models
        )
        last = self._last_ones.get(self.line(original_node), "")
        if len(models) != 1 or not last or not isinstance(updated_node.body, cst.IndentedBlock):
            return updated_node
        self._models.clear()  # the innermost loop comes first, and is the only one
        line = cst.parse_statement(f"{models[0]}.require_backward_grad_sync = {last}")
        return updated_node.with_deep_changes(updated_node.body, body=[line, *updated_node.body.body])


def _last_one(loop: ast.For) -> ast.expr | None:
    """A condition that is true when an optimizer steps after this iteration; None if the loop does not tell."""
    for one in loop.body:
        if isinstance(one, ast.If) and not one.orelse and _calls(one.body, "step"):
            return None if _names(one.test, ast.Load) & _names(ast.Module(loop.body, []), ast.Store) else one.test
    if _calls(loop.body, "step"):
        return None
    text = ""
    match loop.target, loop.iter:
        case ast.Name(id=number), ast.Call(func=ast.Name(id="range"), args=[count]):
            text = f"{number} == {ast.unparse(count)} - 1"
        case ast.Tuple(elts=[ast.Name(id=number), *_]), ast.Call(
            func=ast.Name(id="enumerate"), args=[ast.Name(id=several)]
        ):
            text = f"{number} == len({several}) - 1"
    return ast.parse(text, mode="eval").body if text else None


def _calls(body: Sequence[ast.AST], name: str) -> list[ast.Call]:
    nodes = [node for one in body for node in ast.walk(one)]
    return [one for one in nodes if isinstance(one, ast.Call) and _called(one) == name]


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, context)}


def _visiting(change: type[_AtLines], **settings: str) -> Callable[[MetadataWrapper, frozenset[int]], cst.Module]:
    return lambda wrapper, lines: wrapper.visit(change(lines, **settings))


def _text(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


EDITS: dict[str, SourceEdit] = {
    "prefetch": SourceEdit(_write_prefetch),
    "pin_memory": SourceEdit(_visiting(_Loaders, pin_memory="True")),
    "prepare_in_workers": SourceEdit(
        _visiting(_Loaders, num_workers="4", pin_memory="True", persistent_workers="True"), why=_DRAW_ONCE
    ),
    f"prepare_in_workers{_EACH_EPOCH}": SourceEdit(_visiting(_Loaders, num_workers="4", pin_memory="True")),
    "keep_memory": SourceEdit(_visiting(_WithoutCall, name="torch.cuda.empty_cache")),
    "drop_sync": SourceEdit(_visiting(_WithoutCall, name="torch.cuda.synchronize")),
    "make_on_device": SourceEdit(_visiting(_MadeThere)),
    "keep_on_device": SourceEdit(_visiting(_MadeThere)),
    "readback": SourceEdit(write_late_reads),
    "fuse_optimizer": SourceEdit(_visiting(_Fused), 1e-4, "fused steps round differently"),
    "save_later": SourceEdit(_visiting(_SavedLater), why="the file is there a little later"),
    "accumulate": SourceEdit(
        _visiting(_LastTravels), 1e-4, "gradients of ranks and micro-batches are added in another order"
    ),
    "graph": SourceEdit(lambda _, __: None, 1e-4, "Adam and its kin round differently in a graph"),
    "keep_shapes": SourceEdit(_visiting(_MaskedSums), 1e-5, "sums are rounded in another order"),
}
"""By name; see `IN_THE_SOURCE`."""
