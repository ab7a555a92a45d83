"""The lines of the report that marks alone can tell."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from build import Run, loop
from diagnoses import STALLED, ms
from jsonschema import Draft202012Validator

from keepbusy.explain import explain
from keepbusy.report import as_json, run_report, terminal
from keepbusy.report.paper import laid_out
from keepbusy.report.run_report import asides
from keepbusy.timeline.model import NONE
from keepbusy.timeline.run_facts import LOOP, Part, PlainRun, RareStall
from keepbusy.timeline.run_facts import RUN as WHOLE_RUN

SAVE = RareStall(
    "checkpoint", 24, 100.0, True, ms(812), ms(24 * 812), 0.14, ("train.py(90): <module>", "train.py(41): main")
)
RUN = PlainRun(
    "optimizer", 2400, ms(25), ms(24.1), ms(26.3), warm_up=12, warm_up_time=ms(8100), lead=ms(3.2), stalls=(SAVE,)
)
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "reference" / "explain.schema.json").read_text())


def told(*runs: PlainRun) -> list[str]:
    return [f"{label}: {text}" for label, text in asides(dict(enumerate(runs)))]


def test_the_whole_run_is_told() -> None:
    assert told(RUN) == [
        "plain: 80% of the 2,400 steps that were not recorded take 24.1–26.3 ms. The first 12 took 8.10 s in total.",
        "lead: When a step ends, Python is 3.2 ms ahead.",
        "rarely: Every 100 steps 812 ms of a checkpoint at train.py:41 · 14% of the run",
    ]


def test_it_stands_in_the_report() -> None:
    text = terminal.render_full(replace(STALLED, plain_runs={0: RUN}))
    assert "rarely  Every 100 steps 812 ms of a checkpoint at train.py:41 · 14% of the run" in text
    assert "rarely" not in terminal.render_full(STALLED)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"no_lead": 1.0, "lead": 4}, "Python has no lead: when a step ends, the GPU is idle."),
        ({"no_lead": 0.3}, "but in 30% of the steps it has no lead."),
        ({"input": ms(5)}, "Python waits for input for 5.0 ms of each step (20%)."),
        ({"collector": ms(1)}, "Python collects garbage for 1.0 ms of each step (4%)."),
        ({"requests": 2.25}, "PyTorch requests memory from the driver 2.2 times per step, also after the warm-up."),
        ({"delayed": 0.3}, "For 30% of the run the program was ready to run, but other processes used the CPU cores."),
        ({"retries": 3}, "GPU memory was full 3 times."),
        ({"fault": "RuntimeError: \x1b[2J"}, "Step times were not measured to the end of the run (RuntimeError: �[2J)"),
    ],
)
def test_what_matters_is_said(change: dict[str, object], says: str) -> None:
    assert says in "\n".join(told(replace(RUN, **change)))


def test_what_does_not_matter_is_not() -> None:
    quiet = replace(
        RUN, lead=NONE, input=ms(0.1), collector=1, requests=0.001, warm_up=0, stalls=(replace(SAVE, share=0.004),)
    )
    assert told(quiet) == ["plain: 80% of the 2,400 steps that were not recorded take 24.1–26.3 ms."]
    assert told() == []
    assert told(PlainRun("nobody", 0, 0, 0, 0)) == []


def test_a_place_shows_its_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nscore = evaluate(model)\n")
    stall = replace(SAVE, what="", regular=False, lines=(f"{script}(2): <module>",), library="lib/loop.py(7): run")
    (line,) = [one for one in told(replace(RUN, stalls=(stall,))) if one.startswith("rarely")]
    assert line.startswith("rarely: 24 times 812 ms at ")
    assert line.endswith("train.py:2 (lib/loop.py(7): run): score = evaluate(model) · 14% of the run")
    inner = replace(stall, lines=("a.py(9): main", "a.py(3): loop", *stall.lines), loop=1)
    assert ": score = evaluate(model), called at a.py:3 · 14%" in told(replace(RUN, stalls=(inner,)))[-1]
    assert "Once 812 ms" in told(replace(RUN, stalls=(replace(stall, count=1),)))[-1]


def test_stalls_one_after_the_other_are_counted() -> None:
    row = replace(SAVE, count=4, every=1.0)
    assert "rarely: 4 times 812 ms of a checkpoint" in told(replace(RUN, stalls=(row,)))[-1]


def test_two_stalls_are_no_rhythm_where_nothing_is_known_to_bring_them() -> None:
    row = replace(SAVE, what="", count=2, every=777.0)
    assert "rarely: 2 times 812 ms at train.py:41" in told(replace(RUN, stalls=(row,)))[-1]


def test_a_stall_at_an_unknown_line_is_told_without_a_place() -> None:
    assert (
        told(replace(RUN, stalls=(replace(SAVE, what="", lines=()),)))[-1]
        == "rarely: Every 100 steps 812 ms, at an unknown line · 14% of the run"
    )


def test_of_ranks_that_stall_together_the_one_with_a_reason_is_told() -> None:
    waits = replace(RUN, stalls=(replace(SAVE, what="", share=0.15, lines=("train.py(33): main",)),))
    assert (
        told(waits, RUN)[-1]
        == "rarely: Every 100 steps 812 ms of a checkpoint on rank 1 at train.py:41 · 14% of the run"
    )
    assert len([one for one in told(waits, RUN) if one.startswith("rarely")]) == 1


def test_a_rank_that_waits_for_the_one_that_stalls_is_told_with_it() -> None:
    evaluates = replace(SAVE, what="", count=8, every=40.0, last=321)
    waits = replace(RUN, stalls=(replace(SAVE, what="", count=13, every=39.0, lines=(), last=320),))
    once = replace(SAVE, what="", count=1, every=0.0, regular=False, lines=("train.py(32): main",), last=281)
    said = [one for one in told(replace(RUN, stalls=(evaluates, once)), waits) if one.startswith("rarely")]
    assert said == ["rarely: Every 40 steps 812 ms on rank 0 at train.py:41 · 14% of the run"]


def test_the_json_keeps_to_its_schema() -> None:
    runs = {0: RUN, 2: PlainRun("nobody", 0, 0, 0, 0)}
    said = json.loads(as_json.render(replace(STALLED, plain_runs=runs)))
    Draft202012Validator(SCHEMA).validate(said)
    assert said["plain_runs"][0]["stalls"][0] | {"place": 0} == {
        "what": "checkpoint",
        "where": "train.py:41",
        "place": 0,
        "called_at": "",
        "count": 24,
        "every": 100.0,
        "regular": True,
        "time": 812.0,
        "share": 0.14,
    }
    assert said["plain_runs"][1]["lead"] is None


def test_marks_go_with_the_timeline() -> None:
    def body(run: Run) -> None:
        run.launch(50).sync()

    assert explain(loop(body, 8, device="NVIDIA H200", plain_runs={0: RUN})).plain_runs == {0: RUN}
    assert explain(loop(body, 8, device="NVIDIA H200")).plain_runs == {}


def test_a_mean_outside_of_what_most_iterations_take_is_said_to_be_one() -> None:
    loop = Part(LOOP, "train.py:3", time=ms(6_300), busy=0, turns=100, turn=ms(63), low=ms(1.7), high=ms(19.7))
    run = Part(WHOLE_RUN, time=ms(6_300), busy=0, parts=(loop,))
    assert "63.0 ms per iteration on average (mostly 1.7–19.7)" in laid_out(
        run_report.tree(run, 100), 100, colour=False
    )
    usual = replace(run, parts=(replace(loop, high=ms(70)),))
    assert "63.0 ms per iteration (1.7–70.0)" in laid_out(run_report.tree(usual, 100), 100, colour=False)


def test_a_run_in_which_the_gpu_computed_nothing_does_not_count_no_milliseconds() -> None:
    assert run_report.headline(Part(WHOLE_RUN, time=ms(6_300), busy=0)) == (
        "The run took 6.30 s. The GPU computed nothing."
    )
