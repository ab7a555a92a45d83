"""How fast, and in how much memory: reading a trace, explaining it, replaying it.

    python benchmarks/explain_speed.py                                # one million events
    python benchmarks/explain_speed.py --events 0.1 1 4               # in millions: does it grow in proportion?
    python benchmarks/explain_speed.py --hta-python hta/bin/python    # beside HolisticTraceAnalysis; see README.md

The trace is a real one, three steps on an H200, repeated with its times and numbers moved on. Each
measurement is a process of its own; the two readers take turns, and the figures are medians.
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

SOURCE = Path(__file__).parents[1] / "tests" / "snapshots" / "traces" / "tokens.trace.json.gz"
PLAIN_STEP = 53.0
REPLAYED = 100_000
_BETWEEN = b"\n  },\n  {"
_MOVED = re.compile(
    rb'(?:(?<="ts": )|(?<="correlation": )|(?<="External id": )|(?<="Sequence number": )|(?<="[sf]", "id": ))'
    rb"(\d+(?:\.\d+)?)"
)
_REPEATED = re.compile(rb'"ph": "[Xsf]"')
_READ = """
import sys, time
{importing}
begin = time.perf_counter()
{reading}
print(time.perf_counter() - begin)
"""
OURS = _READ.format(importing="from keepbusy.traces.trace_file import read_trace", reading="read_trace(sys.argv[1])")
THEIRS = _READ.format(
    importing="from hta.common.trace import parse_trace_file", reading="parse_trace_file(sys.argv[1])"
)
REPLAY = """
import sys, time
import numpy as np
from keepbusy.traces import read
from keepbusy.timeline.replay import replay
timeline = read([sys.argv[1]])
count = int(sys.argv[2])
if len(timeline) < count:
    sys.exit(f"only {len(timeline)} spans")
timeline = timeline.keep(np.arange(len(timeline)) < count)
begin = time.perf_counter()
replay(timeline)
print(time.perf_counter() - begin)
"""


@dataclass(frozen=True)
class Measured:
    seconds: float
    megabytes: float


def main() -> None:
    options = parse()
    if options.build:
        print(*build(Path(options.build[0]), int(options.build[1])))
        return
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, medians of {options.repeats}")
    with tempfile.TemporaryDirectory(prefix="keepbusy") as folder:
        for millions in options.events:
            path = Path(folder) / "repeated.trace.json.gz"
            size, events = built_elsewhere(path, int(millions * 1e6))
            print(f"\n{events:,} events, {size / 1e6:.0f} MB of JSON, {path.stat().st_size / 1e6:.0f} MB compressed")
            for line in measure(path, events, options):
                print(line, flush=True)


def built_elsewhere(path: Path, least: int) -> tuple[int, int]:
    """In a process of its own: Linux counts the memory of a parent as its child's peak."""
    command = [sys.executable, __file__, "--build", str(path), str(least)]
    size, events = subprocess.run(command, check=True, capture_output=True).stdout.split()
    return int(size), int(events)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=float, nargs="+", default=[1.0], metavar="MILLIONS")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hta-python", metavar="PATH", help="a Python that has HolisticTraceAnalysis==0.5.0")
    parser.add_argument("--build", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(path: Path, events: int, options: argparse.Namespace) -> Iterator[str]:
    yield f"{'':28}{'seconds':>9}{'events/s':>12}{'peak MB':>9}"
    commands = {"keepbusy reads it": [sys.executable, "-c", OURS, str(path)]}
    if options.hta_python:
        commands["HTA 0.5.0 reads it"] = [options.hta_python, "-c", THEIRS, str(path)]
    reads = in_turns(commands, options.repeats)
    for name, measured in reads.items():
        yield row(name, measured, events)
    if options.hta_python:
        ours, theirs = reads.values()
        yield f"{'ratio':28}{theirs.seconds / ours.seconds:>8.1f}x{'':12}{theirs.megabytes / ours.megabytes:>8.1f}x"
    explain = [sys.executable, "-m", "keepbusy", "explain", str(path), "--plain-step", str(PLAIN_STEP), "--json"]
    yield row("keepbusy explain, all of it", run(explain, whole=True), events)
    if events >= 5 * REPLAYED:
        replays = [run([sys.executable, "-c", REPLAY, str(path), str(REPLAYED)]) for _ in range(options.repeats)]
        yield f"{'replay of 100,000 spans':28}{median(one.seconds for one in replays):>9.2f}"


def row(name: str, measured: Measured, events: int) -> str:
    return f"{name:28}{measured.seconds:>9.2f}{events / measured.seconds:>12,.0f}{measured.megabytes:>9.0f}"


def in_turns(commands: dict[str, list[str]], repeats: int) -> dict[str, Measured]:
    """So that whatever else the machine does meets all of them."""
    done: dict[str, list[Measured]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            done[name].append(run(command))
    return {
        name: Measured(median(one.seconds for one in each), median(one.megabytes for one in each))
        for name, each in done.items()
    }


def run(command: list[str], whole: bool = False) -> Measured:
    """What the process prints as its time, or else how long the whole of it took; and its peak memory."""
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.PIPE, env=environment())
        errors = process.stderr.read().decode() if process.stderr else ""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - begin
        if process.returncode:
            sys.exit(f"{' '.join(command[:4])} … ended with {process.returncode}:\n{errors}")
        if not whole:
            said.seek(0)
            seconds = float(said.read().split()[-1])
    return Measured(seconds, usage.ru_maxrss / (1 << 10 if sys.platform == "linux" else 1 << 20))


def environment() -> dict[str, str]:
    source = str(Path(__file__).parents[1] / "src")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}


def build(path: Path, least: int) -> tuple[int, int]:
    """Write the source repeated to at least so many events; its size as JSON, and how many there are."""
    text = gzip.decompress(SOURCE.read_bytes())
    begin = text.index(b'"traceEvents": [\n  {') + len(b'"traceEvents": [\n  ')
    end = text.rindex(b"\n  ],")
    rows = text[begin + 1 : end - len(b"\n  }")].split(_BETWEEN)
    moving = [row for row in rows if _REPEATED.search(row)]
    still = [row for row in rows if not _REPEATED.search(row)]
    copies = max(1, -(-(least - len(still)) // len(moving)))
    size = 0
    with gzip.open(path, "wb", compresslevel=4) as file:
        for part in (text[:begin], *repeated(moving, copies), b",\n  {" + _BETWEEN.join(still) + b"\n  }", text[end:]):
            file.write(part)
            size += len(part)
    return size, copies * len(moving) + len(still)


def repeated(rows: list[bytes], copies: int) -> Iterator[bytes]:
    """The rows again and again: later by their whole extent each time, with correlations and flows of their own."""
    pieces = _MOVED.split(b"{" + _BETWEEN.join(rows) + b"\n  }")
    between, numbers = pieces[::2], pieces[1::2]
    times = [as_nanoseconds(number) for number in numbers if b"." in number]
    period = max(times) - min(times) + 2_000_000
    highest = max(int(number) for number in numbers if b"." not in number) + 1
    for copy in range(copies):
        moved = [move(number, copy * period, copy * highest) for number in numbers]
        yield (b",\n  " if copy else b"") + b"".join(
            part for pair in zip(between, [*moved, b""], strict=True) for part in pair
        )


def as_nanoseconds(number: bytes) -> int:
    whole, _, fraction = number.partition(b".")
    return int(whole) * 1000 + int(fraction.ljust(3, b"0"))


def move(number: bytes, later: int, higher: int) -> bytes:
    if b"." not in number:
        return b"%d" % (int(number) + higher)
    whole, fraction = divmod(as_nanoseconds(number) + later, 1000)
    return b"%d.%03d" % (whole, fraction)


if __name__ == "__main__":
    main()
