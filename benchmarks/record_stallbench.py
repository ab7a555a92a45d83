"""Programs with a known stall, recorded live on a real GPU, against what fixing them really gains in the same job.

    python benchmarks/record_stallbench.py record --cases DIR --out DIR [--only CASE...] [--ranks N] [--repeat N]
    python benchmarks/record_stallbench.py score --out DIR --planted FILE

DIR of cases holds ordinary scripts, `main(tick, fixed)` in each; FILE says which causes, fixed together, make the
fixed variant. `record` needs the GPU: it times each case plain, stalled and fixed in turns, runs the stalled script
under `keepbusy run --json --save`, and writes it all to DIR. `score` needs none.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from forked import forked

WARM = 8
GAIN = 0.05
"""A smaller gain is none."""
BLAME = ("host_sync", "blocking_copy", "copy_not_overlapped", "input_late", "made_on_host", "allocator", "peer_late")


def timed(path: Path, fixed: bool) -> float:
    """Milliseconds a step; the device is drained before the first and after the last."""
    import torch

    spec = importlib.util.spec_from_file_location(path.stem, path)
    case: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(case)
    steps, begin = 0, 0.0

    def tick() -> None:
        nonlocal steps, begin
        steps += 1
        if steps == WARM:
            torch.cuda.synchronize()
            begin = time.perf_counter()

    case.main(tick, fixed)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / (steps - WARM) * 1e3


def in_turns(path: Path, repeat: int) -> list[tuple[float, float]]:
    """Stalled and fixed, in pairs."""
    return [(timed(path, False), timed(path, True)) for _ in range(repeat)]


def truth(path: Path, pairs: list[tuple[float, float]], machine: dict[str, str], world: int = 1) -> dict[str, Any]:
    stalled, fixed = (statistics.median(column) for column in zip(*pairs, strict=True))
    gains = [1 - after / before for before, after in pairs]
    return {
        "case": path.stem,
        "stalled_ms": stalled,
        "fixed_ms": fixed,
        "gain": 1 - fixed / stalled,
        "gain_low": min(gains),
        "gain_high": max(gains),
        "pairs": pairs,
        "world": world,
        **machine,
    }


def machine() -> dict[str, str]:
    import torch

    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}


def truth_of_ranks(options: argparse.Namespace) -> None:
    """In each of several ranks."""
    import torch

    threads, rank = torch.get_num_threads(), int(os.environ["RANK"])
    sys.path.insert(0, str(options.cases.parent))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    for path in paths_of(options):
        torch.set_num_threads(threads)  # a case may have set its own
        try:
            pairs = in_turns(path, options.repeat)
        except Exception as error:
            print(f"{path.stem}: {type(error).__name__}: {error}", flush=True)
            continue
        if rank == 0:
            note(path, truth(path, pairs, machine(), int(os.environ["WORLD_SIZE"])), options)


def note(path: Path, found: dict[str, Any], options: argparse.Namespace) -> None:
    (options.out / f"{path.stem}.json").write_text(json.dumps(found, indent=1))
    print(f"{path.stem:24s} {found['stalled_ms']:8.2f} -> {found['fixed_ms']:8.2f} ms", flush=True)


def paths_of(options: argparse.Namespace) -> list[Path]:
    found = {path.stem: path for path in sorted(options.cases.parent.glob(f"{options.cases.name}/*.py"))}
    return [found[name] for name in options.only or found]


def record(options: argparse.Namespace) -> None:
    """Everything in one job: the host of a virtual machine drifts, and no two are alike."""
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(options.cases.parent), os.environ.get("PYTHONPATH", "")])
    if options.ranks > 1:
        record_ranks(options)
        return
    importlib.import_module("torch.utils.data")  # once, for all that are forked from here
    sys.path.insert(1, str(options.cases.parent))  # the first place is the script's own folder
    for path in paths_of(options):
        beside(path, options)


def beside(path: Path, options: argparse.Namespace) -> None:
    """The live run, timed plain before it and after it. What keepbusy says cannot know what is measured."""
    pairs = forked(lambda: in_turns(path, options.repeat))
    live(path, options)
    pairs += forked(lambda: in_turns(path, options.repeat))
    note(path, truth(path, pairs, forked(machine)), options)


def record_ranks(options: argparse.Namespace) -> None:
    for path in paths_of(options):
        live(path, options)
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    again = [__file__, "truth", "--cases", str(options.cases), "--out", str(options.out)]
    only = ["--only", *options.only] if options.only else []
    subprocess.run([*agent, *again, "--repeat", str(options.repeat), *only], check=False)


def live(path: Path, options: argparse.Namespace) -> None:
    """`keepbusy run --json --save` of the script."""
    call = [sys.executable, "-m", "keepbusy", "run", "--json", "--save", str(options.out / f"{path.stem}.busy")]
    call += ["--ranks", str(options.ranks)] if options.ranks > 1 else []
    with (
        (options.out / f"{path.stem}.said.json").open("w") as out,
        (options.out / f"{path.stem}.log").open("w") as err,
    ):
        subprocess.run([*call, str(path)], stdout=out, stderr=err, check=False, timeout=120)


def score(options: argparse.Namespace) -> None:
    import keepbusy

    planted = json.loads(options.planted.read_text())
    rows = []
    for path in sorted(options.out.glob("*.busy")):
        truth = json.loads(path.with_suffix(".json").read_text())
        rows.append(judged(keepbusy.load(path), truth, planted[path.stem]))
        print(f"{path.stem:20s} {line(rows[-1], truth)}")
    decided = [row["right"] for row in rows if row["right"] is not None]
    errors = sorted(row["error"] for row in rows)
    tenth = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    print(f"{sum(decided)} of {len(decided)} right, {len(rows) - len(decided)} undecided")
    print(f"error: median {statistics.median(errors):.1%}, 90th percentile {tenth:.1%}")


def line(row: dict[str, Any], truth: dict[str, Any]) -> str:
    verdict = {True: "right", False: "WRONG", None: "undecided"}[row["right"]]
    return (
        f"{verdict:9s}  {row['named']:34s} plain {row['plain']:7.2f} ({truth['stalled_ms']:7.2f} by stopwatch)  "
        f"fixed {truth['fixed_ms']:7.2f}  predicted {row['predicted']:7.2f}  error {row['error']:6.1%}  {row['place']}"
    )


def judged(timeline: Any, truth: dict[str, Any], planted: list[str]) -> dict[str, Any]:
    """What keepbusy predicts against what fixing really gains. Where that is nothing, no line may be blamed.

    Where one pair of runs shows a gain and another none, the machine was too uneven to decide.
    """
    import keepbusy

    undecided = truth["gain_low"] < GAIN <= truth["gain_high"]
    planted = planted if truth["gain"] >= GAIN else []
    said = keepbusy.explain(timeline, what_if=planted)
    if not said.plain_step:
        return {"right": False, "named": "not explained", "plain": 0.0, "predicted": 0.0, "error": 1.0, "place": ""}
    plain, fixed = said.plain_step / 1e6, truth["fixed_ms"]
    lines = [one.predicted.step / 1e6 for one in said.causes if one.cause in BLAME]
    predicted = said.predicted.step / 1e6 if planted else min([plain, *lines])
    share = 1 - predicted / plain
    right = share >= 0.5 * truth["gain"] if planted else share <= GAIN
    first = next((one for one in said.causes if one.cause in planted), None) or next(iter(said.causes), None)
    return {
        "right": None if undecided else right,
        "named": ",".join(one.cause for one in said.causes) or "silent",
        "plain": plain,
        "predicted": predicted,
        "error": abs(predicted - fixed) / min(plain, truth["stalled_ms"]),
        "place": str(first.sites[0].where) if first else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("record", "truth", "score"))
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--planted", type=Path)
    options = parser.parse_args()
    {"record": record, "truth": truth_of_ranks, "score": score}[options.what](options)


if __name__ == "__main__":
    main()
