"""Reading traces: every event of every layout, to the nanosecond."""

from __future__ import annotations

import functools
import gzip
import json
from dataclasses import fields
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import NCCL, TRACES, Read, beside, event, reader, real, small, trace_of

from keepbusy.timeline.files import BadInput
from keepbusy.timeline.model import NONE
from keepbusy.traces import json_events, trace_file
from keepbusy.traces.json_events import scan
from keepbusy.traces.kineto_names import Category
from keepbusy.traces.trace_file import Collective, Thread, Trace, deal, read_trace, read_traces


@pytest.fixture
def read(tmp_path: Path) -> Read:
    return reader(tmp_path)


def assert_same(one: Trace, other: Trace) -> None:
    tables = ("events", "device_events", "memory")
    for ours, theirs in ((getattr(one, table), getattr(other, table)) for table in tables):
        for name, column in ours.columns().items():
            np.testing.assert_array_equal(column, getattr(theirs, name), err_msg=name)
    for field in fields(Trace):
        if field.name not in ("path", *tables):
            assert getattr(one, field.name) == getattr(other, field.name), field.name


# What is read


def test_every_event_of_a_real_trace_is_read_to_the_nanosecond(read: Read) -> None:
    text = real("images")
    trace = read(text)
    said = [one for one in json.loads(text, parse_float=Decimal)["traceEvents"] if one["ph"] == "X"]
    said = [one for one in said if one["cat"] not in ("Trace", "gpu_user_annotation")]
    events = trace.events
    assert [trace.names[name] for name in events.name] == [one["name"] for one in said]
    assert events.start.tolist() == [int(one["ts"] * 1000) for one in said]
    assert events.end.tolist() == [int((one["ts"] + one["dur"]) * 1000) for one in said]
    for name, key in (("correlation", "correlation"), ("sequence", "Sequence number")):
        assert getattr(events, name).tolist() == [one.get("args", {}).get(key, NONE) for one in said], name
    commands = [(row, one["args"]) for row, one in enumerate(said) if "stream" in one.get("args", {})]
    assert trace.device_events.event.tolist() == [row for row, _ in commands]
    assert (events.category[trace.device_events.event] <= Category.FILL).all()
    assert trace.device_events.stream.tolist() == [args["stream"] for _, args in commands]
    assert trace.device_events.size.tolist() == [args.get("bytes", NONE) for _, args in commands]
    assert trace.skipped == 0


def test_what_stands_beside_the_events_is_kept(read: Read) -> None:
    facts = beside(TRACES / "images.trace.json.gz")
    said = json.loads(real("images"))
    del said["traceEvents"]
    assert facts == said
    assert {"schemaVersion", "deviceProperties", "with_stack", "baseTimeNanoseconds", "traceName"} <= facts.keys()


def test_threads_bear_the_names_that_the_trace_gives_them(read: Read) -> None:
    threads = read(real("images")).threads
    assert "stream 7 " in [thread.name for thread in threads if thread.process == "0"]
    assert any(thread.name.startswith("thread ") for thread in threads)


@pytest.mark.parametrize(
    ("said", "ranks", "peer"),
    [
        ({}, (0, 3), NONE),
        ({"Process Group Ranks": [0, 3]}, (0, 3), NONE),
        ({"Process Group Ranks": "[0, 1, 2, ...]"}, (), NONE),
        ({"Process Group Ranks": None}, (), NONE),
        ({"Collective name": "send", "Dst Rank": 3}, (0, 3), 3),
        ({"Collective name": "recv", "Src Rank": 0}, (0, 3), 0),
    ],
)
def test_collectives(read: Read, said: dict[str, Any], ranks: tuple[int, ...], peer: int) -> None:
    arguments = NCCL | said | {"Seq": 41, "device": 1, "stream": 20, "correlation": 9}
    host = event(cat="cpu_op", name="record_param_comms", args=NCCL | {"Sequence number": 5})
    trace = read(trace_of(event(name="ncclDevKernel", args=arguments), event(), host))
    assert trace.collectives == (Collective(arguments["Collective name"], 8, 16, "Float", "0", 2, ranks, peer),)
    assert trace.device_events.event.tolist() == [0, 1]
    assert trace.device_events.collective.tolist() == [0, NONE]
    assert trace.events.sequence.tolist() == [NONE, NONE, 5]


def test_sync_rows_say_whom_they_await(read: Read) -> None:
    sync = {"cuda_sync_kind": "Stream Wait Event", "stream": 7, "correlation": 5, "device": 0, "context": 1}
    wait = {"wait_on_stream": 20, "wait_on_cuda_event_record_corr_id": 77}
    record = {"stream": 20, "correlation": 77, "device": 0}
    context = {"cuda_sync_kind": "Context Sync", "stream": -1, "correlation": 6, "device": 0, "context": 1}
    rows = [("cuda_sync", sync | wait), ("cuda_event", record), ("cuda_sync", context)]
    trace = read(trace_of(*[event(cat=category, tid=1, args=arguments) for category, arguments in rows]))
    assert trace.events.category.tolist() == [Category.SYNC, Category.RECORD, Category.SYNC]
    assert trace.events.correlation.tolist() == [5, 77, 6]
    assert trace.device_events.stream.tolist() == [7, 20, NONE]
    assert trace.device_events.awaited_stream.tolist() == [20, NONE, NONE]
    assert trace.device_events.awaited_record.tolist() == [77, NONE, NONE]


def test_amd_names_streams_by_address_in_its_calls_and_by_row_for_its_kernels(read: Read) -> None:
    call = event(cat="cuda_runtime", name="hipLaunchKernel", pid=5, tid=5, args={"stream": "0x7f", "correlation": 3})
    trace = read(trace_of(call, event(pid=2, tid=1, args={"correlation": 3})))
    assert trace.events.correlation.tolist() == [3, 3]
    assert trace.device_events.event.tolist() == [1]
    assert trace.device_events.device.tolist() == [2]
    assert trace.device_events.stream.tolist() == [1]


def test_processes_and_threads_are_numbers_or_texts(read: Read) -> None:
    thread = {"ph": "M", "name": "thread_name", "pid": "1", "tid": 7, "args": {"name": "stream 7"}}
    rows = [event(pid=1, tid=7), event(pid="1", tid="7"), event(pid="Spans", tid=None), event(pid=2**70, tid=1.5)]
    trace = read(trace_of(*rows, thread))
    assert trace.events.thread.tolist() == [0, 0, 1, 2]
    assert trace.threads == (
        Thread("1", "7", "stream 7"),
        Thread("Spans", "None", ""),
        Thread(str(2**70), "1.5", ""),
    )


def test_categories_that_say_nothing_are_passed_over(read: Read) -> None:
    quiet = ["gpu_user_annotation", "Trace", "ac2g", "cpu_instant_event", ""]
    trace = read(trace_of(event(name="a"), *[event(cat=category) for category in quiet], {"ph": "i", "ts": 1}))
    assert trace.names[0] == "a"
    assert len(trace.events) == 1


# Times

microseconds = st.decimals(0, 5_000_000_000_000, places=3)


@given(st.tuples(microseconds, st.lists(st.decimals(0, 1_000_000, places=3), min_size=1, max_size=4)))
@settings(max_examples=40)
def test_nanoseconds_are_exact(tmp_path_factory: pytest.TempPathFactory, drawn: tuple[Decimal, list[Decimal]]) -> None:
    begin, lengths = drawn
    rows = [f'{{"ph":"X","cat":"kernel","ts":{begin:f},"dur":{length:f}}}' for length in lengths]
    path = tmp_path_factory.getbasetemp() / "times.json"
    path.write_text(f"[{','.join(rows)}]")
    events = read_trace(path).events
    assert set(events.start.tolist()) == {int(begin * 1000)}
    assert events.end.tolist() == [int((begin + length) * 1000) for length in lengths]


def test_children_end_with_their_parents_whatever_the_digits(read: Read) -> None:
    end = 1_000.0004
    rows = [event(ts=begin / 7, dur=end - begin / 7) for begin in range(0, 7_000, 11)]
    assert set(read(trace_of(*rows)).events.end.tolist()) == {1_000_000}


def test_times_since_1970_keep_their_nanoseconds(read: Read) -> None:
    text = b'[{"ph":"X","cat":"kernel","ts":1690000000123456.789,"dur":2.001},{"ph":"X","cat":"kernel","ts":1,"dur":0}]'
    events = read(text).events
    assert events.start.tolist() == [1690000000123456789, 1000]
    assert events.end.tolist() == [1690000000123458790, 1000]


def test_whole_microseconds_are_times_too(read: Read) -> None:
    assert read(trace_of(event(ts=1690000, dur=3))).events.end.tolist() == [1690003000]


# Layouts


@functools.cache
def layouts() -> dict[str, bytes]:
    text = small("tokens")
    said = json.loads(text)
    nested = [one | {"more": [{"a": 1}, {"b": '},{"]'}, []]} for one in said["traceEvents"]]
    return {
        "minified": json.dumps(said, separators=(",", ":")).encode(),
        "one line": json.dumps(said).encode(),
        "indented": json.dumps(said, indent=3).encode(),
        "windows": text.replace(b"\n", b"\r\n"),
        "sorted": json.dumps(said, sort_keys=True).encode(),
        "events first": json.dumps({"traceEvents": said["traceEvents"]} | said).encode(),
        "unescaped": json.dumps(said, ensure_ascii=False).encode(),
        "marked": b"\xef\xbb\xbf" + text,
        "nested": json.dumps(said | {"traceEvents": nested}, separators=(",", ":")).encode(),
        "gzip": gzip.compress(text),
        "gzip in two": gzip.compress(text[:5000]) + gzip.compress(text[5000:]),
    }


@pytest.mark.parametrize("block", [64, 1000, 1 << 20])
@pytest.mark.parametrize(
    "layout",
    [
        *("minified", "one line", "indented", "windows", "sorted", "events first", "unescaped", "marked", "nested"),
        *("gzip", "gzip in two"),
    ],
)
def test_every_layout_reads_the_same(read: Read, monkeypatch: pytest.MonkeyPatch, layout: str, block: int) -> None:
    monkeypatch.setattr(json_events, "BLOCK_SIZE", block)
    assert_same(read(small("tokens")), read(layouts()[layout]))


def test_the_name_of_a_file_proves_nothing(read: Read) -> None:
    assert_same(read(small("images"), "a.json.gz"), read(gzip.compress(small("images")), "a.json"))


def test_a_bare_list_is_a_trace(read: Read) -> None:
    trace = read(small("images"))
    bare = read(json.dumps(json.loads(small("images"))["traceEvents"]).encode())
    assert beside(bare.path) == {}
    np.testing.assert_array_equal(trace.events.start, bare.events.start)


def test_the_key_of_the_events_may_stand_elsewhere_too(read: Read) -> None:
    text = json.dumps({"note": '"traceEvents": [', "old": {"traceEvents": [{"a": 1}]}, "traceEvents": [event()]})
    trace = read(text.encode())
    assert len(trace.events) == 1
    assert set(beside(trace.path)) == {"note", "old"}


events_and_strings = st.text(st.sampled_from('{}[],:"\\ \na'), max_size=12)


@given(st.lists(st.dictionaries(events_and_strings, events_and_strings | st.lists(events_and_strings)), max_size=5))
@settings(max_examples=100)
def test_events_are_found_exactly(events: list[dict[str, Any]]) -> None:
    for separators in ((",", ":"), (" ,\n", "\n: ")):
        text = json.dumps(events, separators=separators)
        piece = scan(text[1:].encode())
        assert [json.loads(text[1:][start:end]) for start, end in piece.events] == events
        assert piece.closing == len(text) - 2


# Several


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"rank{rank}.json" for rank in range(3)]
    for path, name in zip(paths, ["images", "tokens", "images_pinned"], strict=True):
        path.write_bytes(small(name))
    return paths


@pytest.mark.parametrize("worth", [0, 1 << 40], ids=["in processes", "here"])
def test_several_are_read_in_their_order(three: list[Path], monkeypatch: pytest.MonkeyPatch, worth: int) -> None:
    monkeypatch.setattr(trace_file, "WORTH_PROCESSES", worth)
    shares: list[float] = []
    traces = read_traces(three, lambda _, share: shares.append(share))
    for trace, path in zip(traces, three, strict=True):
        assert_same(trace, read_trace(path))
        assert not trace.events.start.flags.writeable
    assert shares == sorted(shares)
    assert shares[-1] == 1


@pytest.mark.parametrize("worth", [0, 1 << 40], ids=["in processes", "here"])
def test_one_bad_one_is_named(three: list[Path], monkeypatch: pytest.MonkeyPatch, worth: int) -> None:
    monkeypatch.setattr(trace_file, "WORTH_PROCESSES", worth)
    three[1].write_bytes(b"{}")
    with pytest.raises(BadInput, match=r"rank1\.json has no `traceEvents`"):
        read_traces(three)


def test_a_process_that_dies_does_no_harm(three: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "WORTH_PROCESSES", 0)
    monkeypatch.setattr(trace_file.sys, "executable", "/bin/false")
    assert [len(trace.events) for trace in read_traces(three)] == [len(read_trace(path).events) for path in three]


def test_files_are_dealt_evenly() -> None:
    assert sorted(map(sorted, deal([5, 1, 4, 2], 2))) == [[0, 1], [2, 3]]
    assert sorted(index for hand in deal([0, 0, 0], 2) for index in hand) == [0, 1, 2]


def test_progress_runs_from_nothing_to_all(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(small("images"))
    told: list[tuple[str, float]] = []
    read_trace(path, lambda what, share: told.append((what, share)))
    assert told[-1] == ("reading a.json", 1.0)
