"""Profiler traces that strangers put into public repositories: what keepbusy makes of each, and what others do.

    git clone --mirror https://github.com/OWNER/NAME MIRRORS/OWNER+NAME         # each repository of the list
    python benchmarks/public_traces.py MIRRORS                                  # all of them
    python benchmarks/public_traces.py MIRRORS kineto --peers VENV/bin/python   # those named so, and what peers say
    python benchmarks/public_traces.py MIRRORS --peers VENV/bin/python --markdown stallbench/public-traces.md

The list is public_traces.txt: repository, commit, path, and the first half of the file's SHA-256, so that everybody
looks at the same bytes; none of the files is kept here. Each is explained by a command of its own. Busy, computing,
communication, copying and idle are shares of the time from the first command that the trace shows to the last one, as
our reader sees them; HTA (`pip install HolisticTraceAnalysis`) and TraceLens (from its repository) read the same file
in the interpreter that `--peers` names, HTA to the nanosecond and with its last step. Communication is what no
computing hides, copying what neither hides; HTA does not tell these two apart. Shares that differ from ours by more
than two points are bold.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".txt")
SHARES = ("busy", "computing", "communication", "copying", "idle")
POINTS = 2.0
"""Shares that differ by more are marked."""
PATIENCE = 600


@dataclass(frozen=True)
class PublicTrace:
    repository: str
    commit: str
    path: str
    sha256: str

    def content(self, mirrors: Path) -> bytes:
        owner_name = mirrors / self.repository.replace("/", "+")
        folder = owner_name / "repo" if (owner_name / "repo").is_dir() else owner_name
        command = ["git", "--git-dir", str(folder), "cat-file", "blob", f"{self.commit}:{self.path}"]
        content = subprocess.run(command, capture_output=True, check=True).stdout
        if not hashlib.sha256(content).hexdigest().startswith(self.sha256):
            sys.exit(f"{self.repository} {self.commit}:{self.path} is another file than the list's")
        return content


@dataclass
class Outcome:
    trace: PublicTrace
    code: int
    said: str
    shares: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """By who tells them: keepbusy, HTA, TraceLens."""

    def apart(self) -> list[str]:
        """Where a peer's share is another than ours."""
        ours = self.shares.get("keepbusy")
        return [
            f"{peer}: {name}"
            for peer, theirs in self.shares.items()
            for name, share in theirs.items()
            if ours and share is not None and (own := ours[name]) is not None and abs(share - own) > POINTS
        ]


def listed(names: Sequence[str]) -> list[PublicTrace]:
    rows = [line.split() for line in LIST.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    traces = [PublicTrace(*row) for row in rows if row]
    return [one for one in traces if not names or any(name in f"{one.repository} {one.path}" for name in names)]


def outcome_of(trace: PublicTrace, mirrors: Path, folder: Path, peers: str) -> Outcome:
    path = folder / Path(trace.path).name
    path.write_bytes(trace.content(mirrors))
    command = [sys.executable, "-m", "keepbusy", "explain", str(path), "--json", "--quiet"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    said = done.stderr.strip().removeprefix("keepbusy: ").replace(str(path), "It")
    outcome = Outcome(trace, done.returncode, said if done.returncode else summary(json.loads(done.stdout)))
    if (shares := our_shares(path)) is not None:
        outcome.shares["keepbusy"] = shares
    if shares is not None and peers:
        outcome.shares |= {peer: their_shares(peers, peer, path) for peer in PEERS}
    path.unlink()
    return outcome


def summary(told: dict[str, Any]) -> str:
    """The step, and the cause that most of its waiting is for."""
    waits = {
        name: time for name, time in told["ledger"].items() if name not in ("computing", "copying", "communication")
    }
    most = max(waits, key=lambda name: waits[name], default="")
    share = 100 * told["waiting"] / told["plain_step"]
    return f"{told['steps']} step{'s' * (told['steps'] != 1)} of {told['plain_step']:.3g} ms, {share:.0f}% waiting" + (
        f": {most}" if share >= 1 else ""
    )


# -- shares ------------------------------------------------------------------------------------------------------------


def union(start: Any, end: Any) -> tuple[Any, Any]:
    """Intervals that do not overlap, over the same time."""
    order = np.argsort(start, kind="stable")
    start, end = np.asarray(start)[order], np.maximum.accumulate(np.asarray(end)[order])
    first = np.flatnonzero(np.append(True, start[1:] > end[:-1])) if len(start) else []
    last = np.append(first[1:], len(start))[: len(first)] - 1
    return start[first], end[np.asarray(last, int)]


def covered(*parts: tuple[Any, Any]) -> float:
    start, end = union(*(np.concatenate(side) for side in zip(*parts, strict=True)))
    return float((end - start).sum())


def our_shares(path: Path) -> dict[str, float | None] | None:
    """None of what holds nothing of a GPU, or cannot be read."""
    from keepbusy.timeline.files import BadInput
    from keepbusy.timeline.model import Kind
    from keepbusy.traces import read

    try:
        timeline = read([path])
    except BadInput:
        return None
    spans, kind = timeline.spans, timeline.spans.kind
    computing, communication, commands = (
        (spans.start[rows], spans.end[rows])
        for rows in (kind == Kind.KERNEL, kind == Kind.COLLECTIVE, timeline.on_device)
    )
    extent = float(commands[1].max() - commands[0].min()) or 1.0
    busy, alone, uncopied = covered(commands), covered(computing), covered(computing, communication)
    times = (busy, alone, uncopied - alone, busy - uncopied, extent - busy)
    return {name: round(100 * time / extent, 2) for name, time in zip(SHARES, times, strict=True)}


# -- peers: this file run by another interpreter, in which they are installed ------------------------------------------


def their_shares(python: str, peer: str, path: Path) -> dict[str, float | None]:
    command = [python, __file__, "--peer", peer, str(path)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)
        shares: dict[str, float | None] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return dict.fromkeys(SHARES)
    return shares


def of_hta(path: str) -> dict[str, float | None]:
    """With all of the trace: as it comes it rounds times to microseconds and leaves out the last profiler step."""
    os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
    from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found]

    folder, name = os.path.split(path)
    trace = TraceAnalysis(trace_files={0: name}, trace_dir=folder, include_last_profiler_step=True)
    told = trace.get_temporal_breakdown(visualize=False).iloc[0]
    idle, computing = float(told["idle_time_pctg"]), float(told["compute_time_pctg"])
    return {"busy": 100 - idle, "computing": computing, "communication": None, "copying": None, "idle": idle}


def of_trace_lens(path: str) -> dict[str, float | None]:
    import gzip

    from TraceLens import GPUEventAnalyser  # type: ignore[import-not-found]

    content = Path(path).read_bytes()
    trace = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    events = [{**event, "UID": number} for number, event in enumerate(trace["traceEvents"])]
    told = GPUEventAnalyser(events).compute_metrics()
    names = ("busy_time", "computation_time", "exposed_comm_time", "exposed_memcpy_time", "idle_time")
    return {ours: 100 * told[theirs] / told["total_time"] for ours, theirs in zip(SHARES, names, strict=True)}


PEERS = {"HTA": of_hta, "TraceLens": of_trace_lens}


# -- the table ---------------------------------------------------------------------------------------------------------


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield "| trace | keepbusy says | who | " + " | ".join(SHARES) + " |"
    yield "|---|---|---|" + "---:|" * len(SHARES)
    for one in outcomes:
        first = f"{one.trace.repository} `{Path(one.trace.path).name}` | {one.said}"
        for who, shares in one.shares.items() or [("", dict.fromkeys(SHARES))]:
            figures = [cell(shares[name], f"{who}: {name}" in one.apart()) for name in SHARES]
            yield f"| {first} | {who} | {' | '.join(figures)} |"
            first = " |"


def cell(share: float | None, apart: bool) -> str:
    return "" if share is None else f"**{share:.1f}**" if apart else f"{share:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mirrors", type=Path, nargs="?", help="the folder of bare clones, OWNER+NAME each")
    parser.add_argument("names", nargs="*", help="only traces whose repository or path contains one of these")
    parser.add_argument("--peers", default="", help="a Python in which HTA and TraceLens are installed")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        print(json.dumps(PEERS[options.peer[0]](options.peer[1])))
        return 0
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for trace in listed(options.names):
            outcomes.append(one := outcome_of(trace, options.mirrors, Path(folder), options.peers))
            print(*list(table([one]))[2:], *[f"apart: {name}" for name in one.apart()], sep="\n", flush=True)
    if options.markdown:
        words = options.markdown.read_text(encoding="utf-8").partition("| trace |")[0]  # the page's own stay
        options.markdown.write_text(words + "\n".join(table(outcomes)) + "\n", encoding="utf-8")
    failed = sum(one.code not in (0, 2) for one in outcomes)
    apart = sum(bool(one.apart()) for one in outcomes)
    print(
        f"\n{len(outcomes)} traces, {sum(not one.code for one in outcomes)} explained, {failed} failures, {apart} apart"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.path.insert(1, str(ROOT / "src"))
    sys.exit(main())
