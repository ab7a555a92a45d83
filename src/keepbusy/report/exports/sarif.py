"""What was explained as SARIF 2.1.0: editors and code scanners show each line with what it costs a step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from keepbusy import __version__
from keepbusy.explain.diagnosis import Cause, Diagnosis, Site, Where
from keepbusy.report.source import source_of
from keepbusy.report.words import change, count, duration, share, transition

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/os/schemas/sarif-schema-2.1.0.json"


def render(diagnosis: Diagnosis) -> str:
    """Places without a line of the program are left out: nobody could show them."""
    return document([*_blamed(diagnosis), *_harmless(diagnosis)])


def document(results: Sequence[dict[str, Any]]) -> str:
    """The whole file; its rules are those of the results."""
    rules = [
        {"id": rule, "shortDescription": {"text": rule.replace("_", " ")}}
        for rule in dict.fromkeys(one["ruleId"] for one in results)
    ]
    tool = {"driver": {"name": "keepbusy", "version": __version__, "rules": rules}}
    run = {"tool": tool, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, ensure_ascii=False) + "\n"


def _blamed(diagnosis: Diagnosis) -> Iterator[dict[str, Any]]:
    step = diagnosis.plain_step
    for cause in diagnosis.causes:
        for site in cause.sites:
            if lines := lines_of(site.where):
                rank = round(100 * min(1.0, site.wait / step), 1) if step else 0.0
                text = _cost(cause, site, step)
                yield {"ruleId": cause.cause, "level": "warning", "message": {"text": text}, "rank": rank, **lines}


def _cost(cause: Cause, site: Site, step: int) -> str:
    waits = f"The GPU waits {duration(site.wait)} of a step for this line ({share(site.wait, step)})"
    often = f", {count(site.count)} times" if site.count > 1 else ""
    fixed = f"Fixed, a step takes {transition(step, cause.predicted.step)}, {change(step, cause.predicted.step)}."
    return f"{waits}{often}. {cause.what} {fixed} {cause.advice}".strip()


def _harmless(diagnosis: Diagnosis) -> Iterator[dict[str, Any]]:
    for one in diagnosis.harmless:
        if lines := lines_of(one.where):
            text = f"Costs nothing here: {one.why}."
            yield {"ruleId": one.cause, "level": "note", "message": {"text": text}, **lines}


def lines_of(where: Where) -> dict[str, Any]:
    """Where the recording knows no more than the function, the line that calls it, if there is only one. Code scanning
    wants paths below the folder that was checked out."""
    source = source_of(where)
    line = source.line if source else where.line
    if not where.file or line < 1:
        return {}
    path, root = Path(where.file).absolute(), Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd())
    uri = quote(path.relative_to(root).as_posix()) if path.is_relative_to(root) else path.as_uri()
    region = {"startLine": line, **({"snippet": {"text": source.text}} if source else {})}
    return {"locations": [{"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}]}
