"""What a logged process leaves -> the timeline of its run: a training that copies from pageable memory, on an H200."""

from __future__ import annotations

import argparse
import json
import shutil
import tarfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from handwritten_log import RECORDED

import keepbusy
from keepbusy.cli import program
from keepbusy.instrument import lines
from keepbusy.instrument.lines import OURS
from keepbusy.log.log_file import ROW
from keepbusy.log.logged_run import read_processes, timeline_of_processes, was_logged
from keepbusy.log.program_log import FACTS, LOOKS
from keepbusy.timeline.model import NONE, Timeline
from keepbusy.timeline.steps import without_first_steps


def unpacked(name: str, into: Path) -> Path:
    """What `keepbusy run` left with KEEPBUSY_KEEP on H200s, of a program of stallbench; of the windows what is read of
    them, and the places of PyTorch and of ours as they are here."""
    with tarfile.open(RECORDED / name) as archive:
        archive.extractall(into, filter="data")
    spec = find_spec("torch")
    torch = f"{Path(spec.origin).parent}/" if spec is not None and spec.origin else "torch/"
    for folder in into.iterdir():
        for file in ("names", "looks.json"):
            text = (folder / file).read_text()
            (folder / file).write_text(text.replace("{ours}", OURS).replace("{torch}", torch))
        looks = json.loads((folder / "looks.json").read_text())
        names = np.frombuffer(json.dumps(looks["names"]).encode(), np.uint8)
        np.savez(folder / LOOKS, times=np.array(looks["times"]), chains=np.array(looks["chains"]), names=names)
    return into


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A training of 100 steps that copies from pageable memory."""
    return unpacked("pageable_copy.tar.gz", tmp_path)


def timeline(left: Path) -> Timeline:
    assert was_logged(left)
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


def test_where_no_kernel_was_timed_nothing_is_said_of_the_gpu(left: Path) -> None:
    (left / "706" / FACTS).unlink()  # as of a process that was killed
    whole = timeline(left)
    assert "No kernel was timed, because the run ended too soon" in whole.facts.notes[1]
    told = keepbusy.explain(without_first_steps(whole))
    assert told.plan == ()
    assert told.ledger == {}


def test_of_a_run_that_went_on_after_its_log_was_full_the_first_part_is_explained(left: Path) -> None:
    path = left / "706" / FACTS
    facts = json.loads(path.read_text())
    later = {"stopped": "the log is full", "ended": facts["ended"] + 3_600 * 10**9}
    path.write_text(json.dumps(facts | later))
    whole = timeline(left)
    assert whole.spans.end.max() <= facts["ended"] - facts["began"]
    assert "11,669 calls, the first 15.26 s of the run" in whole.facts.notes[0]
    assert whole.facts.notes[1].endswith("is not in this report (the log is full).")


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


# they leave their logs for the first of them


def left_by(rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str = "logged") -> list[str]:
    """As the supervisor of this rank leaves it; returns what the first rank says is missing."""
    monkeypatch.setenv("RANK", str(rank))
    process = folder / "42"
    process.mkdir(parents=True)
    (process / "rows").write_bytes(bytes([rank]) * 32)
    return program.shared_logs(folder) if kind == "logged" else program.shared([], [kind])[1]


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


def test_a_rank_that_left_no_log_is_missing_from_the_report(two_ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_by(1, two_ranks / "second", monkeypatch, "It took no step.")
    missing = left_by(0, two_ranks / "first", monkeypatch)
    assert missing == ["rank 1 is missing from this report: It took no step."]


def test_ranks_of_several_hosts_are_not_logged_for_their_clocks_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    asked = argparse.Namespace(after=None, memory=False, live=False)
    assert program._logged(Path(), asked, lambda: None) == (None, "")
