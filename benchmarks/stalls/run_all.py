"""Measures the cases on this machine's GPUs, each in a process of its own, one at a time.

    python run_all.py --measure MEASURE.py --out DIR [--plain CASE...] [--no-stack CASE...] [--world N] [--deadline S]

PyTorch is imported once and each process is forked from here before CUDA starts, which saves the import for each.
Results land in DIR as part<N>.tar (with_stack/, without_stack/, fixed/), growing case by case; DIR/log holds all output.
"""

import argparse
import os
import runpy
import shutil
import signal
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed.fsdp
import torch.profiler
import torch.utils.data
from torch.nn.parallel import DistributedDataParallel  # noqa: F401

HERE = Path(__file__).resolve().parent
PART = 15 << 20


def fork(script, arguments, log, environment):
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1), os.dup2(out, 2)
    os.environ.update(environment)
    sys.argv = [str(script), *arguments]
    code = 1
    try:
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def together(script, arguments, log, world, port, limit):
    """Runs `world` processes; kills what is left after `limit` seconds. Returns how it went."""
    environments = (
        [{}]
        if world == 1
        else [
            dict(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(world),
                LOCAL_WORLD_SIZE=str(world),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                OMP_NUM_THREADS="1",
            )
            for rank in range(world)
        ]
    )
    alive, verdict, start = (
        {fork(script, arguments, log, environment) for environment in environments},
        "ok",
        time.time(),
    )
    started = set(alive)
    while alive and verdict == "ok":
        for pid in list(alive):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                alive.discard(pid)
                if status:
                    verdict = f"FAILED {os.waitstatus_to_exitcode(status)}"
        if time.time() - start > limit:
            verdict = f"STOPPED after {limit} s"
        time.sleep(0.05)
    for pid in started:
        try:
            os.killpg(pid, signal.SIGKILL)  # also loader workers that outlived their parent
        except ProcessLookupError:
            pass
    for pid in alive:
        os.waitpid(pid, 0)
    return verdict


class Parts:
    def __init__(self, folder):
        self.folder, self.number, self.bytes = folder, 1, 0

    def add(self, path, name):
        if self.bytes and self.bytes + path.stat().st_size > PART:
            self.number, self.bytes = self.number + 1, 0
        with tarfile.open(self.folder / f"part{self.number}.tar", "a") as tar:
            tar.add(path, name)
        self.bytes += path.stat().st_size + 1536


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--measure", required=True)
    arguments.add_argument("--out", required=True, type=Path)
    arguments.add_argument("--plain", nargs="*", default=[], help="cases to time and to trace with stacks")
    arguments.add_argument("--no-stack", nargs="*", default=[], help="cases to time and to trace without stacks")
    arguments.add_argument("--folder", default="cases", help="where the cases lie, beside this file")
    arguments.add_argument("--stalled-only", action="store_true", help="no trace of the fixed scripts")
    arguments.add_argument("--extra", help="a script to run once at the end: SCRIPT writes to the file it is given")
    arguments.add_argument("--world", type=int, default=1)
    arguments.add_argument("--limit", type=int, default=45, help="seconds a case may take")
    arguments.add_argument("--deadline", type=int, default=540, help="seconds after which no case starts")
    options = arguments.parse_args()
    begin, port, parts, log = time.time(), 29500, Parts(options.out), options.out / "log"
    sys.path.insert(0, str(HERE))
    work = Path(tempfile.gettempdir(), "stalls")
    print(f"imported torch {torch.__version__}", flush=True)
    if options.extra:
        target = work / "extra.json"
        work.mkdir(parents=True, exist_ok=True)
        print(
            "extra",
            together(HERE / options.extra, [str(target)], log, 1, port, 75),
            f"{time.time() - begin:.0f} s",
            flush=True,
        )
        if target.exists():
            parts.add(target, f"{Path(options.extra).stem}.json")
    for case, stack in [(case, True) for case in options.plain] + [(case, False) for case in options.no_stack]:
        if time.time() - begin > options.deadline:
            print(f"{case}: no time left", flush=True)
            continue
        shutil.rmtree(work, ignore_errors=True)
        kind, start, port = "with_stack" if stack else "without_stack", time.time(), port + 1
        trace = "both" if stack and options.world == 1 and not options.stalled_only else "stalled"
        flags = [
            str(HERE / options.folder / f"{case}.py"),
            "--out",
            str(work),
            "--repeat",
            "3",
            "--trace",
            trace,
            *([] if stack else ["--no-stack"]),
        ]
        verdict = together(Path(options.measure).resolve(), flags, log, options.world, port, options.limit)
        sizes = []
        for path in sorted(work.glob("*.json*")):
            if path.name.endswith((".json.gz", f"{case}.json")):
                parts.add(path, f"{'fixed' if '.fixed.' in path.name else kind}/{path.name}")
                sizes.append(f"{path.stat().st_size / 1e6:.1f}")
        print(f"{case:26s} {kind:14s} {verdict:12s} {time.time() - start:5.1f} s  MB {' '.join(sizes)}", flush=True)
    print(
        Path(log).read_text()[-9000:] if log.exists() else "no log", f"\n{time.time() - begin:.0f} s in all", flush=True
    )
