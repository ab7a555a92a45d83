"""The pytest plugin, in a pytest of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from warm_python import warm

from keepbusy.pytest_plugin import read_budgets
from keepbusy.timeline.files import BadInput

SOURCES = Path(__file__).parents[2] / "src"
TESTS = """\
import pytest, torch

@pytest.mark.keepbusy(max_syncs=1, max_blocking_copies=0, max_wait="2ms", max_memory="12GB")
def test_within(gpu):
    assert torch.ones(3, device=gpu).sum().item() == 3

@pytest.mark.keepbusy(max_syncs=0)
def test_reads(gpu):
    x = torch.ones(3, device=gpu)
    assert x.sum().item() == 3

@pytest.mark.keepbusy(max_blocking_copies=0, max_memory="1MB")
def test_copies(gpu):
    torch.ones(1 << 20).to(gpu)

@pytest.mark.keepbusy(max_wait="1us")
def test_waits(gpu):
    torch.cuda.synchronize()

@pytest.mark.keepbusy(min_overlap=0.9)
def test_copies_in_line(gpu):
    torch.ones(1 << 20).pin_memory().to(gpu, non_blocking=True)

@pytest.mark.keepbusy(max_syncs=0, allow=["test_them.py: on purpose"])
def test_allowed(gpu):
    torch.ones(3, device=gpu).sum().item()

def test_fails_by_itself(gpu):
    assert torch.ones(1, device=gpu).item() == 2

def test_no_gpu():
    pass
"""


def pytest_in(folder: Path, *arguments: str, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """`fresh`: in a Python that has imported nothing yet."""
    installed = any(one.name == "keepbusy" for one in entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "keepbusy.pytest_plugin"]
    command = ["-m", "pytest", *plugin, "-p", "no:cacheprovider", "-q", *arguments]
    if not fresh:
        return warm().python(*command, cwd=folder, agent=True)
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, env=environment)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    (tmp_path / "test_them.py").write_text(TESTS)
    return tmp_path


def test_marks_are_held_and_the_report_names_the_line(folder: Path) -> None:
    told = pytest_in(folder, "--keepbusy", "-rf").stdout
    assert "5 failed, 3 passed" in told
    for sentence in (
        "1 sync, where max_syncs=0",
        "test_them.py:10 in test_reads: assert x.sum().item() == 3",
        "1 blocking copy, where max_blocking_copies=0",
        "4.19 MB of the GPU's memory, where max_memory='1MB'",
        "where max_wait='1us'",
        "0% of the copies ran beside the computation, where min_overlap=0.9",
        "assert 1.0 == 2",
    ):
        assert sentence in told


def test_races_are_held_test_by_test(folder: Path) -> None:
    (folder / "test_them.py").write_text("""\
import pytest, torch

def race():
    side, x = torch.cuda.Stream(), torch.ones(8, device="cuda")
    with torch.cuda.stream(side):
        x.add_(1)
    x.sum()

def test_without_a_limit(gpu):
    race()

@pytest.mark.keepbusy(max_races=0)
def test_that_races(gpu):
    race()

@pytest.mark.keepbusy(max_races=0)
def test_that_does_not(gpu):
    torch.ones(8, device=gpu).sum()
""")
    told = pytest_in(folder, "--keepbusy", "-rf").stdout
    assert "1 failed, 2 passed" in told
    assert "2 data races, where max_races=0" in told
    assert "test_them.py:7 reads memory that test_them.py:6 may still be writing on stream side." in told


def test_unasked_it_holds_nobody_to_anything(folder: Path) -> None:
    assert "1 failed, 7 passed" in pytest_in(folder).stdout


def test_unasked_it_imports_nothing(folder: Path) -> None:
    (folder / "test_them.py").write_text(
        "import sys\n"
        "def test_light():\n"
        "    assert not {'torch', 'numpy', 'rich'} & set(sys.modules)\n"
        "    assert [one for one in sys.modules if one.startswith('keepbusy.')] in ([], ['keepbusy.pytest_plugin'])\n"
    )
    assert "1 passed" in pytest_in(folder, fresh=True).stdout


@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.sweep(room="pytest_plugin"))])
def test_budgets_are_written_and_held(folder: Path, workers: tuple[str, ...]) -> None:
    if workers:
        pytest.importorskip("xdist")
    source = "import torch\ndef test_step(gpu): torch.ones(3, device=gpu)\ndef test_other(gpu): pass\n"
    (folder / "test_them.py").write_text(source)
    assert "2 passed" in pytest_in(folder, "--keepbusy-update", *workers).stdout
    budgets = json.loads((folder / "keepbusy-budgets.json").read_text())
    assert budgets == {
        "test_them.py::test_other": {"syncs": 0, "blocking_copies": 0, "memory": 0},
        "test_them.py::test_step": {"syncs": 0, "blocking_copies": 0, "memory": 512},
    }
    (folder / "test_them.py").write_text(source.replace("device=gpu)", "device=gpu).sum().item()"))
    told = pytest_in(folder, "--keepbusy", *(["-n", "1"] if workers else [])).stdout
    assert "1 failed, 1 passed" in told
    assert "1 sync, where the budget is 0; --keepbusy-update writes a new one" in told


USAGE_ERROR = 4


@pytest.mark.parametrize(
    ("option", "given", "sentence"),
    [
        ("--keepbusy-on", "nope", "'nope' is no device; the devices are a100, "),
        ("--keepbusy-on", "none.toml", "none.toml does not exist; give a device file."),
        ("--keepbusy-budgets", "test_them.py", "test_them.py cannot be understood (Expecting value"),
    ],
)
def test_a_wrong_option_is_a_usage_error(folder: Path, option: str, given: str, sentence: str) -> None:
    done = pytest_in(folder, "--keepbusy", option, given)
    assert done.returncode == USAGE_ERROR
    assert done.stderr.startswith("ERROR: keepbusy: ")
    assert sentence in done.stderr
    assert done.stderr.rstrip().count("\n") == 0
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", r"cannot be understood \(Expecting value"),
        (b"[" * 100_000, r"cannot be understood \(maximum recursion depth"),
        (b"\xff", r"cannot be understood \('utf-8' codec"),
        (b"[]", "holds no budgets; give a file that --keepbusy-update wrote"),
        (b'{"test_it": 3}', "holds no budgets"),
        (b'{"test_it": {"syncs": "none"}}', "holds no budgets"),
        (b'{"test_it": {"syncs": 1.5}}', "holds no budgets"),
    ],
)
def test_broken_budgets_are_no_budgets(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "budgets.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=rf"budgets\.json {sentence}"):
        read_budgets(path)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        (Path(__file__).parent, "is a directory; give a file that --keepbusy-update wrote within it"),
        (Path(__file__).parent / "none" / "budgets.json", "none is no folder; name a budgets file in one that exists"),
        (Path("/dev/full"), "/dev/full has more than 32768 kB"),
    ],
)
def test_what_is_no_budgets_file(path: Path, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        read_budgets(path)


def test_a_budgets_file_that_cannot_be_written_is_a_usage_error(folder: Path) -> None:
    """What was measured is told all the same."""
    (folder / "test_them.py").write_text(
        "from pathlib import Path\ndef test_step(gpu): Path('keepbusy-budgets.json').mkdir()\n"
    )
    done = pytest_in(folder, "--keepbusy-update")
    assert done.returncode == USAGE_ERROR
    assert "keepbusy: 1 tests measured\n1 passed" in done.stdout
    assert done.stderr.endswith("keepbusy-budgets.json: Is a directory.\n\n")


@pytest.mark.parametrize(
    ("mark", "sentence"),
    [
        ("max_wait='2 hours'", "'2 hours' has no unit that is known; write a number and one of "),
        ("max_reads=1", "The keepbusy mark takes max_syncs, "),
    ],
)
def test_a_wrong_mark_is_told_in_a_sentence(folder: Path, mark: str, sentence: str) -> None:
    (folder / "test_them.py").write_text(f"import pytest\n@pytest.mark.keepbusy({mark})\ndef test_it(gpu): pass\n")
    told = pytest_in(folder, "--keepbusy").stdout
    assert sentence in told
    assert "pytest_plugin.py" not in told
