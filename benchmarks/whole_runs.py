"""Whole runs of programs that nobody here wrote: plain, then under keepbusy, and what the report says first.

    python benchmarks/whole_runs.py PROGRAMS.json [NAME ...] --out FOLDER [--seconds 400]

PROGRAMS.json lists them: [{"name", "folder" (beside the file), "command": ["python", "train.py", ...]}, ...]. A file
`prepare.sh` in a program's folder is sourced first. Where the first fix is a number of workers and the command has
`-j`, the program is run once more with that number.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PREPARE = "[ -f prepare.sh ] && . ./prepare.sh >/dev/null 2>&1; env -0"


def timed(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[float, str]:
    began = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return time.perf_counter() - began, done.stdout


def measure(program: dict[str, Any], root: Path, out: Path) -> None:
    folder, command = root / program["folder"], [str(one) for one in program["command"]]
    shown = subprocess.run(["bash", "-c", PREPARE], check=False, cwd=folder, capture_output=True).stdout.decode()
    environment = {**os.environ, **dict(one.split("=", 1) for one in shown.split("\0") if "=" in one)}
    kept = out / f"{program['name']}.busy"
    plain, _ = timed(command, folder, environment)
    keepbusy = [sys.executable, "-m", "keepbusy"]
    under, text = timed([*keepbusy, "run", "--save", str(kept), *command[1:]], folder, environment)
    (out / f"{program['name']}.txt").write_text(text)
    print(f"{program['name']}: plain {plain:.1f} s, under keepbusy and its report {under:.1f} s")
    if not kept.exists():
        return
    said = json.loads(
        subprocess.run([*keepbusy, "explain", str(kept), "--json"], capture_output=True, text=True, check=False).stdout
    )
    run, first = said.get("run") or {}, (said["plan"] or [{}])[0]
    print(f"  run {run.get('time')} s, GPU at work {run.get('busy')} s; first {first.get('fix')}: {first.get('run')} s")
    fix = str(first.get("fix", ""))
    if fix.startswith("num_workers=") and "-j" in command:
        command[command.index("-j") + 1] = fix.partition("=")[2]
        print(f"  made: {timed(command, folder, environment)[0]:.1f} s")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("programs", type=Path)
    arguments.add_argument("names", nargs="*")
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--seconds", type=float, default=400)
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    for program in json.loads(options.programs.read_text()):
        if time.perf_counter() - began < options.seconds and program["name"] in (options.names or [program["name"]]):
            measure(program, options.programs.resolve().parent, options.out.resolve())


if __name__ == "__main__":
    main()
