"""Which rank a file is, and whether several files are the ranks of one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from handwritten import call, command
from traces import trace_of

from keepbusy.explain import explain
from keepbusy.timeline.files import BadInput
from keepbusy.traces import read
from keepbusy.traces.rank_timeline import timeline_of
from keepbusy.traces.trace_file import Trace, ranks_of, read_trace


def trace(folder: Path, name: str, about: Any = None, begin: float = 0) -> Trace:
    """One launch and its kernel, in a file of that name."""
    path = folder / name
    beside = {} if about is None else {"distributedInfo": about}
    path.write_bytes(trace_of(call("cudaLaunchKernel", begin, 5, 1), command(begin + 10, 9, 1), **beside))
    return read_trace(path)


def said(rank: Any, size: Any = 2) -> dict[str, Any]:
    return {"backend": "nccl", "rank": rank, "world_size": size}


def test_what_the_trace_says_comes_first(tmp_path: Path) -> None:
    traces = [trace(tmp_path, "rank0.json", said(1)), trace(tmp_path, "rank1.json", said(0))]
    assert ranks_of(traces) == [1, 0]


@pytest.mark.parametrize("name", ["rank{}.json", "x.rank-{}.trace.json", "worker_RANK_{}.json", "rank.{}.json.gz"])
def test_then_its_name(tmp_path: Path, name: str) -> None:
    assert ranks_of([trace(tmp_path, name.format(rank)) for rank in (3, 0, 11)]) == [3, 0, 11]


def test_then_the_order_given(tmp_path: Path) -> None:
    assert ranks_of([trace(tmp_path, name) for name in ("b.json", "a.json", "c.json")]) == [0, 1, 2]


def test_names_tell_ranks_apart_that_all_say_the_same(tmp_path: Path) -> None:
    """Each was recorded before its process group was made."""
    assert ranks_of([trace(tmp_path, f"rank{rank}.json", said(0)) for rank in (0, 1)]) == [0, 1]


def test_one_file_alone_may_be_any_rank(tmp_path: Path) -> None:
    assert ranks_of([trace(tmp_path, "a.json", said(5, size=64))]) == [5]


@pytest.mark.parametrize("about", [[], "nccl", {}, {"rank": "0"}, {"rank": None, "world_size": "2"}, {"rank": 1.5}])
def test_odd_facts_say_nothing(tmp_path: Path, about: Any) -> None:
    assert ranks_of([trace(tmp_path, name, about) for name in ("a.json", "b.json")]) == [0, 1]


def refused(traces: list[Trace], match: str) -> None:
    with pytest.raises(BadInput, match=match) as caught:
        ranks_of(traces)
    assert str(caught.value).startswith(traces[0].path)
    assert str(caught.value).endswith(".")
    assert len(str(caught.value)) < 600


def test_the_same_rank_twice(tmp_path: Path) -> None:
    refused([trace(tmp_path, name, said(0)) for name in ("a.json", "b.json")], "are not the ranks of one run")


def test_one_that_says_its_rank_and_one_that_does_not(tmp_path: Path) -> None:
    refused([trace(tmp_path, "a.json", said(0)), trace(tmp_path, "b.json")], "are not the ranks of one run")


def test_runs_of_different_sizes(tmp_path: Path) -> None:
    refused([trace(tmp_path, "a.json", said(0, 2)), trace(tmp_path, "b.json", said(1, 4))], "runs with .* ranks")


@pytest.mark.parametrize("size", [4, 64, 10**15])
def test_ranks_may_be_missing(tmp_path: Path, size: int) -> None:
    """What is there is explained, however many the run had, or a damaged fact claims."""
    traces = [trace(tmp_path, f"{rank}.json", said(rank, size)) for rank in (0, 2)]
    assert ranks_of(traces) == [0, 2]
    assert timeline_of(traces[0]).facts.world == (size if size < 10**15 else None)


def test_runs_of_different_times(tmp_path: Path) -> None:
    """A minute apart: one clock, and yet they never ran together."""
    traces = [trace(tmp_path, "a.json"), trace(tmp_path, "b.json", begin=60e6)]
    refused(traces, "do not overlap in time; give the traces that one run's ranks recorded together")


def test_hosts_with_other_clocks_may_seem_not_to_overlap(tmp_path: Path) -> None:
    assert ranks_of([trace(tmp_path, "a.json"), trace(tmp_path, "b.json", begin=8_000e6)]) == [0, 1]


@pytest.mark.parametrize(
    ("devices", "bandwidth"),
    [
        ([{"computeMajor": 12}], 52.0),
        ([{"computeMajor": 9}], 52.0),
        ([{"computeMajor": 8}, {"computeMajor": 9}], 24.0),
        ([{"computeMajor": 7, "name": "NVIDIA H200"}], 12.0),
        ([{"computeMajor": "9"}], None),
        ([9], None),
        ({}, None),
        (None, None),
    ],
)
def test_the_link_is_known_by_the_capability_of_the_device(tmp_path: Path, devices: Any, bandwidth: float) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(trace_of(call("cudaLaunchKernel", 0, 5, 1), command(10, 9, 1), deviceProperties=devices))
    assert timeline_of(read_trace(path)).facts.pinned_bandwidth == bandwidth


def test_a_trace_of_one_call_is_one_step(tmp_path: Path) -> None:
    """Three kernels, each launched 100 µs after the one before it has ended."""
    rows = [
        row
        for number in range(3)
        for row in (call("cudaLaunchKernel", 120 * number, 5, number), command(120 * number + 10, 10, number))
    ]
    path = tmp_path / "call.json"
    path.write_bytes(trace_of(*rows))
    told = explain(read([path]))
    assert told.steps == 1
    assert told.plain_step == 260_000
    assert told.ledger["computing"] == 30_000
    assert told.ledger["launch_bound"] >= 0.8 * 200_000
    assert [note for note in told.notes if "nothing that comes again" in note]
