"""Files take their place once they are whole: nobody else's is touched, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from build import loop

from keepbusy.timeline import files
from keepbusy.timeline.busy_file import save
from keepbusy.timeline.files import BadInput, replacing, replacing_folder, write_whole


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def parts_in(folder: Path) -> list[Path]:
    return [*folder.glob(".keepbusy-*")]


@pytest.fixture
def _umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_umask")
@pytest.mark.parametrize("mode", [0o750, 0o600, 0o444, 0o2755])
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "out"
    path.write_text("before")
    path.chmod(mode)
    write_whole(path, "after")
    assert (path.read_text(), mode_of(path)) == ("after", mode)
    write_whole(tmp_path / "new", b"")
    assert mode_of(tmp_path / "new") == 0o640


@pytest.mark.usefixtures("_umask")
def test_a_folder_that_is_replaced_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    for step, mode in ((1, 0o750), (2, 0o700)):
        with replacing_folder(path) as part:
            (part / f"of step {step}").touch()
        assert [one.name for one in path.iterdir()] == [f"of step {step}"]
        assert mode_of(path) == mode
        path.chmod(0o700)
    with pytest.raises(ZeroDivisionError), replacing_folder(path):
        raise ZeroDivisionError
    assert [one.name for one in path.iterdir()] == ["of step 2"]
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_takes_its_place_only_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"%d" % (1 / 0))
    assert path.read_text() == "before"
    assert [*tmp_path.iterdir()] == [path]


def test_its_owner_too_where_it_may_be_given_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, given = tmp_path / "out", []
    path.touch()
    path.chmod(0o4755)
    monkeypatch.setattr(os, "fchown", lambda _, user, group: given.append((user, group)))
    write_whole(path, "after")
    about = path.stat()
    assert given == [(-1, about.st_gid), (about.st_uid, -1)]
    assert mode_of(path) == 0o4755


def test_what_ran_as_its_owner_runs_as_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    path.touch()
    path.chmod(0o4755)
    about = list(path.stat())
    about[stat.ST_UID] += 1
    monkeypatch.setattr(files, "_status", lambda _: os.stat_result(about))

    def refuse(_: int, user: int, group: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchown", refuse)
    write_whole(path, "after")
    assert (path.read_text(), mode_of(path)) == ("after", 0o755)


def test_a_link_stays_one_and_what_it_points_to_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    path, link = tmp_path / "folder" / "out", tmp_path / "link"
    link.symlink_to(Path("folder") / "out")
    write_whole(link, "first")
    path.chmod(0o600)
    write_whole(link, "second")
    assert link.is_symlink()
    assert (path.read_text(), mode_of(path)) == ("second", 0o600)


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "link"
    path.symlink_to(path)
    with pytest.raises(OSError, match=r"Too many levels of symbolic links: .*link'$"):
        write_whole(path, "x")
    assert path.is_symlink()


def test_nobody_can_have_another_file_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should somebody guess the name after all, the link that he put there is not followed."""
    victim, path = tmp_path / "victim", tmp_path / "out.busy"
    victim.write_text("precious")
    monkeypatch.setattr(os, "urandom", lambda count: bytes(count))
    with replacing(path) as file:
        guessed = Path(file.name)
    guessed.symlink_to("victim")
    with pytest.raises(FileExistsError, match=r"File exists: .*out\.busy'$"):
        write_whole(path, "x")
    with pytest.raises(FileExistsError), replacing_folder(path):
        raise AssertionError("it has begun")
    assert victim.read_text() == "precious"
    assert guessed.is_symlink()


def test_no_two_names_are_alike(tmp_path: Path) -> None:
    with replacing(tmp_path / "out") as one, replacing(tmp_path / "out") as other:
        assert one.name != other.name
        assert str(os.getpid()) not in Path(one.name).name.split("-")


def write_often(path: Path, letter: str) -> None:
    for _ in range(50):
        write_whole(path, letter * 5_000, durable=False)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_many_may_save_to_one_path(tmp_path: Path, kind: str) -> None:
    path, letters = tmp_path / "out.busy", "abcdef"
    pool = ThreadPoolExecutor(6) if kind == "threads" else ProcessPoolExecutor(6, get_context("fork"))
    with pool:
        [*pool.map(write_often, [path] * 6, letters)]
    assert path.read_text() in [letter * 5_000 for letter in letters]
    assert [*tmp_path.iterdir()] == [path]


# Parts of processes that were killed

KILLED = """\
import os, sys
from keepbusy.timeline.files import replacing, replacing_folder
with replacing(sys.argv[1]) as file, replacing_folder(sys.argv[1] + ".d") as folder:
    file.write(b"half")
    (folder / "half").touch()
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def stale(tmp_path: Path) -> list[Path]:
    """What a killed process left."""
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "step1.pt")], check=False)
    parts = parts_in(tmp_path)
    assert len(parts) == 2
    return parts


def test_what_a_killed_process_left_goes_with_the_next_file_there(tmp_path: Path, stale: list[Path]) -> None:
    with replacing(tmp_path / "step2.pt") as file, replacing_folder(tmp_path / "step3.pt") as folder:
        write_whole(tmp_path / "other", "x")  # what is being written stays
        assert sorted(parts_in(tmp_path)) == sorted([Path(file.name), folder])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "step2.pt", "step3.pt"]


def test_what_a_living_process_writes_stays(tmp_path: Path) -> None:
    begun = KILLED.replace("os.kill(os.getpid(), 9)", "print(flush=True); input()")
    command = [sys.executable, "-c", begun, str(tmp_path / "step1.pt")]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    write_whole(tmp_path / "other", "x")
    assert len(parts_in(tmp_path)) == 2
    writer.communicate(b"\n")
    assert (tmp_path / "step1.pt").read_bytes() == b"half"
    assert (tmp_path / "step1.pt.d" / "half").exists()


@pytest.mark.parametrize(("name", "value"), [("getuid", 1), ("uname", os.uname_result(["", "elsewhere", "", "", ""]))])
def test_what_others_left_stays(
    tmp_path: Path, stale: list[Path], monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    """Another user's, and another host's: it may not see our locks, nor we its."""
    monkeypatch.setattr(os, name, lambda: value)
    write_whole(tmp_path / "other", "x")
    assert sorted(parts_in(tmp_path)) == sorted(stale)


def test_where_nothing_can_be_locked_nothing_is_stale(
    tmp_path: Path, stale: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    write_whole(tmp_path / "other", "x")
    assert sorted(parts_in(tmp_path)) == sorted(stale)
    assert (tmp_path / "other").read_text() == "x"


def test_a_link_with_such_a_name_is_not_followed(tmp_path: Path, stale: list[Path]) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").touch()
    for number, target in enumerate((victim, victim / "file")):
        stale[0].with_name(f"{stale[0].stem}{number}.part").symlink_to(target)
    write_whole(tmp_path / "other", "x")
    assert (victim / "file").exists()


def test_who_is_taken_for_stale_before_it_is_locked_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken_away(descriptor: int, kind: int) -> bool:
        if not taken:
            taken.extend(parts_in(tmp_path))
            taken[0].unlink()
        return True

    taken: list[Path] = []
    monkeypatch.setattr(files, "lock", taken_away)
    write_whole(tmp_path / "out", "x")
    assert len(taken) == 1
    assert (tmp_path / "out").read_text() == "x"


# Where nothing can be written


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("call", ["open", "write", "fsync"])
def test_the_path_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    def fails(*given: object, **named: object) -> None:
        raise OSError(code, os.strerror(code), *(given[:1] if call == "open" else ()))

    path = tmp_path / "out.html"
    path.write_text("before")
    if call == "write":
        failing = pytest.raises(OSError, match=rf"\[Errno {code}\] {os.strerror(code)}: '.*/out\.html'$")
        with failing, replacing(path):
            fails()
    else:
        monkeypatch.setattr(os, call, fails)
        with pytest.raises(OSError, match=rf"\[Errno {code}\] {os.strerror(code)}: '.*/out\.html'$"):
            write_whole(path, "after")
    monkeypatch.undo()
    assert path.read_text() == "before"
    assert [*tmp_path.iterdir()] == [path]


def test_a_device_is_written_and_named() -> None:
    write_whole(os.devnull, "x")
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        write_whole("/dev/full", "x")


def test_a_run_too_large_for_its_place_is_a_sentence(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(BadInput, match=r"run\.busy cannot be written \(File too large\)"):
            save(loop(lambda run: run.launch(5), 3), tmp_path / "run.busy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [*tmp_path.iterdir()] == []
