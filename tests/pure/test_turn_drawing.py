"""Iterations in characters: rows are as long as the drawing, and idle times bear the numbers that are explained."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from build import HOME, MB, US, Run

from keepbusy.explain import explain
from keepbusy.explain.diagnosis import Diagnosis
from keepbusy.report import edges
from keepbusy.report.turn_drawing import MARGIN, render
from keepbusy.timeline.busy_file import load
from keepbusy.timeline.model import Kind
from keepbusy.timeline.races import KINDS, READ_EARLY, DataRace, RacingUse
from keepbusy.timeline.steps import as_one_step

LIVE = Path(__file__).parents[1] / "gpu" / "truth" / "live"
STREAMS = Path(__file__).parents[1] / "snapshots" / "streams"


@functools.cache
def told(case: str) -> Diagnosis:
    return explain(load(LIVE / f"{case}.busy"), turns=True)


def lane(drawn: str, name: str) -> str:
    return next(row for row in drawn.splitlines() if row.strip().startswith(name))[MARGIN:]


def test_the_gpu_waits_in_as_many_cells_as_it_waits_of_the_turn() -> None:
    said = told("item_every_step")
    drawn = render(said, 116)
    gpu = lane(drawn, "GPU")
    assert gpu.count("1") / 100 == pytest.approx(said.ledger["host_sync"] / said.plain_step, abs=0.03)
    assert re.search(r"^1  4\.\d ms  host sync at .*item_every_step\.py:25$", drawn, re.MULTILINE)


def test_a_line_stands_where_it_holds_the_program() -> None:
    drawn = render(told("item_every_step"), 116)
    lines, python = lane(drawn, "your lines"), lane(drawn, "Python")
    assert lines.startswith("25 ")
    assert python.startswith("~~~~")
    assert re.findall(r"\d+", lines)[1:3] == ["8", "9"]


@pytest.mark.parametrize("case", ["slow_loader", "late_rank"])
def test_the_gpu_is_busy_or_idle_for_a_reason_in_every_cell(case: str) -> None:
    """Also where the drawing begins or ends while the GPU is idle."""
    rows = [row[MARGIN:] for row in render(told(case), 116).splitlines() if "GPU" in row[:MARGIN]]
    assert len(rows) == len(told(case).given)
    assert [row for row in rows if "  " in row or len(row) != 116 - MARGIN] == []


def test_what_waits_for_a_late_rank_is_no_wire() -> None:
    drawn = render(told("late_rank"), 96)
    first, late, *_ = [row[MARGIN:] for row in drawn.splitlines() if row.strip()[1:].startswith(": GPU")]
    assert first.count("1") >= late.count("1")
    assert "▒" not in first
    assert re.search(r"^1  2\d\.\d ms per iteration  late peer at .*late_rank\.py:15$", drawn, re.MULTILINE)


@pytest.mark.parametrize("width", [40, 80, 110])
def test_no_row_is_wider_than_the_screen(width: int) -> None:
    rows = render(told("item_every_step"), width, unicode=False)
    assert rows.isascii()
    assert max(map(len, rows.splitlines()[2:7])) <= width


def test_what_holds_no_turns_is_not_drawn() -> None:
    assert render(explain(load(LIVE / "copy_in_line.busy")), 100) == ""


def test_a_copy_beside_a_product_looks_as_in_a_textbook(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host runs ahead and its iterations are short: those of the GPU are drawn, with a row for each stream."""
    monkeypatch.chdir(STREAMS)  # where the program is, whose lines the boxes bear
    drawn = render(explain(load(STREAMS / "two_streams.busy"), turns=True), MARGIN + 84)
    assert drawn.startswith("Two iterations, 6.5 ms\n")
    compute, copies = lane(drawn, "stream 7 (compute)"), lane(drawn, "stream 8 (copies)")
    assert compute.count("▸21 result = batch @ weights") == 2
    assert "─" not in compute
    assert re.fullmatch(r"(\[10 on_g[^\]]*\]─*)+", copies)
    assert (len(compute), len(copies)) == (84, 84)


def test_a_loader_that_copies_ahead_copies_beside_each_product() -> None:
    drawn = render(explain(load(LIVE.parent / "prefetched.busy"), turns=True), 116)
    copies = lane(drawn, "stream 13 (copies)")
    assert re.fullmatch(r"▸20 \](─after 26 on stream 7▸20 for bat[^\]]*\])+─+", copies)


# a script that runs once, on paper


def script(body: Callable[[Run], object], *races: DataRace) -> Diagnosis:
    run = Run.of()
    body(run)
    timeline = as_one_step(run.timeline(virtual=True, races=races))
    return explain(timeline, turns=True)


def at(line: int) -> list[str]:
    return [f"script.py({line}): <module>"]


def prefetching(run: Run) -> None:
    for _ in range(3):
        run.copy(MB, 900, blocking=False, pinned=True, stream=8, at=at(7))
        run.order(8, 7)
        run.launch(2_000, at=at(14))
    run.sync(None, at=at(18))


def test_each_run_of_a_line_has_its_box_and_in_front_of_it_what_it_waits_for() -> None:
    drawn = render(script(prefetching), MARGIN + 84)
    compute, copies = lane(drawn, "stream 7 (compute)"), lane(drawn, "stream 8 (copies)")
    assert re.fullmatch(r"─+after 7(▸script\.py:14 █+\]){3}", compute)
    assert re.fullmatch(r"─*(\[7 ▓+\]){3}─+", copies)
    assert (
        "▸  line 14 on stream 7 waits for line 7 on stream 8\n~  Python waits in line 18 for the whole GPU\n" in drawn
    )


def test_commands_of_one_line_that_are_alike_have_a_box_each_if_they_are_wide_enough() -> None:
    def looping(times: int, time: float) -> str:
        def body(run: Run) -> None:
            with run.inside(*at(16)):
                for _ in range(times):
                    run.launch(time)
            run.sync(None, at=at(17))

        return lane(render(script(body), MARGIN + 80), "stream 7 (compute)")

    assert looping(4, 500).count("[script.py:16") == 4
    assert looping(60, 500).count("[script.py:16") == 1


def test_each_of_a_few_launches_is_drawn() -> None:
    python = lane(render(script(prefetching), MARGIN + 84), "Python")
    assert python.startswith("'")
    assert python.count("~") > 70


def race_of(*places: tuple[int, str]) -> DataRace:
    first, second = (RacingUse(f"script.py:{line}", line == 7, stream) for line, stream in places)
    return DataRace(KINDS[0], first, second, 400, 1, "side.wait_event(ready)", second.place)


def forgetting(run: Run, ordered_by: str = "") -> None:
    run.launch(2_000, stream=7, at=at(7))
    if ordered_by == "sync":
        run.sync(None, at=at(8))
    if ordered_by == "event":
        run.order(7, 8)
    if ordered_by == "event on the host":
        run.event_sync(7, at=at(8))
    run.work(400, at=at(9))
    run.copy(MB, 900, HOME, pinned=True, blocking=False, stream=8, at=at(10))
    run.sync(8, at=at(11))


RACE = race_of((7, "stream 7"), (10, "stream 8"))


def test_the_edge_that_a_race_misses_is_drawn_with_its_sentence() -> None:
    drawn = render(script(forgetting, RACE), MARGIN + 84)
    assert re.match(r"─+not after 7✗script.py:10 ▓*\]─+$", lane(drawn, "stream 8 (copies)"))
    assert "▸" not in drawn
    said = " ".join(drawn.partition("✗  ")[2].split())
    assert said.startswith("script.py:10 reads memory that script.py:7 may still be writing on stream 7. Add side.wait")
    assert "not after 7!" in render(script(forgetting, RACE), MARGIN + 84, unicode=False)


@pytest.mark.parametrize("ordered_by", ["sync", "event", "event on the host"])
def test_where_something_orders_the_lines_of_a_race_no_edge_is_missing(ordered_by: str) -> None:
    """The same lines may race in another iteration."""
    diagnosis = script(functools.partial(forgetting, ordered_by=ordered_by), RACE)
    assert edges.missing_edges(diagnosis.turns, diagnosis.races) == []


def test_a_race_with_the_host_misses_an_edge_to_the_line_of_the_host() -> None:
    def reading_early(run: Run) -> None:
        run.copy(MB, 900, HOME, pinned=True, blocking=False, stream=8, at=at(7))
        run.work(200, at=at(9))
        run.sync(None, at=at(11))

    race = replace(race_of((7, "stream 8"), (9, "")), kind=READ_EARLY)
    diagnosis = script(reading_early, race)
    ((first, second, _),) = edges.missing_edges(diagnosis.turns, diagnosis.races)
    timeline = diagnosis.turns.timeline
    assert (timeline[first].kind, timeline[second].kind) == (Kind.COPY, Kind.WORK)
    assert timeline[second].work == 200 * US


def test_two_copies_that_share_an_engine_wait_for_no_event() -> None:
    def copying(run: Run) -> None:
        run.copy(MB, 900, pinned=True, blocking=False, stream=8, at=at(7))
        run.order(8, 9)
        run.copy(MB, 900, pinned=True, blocking=False, stream=9, at=at(9))
        run.sync(None, at=at(11))

    assert "▸" not in render(script(copying), MARGIN + 84)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("copies", "copies"),
        ("side", "side (copies)"),
        ("default stream", "default (copies)"),
        ("", "stream 8 (copies)"),
    ],
)
def test_a_stream_has_the_programs_name_and_what_it_does(name: str, shown: str) -> None:
    diagnosis = script(forgetting)
    timeline = diagnosis.turns.timeline
    lanes = tuple(one._replace(name=name) if one.number == 8 else one for one in timeline.lanes)
    named = replace(diagnosis, turns=replace(diagnosis.turns, timeline=timeline.change(lanes=lanes)))
    assert lane(render(named, MARGIN + 84), f"{shown}  ")
