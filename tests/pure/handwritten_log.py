"""Logs of driver calls written by hand, and two from an H100."""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from keepbusy.log.kernel_times import KernelTimes, device_events, learn
from keepbusy.log.log_file import ROW, DriverCall, DriverLog, StackFrame, read_log
from keepbusy.log.profiler_window import CallKey, call_keys
from keepbusy.log.program_log import SAMPLES
from keepbusy.log.rebuild import RebuiltRun, rebuild
from keepbusy.program.lines import OURS

RECORDED = Path(__file__).with_name("driver_logs")
US = 1_000
LAUNCH, GAP, BACK = 5 * US, 1 * US, 3 * US


@dataclass
class HandwrittenLog:
    """Calls one after the other; times in microseconds."""

    rows: list[tuple[Any, ...]] = field(default_factory=list)
    calls: dict[Any, int] = field(default_factory=dict)
    stacks: dict[int, tuple[StackFrame, ...]] = field(default_factory=dict)
    now: float = 0.0

    def call(
        self,
        kind: str,
        grid: int = 0,
        *,
        took: float = 1,
        stream: int = 0,
        value: int = 0,
        flags: int = 0,
        stack: int = 0,
        thread: int = 0,
    ) -> None:
        number = self.calls.setdefault((kind, grid), len(self.calls) + 1)
        begin = round(self.now * US)
        self.rows.append((begin + 1, value, round(took * US), number, stack, stream, thread, flags))
        self.now += took

    def log(self) -> DriverLog:
        rows = np.array(self.rows, ROW)
        calls = {
            number: DriverCall(kind, 7, grid=(grid, 1, 1), block=(32, 1, 1)) if kind == "launch" else DriverCall(kind)
            for (kind, grid), number in self.calls.items()
        }
        log = DriverLog(rows, rows["begin"].astype(np.int64) - 1, rows["took"].astype(np.int64), calls)
        log.stacks |= self.stacks
        return log


def times(log: DriverLog, small: float, large: float = 0.0) -> KernelTimes:
    """What a window would have taught."""
    known = {1: small, 64: large}
    durations = {
        (number, 0, 0): known[call.grid[0]] * US for number, call in log.calls.items() if call.kind == "launch"
    }
    return KernelTimes(durations, launch=LAUNCH, gap=GAP, gap_in_graph=0.0, back=BACK)


def two_streams_and_an_event() -> HandwrittenLog:
    """The second stream waits for a kernel of the first one, and so does the host."""
    written = HandwrittenLog()
    written.call("launch", 64)
    written.call("event_record", value=500)
    written.call("event_wait", value=500, stream=1)
    written.call("launch", 1, stream=1)
    written.call("event_sync", value=500, took=60)
    return written


def recorded(name: str, folder: Path) -> tuple[DriverLog, KernelTimes, RebuiltRun, list[int]]:
    """Recorded by `benchmarks/driver_log.py complete`; of the trace what is read of it, and of files their names. With
    what its window taught, and when its iterations began."""
    with tarfile.open(RECORDED / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    log, said = read_log(folder), json.loads((folder / "window.json").read_text())
    events = device_events(json.loads((folder / "trace.json").read_text())["traceEvents"])
    taught = learn(log, *said["window"], events)
    return log, taught, rebuild(log, taught), said["steps"]


def unpacked(name: str, into: Path) -> Path:
    """What `keepbusy run` left with KEEPBUSY_KEEP on H200s, of a program of stallbench; of the windows what is read of
    them, and the places of PyTorch and of ours as they are here."""
    with tarfile.open(RECORDED / name) as archive:
        archive.extractall(into, filter="data")
    spec = find_spec("torch")
    torch = f"{Path(spec.origin).parent}/" if spec is not None and spec.origin else "torch/"
    for folder in into.iterdir():
        for file in ("names", "looks.json"):
            text = (folder / file).read_text()
            (folder / file).write_text(text.replace("{ours}", OURS).replace("{torch}", torch))
        looks = json.loads((folder / "looks.json").read_text())
        names = np.frombuffer(json.dumps(looks["names"]).encode(), np.uint8)
        np.savez(folder / SAMPLES, times=np.array(looks["times"]), chains=np.array(looks["chains"]), names=names)
    return into


def keys_of(log: DriverLog) -> list[CallKey]:
    return [CallKey(*key) for key in call_keys(log).tolist()]
