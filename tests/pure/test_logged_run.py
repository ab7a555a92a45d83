"""What a logged process leaves -> the timeline of its run: a training that copies from pageable memory, on an H200."""

from __future__ import annotations

import json
import shutil
import threading
import time
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from handwritten_log import unpacked
from hypothesis import given, settings
from hypothesis import strategies as st

import keepbusy
from keepbusy.cli import program
from keepbusy.log.joined_ranks import rebuild_ranks
from keepbusy.log.log_file import RESUMED, ROW, THINNED, read_log
from keepbusy.log.logged_run import read_processes, timeline_of_processes
from keepbusy.log.program_log import FACTS, SAMPLES, LogPortions
from keepbusy.program import lines
from keepbusy.program.loops.log_gaps import LogGaps
from keepbusy.timeline.model import NONE, Timeline
from keepbusy.timeline.steps import without_first_steps


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A training of 100 steps that copies from pageable memory."""
    return unpacked("pageable_copy.tar.gz", tmp_path)


def timeline(left: Path) -> Timeline:
    return timeline_of_processes(read_processes(left), "train.py")


def test_the_run_is_explained_whole(left: Path) -> None:
    """Measured with the fix made: 31.3 -> 8.5 ms, on another day."""
    whole = timeline(left)
    told = keepbusy.explain(without_first_steps(whole))
    assert told.plain_step / 1e6 == pytest.approx(30.8, abs=0.5)
    first = told.plan[0]
    assert [str(where) for where in first.where] == ["/programs/pageable_copy.py:27"]
    assert first.causes == ("blocking_copy",)
    assert first.predicted.step / 1e6 == pytest.approx(8.3, abs=0.6)
    assert "11,669 calls, all of the run" in whole.facts.notes[0]
    assert whole.facts.logged
    assert whole.facts.device == "NVIDIA H200"


def test_the_timeline_lasts_as_long_as_the_run_did(left: Path) -> None:
    facts = json.loads((left / "706" / FACTS).read_text())
    whole = timeline(left)
    assert whole.spans.end[whole.rows_of(0)].max() == facts["ended"] - facts["began"]
    assert len(whole.marks) == 100


def test_iterations_under_the_profiler_are_left_out(left: Path) -> None:
    assert len(timeline(left).facts.beside) in range(2, 12)


def test_of_a_run_within_one_window_the_iterations_stay_in_which_it_neither_began_nor_ended(left: Path) -> None:
    path = left / "706" / FACTS
    facts = json.loads(path.read_text())
    first, last = facts["windows"]
    facts["windows"] = [first | {"closes": facts["ended"] - 1_000_000, "closed": facts["ended"]}, last]
    path.write_text(json.dumps(facts))
    whole = timeline(left)
    assert len(whole.marks) - len(whole.facts.beside) > 20


def test_a_window_that_nobody_closed_lasts_to_the_end(left: Path) -> None:
    path = left / "706" / FACTS
    facts = json.loads(path.read_text())
    del facts["windows"][1]["closed"]
    path.write_text(json.dumps(facts))
    beside = timeline(left).facts.beside
    assert beside[-1] == 99
    assert 5 not in beside


def test_where_no_kernel_was_timed_nothing_is_said_of_the_gpu(left: Path) -> None:
    (left / "706" / FACTS).unlink()  # as of a process that was killed
    whole = timeline(left)
    assert "No kernel was timed, because the run ended too soon" in whole.facts.notes[1]
    told = keepbusy.explain(without_first_steps(whole))
    assert told.plan == ()
    assert told.ledger == {}


def test_of_a_process_that_was_killed_the_cost_is_a_share_of_what_was_recorded(left: Path) -> None:
    path = left / "706" / FACTS
    facts = json.loads(path.read_text())
    assert "held it up for 0.4% of the time" in timeline(left).facts.notes[0]
    del facts["ended"]
    path.write_text(json.dumps(facts))
    assert "held it up for 0.4% of the time" in timeline(left).facts.notes[0]


def test_of_a_run_that_went_on_after_its_log_was_full_the_first_part_is_explained(left: Path) -> None:
    path = left / "706" / FACTS
    facts = json.loads(path.read_text())
    later = {"stopped": "the log is full", "ended": facts["ended"] + 3_600 * 10**9}
    path.write_text(json.dumps(facts | later))
    whole = timeline(left)
    assert whole.spans.end.max() <= facts["ended"] - facts["began"]
    assert "11,669 calls, the first 15.26 s of the run" in whole.facts.notes[0]
    assert whole.facts.notes[1].endswith("is not in this report (the log is full).")


# of a long run calls are left out

MOMENTS = st.lists(st.integers(0, 10**12), max_size=12, unique=True).map(sorted)


@given(MOMENTS, st.lists(st.integers(0, 10**12), min_size=1).map(sorted))
def test_recorded_time_passes_outside_of_what_was_left_out(moments: list[int], times: list[int]) -> None:
    gaps = LogGaps(moments[0:-1:2], moments[1::2])
    passed = [
        time - sum(max(0, min(time, end) - begin) for begin, end in zip(moments[0:-1:2], moments[1::2], strict=True))
        for time in times
    ]
    assert gaps.recorded(np.array(times)).tolist() == passed
    inside = gaps.holds(np.array(times))
    assert inside.tolist() == [
        any(begin <= time < end for begin, end in zip(moments[0:-1:2], moments[1::2], strict=True)) for time in times
    ]
    outside = np.array(times)[~inside]
    assert gaps.real(gaps.recorded(outside)).tolist() == outside.tolist()


@given(st.integers(1, 100_000), st.floats(0.01, 10.0), st.integers(0, 16 << 20))
@settings(max_examples=20)
def test_a_log_has_room_for_a_run_of_any_length(bytes_a_look: int, seconds_a_look: float, before: int) -> None:
    """And some of it for its later hours, also where an earlier run of the process has used some."""
    portions, so_far, written = LogPortions(before, most_bytes=48 << 20), before, list[int]()
    for look in range(1, 40_000):
        time = round(look * seconds_a_look * 1e9)
        if portions.are_written(time, so_far):
            so_far += bytes_a_look
            written.append(look)
    assert so_far <= 48 << 20
    assert written[-1] > 40_000 / 2 or so_far > 44 << 20
    first = [*takewhile(lambda one: one[0] == one[1], zip(written, range(1, 40_000), strict=False))]
    assert len(first) == len(written) or len(first) * bytes_a_look >= 16 << 20


@pytest.fixture
def thinned(left: Path) -> Path:
    """As if nothing had been written of half of its steps, a second and a half."""
    [process] = left.iterdir()
    rows = np.fromfile(process / "rows", ROW)
    log = read_log(process)
    begin, end = log.rows["begin"][np.searchsorted(log.begin, log.begin[-1] - [2_200_000_000, 700_000_000])]
    kept = rows[(rows["begin"] < begin) | (rows["begin"] >= end)]
    number = len(log.calls)
    both = np.zeros(2, ROW)
    both["begin"], both["call"], both["thread"] = (begin, end), (number + 1, number + 2), 1
    (process / "rows").write_bytes(np.concatenate([kept, both]).tobytes())
    with (process / "names").open("a") as names:
        for more, kind in ((1, THINNED), (2, RESUMED)):
            names.write(json.dumps({"call": number + more, "kind": kind}) + "\n")
    return left


def test_what_was_left_out_is_part_of_the_run(thinned: Path) -> None:
    """Steps and the plan are those of what was recorded; where the time went, of all of it."""
    facts = json.loads((thinned / "706" / FACTS).read_text())
    whole = timeline(thinned)
    took = facts["ended"] - facts["began"]
    assert whole.spans.end[whole.rows_of(0)].max() == pytest.approx(took - 1_500_000_000, abs=4 * 10**7)
    assert "calls, in 13.84 s of the run's 15.36 s: its first 13.07 s and a later stretch" in whole.facts.notes[0]
    run = whole.facts.run
    assert run is not None
    assert run.time == took
    told = keepbusy.explain(without_first_steps(whole))
    assert told.plan[0].predicted.step / 1e6 == pytest.approx(8.3, abs=0.6)
    assert told.plain_step / 1e6 == pytest.approx(30.8, abs=1)


def test_where_the_time_went_is_known_of_what_was_left_out(left: Path, request: pytest.FixtureRequest) -> None:
    """Fifteen looks tell it, so to a tenth of a second."""
    before = timeline(left).facts.run
    after = timeline(request.getfixturevalue("thinned")).facts.run
    assert before is not None
    assert after is not None
    assert after.busy == pytest.approx(before.busy, rel=0.05)
    times = [{part.place: part.time for part in run.parts if part.time > 3e8} for run in (before, after)]
    assert times[1] == pytest.approx(times[0], abs=2e8)


def test_threads_beside_the_program_are_known_by_their_lines(left: Path) -> None:
    [process] = left.iterdir()
    with np.load(process / SAMPLES) as looks:
        said, columns = json.loads(looks["names"].tobytes()), {name: looks[name] for name in ("times", "chains")}
    [own, *_] = [number for number, (file, _, _) in enumerate(said["codes"]) if file.endswith("pageable_copy.py")]
    said |= {"beside": [[own, 7, 2 * 10**9]], "ran": 3 * 10**9}
    np.savez(process / SAMPLES, names=np.frombuffer(json.dumps(said).encode(), np.uint8), **columns)
    run = timeline(left).facts.run
    assert run is not None
    assert ([(line.place.rpartition("/")[2], line.time) for line in run.beside], run.ran) == (
        [("pageable_copy.py:7", 2 * 10**9)],
        3 * 10**9,
    )


def test_a_process_that_launched_nothing_is_no_part_of_the_run(left: Path) -> None:
    shutil.copytree(left / "706", left / "707")
    (left / "707" / "rows").write_bytes(np.zeros(8, ROW).tobytes())
    assert len(read_processes(left)) == 1
    shutil.rmtree(left / "706")
    assert read_processes(left) == []


def test_the_package_that_ran_is_the_users_own_wherever_it_lies(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_RAN_ELSEWHERE", [])
    path = left / "706" / FACTS
    path.write_text(json.dumps(json.loads(path.read_text()) | {"program": "/x/site-packages/train/"}))
    assert lines.kind_of("/x/site-packages/train/loop.py") == lines.LIBRARY
    timeline(left)
    assert lines.kind_of("/x/site-packages/train/loop.py") == lines.USER
    assert lines.kind_of("/x/site-packages/other/loop.py") == lines.LIBRARY


# several ranks


def test_the_line_that_makes_a_rank_late_is_to_blame_and_its_saving_was_measured(tmp_path: Path) -> None:
    """Two H200s, 40 steps; with the line left out a step took 21 to 22 ms. Rank 0 is ahead until its queue is full."""
    processes = read_processes(unpacked("late_rank.tar.xz", tmp_path))
    run = without_first_steps(timeline_of_processes(processes, "late_rank.py"))
    parts = run.spans.meeting[run.spans.meeting != NONE]
    ends = run.spans.end[run.spans.meeting != NONE]
    latest, earliest = np.zeros(parts.max() + 1), np.full(parts.max() + 1, np.inf)
    np.maximum.at(latest, parts, ends)
    np.minimum.at(earliest, parts, ends)
    assert np.median(latest - earliest) < 20_000  # a collective ends for both once the last has come
    first = keepbusy.explain(run).plan[0]
    assert [str(where) for where in first.where] == ["/programs/late_rank.py:15"]
    assert first.predicted.step / 1e6 == pytest.approx(22, abs=2.5)


def test_a_rank_in_which_no_window_opened_takes_its_kernel_times_from_the_other(tmp_path: Path) -> None:
    expected = read_processes(unpacked("late_rank.tar.xz", tmp_path / "both"))
    for window in expected[1].folder.glob("window*.json"):
        window.unlink()
    found = read_processes(tmp_path / "both")
    whole = timeline_of_processes(found, "late_rank.py")
    assert "of kernel times known" not in whole.facts.notes[0]
    assert len(whole.facts.notes) == 1
    common = found[1].times.durations.keys() & expected[1].times.durations.keys()
    assert len(common) > 0.9 * len(expected[1].times.durations)


def test_what_rebuilt_times_are_wrong_by_is_noise(left: Path) -> None:
    whole = without_first_steps(timeline(left))
    told, unsure = keepbusy.explain(whole), keepbusy.explain(whole.change_facts(rebuilt_within=0.5))
    assert told.noise == round(0.03 * told.plain_step)
    assert unsure.noise == pytest.approx(0.5 * told.ledger["computing"], rel=0.01)


# they leave their logs for the first of them


def left_by(rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As the supervisor of this rank leaves it; returns what the first rank says is missing."""
    monkeypatch.setenv("RANK", str(rank))
    process = folder / "42"
    process.mkdir(parents=True)
    (process / "rows").write_bytes(bytes([rank]) * 32)
    return program.shared_logs(folder)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(program.MEETING, str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    return tmp_path


def test_the_first_rank_has_the_logs_of_all_of_them(two_ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert left_by(1, two_ranks / "second", monkeypatch) == []
    assert left_by(0, two_ranks / "first", monkeypatch) == []
    rows = {path.parent.name: path.read_bytes()[0] for path in (two_ranks / "first").glob("*/rows")}
    assert rows == {"42": 0, "rank1-42": 1}
    assert not [*two_ranks.glob("keepbusy-*")]


def test_a_rank_that_could_not_be_logged_says_why(two_ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    (second := two_ranks / "second").mkdir()
    (second / program.WHY_NOT).write_text("The run is not recorded: there is no C compiler.")
    program.shared_logs(second)
    assert left_by(0, two_ranks / "first", monkeypatch) == [
        "rank 1 is missing from this report: The run is not recorded: there is no C compiler."
    ]


def test_of_a_rank_that_waited_too_long_the_time_of_day_tells_its_clock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    distributed = pytest.importorskip("torch.distributed")
    served = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    served.set("keepbusy/1/0", b"log")
    served.set("keepbusy/1", f"rank1.tar 1 {program._clock_ahead() - 10**12}")
    monkeypatch.setattr(program, "_ANSWERS_WITHIN", 0.01)
    program._receive(served, 1, tmp_path)
    assert (tmp_path / "rank1.tar").read_bytes() == b"log"
    assert int((tmp_path / "rank1.clock").read_text()) == pytest.approx(10**12, abs=10**9)


def test_a_rank_of_another_host_sends_its_log_and_what_its_clock_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    distributed = pytest.importorskip("torch.distributed")
    served = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    its = distributed.TCPStore("127.0.0.1", served.port, is_master=False)
    monkeypatch.setenv("RANK", "1")
    (here := tmp_path / "here").mkdir()
    (there := tmp_path / "there").mkdir()
    (there / "rank1.tar").write_bytes(b"log" * program.PIECE)
    began = time.perf_counter_ns()
    sending = threading.Thread(target=program._send, args=(its, there / "rank1.tar"))
    sending.start()
    while not (here / "rank1.tar").exists():
        program._receive(served, 1, here)
    sending.join()
    assert (here / "rank1.tar").read_bytes() == b"log" * program.PIECE
    assert abs(int((here / "rank1.clock").read_text())) < time.perf_counter_ns() - began


def test_ranks_on_two_clocks_are_rebuilt_as_on_one(tmp_path: Path) -> None:
    processes = read_processes(unpacked("late_rank.tar.xz", tmp_path))
    logs, times = [one.log for one in processes], [one.times for one in processes]
    expected = rebuild_ranks(logs, times)
    other = 3_700_000_000
    logs[1] = replace(logs[1], begin=logs[1].begin + other)
    shifted = rebuild_ranks(logs, times, [0, -other])
    for one, its, ahead in zip(expected, shifted, (0, other), strict=True):
        assert np.abs(its.end - ahead - one.end).max() < 1_000
