"""How much of a good engineer's gain `keepbusy run --fix` reaches without touching the program.

    PYTHONPATH=src python benchmarks/fix_stallbench.py [--stallbench FOLDER] [--gpus 2] [--seconds 200] [--out F.json]

Each GPU has a process and cores of its own, which takes case after case, those that take long first: a short run of
each kind, which pays for what comes only once; then as it is written, with the fixes, and as its author would have
fixed it, and the same backwards; and at last with the trial that a user's run makes, where the fixes did anything.
Weights after the last step are compared bit for bit, and two plain runs say whether a case agrees with itself at all.
Two things are the author's to decide and no tool's, and such cases are counted apart. What the program computes: the
short runs use PyTorch's deterministic algorithms, and after them the author's weights are others (other random numbers,
another order of rounding, another algorithm). And what the program's own Python does: the line that stalls says
`host_work`, while the fixes only stand in for functions of PyTorch's.
A case is told as soon as it is known, and after `--seconds` the answer is what is known by then. Cases of several
ranks are left out.
Needs a GPU; without one the cases shrink and run on a virtual GPU, which shows that they run and compute the same.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import multiprocessing
import os
import re
import select
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDERS = (HERE / "stalls" / "cases", HERE / "stalls" / "second")
STEPS, WARM, FIRST = 40, 10, 4
"""Of a run, of these not counted, and of the short run before."""
LOADED_STEPS, LOADED_WARM = 56, 28
"""The same where workers have to be found wanting and started first."""
TRIED_STEPS = 80
"""Of the run with a trial."""
NULL = 0.03
"""Cases whose author gains less are to be left alone."""
LONG = 2
"""Seconds: a program that takes longer runs fewer steps, or, with a loader, once of each kind."""
RANKS = re.compile(r"torch\.distributed as|DistributedDataParallel")
OWN_WORK = "# STALL: host_work"
RECORD = 256
"""Bytes of a case's name on its way to the process that takes it next."""


def cases(folders: list[Path], only: list[str]) -> list[Path]:
    """In the order in which they are asked for; else those with a loader take longest and come first."""
    found = [one for folder in folders for one in sorted(folder.glob("*.py"))]
    texts = {one: one.read_text() for one in found if not only or one.stem in only}
    order = (lambda one: only.index(one.stem)) if only else (lambda one: not is_loaded(one))
    return sorted((one for one, text in texts.items() if not RANKS.search(text)), key=order)


def is_loaded(path: Path) -> bool:
    return "DataLoader(" in path.read_text()


class Case:
    """A case loaded anew for each run: as it is written, with fixes, or as its author fixed it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps, self.warm = (LOADED_STEPS, LOADED_WARM) if is_loaded(path) else (STEPS, WARM)
        sys.path[:0] = [str(path.parent), str(path.parent.parent)]
        self.optimizers: list[Any] = []
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._hook = register_optimizer_step_post_hook(lambda optimizer, *_: self._meet(optimizer))

    def end(self) -> None:
        self._hook.remove()
        del sys.path[:2]

    def _meet(self, optimizer: Any) -> None:
        if not any(one is optimizer for one in self.optimizers):
            self.optimizers.append(optimizer)

    def run(self, fixed: bool, live: Any = None, steps: int = 0) -> dict[str, Any]:
        """Milliseconds a step once warm, and what became of the weights."""
        import torch

        source, path = self.path.read_bytes(), str(self.path)
        wanted, lists = steps or self.steps, list[list[Any]]()
        os.environ["STALLBENCH_STEPS"] = str(wanted)
        for shared in ("models", "common"):
            sys.modules.pop(shared, None)
        if live is not None:
            live.begin()
        names: dict[str, Any] = {"__name__": "case", "__file__": path}
        marks: list[Any] = []

        def tick() -> None:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            marks.append(mark)
            if len(marks) == wanted and not self.optimizers:  # who steps by hand holds the weights in a list
                held = [one for one in sys._getframe(1).f_locals.values() if isinstance(one, list)]
                lists.extend([one for one in some if isinstance(one, torch.nn.Parameter)] for some in held)

        threads = torch.get_num_threads()
        try:
            exec(live.compile(source, path) if live is not None else compile(source, path, "exec"), names)
            seed()
            with contextlib.redirect_stdout(io.StringIO()):
                names["main"](tick, fixed=fixed)
        finally:
            if live is not None:
                live.end()
            torch.set_num_threads(threads)
        torch.cuda.synchronize()
        warm = min(self.warm, len(marks) // 2)
        each = marks[warm].elapsed_time(marks[-1]) / max(1, len(marks) - 1 - warm)
        lists += [group["params"] for one in self.optimizers for group in one.param_groups]
        weights = [digest(one) for some in lists for one in some]
        self.optimizers.clear()
        names.clear()
        gc.unfreeze()
        gc.collect()
        return {"ms": each, "weights": hash(tuple(weights))}


def seed() -> None:
    import random

    import numpy as np
    import torch

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def digest(tensor: Any) -> int:
    import torch

    bits = tensor.detach().contiguous().flatten().view(torch.uint8).long()
    return int((bits * (torch.arange(len(bits), device=bits.device) % 65521 + 1)).sum())


def measure(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from keepbusy.fix.live.live_fixes import LiveFixes, chosen

    def fixes(tried: bool = False) -> LiveFixes:
        return LiveFixes(chosen(also=options.also), tried)

    case, began = Case(path), time.monotonic()
    times: dict[str, list[float]] = {"plain": [], "live": [], "author": []}
    weights: dict[str, list[int]] = {kind: [] for kind in times}
    torch.use_deterministic_algorithms(True, warn_only=True)
    short = [case.run(kind == "author", fixes() if kind == "live" else None, FIRST) for kind in (*times, "plain")]
    torch.use_deterministic_algorithms(False)
    if not is_loaded(path):
        case.steps = max(FIRST * 4, min(STEPS, int(LONG * 1000 / min(one["ms"] for one in short))))
    found: dict[str, Any] = {"case": path.stem, "folder": path.parent.name, "done": {}, "off": {}}
    for kind in (*times, *reversed(times)) * options.rounds:
        if is_loaded(path) and times[kind] and times["plain"][0] * case.steps > LONG * 1000:
            continue
        live = fixes() if kind == "live" else None
        one = case.run(kind == "author", live)
        times[kind].append(one["ms"])
        weights[kind].append(one["weights"])
        if live is not None:
            found["done"] = {switch.name: switch.done.total() for switch in live.switches if switch.done}
            found["off"] = {switch.name: switch.off_because for switch in live.switches if switch.off_because}
    found |= outcome(times)
    found["same"] = same(weights["plain"], weights["live"])
    first, _, of_author, second = (one["weights"] for one in short)
    other = "computes else" if same([first, second], [of_author]) is False else ""
    found["left_to_author"] = other or "own Python" * (OWN_WORK in path.read_text())
    found["trial_gain"], found["left_alone"] = None, not found["done"]
    if found["done"] and found["plain"] * TRIED_STEPS < 2 * LONG * 1000:
        tried = fixes(tried=True)
        case.run(False, tried, TRIED_STEPS)
        found["told"] = tried.told()
        if tried.result:
            found["trial_gain"] = tried.result.gain
            found["left_alone"] = all(one.off_because or not one.done for one in tried.switches)
    case.end()
    found["seconds"] = time.monotonic() - began
    return found


def outcome(times: dict[str, list[float]]) -> dict[str, Any]:
    """Of runs of each kind the quickest counts: what is slow once is seldom the program."""
    plain, live, author = (min(times[kind]) for kind in ("plain", "live", "author"))
    gain, noise = 1 - author / plain, (max(times["plain"]) - plain) / plain
    share = (plain - live) / (plain - author) if gain > NULL else None
    return {
        "times": times,
        "plain": plain,
        "live": live,
        "author": author,
        "noise": noise,
        "gain": gain,
        "share": share,
    }


def same(plain: list[int], other: list[int]) -> bool | str:
    """Of a program whose plain runs differ nothing can be said."""
    return "varies by itself" if len(set(plain)) > 1 else set(other) == set(plain)


def measured(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Or why not."""
    left = int(min(options.each, options.began + options.seconds - time.monotonic()))
    if left <= 0:
        return {"case": path.stem, "error": "no time left"}

    def too_long(*_: object) -> None:
        raise TimeoutError(f"took more than {left} s")

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(left)
    try:
        return measure(path, options)
    except Exception as error:
        if os.environ.get("KEEPBUSY_DEBUG"):
            traceback.print_exc()
        return {"case": path.stem, "error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        signal.alarm(0)
        gc.collect()


def on_gpus(paths: list[Path], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A process for each GPU, with cores of its own, takes case after case until none is left, or the time is over."""
    asking, giving = os.pipe()
    os.write(giving, b"".join(str(path).encode().ljust(RECORD) for path in paths))
    os.close(giving)
    reading, writing = os.pipe()
    cores, children, turn = sorted(os.sched_getaffinity(0)), [], multiprocessing.Lock()
    for gpu in range(options.gpus):
        children.append(os.fork())
        if not children[-1]:
            os.close(reading)
            share = max(1, len(cores) // options.gpus)
            os.sched_setaffinity(0, cores[gpu * share : (gpu + 1) * share])
            if options.gpus > 1:
                os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
            take_cases(asking, writing, turn, share, options)
            os._exit(0)
    os.close(writing)
    results: list[dict[str, Any]] = []
    text = b""
    while (left := options.began + options.seconds - time.monotonic()) > 0 and select.select([reading], [], [], left)[
        0
    ]:
        came = os.read(reading, 1 << 16)
        if not came:
            break
        *whole, text = (text + came).split(b"\n")
        for told in whole:
            results.append(json.loads(told))
            print(line(results[-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1))
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    known = {one["case"] for one in results}
    return results + [{"case": one.stem, "error": "no time left"} for one in paths if one.stem not in known]


def take_cases(asking: int, writing: int, turn: Any, cores: int, options: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(cores)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # of an H200 anyway; without it products are not deterministic
    if not torch.cuda.is_available():
        os.environ["STALLBENCH_SMALL"] = "1"
        from keepbusy.virtual.virtual_run import Options, start

        start(Options(measured=False, script_clocks=False))
    while (record := os.read(asking, RECORD)).strip():
        told = json.dumps(measured(Path(record.decode().strip()), options))
        with turn, os.fdopen(os.dup(writing), "w") as pipe:
            pipe.write(f"{told}\n")


def line(one: dict[str, Any]) -> str:
    if "error" in one:
        return f"{one['case']:<26} {one['error']}"
    share = "left alone" if one["share"] is None else f"{one['share']:6.0%}"
    done = " ".join(f"{name}:{count}" for name, count in one["done"].items())
    trial = "-" if one["trial_gain"] is None else f"{one['trial_gain']:.0%}{' off' if one['left_alone'] else ''}"
    return (
        f"{one['case']:<26} {one['plain']:8.2f} {one['live']:8.2f} {one['author']:8.2f} {one['noise']:6.0%} "
        f"{one['gain']:6.0%} {share:>10}  {one['same']!s:<16}  {one['left_to_author']:<14}  {trial:<8} "
        f"{one['seconds']:4.0f} {done}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stallbench", type=Path, help="the folder of further cases: FOLDER/cases")
    parser.add_argument("--gpus", type=int, default=1, help="so many cases at once, each with a GPU and cores")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--also", nargs="*", default=[], help="fixes that are asked for by name: fused")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=200, help="for the whole answer")
    parser.add_argument("--each", type=int, default=60, help="seconds for one case")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.began = time.monotonic()
    warnings.simplefilter("ignore")  # of forks: no thread is at work yet
    import torch  # noqa: F401 -- before the children are forked

    folders = [*FOLDERS, *([options.stallbench / "cases"] if options.stallbench else [])]
    print(
        f"{'case':<26} {'plain ms':>8} {'live':>8} {'author':>8} {'noise':>6} {'gain':>6} {'share':>10}"
        "  same weights      the author's    trial       s done",
        flush=True,
    )
    results = on_gpus(cases(folders, options.only), options)
    scored = [one for one in results if one.get("share") is not None]
    reached = [one["case"] for one in scored if one["share"] >= 0.8]
    open_to_all = [one["case"] for one in scored if one["case"] in reached or not one["left_to_author"]]
    nulls = [one for one in results if "share" in one and one["share"] is None]
    slower = [
        one["case"]
        for one in results
        if "plain" in one and not one["left_alone"] and one["live"] > (1 + NULL + one["noise"]) * one["plain"]
    ]
    differing = [one["case"] for one in results if one.get("same") is False]
    unknown = {one["case"]: one["error"] for one in results if "error" in one}
    print(
        f"\n{len(reached)} of {len(scored)} reach 80% of the author's gain: {', '.join(reached)}\n"
        f"where the fix is not the author's to make, {len({*reached} & {*open_to_all})} of {len(open_to_all)}; "
        f"missed: {', '.join(one for one in open_to_all if one not in reached)}\n"
        f"{len(nulls)} null cases; slower beyond noise: {slower}; other weights: {differing}; not measured: {unknown}\n"
        f"{time.monotonic() - options.began:.0f} s"
    )


if __name__ == "__main__":
    main()
