"""A thousand ranks explained: how long it takes, in how much memory, and whether the planted stragglers are named.

    python benchmarks/many_ranks.py                       # 1,000 ranks, then half of them: asked under 5 min and 4 GB
    python benchmarks/many_ranks.py --ranks 100           # fewer
    python benchmarks/many_ranks.py --make traces/        # only write the traces

The traces are those that four ranks really wrote on four H200: 48,000 events each, with Python stacks, too large for
the repository, so they lie beside it, or where STALLBENCH says. Rank 1 of them came 20 ms late to each
step. A rank of the thousand is a copy of one of them under torch's own file name, with its host's clock moved on; one
is the late one, and the eight of one host are that rank with a third of its lateness taken away, as a replay has it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from isal import igzip

from keepbusy.timeline.model import Kind, Timeline
from keepbusy.timeline.ranks import merge
from keepbusy.timeline.replay import replay
from keepbusy.traces.rank_timeline import timeline_of
from keepbusy.traces.rank_trace import RankTrace
from keepbusy.traces.trace_file import Trace, read_trace

STALLBENCH = Path(os.environ.get("STALLBENCH", Path(__file__).resolve().parents[2] / "shared" / "stallbench"))
RECORDED, LATE = "with_stack/late_rank.stalled.rank{}.trace.json.gz", 1
USUAL = 2, 3
"""Rank 0 is slower than these by a fifth without a reason of its own, so a host that is late by less would not be."""
OF_HOST, CLOCKS = 8, 8
LATE_RANK, LATE_HOST, HOST_IS_LATE = 417, 31, 14_000_000
"""Which rank and which host are late (of fewer ranks: the same places), and the host's by how many nanoseconds."""
_TIME = re.compile(rb'"pid": ([^,]+), "tid": ([^,]+),\s+"ts": ([\d.]+)(?:, "dur": ([\d.]+))?')
_MOMENT = re.compile(rb'"ts": ([\d.]+)')


def text_of(path: Path) -> bytes:
    with igzip.open(path, "rb") as file:
        return bytes(file.read())


def less_late(paths: Sequence[Path]) -> bytes:
    """What the late rank would have written, had it been late by less."""
    files = [read_trace(path) for path in (*paths, paths[LATE])]
    merged = merge([timeline_of(file, rank) for rank, file in enumerate(files)])
    spans, rank = merged.spans, merged.rank_of_rows
    rows = np.flatnonzero((rank == len(paths)) & (spans.kind == Kind.WORK) & (spans.work > 15_000_000))
    work = spans.work.copy()
    work[rows] = HOST_IS_LATE
    return moved(text_of(paths[LATE]), files[LATE], merged, replay(merged.change_spans(work=work)), len(paths))


def moved(text: bytes, file: Trace, before: Timeline, after: Timeline, rank: int) -> bytes:
    """Every time of the trace, moved as the spans of its lane were."""
    trace, first = RankTrace(file, rank), min(index for index, lane in enumerate(before.lanes) if lane.rank == rank)
    lanes = dict(trace.lane_of_thread)
    lanes |= dict(zip(trace.events.thread[trace.commands].tolist(), trace.lane_of_command.tolist(), strict=True))
    clocks = {}
    for thread, lane in lanes.items():
        rows = before.rows_of(first + lane)
        if len(rows):
            was, now = (
                np.stack([one.spans.start[rows], one.spans.end[rows]], axis=1).ravel() for one in (before, after)
            )
            known = file.threads[thread]
            clocks[known.process.encode(), known.number.encode()] = (
                np.maximum.accumulate(was), np.maximum.accumulate(now),
            )  # fmt: skip

    def move(found: re.Match[bytes]) -> bytes:
        clock = clocks.get((found[1].strip(b'"'), found[2].strip(b'"')))
        if clock is None:
            return found[0]
        begin = float(found[3]) * 1e3
        ends = [begin] if found[4] is None else [begin, begin + float(found[4]) * 1e3]
        new = [float(np.interp(one, *clock)) for one in ends]
        told = found[0].replace(found[3], b"%.3f" % (new[0] / 1e3), 1)
        return told if found[4] is None else told.replace(b": " + found[4], b": %.3f" % ((new[1] - new[0]) / 1e3), 1)

    return _TIME.sub(move, text)


def late_of(ranks: int) -> tuple[int, int]:
    """Of so many ranks: which rank is late, and which host."""
    return LATE_RANK % ranks, LATE_HOST % max(1, ranks // OF_HOST)


def write(folder: Path, ranks: int, truth: Path = STALLBENCH / "truth", has_late: bool = True) -> None:
    paths = [truth / RECORDED.format(rank) for rank in range(4)]
    texts = {"late": text_of(paths[LATE]), "host": less_late(paths)}
    usual = [text_of(paths[rank]) for rank in USUAL]
    texts |= {f"usual{index}": text for index, text in enumerate(usual)}
    bodies: dict[tuple[str, int], tuple[bytes, bytes]] = {}
    listed = b"[%s, ...]" % b", ".join(b"%d" % one for one in range(30)) if ranks > 30 else b"%a" % [*range(ranks)]
    late_rank, late_host = late_of(ranks) if has_late else (-1, -1)
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        host = rank // OF_HOST
        kind = "late" if rank == late_rank else "host" if host == late_host else f"usual{rank % len(usual)}"
        clock = host % CLOCKS
        if (kind, clock) not in bodies:
            text = texts[kind].replace(b'"Group size": 4', b'"Group size": %d' % ranks)
            text = text.replace(b'"Process Group Ranks": "[0, 1, 2, 3]"', b'"Process Group Ranks": "%s"' % listed)
            ahead = clock * 3_217.125  # microseconds
            text = _MOMENT.sub(lambda found, ahead=ahead: b'"ts": %.3f' % (float(found[1]) + ahead), text)
            head, _, body = text.partition(b'"traceEvents"')
            bodies[kind, clock] = head, igzip.compress(b'"traceEvents"' + body, 1)
        head, body = bodies[kind, clock]
        head = re.sub(rb'"rank": \d+, "world_size": 4', b'"rank": %d, "world_size": %d' % (rank, ranks), head)
        everyone = b'"pg_size": %d, "ranks": %a' % (ranks, [*range(ranks)])
        head = head.replace(b'"pg_size": 4, "ranks": [0, 1, 2, 3]', everyone)
        name = f"node-{host:03d}_{4000 + rank}.{1790857026000000000 + rank * 1001}.pt.trace.json.gz"
        (folder / name).write_bytes(igzip.compress(head, 1) + body)


def held(process: int) -> int:
    """Bytes of memory that it and its children hold; pages that they share count for each."""
    todo, total = [process], 0
    while todo:
        one = todo.pop()
        try:
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * 4096
            for thread in Path(f"/proc/{one}/task").iterdir():
                todo += map(int, (thread / "children").read_text().split())
        except (OSError, IndexError):
            continue
    return total


def watched(*command: str) -> tuple[str, str]:
    """What `keepbusy` prints, and what it took, as a sentence."""
    begin, before, most = time.perf_counter(), os.times(), 0
    with tempfile.TemporaryFile() as out:
        with subprocess.Popen([sys.executable, "-m", "keepbusy", *command], stdout=out) as process:
            while process.poll() is None:
                most = max(most, held(process.pid))
                time.sleep(0.1)
        out.seek(0)
        said = out.read().decode()
    if process.returncode:
        sys.exit(f"keepbusy {command[0]} ended with exit code {process.returncode}")
    now = os.times()
    own = now.children_user + now.children_system - before.children_user - before.children_system
    return said, f"{time.perf_counter() - begin:.0f} s ({own:.0f} s of the processors), at most {most / 1e9:.2f} GB"


def told(named: str, files: Sequence[str]) -> Iterator[str]:
    said, took = watched("explain", "--json", *files)
    found = json.loads(said)
    yield f"{named}: {took}; asked 300 s and 4 GB\n"
    for one in found["cluster"]["stragglers"]:
        yield f"  {one['host']}, ranks {one['ranks']}: {one['late']} ms late, {one['step_without']} ms without\n"
    yield from (f"  {note}\n" for note in found["notes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="only write the traces there")
    options = parser.parse_args()
    if options.make:
        write(options.make, options.ranks)
        return
    with tempfile.TemporaryDirectory(prefix="keepbusy-ranks-") as name:
        begin = time.perf_counter()
        write(Path(name), options.ranks)
        files = sorted(map(str, Path(name).iterdir()))
        size = sum(Path(one).stat().st_size for one in files)
        print(f"{len(files)} traces, {size / 1e9:.2f} GB, written in {time.perf_counter() - begin:.0f} s", flush=True)
        for line in told("all of them", [name]):
            print(line, end="", flush=True)
        kept = np.random.default_rng(0).permutation(len(files))[: len(files) // 2].tolist()
        late, _ = late_of(options.ranks)
        for line in told("half of them", [files[one] for one in sorted({*kept, late})]):
            print(line, end="", flush=True)


if __name__ == "__main__":
    main()
