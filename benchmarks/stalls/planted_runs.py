"""Whole runs with one planted fault each: as they are and with the fault repaired, in turns, and under keepbusy.

    python benchmarks/stalls/planted_runs.py eleventh --out OUT [NAME …] [--gpus 2] [--pairs 2] [--seconds 500]

Of `one/` several run beside each other, a GPU each; of `ranks/` each takes two. A program prints RUN_SECONDS, from the
end of its imports on, as its last line; `--fixed` repairs it. In OUT: of each program NAME.json with those seconds,
NAME.txt with the report, and in NAME/ the log, which `keepbusy.log.logged_run.timeline_in` reads.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from seats import Seat, seat_all  # noqa: E402

TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]


def measure(program: Path, seat: Seat, out: Path, pairs: int) -> None:
    endpoint = ["--rdzv-endpoint", f"localhost:{seat.port}"]
    python = [sys.executable, *([*TORCHRUN, *endpoint] if program.parent.name == "ranks" else [])]
    printed, seconds = out / f"{program.stem}.out", dict[str, list[float]](plain=[], fixed=[])
    for _ in range(pairs):
        for kind, options in (("plain", []), ("fixed", ["--fixed"])):
            seat.run([*python, program.name, *options], program.parent, printed, {})
            seconds[kind] += [float(one) for one in re.findall(r"RUN_SECONDS ([\d.]+)", printed.read_text())]
    (out / f"{program.stem}.json").write_text(json.dumps(seconds))
    kept = out / program.stem
    kept.mkdir(exist_ok=True)
    run = ["-m", "keepbusy", "run", "--full", program.name]
    seat.run([*python, *run], program.parent, out / f"{program.stem}.txt", {"KEEPBUSY_KEEP": str(kept)})
    print(program.stem, seconds, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=500)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for kind, each in (("one", 1), ("ranks", 2)):
        found = sorted((HERE / options.set / kind).glob("*.py"))
        wanted = [one for one in found if not options.names or one.stem in options.names]
        out, pairs = options.out.resolve(), options.pairs
        seat_all(wanted, options.gpus, each, lambda one, seat, o=out, p=pairs: measure(one, seat, o, p), options.seconds)


if __name__ == "__main__":
    main()
