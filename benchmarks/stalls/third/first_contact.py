"""What `keepbusy run` says of the stalled programs of this set, beside their seconds stalled and fixed, once each.

    python benchmarks/stalls/third/first_contact.py one|ranks [NAME ...] --out FOLDER [--seconds 300] [--folder benchmarks/stalls/fourth]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def seconds(command, environment, folder):
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False)
    figures = [line for line in done.stdout.splitlines() if line.replace(".", "", 1).isdigit()]
    return float(figures[-1]) if figures else None


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("kind", choices=("one", "ranks"))
    arguments.add_argument("names", nargs="*")
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--seconds", type=float, default=300)
    arguments.add_argument("--folder", type=Path, default=HERE, help="where the programs are")
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.folder.resolve()
    path = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    start = ["torchrun", "--standalone", "--nproc_per_node=2"] if options.kind == "ranks" else [sys.executable]
    ranks = ["--ranks", "2"] if options.kind == "ranks" else []
    began = time.perf_counter()
    for name in options.names or sorted(path.stem for path in (folder / options.kind).glob("*.py")):
        if time.perf_counter() - began > options.seconds:
            break
        script, kept = f"{options.kind}/{name}.py", options.out.resolve() / f"{name}.busy"
        keepbusy = [sys.executable, "-m", "keepbusy"]
        stalled = seconds([*start, script], environment, folder)
        watched = seconds([*keepbusy, "run", "--save", str(kept), *ranks, script], environment, folder)
        fixed = seconds([*start, script, "--fixed"], environment, folder)
        print(f"{name}: stalled {stalled} s, under keepbusy {watched} s, fixed {fixed} s")
        said = json.loads(
            subprocess.run([*keepbusy, "explain", str(kept), "--json"], capture_output=True, text=True, check=False).stdout
        )
        for cause in said["causes"]:
            print(f"  {cause['cause']} {cause['where']}: {said['plain_step']} -> {cause['predicted_step']} ms")
        for fix in said["plan"]:
            print(f"  plan: {fix['fix']} {fix['where'][:1]}: {fix['step']} ms, run {fix['run']} s")


if __name__ == "__main__":
    main()
