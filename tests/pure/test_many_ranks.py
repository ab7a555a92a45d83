"""Very many ranks: who is late among them is told, and a few of them are kept whole."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from build import MB, Run
from handwritten import call, command, flat, frame, launched, mark
from jsonschema import Draft202012Validator
from test_ranks import SECOND, alone
from traces import NCCL, trace_of

from keepbusy.explain import explain
from keepbusy.report import as_json, run_report, terminal, verdict
from keepbusy.timeline import busy_file
from keepbusy.timeline.model import NONE, Timeline
from keepbusy.timeline.ranks import join_ranks
from keepbusy.timeline.run_facts import Cluster
from keepbusy.traces import WHOLE, read
from keepbusy.traces.many_ranks import KEPT

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "reference" / "explain.schema.json").read_text())
RANKS, OF_HOST, STEPS = 24, 4, 5
USUAL, WIRE = (2_000, 1_000), 300
"""Microseconds a step: of the host, of its kernel afterwards, and of the gradients' way once all have come."""
LATE_RANK, LATE_HOST = 5, range(12, 16)
LATE = {LATE_RANK: (5_000, 1_000)} | dict.fromkeys(LATE_HOST, (2_000, 2_500))
"""One rank's host takes 3 ms longer, one host's GPUs 1.5 ms."""


def write(folder: Path, late: Mapping[int, tuple[int, int]] = LATE, ranks: Iterable[int] = range(RANKS)) -> list[Path]:
    """A trace a rank, as torch names it. Hosts have clocks of their own; each step ends together, and is read."""
    slowest = max(sum(late.get(rank, USUAL)) for rank in range(RANKS))
    return [_trace(folder, rank, late.get(rank, USUAL), slowest + WIRE) for rank in ranks]


def _trace(folder: Path, rank: int, takes: tuple[int, int], met_after: int) -> Path:
    host, kernel = takes
    clock, rows = 500 * (rank // OF_HOST), list[Any]()
    for step in range(STEPS):
        begin, number = clock + step * (met_after + 100), 10 * step
        came, left = begin + host + 10 + kernel, begin + 10 + met_after
        rows += [
            mark(step, begin, met_after + 90),
            frame("train.py(9): batch", begin + 1, host - 2),
            launched(begin + host, begin + host + 10, kernel, number + 1),
            call("INVALID", begin + host + 6, 3, number + 2),
            command(came, left - came, number + 2, stream=20, name="ncclDevKernel_AllReduce", args=ALL),
            call("cudaDeviceSynchronize", begin + host + 20, left + 15 - begin - host - 20, number + 3),
        ]
    about = {"rank": rank, "world_size": RANKS, "backend": "nccl"}
    path = folder / f"node-{rank // OF_HOST}_{4000 + rank}.17900000{rank:02}.pt.trace.json"
    path.write_bytes(trace_of(*flat(rows), distributedInfo=about))
    return path


ALL = NCCL | dict.fromkeys(("In msg nelems", "Out msg nelems"), 1 << 20)
ALL |= {"Group size": RANKS, "Process Group Ranks": "[0, ...]"}


def cluster_of(timeline: Timeline) -> Cluster:
    assert timeline.facts.cluster is not None
    return timeline.facts.cluster


def named(timeline: Timeline) -> list[tuple[str, tuple[int, ...], bool, float, float]]:
    """Host, ranks, whether its GPU; how late, and the step without it, in milliseconds."""
    return [
        (one.host, one.ranks, one.computing, round(one.late / 1e6, 1), round(one.left / 1e6, 1))
        for one in cluster_of(timeline).stragglers
    ]


def test_a_late_rank_and_a_late_host_are_named_with_what_each_costs(tmp_path: Path) -> None:
    timeline = read(write(tmp_path))
    assert named(timeline) == [
        ("node-1", (LATE_RANK,), False, 3.0, 4.9),
        ("node-3", tuple(LATE_HOST), True, 1.5, 3.4),
    ]
    assert cluster_of(timeline).step == pytest.approx(6.4e6, rel=0.01)
    assert len(timeline.ranks) == KEPT
    assert LATE_RANK in timeline.ranks
    assert len(set(timeline.ranks) & set(LATE_HOST)) == 1


def test_each_rank_is_known_by_when_it_comes_and_how_long_it_waits(tmp_path: Path) -> None:
    ranks = cluster_of(read(write(tmp_path))).ranks
    assert [one.rank for one in ranks] == list(range(RANKS))
    assert {one.rank for one in ranks if one.last} == {LATE_RANK}
    assert (ranks[LATE_RANK].waits, ranks[LATE_RANK].behind) == (0, 3_000_000)
    assert (ranks[0].waits, ranks[0].behind) == (3_000_000, 0)
    assert (ranks[12].waits, ranks[12].behind, ranks[12].computing) == (1_500_000, 1_500_000, 2_500_000)


def test_half_of_them_missing_changes_a_note(tmp_path: Path) -> None:
    here = sorted({*range(0, RANKS, 2), LATE_RANK, *LATE_HOST, 1, 3, 7})
    all_of_them, half = read(write(tmp_path)), read(write(tmp_path, ranks=here))
    assert named(half) == named(all_of_them)
    assert [note for note in half.facts.notes if note not in all_of_them.facts.notes] == [
        f"Of the run's {RANKS} ranks {len(here)} are here: another one that is late shows in what these wait, "
        "not by name."
    ]


def test_a_damaged_file_is_a_note(tmp_path: Path) -> None:
    paths = write(tmp_path)
    paths[8].write_bytes(b"{}")
    timeline = read(paths)
    assert len(named(timeline)) == 2
    assert f"1 of the files could not be read and are left out; the first: {paths[8]} has no `traceEvents`" in " ".join(
        timeline.facts.notes
    )


def test_where_nobody_is_late_nobody_is_named(tmp_path: Path) -> None:
    diagnosis = explain(read(write(tmp_path, {})))
    assert diagnosis.cluster is not None
    assert diagnosis.cluster.stragglers == ()
    text = terminal.render_full(diagnosis)
    assert "No rank and no host takes much longer than the others of its kind." in text
    assert f"All {RANKS} ranks on 6 hosts take 3.1 ms per step by themselves" in text


def test_the_report_is_short_however_many_there_are(tmp_path: Path) -> None:
    diagnosis = explain(read(write(tmp_path)))
    text = terminal.render_full(diagnosis, 110)
    assert len(verdict.render(diagnosis).splitlines()) <= verdict.HEIGHT
    assert f"{RANKS} ranks" in text.splitlines()[0]
    assert "1  rank 5 on node-1: Python takes 3.0 ms longer per step than elsewhere   6.4 → 4.9 ms without" in text
    assert (
        "2  node-3, 4 ranks (12–15): the GPU computes 1.5 ms longer per step than elsewhere   4.9 → 3.4 ms without"
        in text
    )
    assert run_report.lateness(diagnosis.late[0], diagnosis.given).startswith(
        f"Rank 5 arrives 3.0 ms late, and {RANKS - 1} ranks wait for it: host work"
    )


def test_all_ranks_are_in_the_json_and_in_the_saved_run(tmp_path: Path) -> None:
    timeline = read(write(tmp_path))
    busy_file.save(timeline, tmp_path / "run.busy")
    said = json.loads(as_json.render(explain(busy_file.load(tmp_path / "run.busy"))))
    Draft202012Validator(SCHEMA).validate(said)
    assert len(said["cluster"]["ranks"]) == RANKS
    assert [one["ranks"] for one in said["cluster"]["stragglers"]] == [[LATE_RANK], list(LATE_HOST)]
    assert said["cluster"]["stragglers"][1]["cause"] == "computing"


def test_as_many_as_two_hosts_have_are_all_kept_whole(tmp_path: Path) -> None:
    timeline = read(write(tmp_path, ranks=range(WHOLE)))
    assert timeline.facts.cluster is None
    assert timeline.ranks == list(range(WHOLE))


def test_ranks_that_never_meet_share_the_clock_of_whom_both_meet() -> None:
    """0 meets 1, and 1 meets 2. By its own clock rank 2 is a second ahead of rank 1, which is ahead of rank 0."""
    run = Run.of(ranks=3)
    for _ in range(5):
        for rank in run.ranks:
            run.on(rank).step().work(20).launch(kernel=300)
        run.collective(wire=50, size=MB, group=1, ranks=[0, 1]).collective(wire=50, size=MB, group=2, ranks=[1, 2])
    timeline = run.timeline()
    together = join_ranks([alone(timeline, rank, clock=rank * SECOND) for rank in range(3)])
    assert np.ptp(together.spans.start[together.spans.meeting != NONE]) < SECOND
