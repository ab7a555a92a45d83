"""The line at the bottom of the terminal, and what it leaves alone."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from diagnoses import HEALTHY, STALLED, ms
from hypothesis import given
from hypothesis import strategies as st
from screens import PaperScreen

from keepbusy.cli.program import BottomLines, live
from keepbusy.explain.diagnosis import Diagnosis
from keepbusy.report.run_report import live_line, live_lines
from keepbusy.timeline.run_facts import Part


def shown(diagnosis: Diagnosis | None, width: int = 120) -> str:
    return live_line(diagnosis, width, colour=False)


def test_it_says_the_iteration_and_the_worst_line() -> None:
    assert shown(None) == "keepbusy · recording"
    assert shown(STALLED) == (
        "keepbusy · 31.3 ms per iteration · GPU computes 26% · blocking copy train.py:3: 20.1 ms per iteration"
    )
    assert shown(HEALTHY).endswith(" · GPU computes 97%")


def test_what_has_no_room_is_left_out_and_the_worst_line_is_not() -> None:
    deep = replace(STALLED.causes[0].where, file="/home/somebody/project/benchmarks/windows/train.py")
    site = replace(STALLED.causes[0].sites[0], where=deep)
    stalled = replace(STALLED, causes=(replace(STALLED.causes[0], sites=(site,)),))
    assert shown(stalled).endswith(" · GPU computes 26% · blocking copy train.py:3: 20.1 ms per iteration")
    assert shown(stalled, 90).endswith("ms per iteration · blocking copy train.py:3: 20.1 ms per iteration")
    assert shown(stalled, 60) == "keepbusy · blocking copy train.py:3: 20.1 ms per iteration"


EPOCHS = Part("loop", "src/train.py:9", time=ms(9_000), busy=ms(4_500), turns=3, turn=ms(3_000))
BATCHES = Part("loop", "src/train.py:11", time=ms(8_000), busy=ms(4_400), turns=1_200, turn=ms(6.7))
SAVED = Part("loop", "src/train.py:20", time=ms(100), busy=0, turns=3)
GROWN = Part("run", time=ms(12_000), busy=ms(4_500), parts=(replace(EPOCHS, parts=(BATCHES, SAVED)),))


def grown(width: int = 100, rows: int = 40) -> list[str]:
    return live_lines(replace(STALLED, run=GROWN), (width, rows), colour=False)


def test_it_shows_the_tree_as_far_as_it_has_grown() -> None:
    assert [text.rstrip() for text in grown()[:3]] == [
        "12.00 s so far, GPU busy 38%",
        "train.py:9  ×3  9.00 s  3.00 s per iteration  GPU busy 50%",
        "  train.py:11  ×1,200  8.00 s  6.7 ms per iteration  GPU busy 55%",
    ]
    assert grown()[-1] == shown(STALLED, 100)


def test_a_small_terminal_has_one_line() -> None:
    assert len(grown(rows=12)) == len(grown(width=50)) == 1
    assert len(grown(rows=16)) == 4
    assert all(len(text) < 60 for text in grown(width=60))


@pytest.mark.parametrize("width", [40, 60, 200])
def test_it_never_wraps(width: int) -> None:
    coloured = live_line(STALLED, width)
    plain = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert "\n" not in coloured
    assert len(plain) < width


def test_what_the_program_prints_scrolls_above_it() -> None:
    screen = PaperScreen(rows=5)
    bottom = BottomLines(screen)
    for number in range(12):
        screen.write(f"epoch {number}\n")
        bottom.show([f"line {number}"])
    assert screen.lines == ["epoch 9", "epoch 10", "epoch 11", "", "line 11"]
    assert screen.scrolled == [f"epoch {number}" for number in range(9)]
    bottom.end()
    screen.write("done")
    assert screen.lines == ["epoch 9", "epoch 10", "epoch 11", "done", ""]
    assert (screen.top, screen.bottom) == (0, 4)


@given(
    rows=st.integers(4, 12),
    said=st.lists(st.sampled_from([1, 2, 3, "text", "text\n", "\r", "\n"]), max_size=60),
)
def test_whatever_the_program_prints_is_all_there(rows: int, said: list[str | int]) -> None:
    """With our lines, which grow and shrink, and without them, the same text in the same order."""
    with_us, without = PaperScreen(rows=rows), PaperScreen(rows=rows)
    bottom = BottomLines(with_us)
    for number, one in enumerate(said):
        if isinstance(one, int):
            bottom.show(["ours"] * one)
        else:
            text = one.replace("text", f"<{number}>")
            with_us.write(text)
            without.write(text)
    assert "ours" not in "".join(with_us.scrolled)
    bottom.end()
    assert "ours" not in "".join(with_us.lines)
    printed, expected = ("".join(one.scrolled + one.lines) for one in (with_us, without))
    assert printed == expected


def test_a_progress_bar_stays_where_it_is() -> None:
    screen = PaperScreen()
    bottom = BottomLines(screen)
    for percent in range(0, 101, 20):
        screen.write(f"\rtraining {percent}%")
        bottom.show(["ours"])
    assert screen.lines[0] == "training 100%"
    assert screen.lines[-1] == "ours"


def test_a_terminal_that_changes_its_size_keeps_one_line() -> None:
    screen = PaperScreen(rows=6)
    bottom = BottomLines(screen)
    bottom.show(["ours"])
    screen.resize(9)
    bottom.show(["ours"])
    assert (screen.top, screen.bottom) == (0, 7)
    assert screen.lines[8] == "ours"


def test_a_change_is_one_write() -> None:
    screen = PaperScreen()
    bottom = BottomLines(screen)
    bottom.show(["one"])
    bottom.show(["two"])
    bottom.end()
    bottom.end()
    assert screen.writes == 3


def test_without_a_terminal_nothing_is_drawn(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with live(tmp_path, "train.py", lambda timeline: STALLED):
        sys.stdout.write("the program's own\n")
    assert capfd.readouterr() == ("the program's own\n", "")
