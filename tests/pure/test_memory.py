"""Device memory over time: read from a trace, kept in a file, brought together, told by the lines that held most."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from build import US, Run
from handwritten import MAIN, frame, launched, mark, showing
from traces import event

from keepbusy.explain import explain
from keepbusy.report.exports import perfetto
from keepbusy.report.page.contents import memory_peaks, memory_table
from keepbusy.timeline.busy_file import from_bytes, load, to_bytes
from keepbusy.timeline.model import MemoryUse, Timeline
from keepbusy.timeline.ranks import merge

MB = 1 << 20


def moment(ts: float, block: int, size: int, allocated: int, kind: int = 1, tid: int = MAIN) -> dict[str, Any]:
    """As `torch.profiler.profile(profile_memory=True)` writes it."""
    args = {"Device Type": kind, "Device Id": 0, "Addr": block, "Bytes": size}
    totals = {"Total Allocated": allocated, "Total Reserved": 2 * allocated}
    return event(ph="i", cat="cpu_instant_event", name="[memory]", s="t", pid=MAIN, tid=tid, ts=ts, args=args | totals)


TURNS = [
    row
    for turn in range(5)
    for row in (
        mark(turn, 100 * turn, 100),
        frame("train.py(7): forward", 100 * turn + 1, 40),
        launched(100 * turn + 10, 100 * turn + 20, 5, 2 * turn + 1),
        moment(100 * turn + 8, 1, 64, 96),
        frame("train.py(9): backward", 100 * turn + 50, 40),
        moment(100 * turn + 55, 2, 32, 128),
        launched(100 * turn + 60, 100 * turn + 70, 5, 2 * turn + 2),
        moment(100 * turn + 80, 1, -64, 64),
        moment(100 * turn + 81, 2, -32, 32),
        moment(100 * turn + 82, 3, 8, 8, kind=0),  # the host's own
    )
]


@pytest.fixture
def run(tmp_path: Path) -> Timeline:
    return showing(tmp_path)(*TURNS)


def test_a_trace_tells_what_was_taken_and_given_back(run: Timeline) -> None:
    assert run.memory.size.tolist() == [64, 32, -64, -32] * 5
    assert run.memory.time[:3].tolist() == [8 * US, 55 * US, 80 * US]
    assert run.memory.reserved[:2].tolist() == [192, 256]
    assert {run.lanes[lane].device for lane in run.memory.lane} == {None}


def test_a_file_keeps_it_and_older_files_have_none(run: Timeline) -> None:
    kept = from_bytes(to_bytes(run)).memory
    for name, column in run.memory.columns().items():
        np.testing.assert_array_equal(column, getattr(kept, name))
    assert len(from_bytes(to_bytes(run.change(memory=MemoryUse.of(0)))).memory) == 0


def test_most_is_held_in_the_backward_pass_by_two_lines(run: Timeline) -> None:
    told = explain(run, turns=True)
    assert told.turns is not None
    (peak,) = memory_peaks(told.turns)
    places = [(told.turns.places[place].line, size) for place, size in peak["lines"]]
    assert (peak["allocated"], peak["reserved"], peak["rest"]) == (128, 256, 32)
    assert places == [(7, 64), (9, 32)]
    table = memory_table(told.turns, 0)
    assert len(set(map(len, table.values()))) == 1
    assert set(table["allocated"].tolist()) == {96, 128, 64, 32}


def test_ranks_keep_their_own_by_one_clock() -> None:
    """Rank 1 has a clock that is an hour ahead; its memory moves with its spans."""
    built = Run.of(ranks=2)
    for _ in range(4):
        built.step().launch(kernel=100).collective(10).sync()
    both = built.timeline()
    hour = 3_600 * 10**9
    alone = []
    for rank in (0, 1):
        lanes = [index for index, lane in enumerate(both.lanes) if lane.rank == rank]
        new = np.full(len(both.lanes), -1)
        new[lanes] = range(len(lanes))
        seen = both.change(marks=both.marks_of(rank)).keep(both.rank_of_rows == rank)
        spans = seen.spans.change(
            lane=new[seen.spans.lane],
            awaits=np.where(seen.spans.awaits >= 0, new[seen.spans.awaits], seen.spans.awaits),
            start=seen.spans.start + rank * hour,
            end=seen.spans.end + rank * hour,
            meeting=np.full(len(seen), -1),
        )
        held = MemoryUse.of(1, time=[5 * US + rank * hour], size=[MB + rank], allocated=[MB])
        own = seen.change(lanes=tuple(both.lanes[lane] for lane in lanes), spans=spans, memory=held)
        alone.append(own.change_facts(groups={0: 2}))
    joined = merge(alone)
    assert joined.memory.size.tolist() == [MB, MB + 1]
    assert [joined.lanes[lane].rank for lane in joined.memory.lane] == [0, 1]
    assert abs(int(np.diff(joined.memory.time)[0])) < US


def test_perfetto_gets_it_as_a_counter(run: Timeline) -> None:
    events = json.loads("".join(perfetto(run, explain(run, turns=True))))["traceEvents"]
    counted = [one["args"]["allocated"] for one in events if one["ph"] == "C"]
    assert counted[:4] == [96, 128, 64, 32]


def test_a_real_gpu_tells_it_while_it_is_recorded() -> None:
    """By `keepbusy run --memory` on an H200: what the forward pass left is held by its line at the peak."""
    told = explain(load(Path(__file__).parents[1] / "gpu" / "truth" / "prefetched.busy"), turns=True)
    assert told.turns is not None
    (peak,) = memory_peaks(told.turns)
    assert [(told.turns.places[place].line, size) for place, size in peak["lines"]] == [(22, 409231872)]
    assert (peak["allocated"], peak["reserved"]) == (1318956544, 1830813696)
