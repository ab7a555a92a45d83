"""Folders of runs: nobody else's, and gone when the run is."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from keepbusy.cli import program
from keepbusy.program import processes
from keepbusy.program.processes import RunFolder, make_folder
from keepbusy.timeline.files import BadInput

MAKE = "from keepbusy.program.processes import make_folder; import os; print(make_folder(), flush=True); {}"


def made(folder: Path, end: str) -> Path:
    variables = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", MAKE.format(end)], capture_output=True, text=True, env=variables)
    return Path(done.stdout.strip())


def test_a_killed_run_leaves_one_and_the_next_takes_it_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not made(tmp_path, "").exists()
    stale = made(tmp_path, "os.kill(os.getpid(), 9)")
    assert stale.exists()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine, another = make_folder(), make_folder()
    assert not stale.exists()
    assert mine.exists()
    assert another.stat().st_mode & 0o777 == 0o700


def test_a_run_that_needs_none_makes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So nothing is left of one that a signal ends."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = RunFolder()
    assert folder.files("*") == []
    assert [*tmp_path.iterdir()] == []
    (folder.path() / "rank1.busy").touch()
    assert [path.parent for path in folder.files("rank*.busy")] == [*tmp_path.iterdir()] == [folder.path()]


def test_a_session_leaves_nothing(tmp_path: Path) -> None:
    """Its process has a folder within one of the session's, and both go."""
    session = "import keepbusy\nwith keepbusy.record():\n    pass\n"
    for end in ("", "raise SystemExit(3)"):
        variables = {**os.environ, "TMPDIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", session + end], check=False, capture_output=True, env=variables)
        assert [*tmp_path.glob("keepbusy-*")] == []


MEET = """\
import os
from keepbusy.cli import program
folder = program.meeting_place()
(folder / "rank1.busy").touch()
print(folder, flush=True)
{}
"""


def rank(folder: Path, run: str, end: str) -> tuple[Path, subprocess.Popen[str]]:
    """A rank that has left something where it meets others, and ends like this."""
    variables = {**os.environ, "TMPDIR": str(folder), "TORCHELASTIC_RUN_ID": run}
    command = [sys.executable, "-c", MEET.format(end)]
    started = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables)
    assert started.stdout is not None
    return Path(started.stdout.readline().strip()), started


def test_where_ranks_met_that_were_killed_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _, killed = rank(tmp_path, "killed", "os.kill(os.getpid(), 9)")
    killed.communicate()
    held, living = rank(tmp_path, "living", "input()")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "living")
    assert program.meeting_place() == held
    assert [path.name for path in held.iterdir()] == ["rank1.busy"]
    assert [*tmp_path.iterdir()] == [held]
    living.communicate("\n")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    program.meeting_place()
    assert held.exists()  # this process is in there, too


def test_what_an_earlier_run_of_this_name_left_is_not_taken_for_this_run(tmp_path: Path) -> None:
    """A port and an id of torchrun come again."""
    for _ in range(2):
        folder, killed = rank(tmp_path, "none", "os.kill(os.getpid(), 9)")
        killed.communicate()
        (folder / "rank7.busy").touch()
    [folder] = tmp_path.iterdir()
    again, living = rank(tmp_path, "none", "input()")
    assert [path.name for path in again.iterdir()] == ["rank1.busy"]
    assert again == folder
    living.communicate("\n")


def test_ranks_do_not_meet_in_a_folder_that_others_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = program.meeting_place()
    assert program.meeting_place() == folder
    folder.chmod(0o777)
    with pytest.raises(BadInput, match="not this user's alone"):
        program.meeting_place()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="not this user's alone"):
        program.meeting_place()


def test_to_follow_twice_is_to_follow_once_and_it_is_undone() -> None:
    import multiprocessing.spawn

    processes.follow(make_folder, {})()  # whoever followed in an earlier test does no longer
    before = multiprocessing.spawn.get_preparation_data
    processes.follow(make_folder, {})
    undo = processes.follow(make_folder, {})
    assert multiprocessing.spawn.get_preparation_data.__wrapped__ is before
    undo()
    assert multiprocessing.spawn.get_preparation_data is before


def test_a_rank_that_knows_only_its_own_number_has_a_gpu_of_that_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `srun python`."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert program.devices(1) == 4
