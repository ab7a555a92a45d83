"""Saving and loading: the same timeline comes back, and nothing else is let in."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import decorated, timelines

from keepbusy.timeline import busy_file, files
from keepbusy.timeline.busy_file import from_bytes, load, pack, save, to_bytes, unpack
from keepbusy.timeline.files import BadInput
from keepbusy.timeline.model import Kind, Lane, Links, Spans, Timeline
from keepbusy.timeline.run_facts import Part, PlainRun, RunFacts, WindowReason

LANES = (Lane(0, None, 0, "main"), Lane(0, 0, 7))
ONE_LAUNCH = Timeline(
    lanes=LANES,
    names=("launch", "kernel"),
    spans=Spans.of(2, lane=[0, 1], name=[0, 1], kind=[Kind.LAUNCH, Kind.KERNEL], start=[0, 5], end=[4, 9]),
    links=Links.of(1, source=[0], target=[1]),
)


def assert_same(one: Timeline, other: Timeline) -> None:
    assert (one.lanes, one.names, one.facts) == (other.lanes, other.names, other.facts)
    np.testing.assert_array_equal(one.marks, other.marks)
    for table in ("spans", "links", "frames", "meetings"):
        ours, theirs = getattr(one, table), getattr(other, table)
        for name, column in ours.columns().items():
            loaded = getattr(theirs, name)
            np.testing.assert_array_equal(column, loaded, err_msg=f"{table}.{name}")
            assert column.dtype == loaded.dtype
            assert not loaded.flags.writeable


@given(decorated())
@settings(max_examples=60)
def test_loading_is_the_inverse_of_saving(timeline: Timeline) -> None:
    content = to_bytes(timeline)
    assert_same(timeline, from_bytes(content))
    assert to_bytes(from_bytes(content)) == content


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=20), st.data())
@settings(max_examples=60)
def test_any_numbers_come_back(numbers: list[int], data: st.DataObject) -> None:
    others = [data.draw(st.permutations(numbers)) for _ in range(3)]
    lanes = data.draw(st.lists(st.integers(0, 1), min_size=len(numbers), max_size=len(numbers)))
    spans = Spans.of(len(numbers), lane=lanes, start=numbers, end=others[0], work=others[1], lag=others[2])
    packed = list(pack(spans.columns()))
    content = memoryview(b"".join(content for _, content in packed))
    for name, column in unpack([described for described, _ in packed], content, len(numbers)).items():
        np.testing.assert_array_equal(column, getattr(spans, name), err_msg=name)


def test_a_width_that_no_number_has_is_refused_before_anything_is_made_of_it() -> None:
    """Of a column without rows the content is as long as any width asks for: nothing."""
    nothing = zlib.compress(b"")
    with pytest.raises(KeyError):
        unpack([("start", "", 1 << 40, len(nothing))], memoryview(nothing), 0)


def test_names_may_be_anything_and_facts_may_hold_numbers_of_numpy() -> None:
    facts = RunFacts(device="H200 \ud83d\ude00", skipped=np.int64(3), notes=("\ud800 lone",))
    timeline = ONE_LAUNCH.change(names=("\ud800 lone", "\ud83d\ude00\0\x1b[31m"), facts=facts)
    assert_same(timeline, from_bytes(to_bytes(timeline)))


def test_facts_that_a_later_version_added_are_passed_over(saved: bytes) -> None:
    plain = {"marked_by": "step", "steps": 9, "step": 4, "low": 3, "high": 5, "tide": "low"}
    later = {
        "device": "H200",
        "groups": {"7": 2},
        "source": "train.py",
        "reason": {"why": "stall", "step": 200, "stall": None, "before": 3},
        "plain_runs": {"0": plain, "1": plain},
        "moon": "full",
    }
    facts = from_bytes(forged(saved, '"facts":{}', f'"facts":{json.dumps(later)}')).facts
    assert (facts.device, facts.source, facts.groups) == ("H200", "train.py", {7: 2})
    assert facts.plain_runs == dict.fromkeys((0, 1), PlainRun("step", 9, 4, 3, 5))
    assert facts.reason == WindowReason("stall")


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": 3},
        {"notes": "all"},
        {"notes": [3]},
        {"groups": {"a": 2}},
        {"groups": {"3": "b"}},
        {"pending_limit": True},
        {"recorded": {}},
        {"plain_step": 1e9},
        {"skipped": 1 << 70},
        {"plain_runs": {"0": {"marked_by": "step", "steps": []}}},
        {"plain_runs": [1]},
        {"reason": {"step": 3}},
        [3],
    ],
)
def test_facts_of_another_type_are_refused(saved: bytes, wrong: object) -> None:
    with pytest.raises(BadInput, match=r"run\.busy is damaged"):
        from_bytes(forged(saved, '"facts":{}', f'"facts":{json.dumps(wrong)}'), "run.busy")


def test_a_fact_that_json_cannot_say_is_an_error_at_once() -> None:
    with pytest.raises(TypeError, match="facts cannot hold set"):
        to_bytes(ONE_LAUNCH.change(facts=RunFacts(device={1, 2})))


def test_an_empty_timeline_comes_back() -> None:
    empty = Timeline(lanes=(), names=(), spans=Spans.of(0))
    assert_same(empty, from_bytes(to_bytes(empty)))


def test_the_file_is_small() -> None:
    rows = 10_000
    start = np.arange(rows) * 1_000
    spans = Spans.of(rows, lane=0, start=start, end=start + 1_000, work=1_000)
    assert len(to_bytes(Timeline(lanes=LANES, names=("a",), spans=spans))) < rows


@pytest.fixture(scope="module")
def saved() -> bytes:
    return to_bytes(ONE_LAUNCH)


@pytest.mark.parametrize("place", range(0, 400, 7))
def test_a_damaged_byte_is_found(saved: bytes, place: int) -> None:
    place %= len(saved)
    damaged = saved[:place] + bytes([saved[place] ^ 0x40]) + saved[place + 1 :]
    with pytest.raises(BadInput, match=r"damaged|no \.busy file|has format|cut off"):
        from_bytes(damaged, "run.busy")


@pytest.mark.parametrize("length", [0, 3, 8, 20, 24, 60, -1])
def test_a_file_that_is_cut_off_says_so(saved: bytes, length: int) -> None:
    with pytest.raises(BadInput, match=r"empty|cut off|no \.busy file"):
        from_bytes(saved[:length], "run.busy")


@pytest.mark.parametrize(("version", "advice"), [(2, "update keepbusy"), (0, "save the run again")])
def test_another_format_is_refused(saved: bytes, version: int, advice: str) -> None:
    other = saved[:8] + struct.pack("<I", version) + saved[12:]
    with pytest.raises(BadInput, match=f"run.busy has format {version}.*reads format 1; {advice}"):
        from_bytes(other, "run.busy")


def forged(saved: bytes, old: str, new: str) -> bytes:
    """The same file with a changed header and sound checksums."""
    rest = saved[24:]
    (size,) = struct.unpack_from("<Q", rest)
    header = zlib.decompress(rest[8 : 8 + size]).decode()
    assert old in header
    changed = zlib.compress(header.replace(old, new).encode())
    rest = struct.pack("<Q", len(changed)) + changed + rest[8 + size :]
    return saved[:12] + struct.pack("<IQ", zlib.crc32(rest), len(rest)) + rest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"names":["launch","kernel"]', '"names":["launch"]'),
        ('"names":["launch","kernel"]', '"names":["launch",3]'),
        ('"names":["launch","kernel"]', '"names":5'),
        ('"lanes":[[0,null,0,"main"],[0,0,7,""]]', '"lanes":[[0,null,0,"main"]]'),
        ('"lanes":[[0,null,0,"main"],[0,0,7,""]]', '"lanes":[[0,null,0,"main"],[0,0,[],""]]'),
        ('"facts":{}', '"facts":[1]'),
        ('"facts":{}', '"tables":{}'),
        ('"rows":2', '"rows":3'),
        ('"rows":2', '"rows":-2'),
        ('"rows":2', '"rows":"2"'),
        ('"rows":2', '"rows":1000000000000'),
        ('["kind","",1', '["kind","",3'),
        (',["present","",1,8]]', "]"),
        ('["kind","",1', '["kinds","",1'),
        ('["kind","",1', '["kind","start",1'),
        ('["lane","",1', '["lane","lane",1'),
    ],
)
def test_a_forged_header_is_refused_too(saved: bytes, old: str, new: str) -> None:
    with pytest.raises(BadInput, match=r"run\.busy is damaged"):
        from_bytes(forged(saved, old, new), "run.busy")


@pytest.mark.parametrize(
    "wrong",
    [
        ONE_LAUNCH.change_spans(lane=[0, 2]),
        ONE_LAUNCH.change_spans(lane=[-1, 1]),
        ONE_LAUNCH.change_spans(kind=[1, 7]),
        ONE_LAUNCH.change_spans(frame=[0, 0]),
        ONE_LAUNCH.change_spans(awaits=[-3, 0]),
        ONE_LAUNCH.change_spans(meeting=[0, 0]),
        ONE_LAUNCH.change(links=Links.of(1, source=[0], target=[2])),
        ONE_LAUNCH.change(links=Links.of(1, source=[0], target=[1], kind=[3])),
        ONE_LAUNCH.change(marks=np.array([2])),
    ],
)
def test_nothing_points_outside(wrong: Timeline) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        from_bytes(to_bytes(wrong))


def test_a_missing_column_holds_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a column can be added without a new format."""
    columns = {name: dict(table) for name, table in busy_file._columns_of(ONE_LAUNCH).items()}
    del columns["spans"]["frame"], columns["meetings"]["present"]
    monkeypatch.setattr(busy_file, "_columns_of", lambda _: columns)
    assert_same(ONE_LAUNCH, from_bytes(to_bytes(ONE_LAUNCH)))


def test_saving_replaces_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.busy"
    save(ONE_LAUNCH, path)
    save(ONE_LAUNCH.change(names=("a", "b")), path)
    assert load(path).names == ("a", "b")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.busy"]


def test_a_failed_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.busy"
    save(ONE_LAUNCH, path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(BadInput, match=r"run\.busy cannot be written .No space left on device"):
        save(ONE_LAUNCH.change(names=("a", "b")), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.busy"]


def test_places_where_nothing_can_be_saved_or_loaded(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "run.busy", tmp_path / "a\0b"):
        with pytest.raises(BadInput, match="cannot be written"):
            save(ONE_LAUNCH, path)
        with pytest.raises(BadInput, match=r"cannot be read|does not exist|is a directory"):
            load(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"{}", b"\x1f\x8b", b"PK\x03\x04", b"\x89PNG\r\n\x1a\n"])
def test_foreign_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.busy"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"run\.busy is no \.busy file"):
        load(path)


@given(timelines())
@settings(max_examples=20)
def test_drawn_timelines_are_recordings_that_may_be_saved(timeline: Timeline) -> None:
    assert_same(timeline, from_bytes(to_bytes(timeline)))


@given(decorated(), decorated(), decorated())
@settings(max_examples=20)
def test_what_else_was_recorded_of_the_run_goes_with_it(one: Timeline, other: Timeline, third: Timeline) -> None:
    whole = one.change(further=(other, third))
    content = to_bytes(whole)
    again = from_bytes(content)
    assert_same(one, again)
    for before, after in zip(whole.further, again.further, strict=True):
        assert_same(before, after)
    assert to_bytes(again) == content


@pytest.mark.parametrize("lengths", [[-1], [10**9], [0], 7, ["a"], [12.5]])
def test_a_further_timeline_that_is_not_there_is_damage(lengths: object) -> None:
    content = to_bytes(ONE_LAUNCH.change(further=(ONE_LAUNCH,)))
    length = len(to_bytes(ONE_LAUNCH))
    wrong = json.dumps(lengths)
    with pytest.raises(BadInput, match=r"damaged|no .busy file|cut off"):
        from_bytes(forged(content, f'"further":[{length}]', f'"further":{wrong}'))


def test_a_launch_of_what_is_no_command_is_refused() -> None:
    wrong = ONE_LAUNCH.change(links=Links.of(1, source=[0], target=[0], kind=[0]))
    with pytest.raises(BadInput, match="a launch of what is no command"):
        from_bytes(to_bytes(wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        ONE_LAUNCH.change_spans(work=np.full(len(ONE_LAUNCH), 1 << 62)),
        ONE_LAUNCH.change_spans(lag=np.full(len(ONE_LAUNCH), -(1 << 63))),
        ONE_LAUNCH.change_spans(size=np.full(len(ONE_LAUNCH), 1 << 62)),
        ONE_LAUNCH.change_spans(recording=np.full(len(ONE_LAUNCH), -1)),
        ONE_LAUNCH.change_spans(end=ONE_LAUNCH.spans.end + (1 << 53)),
        ONE_LAUNCH.change_spans(start=ONE_LAUNCH.spans.end + 1),
        ONE_LAUNCH.change(lanes=tuple(lane._replace(rank=10**30) for lane in ONE_LAUNCH.lanes)),
        ONE_LAUNCH.change(lanes=tuple(lane._replace(rank=-1) for lane in ONE_LAUNCH.lanes)),
        ONE_LAUNCH.change(lanes=ONE_LAUNCH.lanes * 1000),
        ONE_LAUNCH.change(further=(ONE_LAUNCH.change(further=(ONE_LAUNCH,)),)),
        ONE_LAUNCH.change(marks=np.array([0, 0])),
    ],
)  # fmt: skip
def test_what_no_run_holds_is_refused_in_a_sentence(wrong: Timeline) -> None:
    with pytest.raises(BadInput, match="is damaged"):
        from_bytes(to_bytes(wrong))


def test_a_tree_deeper_than_any_program_is_refused_in_a_sentence() -> None:
    tree = Part("loop")
    for _ in range(60):
        tree = Part("loop", parts=(tree,))
    assert from_bytes(to_bytes(ONE_LAUNCH.change_facts(run=tree))).facts.run == tree
    for _ in range(60):
        tree = Part("loop", parts=(tree,))
    with pytest.raises(BadInput, match="is damaged"):
        from_bytes(to_bytes(ONE_LAUNCH.change_facts(run=tree)))
