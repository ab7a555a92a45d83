"""What is no trace of PyTorch is named, and it is said what to do; nothing waits for ever or fills memory."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from build import loop

from keepbusy.timeline import files
from keepbusy.timeline.busy_file import from_bytes, load, save, to_bytes
from keepbusy.timeline.files import BadInput
from keepbusy.timeline.model import Kind
from keepbusy.timeline.replay import replay
from keepbusy.timeline.steps import whole_steps
from keepbusy.traces import json_events, read

EVENT = {"ph": "X", "ts": 1, "dur": 2, "name": "a", "pid": 1, "tid": 1}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "Git LFS.*git lfs pull"),
        (b"PK\x03\x04\x14\0\0\0", "zip archive; unpack it"),
        (b"SQLite format 3\0", "nsys export.*record with torch.profiler"),
        (b"\x28\xb5\x2f\xfd\x04", "zstd; unpack it"),
        (b'{"a": 1}\n{"a": 2}\n', "object a line.*nsys export"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=said):
        read([path])


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        ([{**EVENT, "pid": "CPU functions"}], "autograd profiler"),
        ({"displayTimeUnit": "ns", "metadata": {"highres-ticks": True}, "traceEvents": [EVENT]}, "JAX and TensorFlow"),
        ({"traceEvents": [{**EVENT, "cat": "v8"}]}, "another profiler .its categories: v8"),
        ({"traceEvents": [{**EVENT, "ph": "i"}]}, "holds no complete events"),
    ],
)
def test_a_trace_of_another_profiler_is_named(tmp_path: Path, trace: Any, said: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(trace))
    with pytest.raises(BadInput, match=said):
        read([path])


def test_more_events_than_a_file_can_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file of equal ones takes as much memory as a large trace."""
    monkeypatch.setattr(json_events, "FEW_EVENTS", 1_000)
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [EVENT] * 100_000}).encode()))
    with pytest.raises(BadInput, match=r"has more than [0-9,]+ events in \d+ kB, which no profiler trace has"):
        read([path])
    (tmp_path / "x.json").write_bytes(gzip.decompress(path.read_bytes()))
    with pytest.raises(BadInput, match="holds no complete events"):
        read([tmp_path / "x.json"])


def test_a_report_of_nsight_is_named(tmp_path: Path) -> None:
    path = tmp_path / "report1.nsys-rep"
    path.write_bytes(b"\x01\x02")
    with pytest.raises(BadInput, match=r"report of NVIDIA Nsight; record with torch\.profiler"):
        read([path])


@pytest.mark.parametrize("given", ["x.json", b"x.json", Path("x.json"), [], (), [3], [None]])
def test_read_takes_a_list_of_paths(given: Any) -> None:
    with pytest.raises(BadInput, match="list of"):
        read(given)


def test_a_pipe_into_which_nobody_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    for opened in (lambda: read([path]), lambda: load(path)):
        with pytest.raises(BadInput, match="nobody has written"):
            opened()


def test_a_pipe_that_is_written(tmp_path: Path) -> None:
    timeline = loop(lambda run: run.launch(5), 3)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(to_bytes(timeline)), daemon=True)
    writer.start()
    assert load(path).names == timeline.names
    writer.join()


def test_one_budget_holds_for_a_whole_file(saved_run: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepbusy.timeline.busy_file._SMALL", 50_000)
    monkeypatch.setattr("keepbusy.timeline.busy_file._MOST_RATIO", 0)
    one = from_bytes(saved_run)
    with pytest.raises(BadInput, match="MB of memory"):
        from_bytes(to_bytes(one.change(further=(one,) * 20)))


@pytest.fixture
def saved_run() -> bytes:
    return to_bytes(loop(lambda run: run.launch(5), 12))


@pytest.mark.parametrize("limit", [0, -3, 1 << 40])
def test_a_queue_of_impossible_length_is_refused(tmp_path: Path, limit: int) -> None:
    save(loop(lambda run: run.launch(5), 3).change_facts(pending_limit=limit), tmp_path / "x.busy")
    with pytest.raises(BadInput, match="pending_limit"):
        load(tmp_path / "x.busy")


def test_a_long_queue_costs_no_more_than_it_holds() -> None:
    timeline = loop(lambda run: run.launch(5), 3)
    assert (replay(timeline.change_facts(pending_limit=1 << 60)).spans.end == replay(timeline).spans.end).all()


def test_categories_of_old_pytorch_are_read(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    for step in range(5):
        at = 1000 * step
        events += [
            {**EVENT, "cat": "Operator", "name": f"ProfilerStep#{step}", "ts": at, "dur": 990},
            {**EVENT, "cat": "Operator", "name": "aten::mm", "ts": at + 100, "dur": 50},
            {**EVENT, "cat": "Runtime", "name": "cudaLaunchKernel", "ts": at + 110, "dur": 9},
            {**EVENT, "cat": "Kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": at + 200, "dur": 300},
        ]
        events[-2]["args"] = {"correlation": step + 1}
        events[-1]["args"] = {"correlation": step + 1, "device": 0, "stream": 7}
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"traceEvents": events}))
    timeline = read([path])
    assert (timeline.spans.kind == Kind.KERNEL).sum() == 5
    assert len(timeline.marks) >= 5


def test_a_backlog_at_the_start_is_before_the_window(tmp_path: Path) -> None:
    test_categories_of_old_pytorch_are_read(tmp_path)
    whole = json.loads((tmp_path / "old.json").read_text())
    early = [
        {**EVENT, "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": -900 + 10 * row, "dur": 9}
        | {"args": {"correlation": 900 + row, "device": 0, "stream": 7}}
        for row in range(80)
    ]
    late = [{**early[0], "ts": 4700}]
    (tmp_path / "x.json").write_text(json.dumps({"traceEvents": early + whole["traceEvents"] + late}))
    timeline = read([tmp_path / "x.json"])
    commands = np.flatnonzero(timeline.spans.kind == Kind.KERNEL)
    assert len(commands) == 86
    assert (commands < timeline.marks[0]).sum() == 80
    assert (whole_steps(timeline).spans.kind == Kind.KERNEL).sum() == 4


@pytest.mark.parametrize("elements", [1 << 62, 1 << 80, -(1 << 62), -(1 << 63), -3])
def test_impossible_numbers_are_no_bug_of_ours(tmp_path: Path, elements: int) -> None:
    test_categories_of_old_pytorch_are_read(tmp_path)
    whole = json.loads((tmp_path / "old.json").read_text())
    collective = {
        "Collective name": "all_reduce",
        "In msg nelems": elements,
        "dtype": "Float99999999999",
        "Group size": 2,
    } | ({"Out msg nelems": elements} if elements < 0 else {})
    whole["traceEvents"][3]["args"] |= collective
    whole["distributedInfo"] = {"rank": 10**30, "world_size": 10**30}
    (tmp_path / "rank99999999999999999999.json").write_text(json.dumps(whole))
    assert read([tmp_path / "rank99999999999999999999.json"]).spans.size.min() >= 0
