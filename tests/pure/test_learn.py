"""The course in the terminal, and its programs in a folder of the reader's."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepbusy import cli

COURSE = Path(__file__).parents[2] / "docs" / "course"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["learn", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_chapters_are_those_of_the_index(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys)
    titles = out.partition("\n\n")[0].splitlines()
    assert code == 0
    assert titles[0] == "1. Host and device"
    index = (COURSE / "README.md").read_text(encoding="utf-8")
    for title in titles:
        number, _, name = title.partition(". ")
        assert f"{number}. [{name}](" in index


def test_a_chapter_in_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    code, out, _ = told(capsys, "1")
    assert code == 0
    assert "<!--" not in out
    assert "<details>" not in out
    assert "(#" not in out
    assert "A launch is not the work" in out
    programs = [path.read_text(encoding="utf-8") for path in COURSE.glob("chapter1/*.py")]
    assert [line for text in programs for line in text.splitlines() if line not in out] == []  # whole, to be copied
    assert out.count("Answer.") == (COURSE / "1-host-and-device.md").read_text().count("<summary>Answer</summary>")


def test_its_programs_are_copied_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, "1", "--copy", str(tmp_path))
    assert code == 0
    assert "`keepbusy learn 1` says how to run them" in out
    for program in (COURSE / "chapter1").glob("*.py"):
        assert (tmp_path / "chapter1" / program.name).read_bytes() == program.read_bytes()
    assert told(capsys, "1", "--copy", str(tmp_path)) == (
        2,
        "",
        f"keepbusy: {tmp_path / 'chapter1'} is there already; nothing was copied.\n",
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["9"], "there is no chapter 9; there are 1"),
        (["--copy", "."], "--copy needs the number of a chapter"),
        (["one"], "argument CHAPTER: invalid int value: 'one'"),
    ],
)
def test_what_is_not_there_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, error = told(capsys, *arguments)
    assert (code, out) == (2, "")
    assert error.startswith(f"keepbusy: {sentence}")
    assert error.count("\n") == 1
