"""What is packaged says the same everywhere, and the wheel holds all that the code reads."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import keepbusy

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_version_to_cite_is_the_version() -> None:
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited
    assert cited[1] == keepbusy.__version__


def test_the_newest_changes_are_of_this_version() -> None:
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest
    assert newest[1] == keepbusy.__version__


def test_one_range_of_pytorch_stands_everywhere() -> None:
    (needed,) = PROJECT["optional-dependencies"]["torch"]
    assert needed == "torch>=2.9"
    said = [
        (path.name, version)
        for path in (ROOT / "src").rglob("*.py")
        for version in re.findall(r"torch>=([0-9.]+)", path.read_text(encoding="utf-8"))
    ]
    assert {version for _, version in said} == {"2.9"}
    assert "PyTorch 2.9 or newer" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_python_that_it_runs_on_is_named() -> None:
    named = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if "Python :: 3." in one]
    assert PROJECT["requires-python"] == f">={named[0]}"
