"""Setting up from a fresh clone: each step says what it does, and one that fails shows its error and is the last.

The Python is a script that writes down what it is asked for, and that fails where pip installs what FAILS names.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = r"""#!/bin/sh
case "$*" in
*sys.version_info*) echo python3.11 ;;
--version) echo Python 3.11.9 ;;
"-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
*" install "*"$FAILS"*) echo "ERROR: no room for $FAILS" >&2; exit 1 ;;
*" install "*) echo "pip is quiet: ${PIP_QUIET:-no}" ;;
*) echo "run: $*" ;;
esac
"""
WHOLE = ["Python 3.11.9 in .venv-python3.11", "PyTorch", "tests and tools"]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def make(folder: Path, goal: str, fails: str = "nothing") -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", goal, "PYTHON=./python"]
    environment = {**os.environ, "FAILS": fails}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("goal", "steps"),
    [
        ("test", WHOLE),
        ("site", [*WHOLE, "the site"]),
        ("test-pure", ["Python 3.11.9 in .venv-python3.11", "tests and tools"]),
    ],
)
def test_each_step_of_setting_up_says_what_it_installs(clone: Path, goal: str, steps: list[str]) -> None:
    said = [line for line in make(clone, goal).stdout.splitlines() if line.startswith("setting up: ")]
    assert len(said) == len(steps)
    assert all(step in line for step, line in zip(steps, said, strict=True)), said


@pytest.mark.parametrize(
    ("goal", "fails"), [("test", "torch=="), ("test", "-e"), ("test-pure", "-e"), ("site", "site")]
)
def test_a_step_that_fails_shows_its_error_and_is_the_last(clone: Path, goal: str, fails: str) -> None:
    done = make(clone, goal, fails)
    assert done.returncode == 2
    assert f"ERROR: no room for {fails}\n" in done.stderr
    assert "run: " not in done.stdout
    assert "ERROR" in make(clone, goal, fails).stderr, "the next attempt takes what failed for done"


def test_pip_shows_how_far_it_is_on_a_terminal_alone(clone: Path) -> None:
    assert "pip is quiet: 2\n" in make(clone, "test-pure").stdout
    shown, terminal = pty.openpty()
    subprocess.run(["make", "dist", "PYTHON=./python"], cwd=clone, env={**os.environ, "FAILS": "none"}, stdout=terminal)
    os.close(terminal)
    said = b""
    with suppress(OSError):  # so a terminal ends
        while part := os.read(shown, 4096):
            said += part
    os.close(shown)
    assert set(re.findall("pip is quiet: (.*)\r", said.decode())) == {"no"}


def test_where_pip_finds_no_pytorch_the_newest_python_is_taken_and_pip_says_why(tmp_path: Path) -> None:
    """As without a network: to ask for a newer Python would lead nowhere."""
    for name in ("bash", "env", "seq", "grep", "head"):
        (tmp_path / name).symlink_to(shutil.which(name) or pytest.fail(f"there is no {name}"))
    for name in ("python3.14", "python3.12"):
        (tmp_path / name).write_text('#!/bin/sh\ncase "$*" in *"!= (3, ${0##*.})"*) exit 0 ;; esac\nexit 1\n')
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": str(tmp_path), "PYENV_ROOT": str(tmp_path)}
    done = subprocess.run([ROOT / ".ci/pythons", "torch==2.13.0"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/python3.14\n")


@pytest.mark.parametrize(
    ("goal", "rooms", "chosen"),
    [
        ("test", "", "not sweep"),
        ("sweeps", "", "sweep"),
        ("sweeps", "log virtual", "sweep and (sweep(room='log') or sweep(room='virtual') or not sweep)"),
    ],
)
def test_sweeps_are_run_for_the_rooms_that_are_named(
    clone: Path, goal: str, rooms: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOMS", rooms)
    assert make(clone, goal).stdout.splitlines()[-1].endswith(f" -m {chosen}")


def test_each_sweep_names_a_room_that_is_there() -> None:
    """Or `.ci/run` would run it for no change."""
    rooms = {path.stem for path in (ROOT / "src" / "keepbusy").iterdir()}
    for path in {*(ROOT / "tests").glob("*/test_*.py")} - {Path(__file__)}:
        text = path.read_text(encoding="utf-8")
        named = re.findall(r'mark\.sweep\(room="(\w+)"\)', text)
        assert len(named) == text.count("mark.sweep("), path
        assert set(named) <= rooms, path
