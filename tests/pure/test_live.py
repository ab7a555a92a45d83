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

from keepbusy.cli.program import BottomLines, latest, live
from keepbusy.report.run_report import live_line, live_lines
from keepbusy.timeline.run_facts import Figures, FiguresFile, Part

FIGURES = Figures(1240, ms(25), ms(24.1), ms(26.3), ms(3.2), ended=10**12, limit=ms(38))
NOW = 10**12 + ms(5)


def shown(figures: Figures | None = FIGURES, diagnosis=None, now: int = NOW, width: int = 120) -> str:
    return live_line(figures, diagnosis, now, width, colour=False)


def test_it_tells_the_step_the_lead_and_later_the_worst_line() -> None:
    assert shown() == "keepbusy · step 1240 · 25.0 ms (24.1–26.3) · lead 3.2 ms"
    assert shown(diagnosis=STALLED).endswith(" · GPU computes 26% · blocking copy train.py:3: 20.1 ms per step")
    assert shown(diagnosis=HEALTHY).endswith(" · GPU computes 97%")


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        (None, "keepbusy · no steps yet"),
        (Figures(1, 0, 0, 0), "keepbusy · no steps yet"),
        (FIGURES._replace(lead=-1), "keepbusy · step 1240 · 25.0 ms (24.1–26.3)"),
        (FIGURES._replace(lead=40_000), "keepbusy · step 1240 · 25.0 ms (24.1–26.3) · no lead"),
    ],
)
def test_it_tells_no_more_than_is_known(figures: Figures | None, says: str) -> None:
    assert shown(figures) == says


def test_a_step_that_does_not_end_is_told() -> None:
    late = 10**12 + 12 * 10**9
    assert shown(now=late) == "keepbusy · step 1240 · the next step takes 12.00 s so far, instead of 25.0 ms"
    assert "25.0 ms (24.1–26.3)" in shown(FIGURES._replace(limit=0), now=late)


def test_what_has_no_room_is_left_out_and_the_worst_line_is_not() -> None:
    deep = replace(STALLED.causes[0].where, file="/home/somebody/project/benchmarks/windows/train.py")
    site = replace(STALLED.causes[0].sites[0], where=deep)
    stalled = replace(STALLED, causes=(replace(STALLED.causes[0], sites=(site,)),))
    assert shown(diagnosis=stalled).endswith(" · GPU computes 26% · blocking copy train.py:3: 20.1 ms per step")
    assert shown(diagnosis=stalled, width=90) == (
        "keepbusy · step 1240 · 25.0 ms · lead 3.2 ms · blocking copy train.py:3: 20.1 ms per step"
    )
    assert shown(diagnosis=stalled, width=60) == "keepbusy · 25.0 ms · blocking copy train.py:3: 20.1 ms per…"


EPOCHS = Part("loop", "src/train.py:9", time=ms(9_000), busy=ms(4_500), turns=3, turn=ms(3_000))
BATCHES = Part("loop", "src/train.py:11", time=ms(8_000), busy=ms(4_400), turns=1_200, turn=ms(6.7))
SAVED = Part("loop", "src/train.py:20", time=ms(100), busy=0, turns=3)
GROWN = Part("run", time=ms(12_000), busy=ms(4_500), parts=(replace(EPOCHS, parts=(BATCHES, SAVED)),))


def grown(width: int = 100, rows: int = 40) -> list[str]:
    return live_lines(FIGURES, GROWN, STALLED, NOW, (width, rows), colour=False)


def test_it_shows_the_tree_as_far_as_it_has_grown() -> None:
    assert [text.rstrip() for text in grown()[:3]] == [
        "12.00 s so far, GPU busy 38%",
        "train.py:9  ×3  9.00 s  3.00 s per iteration  GPU busy 50%",
        "  train.py:11  ×1,200  8.00 s  6.7 ms per iteration  GPU busy 55%",
    ]
    assert grown()[-1] == shown(diagnosis=STALLED, width=100)


def test_a_small_terminal_has_one_line() -> None:
    assert len(grown(rows=12)) == len(grown(width=50)) == 1
    assert len(grown(rows=16)) == 4
    assert all(len(text) < 60 for text in grown(width=60))


@pytest.mark.parametrize("width", [40, 60, 200])
def test_it_never_wraps(width: int) -> None:
    coloured = live_line(FIGURES, STALLED, NOW, width)
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


def test_figures_go_through_their_file(tmp_path: Path) -> None:
    file = FiguresFile(tmp_path / "live")
    assert file.read() is None
    file.write(FIGURES)
    file.write(FIGURES._replace(steps=1241, lead=-1))
    assert file.read() == FIGURES._replace(steps=1241, lead=-1)
    (tmp_path / "live").write_bytes(b"something else")
    assert file.read() is None


def test_of_several_processes_the_busiest_is_shown(tmp_path: Path) -> None:
    assert latest(tmp_path) == (None, None)
    for process, steps in (("11", 5), ("12", 900), ("13", 0)):
        (tmp_path / process).mkdir()
        FiguresFile(tmp_path / process / "live").write(FIGURES._replace(steps=steps))
    (tmp_path / "13" / "live").write_bytes(b"")
    process, figures = latest(tmp_path)
    assert (process, figures) == (tmp_path / "12", FIGURES._replace(steps=900))


def test_without_a_terminal_nothing_is_drawn(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with live(tmp_path, "train.py", lambda timeline: STALLED):
        sys.stdout.write("the program's own\n")
    assert capfd.readouterr() == ("the program's own\n", "")
