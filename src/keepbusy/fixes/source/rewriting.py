"""The fixes of a plan, written into a source: a change of the lines that they name, and of nothing else.

An edit gives the new source, or None where what stands at these lines is not what it knows how to change. Formatting
and comments stay as they are, and what has been changed once is not changed again.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from io import StringIO

import libcst as cst
from libcst.metadata import MetadataWrapper

from keepbusy.fixes import BY_NAME
from keepbusy.fixes.definition import CapturedLines, SourceEdit
from keepbusy.fixes.loading import DRAW_ONCE
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
    """The first line that a fix changes there, as it is to be written; "" where nothing is known of that line."""
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
        found = with_lines_captured(source, captured, loops)
        return found and found[0]
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
    """Behind the imports at its top. LibCST's own visitor does the same, and takes most of a second to look for them in
    all of a file."""
    body, names = [*module.body], set[str]()
    at = int(module.get_docstring(clean=False) is not None)
    while at < len(body):
        match body[at]:
            case cst.SimpleStatementLine(body=[cst.Import(names=imported)]):
                names |= {one.evaluated_alias or one.evaluated_name for one in imported}
            case cst.SimpleStatementLine(body=[cst.ImportFrom()]):
                pass
            case _:
                break
        at += 1
    if "keepbusy" in names:
        return module
    if at < len(body):
        lines = [*body[at].leading_lines]
        if not lines or lines[0].comment is not None:
            body[at] = body[at].with_changes(leading_lines=[cst.EmptyLine(), *lines])
    return module.with_changes(
        body=[*body[:at], cst.parse_statement("import keepbusy", config=module.config_for_parsing), *body[at:]]
    )


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
        staying, fed = (tuple(moved[line] for line in some if line in moved) for some in (lines.staying, lines.fed))
        lines = lines._replace(launching=launching, staying=staying, fed=fed, masked=())
        captured = _captured(_parsed(now), lines, [moved[line] for line in loops if line in moved])
        return captured and _as_before(captured, {to: line for line, to in moved.items()})
    plain, split = with_captured(wrapper, lines, loops), with_split_reads(wrapper, lines, loops)
    if split is None:
        return plain
    parted = with_captured(_parsed(split.module.code), split.lines, split.loops)
    if parted is None or (plain is not None and plain.launches >= parted.launches):
        return plain
    return _as_before(parted, split.origins)


def _as_before(captured: CapturedSource, origins: Mapping[int, int]) -> CapturedSource:
    """Told of the lines as they stood before the source was changed for it."""
    return captured._replace(held=sorted({origins[line] for line in captured.held}))


def lines_of(source: str) -> list[str]:
    """As Python numbers them, each with its end: `splitlines` would end one at a form feed, too."""
    return StringIO(source).readlines()


def moved_lines(source: str, changed: str) -> dict[int, int]:
    """Where each line stands once other fixes have moved it; those that were changed themselves are no longer there."""
    same = SequenceMatcher(None, lines_of(source), lines_of(changed), autojunk=False).get_matching_blocks()
    return {one.a + at: one.b + at for one in same for at in range(1, one.size + 1)}


def replaced_lines(own: str, now: str) -> dict[int, int]:
    """Where the lines stand that were changed themselves, each into one."""
    steps = SequenceMatcher(None, lines_of(own), lines_of(now), autojunk=False).get_opcodes()
    changed = [span for what, *span in steps if what == "replace" and span[1] - span[0] == span[3] - span[2]]
    return {begin + at: to + at for begin, end, to, _ in changed for at in range(1, end - begin + 1)}


def changed_lines(source: str, changed: str) -> list[int]:
    """The lines of the source that another one changes; where it only puts lines in, those that they stand before."""
    steps = SequenceMatcher(None, lines_of(source), lines_of(changed), autojunk=False).get_opcodes()
    put_in = [begin + 1 for what, begin, *_ in steps if what == "insert"]
    return [at + 1 for what, *span, _, _ in steps if what in ("replace", "delete") for at in range(*span)] or put_in


def edit_of(fix: str) -> SourceEdit | None:
    """How a fix of the plan is written, if it can be; `num_workers=8` says itself how many."""
    name, _, count = fix.removesuffix(_EACH_EPOCH).partition("=")
    if name != "num_workers" and not fix.endswith(_EACH_EPOCH):
        return BY_NAME[fix].source_edit() if fix in BY_NAME else None
    arguments = {"num_workers": count} if count.isdecimal() else {"num_workers": "4", "pin_memory": "True"}
    if fix.endswith(_EACH_EPOCH):
        return SourceEdit(fix, with_loader_arguments(**arguments))
    return SourceEdit(fix, with_loader_arguments(**arguments, persistent_workers="True"), why=DRAW_ONCE)


def where_results_differ(way: str) -> str:
    """The name of the edit to try where the results of this one differ; "" for none."""
    loads = way.partition("=")[0] in ("num_workers", "prepare_in_workers") and not way.endswith(_EACH_EPOCH)
    return f"{way}{_EACH_EPOCH}" if loads else ""


def ways_of(fix: str) -> tuple[str, ...]:
    """The names of edits that serve a fix of the plan; of `num_workers=8`, that name."""
    if fix.startswith("num_workers="):
        return (fix,)
    return BY_NAME[fix].served_by if fix in BY_NAME and BY_NAME[fix].served_by else (fix,)
