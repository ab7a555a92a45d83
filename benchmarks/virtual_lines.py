"""Does a run on the virtual GPU point at the planted line, and at no other? Small sizes, a CPU, a minute.

    python benchmarks/virtual_lines.py ../shared/stallbench/cases

A case is a script whose stalling line ends with `# STALL: <cause>`. The line counts as found if a place
of the report names it, under a cause or among what costs nothing: whether it costs anything is the
device's affair, not the line's. `invented`: lines blamed for a sync or a copy that nobody planted.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

SYNCS = ("host_sync", "blocking_copy")
MULTI_RANK = "init_process_group"


def main(folder: str) -> int:
    rows = [_row(path) for path in sorted(Path(folder).glob("*.py"))]
    for row in rows:
        print(*row)
    found = sum(row[1] == "found" for row in rows)
    print(f"{found} of {len(rows)}")
    return int(found < len(rows))


def _row(path: Path) -> tuple[str, str, str]:
    source = path.read_text()
    planted = {number for number, line in enumerate(source.splitlines(), 1) if re.search(r"# STALL: ", line)}
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
    missed = planted - {line for _, line in places}
    invented = sorted({line for cause, line in places if cause in SYNCS} - planted)
    verdict = "missed " + str(sorted(missed)) if missed else "found"
    return path.stem, verdict, f"invented {invented}" if invented else ""


def _places(said: dict[str, Any], name: str) -> Any:
    for cause in said["causes"]:
        for site in cause["sites"]:
            if site["place"]["file"].endswith(name):
                yield cause["cause"], site["place"]["line"]
    for late in said["late"]:
        if late["place"]["file"].endswith(name):
            yield late["cause"], late["place"]["line"]
    for one in said["harmless"]:
        if one["place"]["file"].endswith(name):
            yield one["cause"], one["place"]["line"]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2] or ["../shared/stallbench/cases"]))
