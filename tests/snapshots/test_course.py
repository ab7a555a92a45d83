"""The course: its pages and pictures are what its programs make, and every `assert` of theirs holds. `make course`."""

from __future__ import annotations

from pathlib import Path

import pytest
from warm_python import WarmPython

pytest.importorskip("torch")
COURSE = Path(__file__).parents[2] / "docs" / "course"
PAGES = sorted(COURSE.glob("[1-6]-*.md"))
SWEEPS = [pytest.mark.sweep(room="virtual"), pytest.mark.sweep(room="explain"), pytest.mark.sweep(room="report")]


@pytest.mark.parametrize("page", [pytest.param(page, marks=SWEEPS, id=page.stem) for page in PAGES])
def test_a_chapter_is_what_its_programs_make(page: Path, tmp_path: Path, warm_python: WarmPython) -> None:
    """A program whose assert fails ends the build, and its output is told here."""
    build = [str(COURSE / "build.py"), "--to", str(tmp_path), page.name[0]]
    done = warm_python.python(*build, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    text = page.read_text(encoding="utf-8")
    assert (tmp_path / page.name).read_text(encoding="utf-8") == text, "if this is meant, `make course`"
    for picture in (tmp_path / "pictures").glob("*.svg"):
        assert f"(pictures/{picture.name})" in text
        assert picture.read_bytes() == (COURSE / "pictures" / picture.name).read_bytes()


def test_no_program_and_no_picture_is_left_over() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [picture.name for picture in COURSE.glob("pictures/*.svg") if f"/{picture.name})" not in text] == []
    assert [program.name for program in COURSE.glob("chapter?/*.py") if f"source {program.stem} " not in text] == []


def test_programs_are_short_and_know_nothing_of_keepbusy() -> None:
    for program in COURSE.glob("chapter?/*.py"):
        source = program.read_text(encoding="utf-8")
        assert "import keepbusy" not in source
        assert 10 <= len(source.splitlines()) <= 60, program.name
