"""Whole runs of programs that nobody here wrote: plain, under keepbusy, and with the plan's first fix made as written.

    python benchmarks/whole_runs.py PROGRAMS.json [NAME …] --out OUT [--gpus 4] [--seconds 480] [--fix]

PROGRAMS.json lists them: [{"name", "folder" (beside that file), "command": ["python3", "train.py", ...], "made":
[{"fix":
"num_workers", "options": ["-j", "{}"], "edits": [[file, text, its replacement], ...]}, ...]}, ...]. What is made is the
first of `made` whose name the plan's first row begins with; `{}` is what stands behind that row's equals sign. A file
`prepare.sh` in a program's folder is sourced first. With --fix each also runs under `keepbusy run --fix`, with the plan
of the run that was watched. Plain runs stand first and last. What a program prints of its losses is found by the
pattern `shown`: numbers that two plain runs agree about must be the same in each other run.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from seats import Seat, seat_all

PREPARE = "[ -f prepare.sh ] && . ./prepare.sh >/dev/null 2>&1; env -0"
KEEPBUSY = [sys.executable, "-m", "keepbusy"]


def variables_of(folder: Path) -> dict[str, str]:
    shown = subprocess.run(["bash", "-c", PREPARE], check=False, cwd=folder, capture_output=True).stdout.decode()
    return dict(one.split("=", 1) for one in shown.split("\0") if "=" in one)


class Program:
    def __init__(self, entry: dict[str, Any], options: argparse.Namespace, seat: Seat) -> None:
        self.name, self.made, self.seat, self.out = entry["name"], entry.get("made", []), seat, options.out
        self.folder = options.programs.resolve().parent / entry["folder"]
        self.command = [str(one) for one in entry["command"]]
        self.variables = variables_of(self.folder)
        self.shown = re.compile(entry.get("shown", r"(?i)loss\W{1,4}(\d+\.\d+)"))

    def run(self, which: str, command: list[str]) -> float:
        return round(self.seat.run(command, self.folder, self.log(which), self.variables), 2)

    def log(self, which: str) -> Path:
        return self.out / f"{self.name}.{which}.log"

    def losses(self, which: str) -> list[float]:
        log = self.log(which)
        return [float(one) for one in self.shown.findall(log.read_text(errors="replace"))] if log.exists() else []

    def make(self, row: dict[str, Any]) -> float | None:
        """Seconds with a row of the plan made as written, or None where nobody said how."""
        name, _, value = row["fix"].partition("=")
        for way in self.made:
            if way["fix"] == name:
                edits = [(self.folder / file, old, new.replace("{}", value)) for file, old, new in way.get("edits", [])]
                texts = {path: path.read_text() for path, _, _ in edits}
                try:
                    for path, old, new in edits:
                        assert old in path.read_text(), f"{self.name}: {path.name} has no {old!r}"
                        path.write_text(path.read_text().replace(old, new))
                    return self.run(
                        "made", [*self.command, *(one.replace("{}", value) for one in way.get("options", []))]
                    )
                finally:
                    for path, text in texts.items():
                        path.write_text(text)
        return None

    def measure(self, with_fix: bool) -> dict[str, Any]:
        kept = self.out / f"{self.name}.busy"
        found: dict[str, Any] = {"plain": [self.run("plain", self.command)]}
        found["watched"] = self.run("watched", [*KEEPBUSY, "run", "--save", str(kept), *self.command[1:]])
        if kept.exists():
            explained = subprocess.run(
                [*KEEPBUSY, "explain", str(kept), "--json"], capture_output=True, text=True, check=False
            )
            said = json.loads(explained.stdout) if explained.returncode == 0 else {"plan": []}
            found["run"], found["first"] = said.get("run"), (said["plan"] or [None])[0]
            if with_fix:
                found["fix"] = self.run("fix", [*KEEPBUSY, "run", "--fix", "--against", str(kept), *self.command[1:]])
            found["made"] = self.make(found["first"]) if found["first"] else None
        found["plain"].append(self.run("plain_again", self.command))
        found["losses"] = {
            which: apart(self.losses("plain"), self.losses(which)) for which in ("plain_again", "watched", "fix")
        }
        (self.out / f"{self.name}.json").write_text(json.dumps(found))
        return found


def apart(first: list[float], other: list[float]) -> str:
    """How far the numbers that two runs printed are from one another."""
    if not first or len(first) != len(other):
        return f"{len(first)} and {len(other)} numbers"
    furthest = max(abs(one - two) / max(abs(one), abs(two), 1e-9) for one, two in zip(first, other, strict=True))
    return f"{len(first)} numbers, {'the same' if not furthest else f'up to {furthest:.1e} apart'}"


def told(name: str, found: dict[str, Any]) -> str:
    run, first = found.get("run") or {}, found.get("first") or {}
    lines = [f"{name}: plain {found['plain']}, under keepbusy and its report {found['watched']} s"]
    lines += [f"  run {run.get('time')} s, GPU at work {run.get('busy')} s; --fix {found.get('fix')}"]
    lines += [f"  first {first.get('fix')} at {first.get('where', [])[:1]}: {first.get('run')} s foretold"]
    lines += [f"  losses: {', '.join(f'{which} {said}' for which, said in found['losses'].items())}"]
    return "\n".join([*lines, f"  made {found.get('made')}"])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("programs", type=Path)
    arguments.add_argument("names", nargs="*")
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--gpus", type=int, default=1)
    arguments.add_argument("--seconds", type=float, default=480)
    arguments.add_argument("--fix", action="store_true")
    options = arguments.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    entries = [
        one for one in json.loads(options.programs.read_text()) if one["name"] in (options.names or [one["name"]])
    ]

    def do(entry: dict[str, Any], seat: Seat) -> None:
        print(told(entry["name"], Program(entry, options, seat).measure(options.fix)), flush=True)

    seat_all(entries, options.gpus, 1, do, options.seconds)


if __name__ == "__main__":
    main()
