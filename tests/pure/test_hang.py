"""What a flight recorder's dumps say of a job that hangs; files of strangers are read, and never run."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepbusy import cli
from keepbusy.hang import flight_recorder
from keepbusy.hang.flight_recorder import is_dump, plain_value, read_dumps
from keepbusy.hang.waiting_ranks import HangVerdict, as_json, explain_hang, hang_report
from keepbusy.timeline.files import BadInput

# Dumps as NCCL's recorder writes them (tests/torch/test_flight_recorder.py makes real ones, of gloo)

FRAMES = [
    {"filename": "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", "line": 9, "name": "call"},
    {"filename": "/home/me/train.py", "line": 31, "name": "step"},
    {"filename": "/home/me/train.py", "line": 50, "name": "<module>"},
]


def entry(kind: str, number: int, state: str = "completed", size: int = 8, **given: Any) -> dict[str, Any]:
    return {
        "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": number,
        "p2p_seq_id": 0, "op_id": number, "profiling_name": f"nccl:{kind}", "time_created_ns": 10**18 + number,
        "input_sizes": [[size]], "input_dtypes": ["Float"], "output_sizes": [[size]], "output_dtypes": ["Float"],
        "state": state, "time_discovered_started_ns": None, "time_discovered_completed_ns": None, "retired": False,
        "timeout_ms": 600_000, "is_p2p": False, "frames": FRAMES, **given,
    }  # fmt: skip


def message(kind: str, ends: str, number: int = 1, state: str = "scheduled", size: int = 8) -> dict[str, Any]:
    return entry(f"{kind} {ends}", 0, state, size, is_p2p=True, p2p_seq_id=number)


def dump(folder: Path, ranks: Sequence[list[dict[str, Any]] | None]) -> list[Path]:
    """Of each rank its entries; None is a rank without a dump."""
    paths = []
    members = str(list(range(len(ranks))))
    for rank, entries in enumerate(ranks):
        if entries is not None:
            config = {"0": {"name": "0", "desc": "default_pg", "ranks": members}}
            held = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}
            paths.append(folder / f"nccl_trace_rank_{rank}")
            paths[-1].write_bytes(pickle.dumps(held, 2))
    return paths


def verdict(folder: Path, *ranks: list[dict[str, Any]] | None) -> HangVerdict:
    return explain_hang(read_dumps(dump(folder, ranks)))


def text(found: HangVerdict) -> str:
    return "".join(hang_report(found))


DONE = [entry("all_reduce", 1), entry("_broadcast_oop", 2)]


def test_a_rank_that_never_came(tmp_path: Path) -> None:
    waits = [*DONE, entry("all_reduce", 3, "started", retired=True)]
    found = verdict(tmp_path, waits, DONE, waits)
    assert text(found) == (
        "keepbusy explain · what 3 ranks wrote down of their collectives\n\n"
        "Rank 1 never came to all_reduce, call 3 of default_pg; ranks 0 and 2 wait there.\n\n"
        "  ranks 0 and 2  all_reduce 8 Float              train.py:31 in step  timed out\n"
        "  rank 1         last was broadcast_oop 8 Float  train.py:31 in step  ended\n\n"
        "look    what rank 1 does after train.py:31 in step: its own log, or `py-spy dump` while it hangs\n"
    )


def test_a_rank_without_a_dump(tmp_path: Path) -> None:
    waits = [*DONE, entry("all_reduce", 3, "started")]
    found = verdict(tmp_path, waits, waits, None)
    assert "Ranks 0 and 1 wait in all_reduce, call 3 of default_pg; of rank 2 nobody knows.\n" in text(found)
    assert "look    whether rank 2 died" in text(found)
    assert "note    There is no dump of rank 2.\n" in text(found)


def test_all_are_there_and_alike(tmp_path: Path) -> None:
    found = verdict(tmp_path, *([*DONE, entry("all_reduce", 3, state)] for state in ("started", "scheduled")))
    assert "All 2 ranks are in all_reduce, call 3 of default_pg, alike, and it has not ended on ranks 0" in text(found)
    assert "look    the network and the GPUs" in text(found)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (entry("all_reduce", 3, "started", 4), "all_reduce 8 Float on rank 0 and all_reduce 4 Float on rank 1."),
        (entry("barrier", 3, "started", 8), "all_reduce 8 Float on rank 0 and barrier 8 Float on rank 1."),
        (
            entry("all_reduce", 3, "started", input_dtypes=["Half"], output_dtypes=["Half"]),
            "all_reduce 8 Float on rank 0 and all_reduce 8 Half on rank 1.",
        ),
    ],
)
def test_ranks_that_disagree(other: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    found = verdict(tmp_path, [*DONE, entry("all_reduce", 3, "started")], [*DONE, other])
    assert f"Ranks disagree in call 3 of default_pg: {sentence}\n" in text(found)


def test_sizes_may_differ_where_they_may(tmp_path: Path) -> None:
    uneven = [[*DONE, entry("all_to_all", 3, "completed", size)] for size in (4, 12)]
    assert verdict(tmp_path, *uneven).stuck == ()
    root = entry("gather", 3, "completed", output_sizes=[[8], [8]])
    assert verdict(tmp_path, [*DONE, root], [*DONE, entry("gather", 3, output_sizes=[])]).stuck == ()


def test_what_the_ring_has_forgotten_is_no_absence(tmp_path: Path) -> None:
    """The recorder keeps the newest calls; a rank that made more of them has forgotten more."""
    known = [entry("all_reduce", number) for number in range(5, 9)]
    assert verdict(tmp_path, known, known[2:]).stuck == ()
    late = verdict(tmp_path, [*known, entry("all_reduce", 9, "started")], known[2:])
    assert (late.stuck[0].number, late.stuck[0].culprits) == (9, [1])


def test_messages(tmp_path: Path) -> None:
    both = verdict(tmp_path, [message("send", "0->1")], [message("recv", "1<-0")])
    assert both.stuck == ()  # both are there: it is under way
    alone = verdict(tmp_path, [message("send", "0->1")], [message("send", "1->0", state="completed")])
    assert "Rank 1 never received message 1 of default_pg; rank 0 waits for it.\n" in text(alone)
    smaller = verdict(tmp_path, [message("send", "0->1")], [message("recv", "1<-0", size=4)])
    assert "Ranks disagree in message 1 of default_pg: send 0→1 8 Float on rank 0 and recv 0→1 4 Float" in text(smaller)
    late = [message("send", "0->1"), message("recv", "0<-1")]  # both in one launch: the second is what it waits for
    half = verdict(tmp_path, late, [message("recv", "1<-0", state="completed")])
    assert "Rank 1 never sent message 1 of default_pg; rank 0 waits for it.\n" in text(half)
    lost = verdict(tmp_path, [message("recv", "0<-1")], None)
    assert "Rank 0 waits in recv, message 1 of default_pg; of rank 1 nobody knows.\n" in text(lost)


def test_what_is_launched_together_is_one_call(tmp_path: Path) -> None:
    parts = [entry("all_reduce", 3, "started"), entry("all_reduce", 3, "started", 4), entry("coalesced", 3, "started")]
    found = verdict(tmp_path, [*DONE, *parts], DONE)
    assert "all_reduce 8 Float and 1 more" in text(found)
    assert found.stuck[0].culprits == [1]


def test_many_ranks_stand_in_one_line(tmp_path: Path) -> None:
    waits = [*DONE, entry("all_reduce", 3, "started")]
    found = verdict(tmp_path, *[DONE if rank == 77 else waits for rank in range(256)])
    assert "Rank 77 never came to all_reduce, call 3 of default_pg; ranks 0–76 and 78–255 wait there.\n" in text(found)


def test_a_dump_without_lines_says_so(tmp_path: Path) -> None:
    """JSON, as PyTorch writes it, has no frames."""
    bare = [{name: value for name, value in one.items() if name != "frames"} for one in DONE]
    for rank, entries in enumerate(([*bare, {**bare[0], "collective_seq_id": 3, "state": "started"}], bare)):
        held = {"entries": entries, "pg_config": {"0": {"ranks": "[0, 1]"}}, "version": "2.10"}
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(held), encoding="utf-8")
    paths = sorted(tmp_path.iterdir())
    assert all(map(is_dump, paths))
    found = explain_hang(read_dumps(paths))
    assert "Rank 1 never came" in text(found)
    assert "note    These dumps hold no lines" in text(found)


def test_as_json(tmp_path: Path) -> None:
    found = as_json(verdict(tmp_path, [*DONE, entry("all_reduce", 3, "started")], DONE))
    (stuck,) = json.loads(json.dumps(found))["stuck"]
    assert (stuck["culprits"], stuck["waiting"], stuck["number"]) == ([1], [0], 3)
    assert stuck["calls"]["0"] == {
        "kind": "all_reduce", "inputs": [[8]], "outputs": [[8]], "state": "on the GPU", "file": "/home/me/train.py",
        "line": 31,
    }  # fmt: skip


# On the command line


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["explain", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_folder_or_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = dump(tmp_path, [[*DONE, entry("all_reduce", 3, "started")], DONE])
    code, out, error = ask(capsys, str(tmp_path))
    assert (code, error) == (0, "")
    assert "Rank 1 never came to all_reduce" in out
    assert ask(capsys, *map(str, paths)) == (0, out, "")
    code, out, _ = ask(capsys, str(tmp_path), "--json")
    assert (code, json.loads(out)["version"]) == (0, 1)


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump(tmp_path, [DONE])
    one = tmp_path / "nccl_trace_rank_0"
    for name, data, why in (
        ("of_nobody", one.read_bytes(), "does not say whose it is"),
        ("again_0", one.read_bytes(), "are both of rank 0"),
        ("cut_1", one.read_bytes()[:-40], "is no dump of PyTorch's flight recorder"),
        ("list_1", pickle.dumps([1], 2), "it has no entries"),
        ("odd_1", pickle.dumps({"entries": [{"collective_seq_id": 1}]}, 2), "an entry has no process group"),
        ("trace_1.json", b'{"traceEvents": []}', "1 of the other files are none"),
    ):
        (tmp_path / name).write_bytes(data)
        code, out, error = ask(capsys, str(one), str(tmp_path / name))
        assert (code, out) == (2, ""), name
        assert why in error
        assert error.count("\n") == 1
    code, _, error = ask(capsys, str(one), "--save", str(tmp_path / "run.busy"))
    assert (code, "only --json goes" in error, (tmp_path / "run.busy").exists()) == (2, True, False)


@pytest.mark.parametrize("verb", ["show", "compare", "export"])
def test_other_verbs_say_where_dumps_go(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = dump(tmp_path, [DONE])
    further = {"show": [], "compare": [str(path)], "export": ["--to", "json"]}[verb]
    assert cli.main([verb, str(path), *further]) == 2
    assert "go to keepbusy explain" in capsys.readouterr().err


# Pickles of strangers

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4) | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@given(PLAIN, st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_read_as_python_reads_them(value: Any, protocol: int) -> None:
    assert plain_value(pickle.dumps(value, protocol)) == value


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_that_a_pickle_names_is_run(protocol: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "made"
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps({"entries": [Harmful(made)]}, protocol))
    code, out, error = ask(capsys, str(path))
    assert (code, out, made.exists()) == (2, "", False)
    assert "which plain values do not need" in error


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02X\xff\xff\xff\x7fshort.",  # a text of 2 GB that is not there
        b"\x80\x02\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x02Nr\xff\xff\xff\xff.."[:8],  # put by at place four billion
        b"\x80\x02e.", b"\x80\x02]h\x05.", b"\x80\x02}]Ns.", b"\x80\x02(NNNu.", b"\x80", b"\x80\x02\x87.",
    ],
)  # fmt: skip
def test_pickles_that_were_made_to_harm(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"damaged|cut off|zip"):
        plain_value(data)


@pytest.mark.parametrize(
    "name", ["profiling_name", "process_group", "input_sizes", "input_dtypes", "frames", "timeout_ms"]
)
def test_a_list_whose_text_has_no_end_is_refused(tmp_path: Path, name: str) -> None:
    laughs: list[Any] = []
    for _ in range(60):
        laughs = [laughs, laughs]
    with pytest.raises(BadInput, match="it holds more than any job writes"):
        verdict(tmp_path, [entry("all_reduce", 1, "started", **{name: laughs})])


def in_itself() -> list[Any]:
    held: list[Any] = []
    held.append(held)
    return held


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ([entry("all_reduce", 1, input_sizes=[[4] * 15_000] * 15_000)], "it holds more than any job writes"),
        ([entry("all_reduce", 1, "started")] * 1_000_000, "it holds more than any job writes"),
        ([entry("x" * 1_000_000, 1)] * 1_000, "it holds more than any job writes"),
        ([entry("all_reduce", 1, frames=[{**FRAMES[0], "filename": "x" * 1_000_000}] * 1_000)], "it holds more than"),
        (in_itself(), "maximum recursion depth exceeded"),
        (["x" * (25 << 20)], "has more than 20 MB, which no flight recorder writes"),
    ],
    ids=["sizes", "entries", "names", "files", "in itself", "bytes"],
)
def test_a_dump_that_would_take_minutes_or_gigabytes_is_refused(tmp_path: Path, entries: list[Any], fault: str) -> None:
    with pytest.raises(BadInput, match=fault):
        verdict(tmp_path, entries)


def test_a_pickle_has_so_many_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "_MOST_INSTRUCTIONS", 2_000)
    verdict(tmp_path, DONE)
    with pytest.raises(BadInput, match="it has more than 2,000 instructions"):
        verdict(tmp_path, [()] * 2_000)


def test_what_is_read_may_be_long(tmp_path: Path) -> None:
    """Twice as many calls as PyTorch keeps, with thirty frames each."""
    calls = [entry("all_reduce", number, frames=FRAMES * 10, input_sizes=[[4] * 8] * 30) for number in range(4_000)]
    assert text(verdict(tmp_path, calls)).count("Nothing hangs") == 1


@given(st.data())
def test_a_damaged_dump_is_refused_or_read(data: st.DataObject) -> None:
    whole = bytearray(pickle.dumps({"entries": [entry("all_reduce", 1)], "version": "2.10"}, 2))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(1, len(whole)))
    try:
        read = plain_value(bytes(whole[:cut]))
    except ValueError:
        return
    assert isinstance(read, dict | list | tuple | str | bytes | int | float | None)  # whatever it is, it is plain
