"""What is committed in the package is what page/ builds, and its types hold."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from warm_python import PATIENCE

ROOT = Path(__file__).parents[2]
SOURCES, BUNDLE = ROOT / "page", ROOT / "src" / "keepbusy" / "report" / "page"


@pytest.fixture(scope="module")
def node() -> str:
    found = shutil.which("node")
    if found is None:
        pytest.skip("there is no Node")
    if not (SOURCES / "node_modules").exists():
        installed = subprocess.run(
            ["npm", "ci", "--silent"], cwd=SOURCES, capture_output=True, text=True, timeout=PATIENCE
        )
        if installed.returncode:
            pytest.skip("npm cannot install what page/package-lock.json names")
    return found


def test_the_bundle_is_that_of_the_sources(node: str, tmp_path: Path) -> None:
    subprocess.run([node, "build.mjs", str(tmp_path)], cwd=SOURCES, check=True, timeout=PATIENCE)
    for name in ("page.js", "page.css"):
        assert (tmp_path / name).read_bytes() == (BUNDLE / name).read_bytes(), f"run `make page`: {name} is another"


def test_the_types_hold(node: str) -> None:
    checked = subprocess.run(
        [node, "node_modules/typescript/bin/tsc", "--noEmit"],
        cwd=SOURCES,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (checked.returncode, checked.stdout) == (0, "")


@pytest.mark.parametrize("name", ["page.js", "page.css"])
def test_a_bundle_cannot_end_the_element_that_it_stands_in(name: str) -> None:
    text = (BUNDLE / name).read_text(encoding="utf-8")
    assert "</" not in text
    assert "<!--" not in text
