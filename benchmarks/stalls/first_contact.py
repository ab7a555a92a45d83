"""What `keepbusy run` says of a set's stalled programs, beside their seconds stalled and fixed, on all GPUs at once.

    python benchmarks/stalls/first_contact.py FOLDER one|ranks [NAME …] --out OUT [--gpus 4] [--seconds 540] [--pairs 2]

FOLDER holds one/ and ranks/, as benchmarks/stalls/fourth does. A program of one GPU has a GPU and its share of the cores
to itself, one of two ranks has two of each. Stalled and fixed take turns; the recording comes between the pairs. For each
program OUT gets NAME.busy, NAME.json with all seconds (by the program's own stopwatch, of the whole process), and what
each process wrote; on the screen stands what was said.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

STALLS = Path(__file__).resolve().parent
sys.path.insert(0, str(STALLS.parent))
from seats import Seat, seat_all  # noqa: E402

SHARED = (STALLS, STALLS / "third", STALLS / "fifth")
PATH = {"PYTHONPATH": os.pathsep.join([*map(str, SHARED), os.environ.get("PYTHONPATH", "")])}


def stopwatch(log: Path) -> float | None:
    """The last line that is a number: the program's own seconds."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    figures = [line for line in lines if line.strip().replace(".", "", 1).isdigit()]
    return float(figures[-1]) if figures else None


def measure(name: str, options: argparse.Namespace, seat: Seat) -> dict:
    script, out = f"{options.kind}/{name}.py", options.out
    ranks = ["torchrun", f"--master-port={seat.port}", "--nproc_per_node=2"] if options.kind == "ranks" else [sys.executable]
    watching = [sys.executable, "-m", "keepbusy", "run", "--save", str(out / f"{name}.busy")]
    watching += ["--ranks", "2"] if options.kind == "ranks" else []
    commands = {"stalled": [*ranks, script], "watched": [*watching, script], "fixed": [*ranks, script, *options.variant.split()]}
    found: dict = {"name": name, "kind": options.kind, "stalled": [], "fixed": [], "watched": []}
    for which in ["stalled", "watched", "fixed", *["stalled", "fixed"] * (options.pairs - 1)]:
        log = out / f"{name}.{which}.log"
        whole = seat.run(commands[which], options.folder, log, PATH)
        found[which].append((stopwatch(log), whole))
    (out / f"{name}.json").write_text(json.dumps(found))
    return found


def told(found: dict, out: Path) -> str:
    seconds = {which: [own for own, _ in found[which]] for which in ("stalled", "fixed", "watched")}
    lines = [f"{found['name']}: " + ", ".join(f"{which} {figures}" for which, figures in seconds.items())]
    kept = str(out / f"{found['name']}.busy")
    explaining = [sys.executable, "-m", "keepbusy", "explain", kept, "--json"]
    said = subprocess.run(explaining, capture_output=True, text=True, check=False)
    if said.returncode:
        return "\n".join([*lines, f"  {said.stderr.strip()}"])
    report = json.loads(said.stdout)
    lines += [f"  {one['cause']} {one['where']}: {report['plain_step']} -> {one['predicted_step']} ms" for one in report["causes"]]
    lines += [f"  plan: {fix['fix']} {fix['where'][:1]}: {fix['predicted']['after']} ms, run {fix['run']}" for fix in report["plan"]]
    return "\n".join(lines)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("kind", choices=("one", "ranks"))
    arguments.add_argument("names", nargs="*")
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--gpus", type=int, default=1)
    arguments.add_argument("--seconds", type=float, default=540)
    arguments.add_argument("--pairs", type=int, default=2)
    arguments.add_argument("--variant", default="--fixed", help="what makes a program run its fixed variant")
    options = arguments.parse_args()
    options.out, options.folder = options.out.resolve(), options.folder.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.names or sorted(json.loads((options.folder / "planted.json").read_text())[options.kind])

    def do(name: str, seat: Seat) -> None:
        print(told(measure(name, options, seat), options.out), flush=True)

    seat_all(names, options.gpus, 2 if options.kind == "ranks" else 1, do, options.seconds)


if __name__ == "__main__":
    main()
