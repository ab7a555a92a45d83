"""How much of a good engineer's gain `keepbusy run --fix` reaches without touching the program.

    PYTHONPATH=src python benchmarks/fix_stallbench.py [--cases STALLBENCH/cases] [--only NAME ...] [--part 1/2]
        [--out FILE.json]

Each case runs in a process of its own: plain, with the fixes, as its author would have fixed it; then once more with
the trial that a user's run makes. Weights after the last step are compared bit for bit. Cases of several ranks are left
out. Needs a GPU; without one the cases shrink and run on a virtual GPU, which shows that they run, and no more.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDERS = (HERE / "stalls" / "cases", HERE / "stalls" / "second")
STEPS, WARM = 50, 12
NULL = 0.03
"""Cases whose author gains less are to be left alone."""


def cases(folders: list[Path], only: list[str], part: str) -> list[Path]:
    found = [one for folder in folders for one in sorted(folder.glob("*.py"))]
    found = [one for one in found if "distributed" not in one.read_text() and (not only or one.stem in only)]
    number, count = (int(one) for one in part.split("/"))
    return found[number - 1 :: count]


class Case:
    """A case loaded twice: as it is written, and with its fixes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        sys.path[:0] = [str(path.parent), str(path.parent.parent)]
        self.optimizers: list[Any] = []
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda optimizer, *_: self._meet(optimizer))

    def _meet(self, optimizer: Any) -> None:
        if not any(one is optimizer for one in self.optimizers):
            self.optimizers.append(optimizer)

    def run(self, fixed: bool, live: Any = None) -> dict[str, Any]:
        """Milliseconds a step once warm, and what became of the weights."""
        import random

        import numpy as np
        import torch

        source, path = self.path.read_bytes(), str(self.path)
        if live is not None:
            live.begin()
        names: dict[str, Any] = {"__name__": "case", "__file__": path}
        marks: list[Any] = []

        def tick() -> None:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            marks.append(mark)

        self.optimizers.clear()
        try:
            exec(live.compile(source, path) if live is not None else compile(source, path, "exec"), names)
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            with contextlib.redirect_stdout(io.StringIO()):
                names["main"](tick, fixed=fixed)
            torch.cuda.synchronize()
        finally:
            if live is not None:
                live.end()
        warm = min(WARM, len(marks) // 3)
        each = marks[warm].elapsed_time(marks[-1]) / max(1, len(marks) - 1 - warm)
        weights = [digest(p) for one in self.optimizers for group in one.param_groups for p in group["params"]]
        self.optimizers.clear()
        return {"ms": each, "weights": hash(tuple(weights))}


def digest(tensor: Any) -> int:
    import torch

    bits = tensor.detach().contiguous().flatten().view(torch.uint8).long()
    return int((bits * (torch.arange(len(bits), device=bits.device) % 65521 + 1)).sum())


def measure(path: Path, rounds: int, also: list[str]) -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        os.environ["STALLBENCH_SMALL"] = "1"
        from keepbusy.virtual.virtual_run import Options, start

        start(Options(measured=False, script_clocks=False))
    from keepbusy.fix.live.live_fixes import LiveFixes, chosen

    case = Case(path)
    found: dict[str, Any] = {"case": path.stem, "folder": path.parent.name}
    times: dict[str, list[float]] = {"plain": [], "live": [], "author": []}
    weights: dict[str, set[int]] = {"plain": set(), "live": set()}
    done: dict[str, int] = {}
    for _ in range(rounds):
        for kind, taken in times.items():
            live = LiveFixes(chosen(also=also), tried=False) if kind == "live" else None
            one = case.run(kind == "author", live)
            taken.append(one["ms"])
            if kind in weights:
                weights[kind].add(one["weights"])
            if live is not None:
                done = {switch.name: switch.done.total() for switch in live.switches if switch.done}
                found["off"] = {switch.name: switch.off_because for switch in live.switches if switch.off_because}
    plain, live_time, author = (median(times[kind]) for kind in times)
    same = weights["live"] == weights["plain"] if len(weights["plain"]) == 1 else "varies by itself"
    found.update(times=times, done=done, same=same, plain=plain, live=live_time, author=author)
    found["gain"] = 1 - author / plain
    found["share"] = (plain - live_time) / (plain - author) if found["gain"] > NULL else None
    tried = LiveFixes(chosen(also=also))
    found["tried"] = case.run(False, tried)["ms"]
    result = tried.trial.result if tried.trial else None
    found["trial_gain"] = result.gain if result else None
    found["left_alone"] = bool(result) and all(one.off_because for one in tried.switches)
    return found


def in_child(path: Path, rounds: int, also: list[str], seconds: int) -> dict[str, Any]:
    """CUDA begins in the child; PyTorch was imported before."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        signal.alarm(seconds)
        try:
            told = measure(path, rounds, also)
        except BaseException as error:
            told = {"case": path.stem, "error": f"{type(error).__name__}: {error}"[:300]}
            if os.environ.get("KEEPBUSY_DEBUG"):
                traceback.print_exc()
        with os.fdopen(writing, "w") as pipe:
            json.dump(told, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"case": path.stem, "error": f"took more than {seconds} s, or died"}


def line(one: dict[str, Any]) -> str:
    if "error" in one:
        return f"{one['case']:<26} {one['error']}"
    share = "left alone" if one["share"] is None else f"{one['share']:6.0%}"
    done = " ".join(f"{name}:{count}" for name, count in one["done"].items())
    trial = "-" if one["trial_gain"] is None else f"{one['trial_gain']:.0%}{' off' if one['left_alone'] else ''}"
    return (
        f"{one['case']:<26} {one['plain']:8.2f} {one['live']:8.2f} {one['author']:8.2f}  {one['gain']:6.0%} {share:>10}"
        f"  {one['same']!s:<16}  {trial:<8} {done}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", type=Path, default=[], help="further folders, such as stallbench/cases")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--also", nargs="*", default=[], help="fixes that are asked for by name: fused")
    parser.add_argument("--part", default="1/1", help="which part of how many")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=60, help="for one case")
    parser.add_argument("--deadline", type=int, default=450, help="seconds, after which no case begins")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("STALLBENCH_STEPS", str(STEPS))
    import torch  # noqa: F401 -- before the children are forked

    began, results = time.monotonic(), []
    print(f"{'case':<26} {'plain ms':>8} {'live':>8} {'author':>8}  {'gain':>6} {'share':>10}  same weights      trial")
    for path in cases([*FOLDERS, *options.cases], options.only, options.part):
        if time.monotonic() - began > options.deadline:
            print(f"{path.stem:<26} no time left")
            continue
        results.append(in_child(path, options.rounds, options.also, options.seconds))
        print(line(results[-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1))
    measured = [one for one in results if one.get("share") is not None]
    reached = sum(one["share"] >= 0.8 for one in measured)
    nulls = [one for one in results if "share" in one and one["share"] is None]
    slower = [one["case"] for one in results if "plain" in one and one["live"] > (1 + NULL) * one["plain"]]
    print(f"\n{reached} of {len(measured)} reach 80% of the author's gain; {len(nulls)} null cases; slower: {slower}")


if __name__ == "__main__":
    main()
