"""What a logged process leaves -> the timeline of its run: a training that copies from pageable memory, on an H200."""

from __future__ import annotations

import json
import shutil
import tarfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from handwritten_log import RECORDED

import keepbusy
from keepbusy.instrument import lines
from keepbusy.instrument.lines import OURS
from keepbusy.log.log_file import ROW
from keepbusy.log.logged_run import read_processes, timeline_of_processes, was_logged
from keepbusy.log.program_log import FACTS, LOOKS
from keepbusy.timeline.model import Timeline
from keepbusy.timeline.steps import without_first_steps


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """Recorded by `keepbusy run` with KEEPBUSY_KEEP: of stallbench's pageable_copy, 100 steps; of the windows what is
    read of them, and the places of PyTorch and of ours as they are here."""
    with tarfile.open(RECORDED / "pageable_copy.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    folder, spec = tmp_path / "706", find_spec("torch")
    torch = f"{Path(spec.origin).parent}/" if spec is not None and spec.origin else "torch/"
    for name in ("names", "looks.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("{ours}", OURS).replace("{torch}", torch))
    looks = json.loads((folder / "looks.json").read_text())
    text = np.frombuffer(json.dumps(looks["names"]).encode(), np.uint8)
    np.savez(folder / LOOKS, times=np.array(looks["times"]), chains=np.array(looks["chains"]), names=text)
    return tmp_path


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
