"""The fixes of a plan, written into a source: a change of the lines that they name, and of nothing else.

An edit gives the new source, or None where what stands at these lines is not what it knows how to change. Formatting
and comments stay as they are, and what has been changed once is not changed again.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

import libcst as cst
from libcst.metadata import MetadataWrapper

from keepbusy.fixes import BY_NAME
from keepbusy.fixes.capture import FEWEST_LAUNCHES
from keepbusy.fixes.definition import LIFTED, CapturedLines, SourceEdit
from keepbusy.fixes.loading import DRAW_ONCE
from keepbusy.fixes.reading import TakeIndicesOnce
from keepbusy.fixes.source.at_lines import bare, lines_of, moved_lines, origins_of, replaced_lines
from keepbusy.fixes.source.captured_lines import CapturedSource, with_captured
from keepbusy.fixes.source.loaders import with_loader_arguments
from keepbusy.fixes.source.masks import write_indices_once
from keepbusy.fixes.source.split_reads import with_split_reads

_BOM = "\ufeff"
"""With which files of some editors begin; LibCST drops it."""
_EACH_EPOCH = " without persistent_workers"


def edited(
    source: str, fix: str, lines: Sequence[int], captured: CapturedLines | None = None, loops: Collection[int] = ()
) -> str | None:
    """The source with this fix at these lines. `captured`: those of a graph; `loops`: see `with_captured`."""
    edit = edit_of(fix)
    return None if edit is None else _with_edit(source, edit, lines, captured, loops)


def line_to_write(source: str, fix: str, line: int) -> str:
    """The first line that a fix changes there, as it is to be written; "" if the fix cannot change that line."""
    own = set(source.splitlines())
    edits = edit_of(fix), BY_NAME[fix].suggested_edit() if fix in BY_NAME else None
    for edit in filter(None, edits):
        changed = (_with_edit(source, edit, [line]) or "").splitlines()
        if new := [text.strip() for text in changed if text not in own and text != "import keepbusy"]:
            return new[0]
    return ""


def _with_edit(
    source: str,
    edit: SourceEdit,
    lines: Sequence[int],
    captured: CapturedLines | None = None,
    loops: Collection[int] = (),
) -> str | None:
    if captured is not None:
        result = with_lines_captured(source, captured, loops)
        return result and result[0]
    try:
        module = edit.write(_parsed(source), frozenset(lines))
    except (cst.ParserSyntaxError, RecursionError):
        return None
    return None if module is None else _written(source, module)


def with_lines_captured(source: str, lines: CapturedLines, loops: Collection[int]) -> tuple[str, list[int]] | None:
    """The source with these lines captured, and which of those that launch a graph holds then. None if nothing is."""
    try:
        captured = _captured(_parsed(source), lines, loops)
    except (cst.ParserSyntaxError, RecursionError):
        return None
    written = None if captured is None else _written(source, captured.module)
    return None if captured is None or written is None else (written, captured.held)


def _written(source: str, module: cst.Module) -> str | None:
    """None if it is the source itself."""
    code = module.code
    if code == source.removeprefix(_BOM):
        return None
    if any(isinstance(node, ast.Name) and node.id == "keepbusy" for node in ast.walk(ast.parse(code))):
        code = _importing_keepbusy(module).code
    return f"{source[: source.startswith(_BOM)]}{code}"


def _importing_keepbusy(module: cst.Module) -> cst.Module:
    """The import stands behind those at the top. LibCST's own visitor does the same, but searches the whole file, which
    takes most of a second."""
    body, imported = [*module.body], set[str]()
    position = int(module.get_docstring(clean=False) is not None)
    while position < len(body):
        match body[position]:
            case cst.SimpleStatementLine(body=[cst.Import(names=aliases)]):
                imported |= {alias.evaluated_alias or alias.evaluated_name for alias in aliases}
            case cst.SimpleStatementLine(body=[cst.ImportFrom()]):
                pass
            case _:
                break
        position += 1
    if "keepbusy" in imported:
        return module
    if position < len(body):
        lines = [*body[position].leading_lines]
        if not lines or lines[0].comment is not None:
            body[position] = body[position].with_changes(leading_lines=[cst.EmptyLine(), *lines])
    statement = cst.parse_statement("import keepbusy", config=module.config_for_parsing)
    return module.with_changes(body=[*body[:position], statement, *body[position:]])


@lru_cache(maxsize=4)
def _parsed(source: str) -> MetadataWrapper:
    """The same for each fix that is tried on a source: to find where its nodes stand takes most of the time."""
    return MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)


def _captured(wrapper: MetadataWrapper, lines: CapturedLines, loops: Collection[int]) -> CapturedSource | None:
    """With constant masks as indices; and with reads split from what they read where graphs hold more then."""
    if (indexed := write_indices_once(wrapper, frozenset(lines.masked))) is not None:
        own, now = wrapper.module.code, indexed.code
        moved = moved_lines(own, now) | replaced_lines(own, now)
        launching = tuple(sorted((moved[line], count) for line, count in lines.launching if line in moved))
        staying = tuple(moved[line] for line in lines.staying if line in moved)
        fed = tuple(moved[line] for line in lines.fed if line in moved)
        lines = lines._replace(launching=launching, staying=staying, fed=fed, masked=())
        captured = _captured(_parsed(now), lines, [moved[line] for line in loops if line in moved])
        return captured and _as_before(captured, {new: old for old, new in moved.items()})
    unsplit, split = with_captured(wrapper, lines, loops), with_split_reads(wrapper, lines, loops)
    if split is None:
        return unsplit
    captured = with_captured(_parsed(split.module.code), split.lines, split.loops)
    if captured is None or (unsplit is not None and unsplit.launches >= captured.launches):
        return unsplit
    return _as_before(captured, split.origins)


def _as_before(captured: CapturedSource, origins: Mapping[int, int]) -> CapturedSource:
    """The same, with the numbers that its lines had before the source was changed."""
    return captured._replace(held=sorted({origins[line] for line in captured.held}))


def edit_of(fix: str) -> SourceEdit | None:
    """How a fix of the plan is written, if it can be. The name may hold a number, as in `num_workers=8`."""
    name, _, count = fix.removesuffix(_EACH_EPOCH).partition("=")
    if name != "num_workers" and not fix.endswith(_EACH_EPOCH):
        return BY_NAME[fix].source_edit() if fix in BY_NAME else None
    arguments = {"num_workers": count} if count.isdecimal() else {"num_workers": "4", "pin_memory": "True"}
    if fix.endswith(_EACH_EPOCH):
        return SourceEdit(fix, with_loader_arguments(**arguments))
    return SourceEdit(fix, with_loader_arguments(**arguments, persistent_workers="True"), why=DRAW_ONCE)


def edit_with_same_results(edit_name: str) -> str:
    """The name of the edit to try where the results of this one differ; "" if there is none."""
    loads = edit_name.partition("=")[0] in ("num_workers", "prepare_in_workers") and not edit_name.endswith(_EACH_EPOCH)
    return f"{edit_name}{_EACH_EPOCH}" if loads else ""


def edits_for(fix: str) -> tuple[str, ...]:
    """The names of edits that serve a fix of the plan; that of `num_workers=8` is its own name."""
    if fix.startswith("num_workers="):
        return (fix,)
    return BY_NAME[fix].served_by if fix in BY_NAME and BY_NAME[fix].served_by else (fix,)


# Graphs, in a source that other fixes may have changed before, and the lines that they hold then.


def with_graphs(own: str, now: str, lines: CapturedLines, loops: Iterable[int]) -> str | None:
    """What `now` becomes. `lines` and `loops` are the user's own file's."""
    result = _graphs_in(own, now, lines, loops)
    return result and result[0]


def _graphs_in(own: str, now: str, lines: CapturedLines, loops: Iterable[int]) -> tuple[str, set[int]] | None:
    """What `now` becomes, and which of the user's lines that launch its new graphs hold."""
    moved = moved_lines(own, now)
    launching = moved | replaced_lines(own, now)  # what stood there may stay no more; it launches as before
    lines_now = lines._replace(
        launching=tuple(sorted((launching[line], count) for line, count in lines.launching if line in launching)),
        staying=tuple(moved[line] for line in lines.staying if line in moved),
        fed=tuple(moved[line] for line in lines.fed if line in moved),
        masked=tuple(moved[line] for line in lines.masked if line in moved),
    )
    result = with_lines_captured(now, lines_now, [moved[line] for line in loops if line in moved])
    return result and (result[0], {old for old, new in launching.items() if new in result[1]})


def reached_lines(
    own: str, edits: Iterable[tuple[str, Sequence[int]]], captured: Iterable[CapturedLines], loops: Sequence[int]
) -> list[int]:
    """The user's lines that launch and are in graphs once these edits are made, and then these lines are captured."""
    now, captured, reached = own, [*captured], set[int]()
    for edit_name, lines in (*edits, *((TakeIndicesOnce.name, captured_lines.masked) for captured_lines in captured)):
        moved = moved_lines(own, now)
        now = edited(now, edit_name, [moved[line] for line in lines if line in moved]) or now
    for captured_lines in captured:
        if sum(launches for _, launches in captured_lines.launching) < FEWEST_LAUNCHES:
            continue
        if result := _graphs_in(own, now, captured_lines, loops):
            now, reached = result[0], reached | result[1]
    return sorted(reached)


def lines_in_graphs(own: str, before: str, now: str) -> list[int]:
    """The user's lines that stand in captured functions now, and did not before."""
    names_before = {function.name for function in _captured_functions(before)}
    functions = [function for function in _captured_functions(now) if function.name not in names_before]
    body = [line for function in functions for line in range(function.body[0].lineno, (function.end_lineno or 0) + 1)]
    if not body:
        return []
    origins, new, old = origins_of(now, own), lines_of(now), lines_of(own)
    return sorted({origins[line - 1] for line in body if bare(new[line - 1]) == bare(old[origins[line - 1] - 1])})


def _captured_functions(source: str) -> list[ast.FunctionDef]:
    return [
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name.startswith(LIFTED)
    ]
