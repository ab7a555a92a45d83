"""Tables of the documents, made of what the sources say of causes and fixes: `python docs/tables.py` writes them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from keepbusy.causes import KINDS, LEDGER
from keepbusy.fixes import FIXES
from keepbusy.fixes.definition import Fix

DOCS = Path(__file__).parent
TABLE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def ledger() -> Iterator[tuple[str, ...]]:
    """Places that no fix empties."""
    yield "place", "the GPU"
    yield from ((f"`{place.name}`", place.happens) for place in list(LEDGER.values())[:3])


def causes() -> Iterator[tuple[str, ...]]:
    yield "cause", "what happens", "what fixes it"
    yield from ((f"`{place.name}`", place.happens, place.fixed_by) for place in list(LEDGER.values())[3:])


def fixes() -> Iterator[tuple[str, ...]]:
    """By the first cause that each answers."""
    yield "fix", "name", "applies to", "answers", "who makes it", "results"
    causes_of = {fix: [cause for cause in KINDS if cause in fix.causes or cause in fix.usual] for fix in FIXES}
    order = list(KINDS)
    for fix in sorted(FIXES, key=lambda fix: order.index(causes_of[fix][0]) if causes_of[fix] else len(order)):
        answers = ", ".join(f"`{cause}`" for cause in causes_of[fix]) or "–"
        yield fix.label, f"`{fix.name}`", (fix.__doc__ or "").rstrip("."), answers, _maker(fix), _results(fix)


def written() -> Iterator[tuple[str, ...]]:
    yield "fix", "what is written"
    yield from ((f"`{fix.name}`", edit.what) for fix in FIXES if (edit := fix.source_edit()))


def _maker(fix: Fix) -> str:
    if not fix.served_by:
        return "you"
    if fix.name not in fix.served_by:
        return f"`fix`, by `{fix.served_by[0]}`"
    return f"`fix`, `run --fix --also {fix.name}`" if fix.is_asked_for else "`fix`, `run --fix`"


def _results(fix: Fix) -> str:
    """What `keepbusy fix` compares, and how closely."""
    edit = fix.source_edit()
    if edit is None:
        return ""
    same = f"within {100 * edit.tolerance:g}%" if edit.tolerance else "the same to the last bit"
    return f"{same}; {edit.why}" if edit.why else same


def as_written(page: str) -> str:
    """The page with its tables made anew."""

    def table(found: re.Match[str]) -> str:
        header, *rows = globals()[found[2]]()
        lines = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
        return found[1] + "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]]) + "\n" + found[3]

    return TABLE.sub(table, page)


if __name__ == "__main__":
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        if (made := as_written(page)) != page:
            path.write_text(made, encoding="utf-8")
            sys.stdout.write(f"{path.relative_to(DOCS)}\n")
