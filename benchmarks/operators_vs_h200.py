"""Claim: operators at plain shapes cost on the virtual H200, and its host, what they cost on a real one.

    python benchmarks/operators_vs_h200.py [part of a label]

The calls of `gpu/operator_costs.py` run on the virtual GPU, in the host that they were measured in. Printed are
those whose label holds the word given, and of all how far off they are.
"""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

import numpy as np

from keepbusy.timeline.busy_file import load
from keepbusy.timeline.model import Timeline

HERE = Path(__file__).parent
TRUTH = HERE.parent / "tests" / "gpu" / "truth" / "operator_costs.json.gz"
ROW = 40
"""Calls in a row, as it takes them to time the host."""
COPY_HOME = "Memcpy DtoH"
"""Reading a count is no kernel of the operator's."""


def main(word: str = "") -> None:
    truth = json.loads(gzip.decompress(TRUTH.read_bytes()))
    timeline = simulated()
    both = [[truth[name][label] for name in ("host", "again")] for label in truth["host"]]
    print(f"host times, the two measurements against each other: {summary([a / b for a, b in both])}")
    host = {label: sum(pair) / 2 for label, pair in zip(truth["host"], both, strict=True)}
    compare("host times", {label: spent / ROW for label, spent in passed(timeline)}, host, word)
    kernels = {
        label: sum(nanoseconds for name, nanoseconds in run if not name.startswith(COPY_HOME))
        for label, run in truth["kernels"].items()
    }
    compare("kernels", dict(busy(timeline)), kernels, word)


def simulated() -> Timeline:
    """All calls on the virtual GPU."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "calls.busy"
        options = ["--on", str(HERE / "h200_quicker_host.toml"), "--clock", "modelled", "--values", "none"]
        command = [sys.executable, "-m", "keepbusy", "run", *options, "--save", str(saved)]
        subprocess.run([*command, str(HERE / "gpu" / "operator_costs.py")], capture_output=True, check=False)
        return load(saved)


def passed(timeline: Timeline) -> Iterator[tuple[str, float]]:
    """Of each row of calls how long the host was at it: the median of its turns."""
    turns: dict[str, list[int]] = {}
    for label, begin, end in announced(timeline, "host: "):
        turns.setdefault(label, []).append(end - begin)
    yield from ((label, median(each)) for label, each in turns.items())


def busy(timeline: Timeline) -> Iterator[tuple[str, float]]:
    """Of each call its kernels' time, in its last turn."""
    spans, device = timeline.spans, np.flatnonzero(timeline.on_device)
    device = device[np.argsort(spans.start[device], kind="stable")]
    before = np.concatenate([[0], np.cumsum(spans.end[device] - spans.start[device])])
    for label, begin, end in announced(timeline, "kernels: "):
        first, last = np.searchsorted(spans.start[device], [begin, end])
        yield label, float(before[last] - before[first])


def announced(timeline: Timeline, kind: str) -> Iterator[tuple[str, int, int]]:
    frames = timeline.frames
    for name, begin, end in zip(frames.name.tolist(), frames.start.tolist(), frames.end.tolist(), strict=True):
        if timeline.names[name].startswith(kind):
            yield timeline.names[name].removeprefix(kind), begin, end


def compare(title: str, ours: Mapping[str, float], measured: Mapping[str, float], word: str) -> None:
    rows = {label: (ours[label], measured[label]) for label in measured if ours.get(label) and measured[label]}
    for label, (mine, theirs) in rows.items():
        if word and word in label:
            print(f"{label:48s} virtual {mine / 1e3:9.1f} us   measured {theirs / 1e3:9.1f} us   x {mine / theirs:.2f}")
    print(f"{title}: {summary([mine / theirs for mine, theirs in rows.values()])}")


def summary(ratios: list[float]) -> str:
    off = [abs(math.log(one)) for one in ratios]
    shares = ", ".join(f"{np.mean(np.array(off) < math.log(1 + one)):.0%} within {one:.0%}" for one in (0.2, 0.5))
    return f"{len(off)}, median {math.expm1(median(off)):.0%} off, {shares}"


if __name__ == "__main__":
    main(*sys.argv[1:2])
