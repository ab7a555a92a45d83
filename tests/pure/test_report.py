"""The terminal report, said of diagnoses of a few lines."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from diagnoses import COPY, HEALTHY, LATE, STALLED, SYNC, ms, predicted, small_timeline

from keepbusy.causes import LEDGER
from keepbusy.causes.places import Where
from keepbusy.cli import fixing
from keepbusy.explain.comparison import compare
from keepbusy.explain.diagnosis import CAUSES, PlannedFix
from keepbusy.report import labels, terminal, verdict
from keepbusy.report.exports import CSV_COLUMNS, csv_table, perfetto
from keepbusy.report.page.contents import words_of
from keepbusy.report.source import fix_line, source_of
from keepbusy.timeline import figures
from keepbusy.timeline.run_facts import RUN, CutShort, Part

WIDTHS = (40, 60, 80, 100, 140)


@pytest.mark.parametrize(
    ("fix", "line", "now", "written"),
    [
        ("drop_sync", 4, True, True),
        ("drop_sync", 3, False, False),  # nothing to remove stands there
        ("num_workers=8", 3, False, True),  # results may differ, so that it has to be asked for
        ("fuse_optimizer", 2, False, True),
        ("align_ranks", 3, False, False),
    ],
)
def test_a_command_is_offered_only_where_it_makes_one_of_the_fixes(
    fix: str, line: int, now: bool, written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("libcst")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "loader = DataLoader(data)\nfit(torch.optim.Adam(model))\nfor x in loader:\n    torch.cuda.synchronize()\n"
    )
    planned = PlannedFix(fix, (Where("train.py", line),), (), ms(1), predicted(30, 29, 31), ms(1))
    known = replace(STALLED, command=("-m", "my.train", "--name", "a b"), plan=(planned,))
    assert fixing("run --fix", known) == ("keepbusy run --fix -m my.train --name 'a b'" if now else "")
    assert fixing("fix", known) == ("keepbusy fix -m my.train --name 'a b'" if written else "")
    assert fixing("fix", replace(known, command=())) == ""


def test_a_stalled_run_is_told_from_top_to_bottom() -> None:
    commands = verdict.Commands(page="keepbusy show run.busy", full="keepbusy explain run.busy --full")
    text = terminal.render_full(STALLED, commands=commands)
    told = [
        "keepbusy · images.trace.json.gz · NVIDIA H200 · 4 iterations recorded",
        "The GPU is busy 27% of an iteration. Python waits for copies to finish.",
        "An iteration takes 31.3 ms. The GPU computes for 8.2 ms of it (26%) and is idle for 23.0 ms (73%).",
        "1  blocking copy         20.1 ms  64%",
        "1  Python waits for copies to finish · blocking_copy",
        "GPU idle 20.1 ms per iteration (64%) · without it 31.3 → 8.9 ms (8.4–10.1)",
        "train.py:3 · aten::to · torch/nn.py:9",
        "One copy of 154 MB a step from pageable memory takes 20.1 ms.",
        "fix: for batch in keepbusy.prefetch(loader):",
        "2  Python blocks on the GPU, which then idles · host_sync",
        "near model.py:44 in forward · aten::item",
        "also near model.py:60 in forward (400 µs), between aten::mm and aten::relu (100 µs) and 1 more place",
        "All of this fixed: 31.3 → 8.6 ms (8.2–9.9) · noise: ±900 µs",
        "ignore  host sync at train.py:60 and 1 more place (14 per iteration) costs nothing here:",
        "ignore  allocator at train.py:70 (every 48th iteration) costs nothing here:",
        "Look at it  keepbusy show run.busy",
    ]
    places = [" ".join(text.split()).index(" ".join(one.split())) for one in told]
    assert places == sorted(places)
    assert commands.full not in text


def test_a_healthy_run_is_told_so_in_one_sentence() -> None:
    text = terminal.render_full(HEALTHY)
    assert "The GPU is busy 97% of an iteration. No fix saves more than the noise (900 µs)." in text
    assert "fix" not in text.replace("No fix", "")


def test_late_ranks_are_named_beside_their_cause() -> None:
    text = terminal.render_full(LATE)
    assert "4 traces · NVIDIA H200 · 4 ranks · 3 iterations recorded" in text
    assert "Rank 1 arrives 20.3 ms late, and 3 ranks wait for it: host work at train.py:15." in text
    assert "late    Rank 1" in terminal.render_full(replace(LATE, causes=()))


def test_without_a_plain_step_the_report_says_what_that_means() -> None:
    text = terminal.render_full(replace(STALLED, plain_given=False, notes=("Time a step and give --plain-step.",)))
    assert "An iteration takes 31.3 ms in this recording." in text
    assert "note    Time a step and give --plain-step." in text


def test_a_script_is_told_of_no_iteration() -> None:
    said = {
        "what": "It waits 4 times per iteration.",
        "advice": "Read it one iteration later.",
        "remedy": "value  # read it",
    }
    script = replace(STALLED, causes=(replace(COPY, **said),), harmless=(), one_turn=True)
    text = terminal.render_full(script)
    assert "From its first launch on, the script takes 31.3 ms." in text
    assert "It waits 4 times.\n   Read it later.\n" in text
    assert "iteration" not in text


def test_fixing_on_request_names_what_was_asked() -> None:
    text = terminal.render_full(replace(STALLED, fixed=("host_sync", "blocking_copy")))
    assert "With host_sync and blocking_copy fixed: 31.3 → 8.6 ms" in text


@pytest.mark.parametrize(
    ("ended", "says"),
    [
        (CutShort("ValueError", "train.py:31"), "The script failed with ValueError at train.py:31 after 40.00 s."),
        (CutShort("KeyboardInterrupt", "train.py:31"), "The script was interrupted at train.py:31 after 40.00 s."),
        (CutShort("SIGKILL"), "The script was killed by SIGKILL after 40.00 s."),
        (CutShort("ValueError", "train.py:31", rank=3), "Rank 3 failed with ValueError at train.py:31 after 40.00 s."),
    ],
)
def test_a_run_that_was_cut_short_is_told_so_first(ended: CutShort, says: str) -> None:
    told = replace(STALLED, cut_short=ended, run=Part(RUN, time=ms(40_000)))
    for render in (verdict.render, terminal.render_full):
        assert render(told).startswith(f"{says}\nkeepbusy")
        assert render(STALLED).startswith("keepbusy")
    assert words_of(told, "train.py")["analyses"][0]["statement"].startswith(says)
    assert f"The run after was cut short by {ended.by}." in compare(STALLED, told).notes


@pytest.mark.parametrize("diagnosis", [STALLED, HEALTHY, LATE], ids=["stalled", "healthy", "late"])
@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_terminal(diagnosis, width: int) -> None:
    lines = terminal.render_full(diagnosis, width).splitlines()
    pasted = "   fix: "
    assert [line for line in lines if len(line) > width and not line.startswith(pasted)] == []


def test_what_is_there_to_be_pasted_is_never_broken() -> None:
    code = "loader = DataLoader(" + ", ".join(f"option_{number}={number}" for number in range(30)) + ")"
    text = terminal.render_full(replace(STALLED, causes=(replace(COPY, remedy=code),)), 60)
    assert f"\n   fix: {code}\n" in text


def test_without_wrapping_no_sentence_is_broken() -> None:
    long = " ".join(["so much to say"] * 30)
    text = terminal.render_full(replace(STALLED, causes=(replace(COPY, what=f"{long}."),)), 60, wrap=False)
    assert f"\n   {long}.\n" in text


def test_many_waits_for_launches_are_not_called_noise() -> None:
    text = terminal.render_full(replace(HEALTHY, ledger={"computing": ms(12.3), "launch_bound": ms(19.0)}))
    assert "The GPU is busy 39% of an iteration. It waits 19.0 ms for launches, and no fix is predicted to save" in text
    assert "noise" not in text


def test_much_that_is_unknown_is_not_called_noise() -> None:
    text = terminal.render_full(replace(HEALTHY, ledger={"computing": ms(12.3), "unknown": ms(19.0)}))
    assert "It is idle for 19.0 ms for reasons that this recording does not show." in " ".join(text.split())
    assert "noise" not in text


def test_where_hardly_a_kernel_was_timed_nothing_is_said_of_the_gpu() -> None:
    unknown = replace(HEALTHY, plain_step=0, steps=0, plan=(), causes=(), run=Part(RUN, time=3_000_000_000))
    assert "Too few of its kernels were timed" in " ".join(verdict.render(unknown).split())
    assert "The GPU is busy" not in " ".join(verdict.render(unknown).split())


def test_a_cause_that_no_fix_of_the_plan_removes_is_not_called_noise() -> None:
    assert "The GPU is busy 27% of an iteration. Python waits for copies to finish." in verdict.render(STALLED)
    for unsure in ({"predicted": predicted(31, 30, 32)}, {"cause": "launch_bound"}):
        causes = tuple(replace(one, **unsure) for one in STALLED.causes)
        assert "No fix saves more than the noise" in verdict.render(replace(STALLED, causes=causes))


def test_a_remedy_for_work_of_any_kind_has_no_line() -> None:
    assert "fix:" not in terminal.render_full(replace(STALLED, causes=(replace(COPY, remedy="", api=""),)))


def test_many_causes_are_all_in_the_full_report() -> None:
    many = replace(STALLED, causes=tuple(replace(COPY, cause=cause) for cause in CAUSES[:-1]))
    text = terminal.render_full(many)
    assert all(f"\n{number}  " in text for number in range(1, len(CAUSES)))


def test_names_cannot_steer_the_terminal_or_its_markup() -> None:
    evil = Where("\x1b[2J[bold]x[/bold].py\u202e", 3, exact=True)
    cause = replace(
        COPY, sites=(replace(COPY.sites[0], where=evil),), what="\x1b]0;title\x07 [red]no[/red] :skull:\n\n"
    )
    text = terminal.render_full(replace(STALLED, causes=(cause,), device="\x9b31m", sources=("\x1b.json", "b")))
    assert "\x1b" not in text
    assert not any((ord(letter) < 32 and letter != "\n") or letter in "\x9b\u202e" for letter in text)
    assert "[bold]x[/bold].py" in text
    assert "[red]no[/red] :skull:" in text


def test_colour_is_only_used_when_asked_for() -> None:
    assert "\x1b[" not in terminal.render_full(STALLED)
    assert "\x1b[" in terminal.render_full(STALLED, colour=True)


def test_ascii_terminals_get_ascii() -> None:
    text = terminal.render_full(STALLED, unicode=False)
    assert text.isascii()
    assert "31.3 -> 8.9 ms" in text


def test_an_empty_ledger_is_no_crash() -> None:
    assert "An iteration takes 0 ms" in terminal.render_full(replace(HEALTHY, plain_step=0, ledger={}))


def test_every_place_has_a_look() -> None:
    assert (
        len({place.label for place in LEDGER.values()})
        == len({place.colour for place in LEDGER.values()})
        == len(LEDGER)
    )


GLOSSARY = Path(__file__).parents[2] / "page" / "src" / "glossary.ts"


def test_no_two_colours_of_the_page_have_one_name() -> None:
    """Its legend holds what a host thread does, and where the GPU's time goes."""
    kinds = dict(re.findall(r'^  (\d+): \["([^"]+)"', GLOSSARY.read_text(), re.MULTILINE))
    names = [*(kinds[number] for number in "0123"), *(place.label for place in LEDGER.values())]
    assert len(set(names)) == len(names)


def test_the_page_counts_places_as_the_report_does() -> None:
    places = tuple(Where("train.py", line, exact=True) for line in range(1, 33))
    fix = PlannedFix("readback", places, ("host_sync",), ms(2), predicted(29, 28, 30), ms(2))
    told = replace(STALLED, plan=(fix,))
    assert "train.py:1, train.py:2 and 30 more" in terminal.render_full(told)
    [on_page] = words_of(told, "train.py")["analyses"][0]["plan"]
    assert on_page["place"] == "train.py:1, 2, 3 +29"
    assert f"1  {on_page['place']}" in verdict.render(told)


# the bar


@pytest.mark.parametrize("width", WIDTHS)
def test_the_bar_is_as_wide_as_the_terminal(width: int) -> None:
    rows = terminal.rows_of(STALLED.ledger, ["blocking_copy", "host_sync"])
    assert len(terminal.bar(rows, width, colour=False)) == width
    assert len(terminal.bar(rows, width, colour=True)) == width


def test_a_place_of_one_percent_keeps_a_cell_however_narrow() -> None:
    rows = terminal.rows_of(dict.fromkeys(LEDGER, 10), [])
    drawn = terminal.bar([*rows, terminal.Row("computing", 10_000, "█")], 40, colour=False).plain
    assert len(drawn) == 40
    rows = terminal.rows_of({"computing": 980, "host_sync": 10, "unknown": 10}, ["host_sync"])
    assert terminal.bar(rows, 20, colour=False).plain == "█" * 18 + "1?"


def test_causes_stand_in_the_order_of_their_numbers() -> None:
    rows = terminal.rows_of(STALLED.ledger, ["blocking_copy", "host_sync"])
    assert [(row.place, row.mark) for row in rows] == [
        ("computing", "█"),
        ("copying", "▓"),
        ("blocking_copy", "1"),
        ("host_sync", "2"),
        ("launch_bound", "·"),
        ("unknown", "?"),
    ]


# words


@pytest.mark.parametrize(
    ("time", "said"),
    [
        (0, "0 ms"),
        (400, "0.4 µs"),
        (4_200, "4.2 µs"),
        (31_000, "31 µs"),
        (820_000, "820 µs"),
        (8_900_000, "8.9 ms"),
        (31_335_936, "31.3 ms"),
        (330_936_000, "331 ms"),
        (1_240_000_000, "1.24 s"),
    ],
)
def test_durations(time: int, said: str) -> None:
    assert figures.duration(time) == said


def test_two_times_share_a_unit() -> None:
    assert figures.transition(ms(31.3), ms(0.41)) == "31.3 → 0.4 ms"
    assert figures.transition(0, ms(20)) == "0 → 20.0 ms"
    assert figures.duration(ms(0.003), ms(31.3)) == "<0.01 ms"
    assert figures.span_of(ms(8.4), ms(8.41), ms(31)) == "8.4"
    assert figures.span_of(0, ms(0.31), ms(0.82)) == "0–310"
    assert figures.span_of(0, ms(3.908), ms(0.82)) == "0–3.9 ms"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (100, 28, "72% shorter"),
        (100, 112, "12% longer"),
        (100, 100, "the same"),
        (100, 301, "3.0× as long"),
        (0, 5, "the same"),
    ],
)
def test_changes(before: int, after: int, said: str) -> None:
    assert figures.change(before, after) == said


@pytest.mark.parametrize(("part", "said"), [(0, "0%"), (3, "<1%"), (640, "64%"), (1000, "100%")])
def test_shares(part: int, said: str) -> None:
    assert figures.share(part, 1000) == said


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (1.2, "every step"),
        (2, "every second step"),
        (12, "every 12th step"),
        (21.9, "every 22nd step"),
        (111, "every 111th step"),
        (101, "every 101st step"),
    ],
)
def test_how_often_in_words(number: float, said: str) -> None:
    assert figures.every(number, "step") == said


@pytest.mark.parametrize(("number", "said"), [(1, "1"), (12.04, "12"), (0.25, "0.2"), (1.5, "1.5")])
def test_counts(number: float, said: str) -> None:
    assert figures.count(number) == said


def test_a_long_name_without_a_folder_loses_its_middle() -> None:
    place = verdict.short_place(Where("sequence_to_sequence_translation.py", 131, exact=True))
    assert place.startswith("sequence")
    assert place.endswith(".py:131")
    assert len(place) <= verdict.LONGEST_PLACE


def test_long_names_lose_their_middle() -> None:
    assert labels.tame("abcdefghij", 5) == "ab…ij"
    assert labels.spot(Where("a/" * 40 + "train.py", 31, exact=True), 17) == "…/a/a/train.py:31"


# the source line

PROGRAM = """\
import torch


def main(loader, model):
    def fetch(batch):
        return batch.to("cuda", non_blocking=True)

    for batch in loader:
        batch = batch.to("cuda")
        loss = model(batch)
        print(loss.item())
        tick(
            loss.norm().cpu(),
        )
    print(loss.item())
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def test_an_exact_line_is_shown_as_it_is(program: Path) -> None:
    assert source_of(Where("train.py", 9, exact=True)) == (9, 'batch = batch.to("cuda")', False)
    assert source_of(Where(str(program), 9, exact=True)) == (9, 'batch = batch.to("cuda")', False)


@pytest.mark.parametrize("line", [8, 12])
def test_the_only_call_in_the_loop_is_likely(program: Path, line: int) -> None:
    where = Where("train.py", line, "main", operator="aten::item")
    assert source_of(where) == (11, "print(loss.item())", True)
    text = terminal.render_full(replace(STALLED, causes=(replace(SYNC, sites=(replace(SYNC.sites[0], where=where),)),)))
    assert f"near train.py:{line} in main · aten::item\n   likely line 11: print(loss.item())" in text


@pytest.mark.parametrize(
    "where",
    [
        Where("train.py", 4, "main", operator="aten::item"),  # two lines call it, one of them in no loop
        Where("train.py", 12, "main", operator="aten::to"),  # two lines call it
        Where("train.py", 4, "main", operator="aten::mm"),  # none does
        Where("train.py", 4, "other", operator="aten::item"),  # another function: the file has changed
        Where("train.py", 400, "main", operator="aten::item"),
        Where("train.py", 400, exact=True),
        Where("train.py", -1, exact=True),
        Where("missing.py", 1, exact=True),
        Where("\0.py", 1, exact=True),
        Where(".", 1, exact=True),
        Where("secret.txt", 1, exact=True),
        Where(),
    ],
)
def test_no_line_is_better_than_a_wrong_one(program: Path, where: Where) -> None:
    (program.parent / "secret.txt").write_text("secret")
    assert source_of(where) is None


def test_the_call_of_a_nested_function_is_its_own(program: Path) -> None:
    where = Where("train.py", 5, "fetch", operator="aten::to")
    assert source_of(where) == (6, 'return batch.to("cuda", non_blocking=True)', True)


def test_a_loader_is_read_by_a_loop_that_does_not_count(program: Path) -> None:
    where = Where("train.py", 12, "main", operator="enumerate(DataLoader)#_Single.__next__")
    assert source_of(where) == (8, "for batch in loader:", True)
    assert source_of(Where("train.py", 4, "main", operator=where.operator)) == (8, "for batch in loader:", True)


def test_a_built_in_function_is_known_by_its_name(program: Path) -> None:
    program.write_text("import time\n\n\ndef main():\n    time.sleep(1)\n")
    where = Where("train.py", 4, "main", operator="<built-in function sleep>")
    assert source_of(where) == (5, "time.sleep(1)", True)


def test_a_broken_program_is_no_crash(program: Path) -> None:
    program.write_text("def main(:\n")
    assert source_of(Where("train.py", 1, "main", operator="aten::item")) is None


# the line to write

LOOPS = """\
import torch
from torch.utils.data import DataLoader

loader = DataLoader(data, batch_size=64, num_workers=2, shuffle=True)


def main(model, device):
    for step, (x, y) in enumerate(loader):
        x = x.to(device)
        noise = torch.randn(64, 3, generator=g).to(device)
        loss = model(x, y)
        print(loss[0, 0])
        log.append(loss.item())
        if loss.isnan().item():
            break
    for _ in range(3):
        weights = make().to(device)
        pinned = torch.rand(8).pin_memory().to(device)
        there = torch.rand(8, device="cpu").to(device)
        halves = (torch.randint(9, (8,)) / 2).to(torch.float16).cuda()
        drawn = torch.rand(8).to(device)
"""


@pytest.mark.parametrize(
    ("line", "fix", "written"),
    [
        (9, "prefetch", "loader = DataLoader(data, batch_size=64, num_workers=2, shuffle=True, pin_memory=True)"),
        (10, "make_on_device", "as general as ever"),  # the generator is one of the CPU
        (21, "keep_on_device", "drawn = torch.rand(8, device=device)"),
        (8, "num_workers=8", "loader = DataLoader(data, batch_size=64, num_workers=8, shuffle=True"),
        (13, "readback", "as general as ever"),  # who reads the log is not known
        (9, "drop_sync", "as general as ever"),
        (9, "align_ranks", "as general as ever"),
    ],
)
def test_the_line_to_write_is_what_fix_writes(program: Path, line: int, fix: str, written: str) -> None:
    pytest.importorskip("libcst")
    program.write_text(LOOPS)
    where = Where("train.py", line, "main", exact=True)
    assert fix_line(fix, where, "as general as ever").startswith(written)


def test_without_the_program_a_remedy_stays_as_it_is() -> None:
    assert fix_line(COPY.fix, COPY.where, COPY.remedy) == COPY.remedy


# exports


def test_perfetto_gets_processes_threads_slices_and_flows() -> None:
    events = json.loads("".join(perfetto(small_timeline())))["traceEvents"]
    named = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == {"steps", "main", "main: calls", "main: annotations", "stream 7"}
    slices = [event for event in events if event["ph"] == "X"]
    assert {"step 0", "step 1", "launch", "gemm", "�[31msync", "aten::item"} == {event["name"] for event in slices}
    assert min(event["ts"] for event in slices) == 0
    flows = [event for event in events if event["ph"] in "sf"]
    assert [(flow["ph"], flow["id"], flow["ts"]) for flow in flows] == [
        ("s", 0, 0.0),
        ("f", 0, 5.0),
        ("s", 1, 10.0),
        ("f", 1, 19.0),
    ]


def test_perfetto_slices_of_a_thread_nest_or_stand_apart() -> None:
    slices = defaultdict(list)
    for event in json.loads("".join(perfetto(small_timeline())))["traceEvents"]:
        if event["ph"] == "X":
            slices[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for mine in slices.values():
        mine.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(mine))


def test_csv_has_a_line_a_span() -> None:
    rows = list(csv.DictReader(io.StringIO("".join(csv_table(small_timeline())))))
    assert list(rows[0]) == list(CSV_COLUMNS)
    assert [row["kind"] for row in rows] == ["launch", "kernel", "launch", "kernel", "sync"]
    times = {"start": "21000", "end": "35000", "work": "1000"}
    assert rows[4] == times | {
        "row": "4",
        "rank": "0",
        "device": "",
        "lane": "77",
        "kind": "sync",
        "name": "�[31msync",
        "inside": "aten::item",
        "size": "0",
        "direction": "",
    }


def test_no_cell_is_a_formula() -> None:
    timeline = small_timeline()
    evil = timeline.change(names=("=1+1", "+a", "-b", "@c"))
    rows = list(csv.DictReader(io.StringIO("".join(csv_table(evil)))))
    assert {row["name"] for row in rows} | {row["inside"] for row in rows} == {"'=1+1", "'+a", "'-b", "'@c", ""}


def test_a_timeline_of_nothing_exports_to_nothing() -> None:
    nothing = (
        small_timeline()
        .keep(small_timeline().spans.lane < 0)
        .change(marks=np.zeros(0, np.int64), frames=small_timeline().frames)
    )
    assert json.loads("".join(perfetto(nothing)))["traceEvents"]
    assert "".join(csv_table(nothing)) == ",".join(CSV_COLUMNS) + "\n"


def test_predictions_keep_their_range() -> None:
    assert "(8.4–10.1)" in terminal.render_full(replace(HEALTHY, causes=(COPY,), predicted=predicted(8.9, 8.4, 10.1)))


def test_places_are_links_where_a_terminal_shows_them(tmp_path: Path) -> None:
    program = tmp_path / "train me.py"
    program.write_text("loss.item()\n")
    there = replace(COPY, sites=(replace(COPY.sites[0], where=Where(str(program), 1, "main", exact=True)),))
    said = replace(STALLED, causes=(there, SYNC))
    shown = terminal.render_full(said, colour=True, wrap=True)
    assert f";{program.as_uri()}#1\x1b\\" in shown
    assert "model.py#" not in shown  # that file is not there
    for elsewhere in (terminal.render_full(said, colour=True, wrap=False), terminal.render_full(said, wrap=True)):
        assert "\x1b]8" not in elsewhere
