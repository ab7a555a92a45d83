"""Times the programs of this set on this machine, stalled and fixed in turn, each run in processes of its own.

    python measure_third.py --set one|ranks --out FILE.json [--folder ../fourth] [--seconds 540] [--pairs 2] [--only NAME...] [--scale 1.0]

Of each run: `whole_s`, from the first line of `main` to the device's last work, and `turn_ms`, the mean time between two
turns of the main loop after the first tenth of them. Where a program has two faults that hide each other, each is also
mended alone. FILE.json grows program by program, and what it holds already is not measured again, so that a run that
was stopped by its time limit is continued by the next. PyTorch is imported once: the runs are forked from here.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def child(path, fixed, answer):
    """One rank of one run: times `main` from outside and writes what it saw, rank 0 only."""
    import torch
    import torch.distributed as dist

    spec = importlib.util.spec_from_file_location(path.stem, path)
    program = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    script = sys.modules["script"]
    script.start_ranks()
    ticks = []
    script.synchronize()
    start = time.perf_counter()
    program.main(lambda: ticks.append(time.perf_counter()), fixed=fixed)
    script.synchronize()
    seconds = time.perf_counter() - start
    first = max(1, len(ticks) // 10)
    turn = (ticks[-1] - ticks[first]) / (len(ticks) - 1 - first) * 1e3 if len(ticks) > first + 1 else None
    if not dist.is_initialized() or dist.get_rank() == 0:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        answer.write_text(json.dumps({"whole_s": seconds, "turn_ms": turn, "turns": len(ticks), "gpu": gpu}))
    if dist.is_initialized():
        dist.destroy_process_group()


def fork(path, fixed, answer, log, environment):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1), os.dup2(out, 2)
        os.environ.update(environment)
        child(path, fixed, answer)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def once(path, fixed, world, port, log, limit):
    """Runs the program in `world` processes; what its rank 0 saw, or how it failed."""
    answer = Path(tempfile.gettempdir(), f"third{os.getpid()}-{port}.json")
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    alone = [{}] if world == 0 else [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(world)]
    alive = {fork(path, fixed, answer, log, environment) for environment in alone}
    started, failure, start = set(alive), None, time.time()
    while alive and failure is None:
        for pid in list(alive):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                alive.discard(pid)
                if status:
                    failure = f"exit {os.waitstatus_to_exitcode(status)}"
        if time.time() - start > limit:
            failure = f"stopped after {limit} s"
        time.sleep(0.02)
    for pid in started:
        try:
            os.killpg(pid, signal.SIGKILL)  # also loader workers that outlived their parent
        except ProcessLookupError:
            pass
    for pid in alive:
        os.waitpid(pid, 0)
    if failure is None and not answer.exists():
        failure = "no answer"
    if failure is not None:
        return {"failed": failure}
    seen = json.loads(answer.read_text())
    answer.unlink()
    return seen


def summary(runs):
    """Medians of what went well, and the gain of each mended form over the stalled one, pair by pair."""
    out = {"runs": runs}
    failed = [run["failed"] for pair in runs for run in pair.values() if "failed" in run]
    if failed:
        return out | {"failed": failed[0]}
    for form in runs[0]:
        for unit in ("whole_s", "turn_ms"):
            values = [pair[form][unit] for pair in runs]
            out[f"{form}_{unit}"] = None if None in values else statistics.median(values)
    for form in runs[0]:
        if form != "stalled":
            gains = sorted(1 - pair[form]["whole_s"] / pair["stalled"]["whole_s"] for pair in runs)
            out[f"{form}_gain"] = {"low": gains[0], "median": statistics.median(gains), "high": gains[-1]}
    return out | {"gpu": runs[0]["stalled"]["gpu"], "turns": runs[0]["stalled"]["turns"]}


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--set", required=True, choices=["one", "ranks"])
    arguments.add_argument("--out", required=True, type=Path)
    arguments.add_argument("--folder", type=Path, default=HERE, help="where planted.json and the programs are")
    arguments.add_argument("--seconds", type=float, default=540, help="no run starts that may not end before")
    arguments.add_argument("--pairs", type=int, default=2)
    arguments.add_argument("--only", nargs="*", default=[])
    arguments.add_argument("--scale", default="1", help="how many turns, as a share of the usual")
    arguments.add_argument("--world", type=int, default=2)
    arguments.add_argument("--limit", type=float, default=90, help="seconds that one run may take")
    options = arguments.parse_args()
    folder = options.folder.resolve()
    begin, log, port = time.time(), Path(f"{options.out}.log"), 29600
    os.environ["THIRD_SCALE"] = options.scale
    sys.path[:0] = [str(HERE.parent), str(HERE), str(folder / options.set)]
    import torch
    import torch.distributed.fsdp
    import torch.utils.data

    planted = json.loads((folder / "planted.json").read_text())[options.set]
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.only or planted:
        if name in results and "failed" not in results[name]:
            continue
        forms = {"stalled": False, "fixed": True, **{f"fixed_{part}": part for part in planted[name].get("alone", [])}}
        pairs, longest, start = [], 0.0, time.time()
        for _ in range(options.pairs):
            pair = {}
            for form, fixed in forms.items():
                if time.time() - begin + (longest or 20) > options.seconds:
                    break
                port, before = port + 1, time.time()
                world = options.world if options.set == "ranks" else 0
                pair[form] = once(folder / options.set / f"{name}.py", fixed, world, port, log, options.limit)
                longest = max(longest, time.time() - before)
                if "failed" in pair[form]:
                    break
            if pair and (len(pair) == len(forms) or any("failed" in run for run in pair.values())):
                pairs.append(pair)
            if len(pair) < len(forms):
                break
        if not pairs:
            print(f"{name}: no time left", flush=True)
            continue
        results[name] = {**planted[name], "torch": torch.__version__, "scale": float(options.scale), **summary(pairs)}
        part = Path(f"{options.out}.part")
        part.write_text(json.dumps(results, indent=1))
        shutil.move(part, options.out)
        told = results[name]
        if "failed" in told:
            print(f"{name:24s} FAILED {told['failed']}", flush=True)
            continue
        gains = "  ".join(f"{form} {told[f'{form}_gain']['median']:6.1%}" for form in forms if form != "stalled")
        turn = "" if told["stalled_turn_ms"] is None else f"turn {told['stalled_turn_ms']:8.2f} -> {told['fixed_turn_ms']:8.2f} ms"
        print(f"{name:24s} whole {told['stalled_whole_s']:6.2f} -> {told['fixed_whole_s']:6.2f} s  {turn}  {gains}  ({time.time() - start:.0f} s)", flush=True)
    if any("failed" in result for result in results.values()):
        print(log.read_text()[-6000:])
