"""Traces with faults: what PyTorch's writer gets wrong is fixed, the rest is skipped or refused with a sentence."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from traces import NCCL, Read, beside, event, parts, reader, small, trace_of

from keepbusy import traces
from keepbusy.timeline.files import BadInput
from keepbusy.timeline.model import NONE
from keepbusy.traces import json_events
from keepbusy.traces.trace_file import read_trace


@pytest.fixture
def read(tmp_path: Path) -> Read:
    return reader(tmp_path)


# What PyTorch's writer gets wrong


def with_name(name: bytes) -> bytes:
    head, rows, tail = parts(small("images"))
    place = next(place for place, row in enumerate(rows) if b'"cpu_op"' in row)
    before, rest = rows[place].split(b'"name": "', 1)
    rows[place] = before + b'"name": "' + name + rest[rest.index(b'", "pid"') :]
    return head + b"\n  },\n  {".join(rows) + tail


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (b'he said "x"', 'he said "x"'),
        (b'an odd " one', 'an odd " one'),
        (b'half {"a": [1', 'half {"a": [1'),
        (b"tab\there", "tab here"),
        (b"\xff\xfe latin", "�� latin"),
        (b"\\ud83d alone", "� alone"),
        (b"\\ud83d\\ude00 together", "\U0001f600 together"),
        (b"nan: nan", "nan: nan"),
    ],
)
def test_a_broken_name_is_fixed(read: Read, written: bytes, meant: str) -> None:
    sound, fixed = read(small("images")), read(with_name(written))
    assert meant in fixed.names
    assert fixed.skipped == 0
    assert len(fixed.events) == len(sound.events)


def test_numbers_that_are_none(read: Read) -> None:
    text = trace_of(event(args={"correlation": 5, "Total Reserved": 12345}), event()).replace(b"12345", b"nan")
    assert read(text).events.correlation.tolist() == [5, NONE]
    assert read(text.replace(b"nan", b"-inf")).skipped == 0
    assert read(text.replace(b"nan", b"Infinity")).skipped == 0


def test_arguments_that_are_no_json_cost_only_themselves(read: Read) -> None:
    text = small("images").replace(b'"Ev Idx": 0\n', b'"Concrete Inputs": ["a/"b"]\n', 1)
    assert b"Concrete" in text
    trace = read(text)
    assert len(trace.events) == len(read(small("images")).events)
    assert trace.skipped == 0


def test_facts_that_are_no_json_cost_only_themselves(read: Read) -> None:
    text = small("images").replace(b'"cuda_runtime_version"', b'"note": he said "x",\n      "cuda_runtime_version"')
    facts = beside(read(text).path)
    assert facts["cuda_runtime_version"] == 13000
    assert "note" not in facts


# Wrong types

wrong = [
    {"ts": "soon"},
    {"ts": None},
    {"ts": 1e300},
    {"ts": -1e300},
    {"dur": "long"},
    {"dur": -1},
    {"dur": None},
    {"dur": 1e18},
    {"name": None},
    {"name": 5},
    {"cat": ["kernel"]},
    {"pid": {}},
    {"tid": []},
    {"ph": 3},
    {"ph": "XX"},
    {"ph": None},
]


@pytest.mark.parametrize("fault", wrong, ids=str)
def test_a_wrong_event_is_skipped_alone(read: Read, fault: dict[str, Any]) -> None:
    trace = read(trace_of(event(name="before"), event() | fault, event(name="after")))
    assert [trace.names[name] for name in trace.events.name] == ["before", "after"]
    assert trace.skipped == 1


def test_an_event_without_a_duration_is_skipped(read: Read) -> None:
    lame = event()
    del lame["dur"]
    assert read(trace_of(event(), lame)).skipped == 1


@pytest.mark.parametrize(
    "value",
    ["x", "12", 1.5, None, [1], [[1, 2]], {"a": 1}, True, 2**63, -(2**70), 10**4000],
    ids=lambda value: repr(value)[:20],
)
@pytest.mark.parametrize("key", ["correlation", "stream", "bytes", "Sequence number", "In msg nelems", "Group size"])
def test_a_wrong_argument_costs_no_event(read: Read, key: str, value: Any) -> None:
    trace = read(trace_of(event(args=NCCL | {key: value}), event(cat="cpu_op", args={key: value}), event()))
    assert len(trace.events) + trace.skipped == 3


def test_a_trace_of_mostly_wrong_events_is_refused(read: Read) -> None:
    with pytest.raises(BadInput, match=r"a\.trace\.json has 2 events of 3 that cannot be read .*float.*; give a trace"):
        read(trace_of(event(), event(ts="a"), event(ts="b")))


# Bad input


def refused(path: Path, content: bytes, match: str) -> None:
    path.write_bytes(content)
    with pytest.raises(BadInput, match=match) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert message.endswith(".")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty"),
        (b" \n\t ", "is blank"),
        (b"\xef\xbb\xbf", "is blank"),
        (b"null", "is not JSON"),
        (b"hello", "is not JSON: it begins with b'hello'"),
        (b"SQLite format 3\0", "SQLite database, as `nsys export` writes"),
        (
            b"\x80\x05pickle",
            "is a pickle, perhaps of PyTorch's flight recorder; those of a job that hangs go to keepbusy explain",
        ),
        (b"{}", "has no `traceEvents` .its keys: none"),
        (b'{"a": 1, "b": [2]}', "has no `traceEvents` .its keys: a, b"),
        (b'{"a": {"traceEvents": [{}]}}', "has no `traceEvents` .its keys: a"),
        (b'{"traceEvents": {}}', "no list"),
        (b'{"traceEvents": "[]"}', "no list"),
        (b'{"traceEvents": nul', "no list"),
        (b'{"traceEvents": []}', "no complete events"),
        (b"[]", "no complete events"),
        (b'["a", 1, [{"ph": "X"}]]', "no complete events"),
        (trace_of({"ph": "i", "ts": 1}), "no complete events"),
        (b'{"traceEv', "cut off"),
        (b'{"traceEvents": ', "cut off"),
        (b'{"traceEvents": [', "cut off"),
        (b'{"traceEvents": [{"ph": "X"', "cut off"),
        (trace_of(event())[:-1], "cut off"),
        (trace_of(event())[:-2], "cut off"),
        (trace_of(event())[:-3], "cut off"),
        (trace_of(event(), event()).replace(b"{}}", b"{}}}", 1), "brackets"),
    ],
    ids=lambda value: value[:24] if isinstance(value, bytes) else "",
)
def test_bad_input_gets_one_sentence(tmp_path: Path, content: bytes, match: str) -> None:
    refused(tmp_path / "a.json", content, match)
    if content:
        refused(tmp_path / "a.json.gz", gzip.compress(content), match)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_trace_that_is_cut_off(tmp_path: Path, share: float) -> None:
    text = small("images")
    refused(tmp_path / "a.json", text[: int(len(text) * share)], "cut off")
    zipped = gzip.compress(text)
    refused(tmp_path / "a.json.gz", zipped[: int(len(zipped) * share)], "damaged gzip")


def test_a_wrong_checksum_is_found(tmp_path: Path) -> None:
    zipped = gzip.compress(small("images"))
    refused(tmp_path / "a.gz", zipped[:-8] + b"\0\0\0\0" + zipped[-4:], "damaged gzip file .CRC")
    refused(tmp_path / "a.gz", b"\x1f\x8b\x08rubbish and more rubbish", "damaged gzip")


def test_a_bomb_is_never_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_events, "SMALL", 1 << 20)
    events = b'{"traceEvents": [' + b'{"ph": "i", "ts": 1, "name": "a"},' * 100_000
    refused(tmp_path / "a.json.gz", gzip.compress(events), "unpacks to more than 2 MB from 9 kB")


def test_an_endless_event_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_events, "_LONGEST_EVENT", 1 << 20)
    refused(tmp_path / "a.json", b'[{"name": "' + b"a" * (2 << 20), "an event of more than 1 MB")


def test_a_place_where_no_trace_is(tmp_path: Path) -> None:
    for path, match in (
        (tmp_path / "none", "does not exist"),
        (tmp_path, "is a directory"),
        (tmp_path / "\0", "cannot be read"),
    ):
        with pytest.raises(BadInput, match=match):
            read_trace(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.touch(0)
    with pytest.raises(BadInput, match=r"cannot be read .Permission denied"):
        read_trace(path)


# Times and sizes of no run


@pytest.mark.parametrize(
    ("category", "changes", "what"),
    [
        ("kernel", {"ts": 2e13}, "times further apart than those of any run"),
        ("gpu_memcpy", {"bytes": 1 << 62}, "more bytes than any run moves"),
    ],
)
def test_what_no_run_can_hold_is_refused(category: str, changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    trace = json.loads(small("images"))
    found = [one for one in trace["traceEvents"] if one.get("cat") == category][-1]
    for name, value in changes.items():
        (found if name in found else found["args"])[name] = value
    path = tmp_path / "damaged.trace.json"
    path.write_text(json.dumps(trace, indent=2), encoding="utf-8")
    with pytest.raises(BadInput, match=f"is damaged: it holds {what}"):
        traces.read([path])
