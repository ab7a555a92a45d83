"""Does a run on the virtual GPU point at the planted line, and at no other? Small sizes, a CPU, a minute.

    python benchmarks/virtual_lines.py ../shared/stallbench/cases

A case is a script whose stalling line ends with `# STALL: <cause>`. The line counts as found if a place
of the report names it, or stands in the function that it calls, under a cause or among what costs nothing:
whether it costs anything is the device's affair, not the line's. `invented`: lines blamed for a sync or a
copy that nobody planted, unless a library makes the call or the sync is a real one that stands in `UNPLANTED`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SYNCS = ("host_sync", "blocking_copy")
MULTI_RANK = "init_process_group"
UNPLANTED = {
    ("mask_index", 31): "its backward pass looks for the mask's places again: 45 of the 81 syncs a step on an H200",
    ("predictions_home", 24): "x.cpu() comes home beside the predictions",
}
"""Lines that wait though nobody planted it, and what shows that they do."""


def main(folder: str) -> int:
    rows = [_row(path) for path in sorted(Path(folder).glob("*.py"))]
    for row in rows:
        print(*row)
    found = sum(row[1] == "found" for row in rows)
    print(f"{found} of {len(rows)}")
    return int(found < len(rows))


def _row(path: Path) -> tuple[str, str, str]:
    source = path.read_text()
    planted = {number: _reach(source, number) for number in _planted(source)}
    ranks = ["--ranks", "4"] if MULTI_RANK in source else []
    done = subprocess.run(
        [sys.executable, "-m", "keepbusy", "run", *ranks, "--json", path.name],
        cwd=path.parent,
        env={**os.environ, "STALLBENCH_SMALL": "1", "STALLBENCH_STEPS": "8", "PYTHONPATH": str(path.parent.parent)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    try:
        said = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        return path.stem, "failed", done.stderr.strip().splitlines()[-1] if done.stderr else str(done.returncode)
    places = list(_places(said, path.name))
    missed = [number for number, reach in planted.items() if not any(line in reach for _, line, _ in places)]
    beside = {line for cause, line, library in places if cause in SYNCS and not library} - set(planted)
    invented = sorted(line for line in beside if (path.stem, line) not in UNPLANTED)
    verdict = f"missed {missed}" if missed else "found"
    real = [f"{line}: {UNPLANTED[path.stem, line]}" for line in sorted(beside - set(invented))]
    return path.stem, verdict, f"invented {invented}" if invented else f"and {'; '.join(real)}" if real else ""


def _planted(source: str) -> list[int]:
    return [number for number, line in enumerate(source.splitlines(), 1) if re.search(r"# STALL: ", line)]


def _reach(source: str, number: int) -> set[int]:
    """The line, and those of the functions of the same file that it calls."""
    tree = ast.parse(source)
    called = {
        one.func.id
        for one in ast.walk(tree)
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.lineno == number
    }
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name in called]
    return {number}.union(*(range(one.lineno, (one.end_lineno or one.lineno) + 1) for one in functions))


def _places(said: dict[str, Any], name: str) -> Iterator[tuple[str, int, str]]:
    """Cause, line and library of each place in the case's own file."""
    named = [(cause["cause"], site["place"]) for cause in said["causes"] for site in cause["sites"]]
    named += [(one["cause"], one["place"]) for one in (*said["late"], *said["harmless"])]
    for cause, place in named:
        if place["file"].endswith(name):
            yield cause, place["line"], place["library"]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2] or ["../shared/stallbench/cases"]))
