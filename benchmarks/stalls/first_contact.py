"""What `keepbusy run` says of a set's stalled programs, beside their seconds stalled and fixed, on all GPUs at once.

    python benchmarks/stalls/first_contact.py FOLDER one|ranks [NAME …] --out OUT [--gpus 4] [--seconds 540] [--pairs 2]

FOLDER holds one/ and ranks/, as benchmarks/stalls/fourth does. A program of one GPU has a GPU and its share of the cores
to itself, one of two ranks has two of each. Stalled and fixed take turns; the recording comes between the pairs. For each
program OUT gets NAME.busy, NAME.json with all seconds, what each process wrote, and on the screen stands what was said.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

STALLS = Path(__file__).resolve().parent
LIMIT = 150
"""Seconds after which a program is ended: it hangs."""


class Seat:
    """Some GPUs, and the cores beside them."""

    def __init__(self, number: int, gpus: int, seats: int) -> None:
        cores = os.cpu_count() // seats
        self.gpus = ",".join(str(number * gpus + one) for one in range(gpus))
        self.cores = f"{number * cores}-{number * cores + cores - 1}"
        self.port = 29500 + number

    def run(self, command: list[str], folder: Path, log: Path) -> tuple[float | None, float]:
        """The seconds by the program's own stopwatch, and those of the whole process."""
        path = os.pathsep.join([str(STALLS), str(STALLS / "third"), os.environ.get("PYTHONPATH", "")])
        surroundings = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": self.gpus}
        began = time.perf_counter()
        with log.open("w", encoding="utf-8") as out:
            try:
                subprocess.run(
                    ["taskset", "-c", self.cores, *command],
                    cwd=folder,
                    env=surroundings,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=LIMIT,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                out.write(f"\nended after {LIMIT} s\n")
        whole = time.perf_counter() - began
        figures = [line for line in log.read_text(errors="replace").splitlines() if line.strip().replace(".", "", 1).isdigit()]
        return (float(figures[-1]) if figures else None), whole


def measure(name: str, kind: str, folder: Path, out: Path, seat: Seat, pairs: int) -> dict:
    script = f"{kind}/{name}.py"
    ranks = ["torchrun", f"--master-port={seat.port}", "--nproc_per_node=2"] if kind == "ranks" else [sys.executable]
    watching = [sys.executable, "-m", "keepbusy", "run", "--save", str(out / f"{name}.busy")]
    watching += ["--ranks", "2"] if kind == "ranks" else []
    commands = {"stalled": [*ranks, script], "watched": [*watching, script], "fixed": [*ranks, script, "--fixed"]}
    found: dict = {"name": name, "kind": kind, "stalled": [], "fixed": [], "watched": []}
    for which in ["stalled", "watched", "fixed", *["stalled", "fixed"] * (pairs - 1)]:
        found[which].append(seat.run(commands[which], folder, out / f"{name}.{which}.log"))
    (out / f"{name}.json").write_text(json.dumps(found))
    return found


def told(found: dict, out: Path) -> str:
    seconds = {which: [own for own, _ in found[which]] for which in ("stalled", "fixed", "watched")}
    lines = [f"{found['name']}: " + ", ".join(f"{which} {figures}" for which, figures in seconds.items())]
    said = subprocess.run(
        [sys.executable, "-m", "keepbusy", "explain", str(out / f"{found['name']}.busy"), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if said.returncode:
        return "\n".join([*lines, f"  {said.stderr.strip()}"])
    report = json.loads(said.stdout)
    lines += [f"  {one['cause']} {one['where']}: {report['plain_step']} -> {one['predicted_step']} ms" for one in report["causes"]]
    lines += [f"  plan: {fix['fix']} {fix['where'][:1]}: {fix['step']} ms, run {fix['run']} s" for fix in report["plan"]]
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
    options = arguments.parse_args()
    out, folder = options.out.resolve(), options.folder.resolve()
    out.mkdir(parents=True, exist_ok=True)
    each = 2 if options.kind == "ranks" else 1
    seats = max(options.gpus // each, 1)
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in options.names or sorted(path.stem for path in (folder / options.kind).glob("*.py")):
        waiting.put(name)
    began = time.perf_counter()

    def work(seat: Seat) -> None:
        while time.perf_counter() - began < options.seconds:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            print(told(measure(name, options.kind, folder, out, seat, options.pairs), out), flush=True)

    threads = [threading.Thread(target=work, args=[Seat(number, each, seats)]) for number in range(seats)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
