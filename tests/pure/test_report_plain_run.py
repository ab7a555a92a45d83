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
from keepbusy.report import as_json, run_report
from keepbusy.report.paper import laid_out
from keepbusy.report.run_report import asides
from keepbusy.timeline.model import NONE
from keepbusy.timeline.run_facts import LOOP, Part, PlainRun, SlowIterations
from keepbusy.timeline.run_facts import RUN as WHOLE_RUN

RUN = PlainRun("optimizer", 2400, ms(25), ms(24.1), ms(26.3), warm_up=12, warm_up_time=ms(8100), lead=ms(3.2))
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "reference" / "explain.schema.json").read_text())


def told(*runs: PlainRun) -> list[str]:
    return [f"{label}: {text}" for label, text in asides(dict(enumerate(runs)))]


def test_the_whole_run_is_told() -> None:
    assert told(RUN) == [
        "plain: 80% of the 2,400 steps that were not recorded take 24.1–26.3 ms. The first 12 took 8.10 s in total.",
        "lead: When a step ends, Python is 3.2 ms ahead.",
    ]


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
    quiet = replace(RUN, lead=NONE, input=ms(0.1), collector=1, requests=0.001, warm_up=0)
    assert told(quiet) == ["plain: 80% of the 2,400 steps that were not recorded take 24.1–26.3 ms."]
    assert told() == []
    assert told(PlainRun("nobody", 0, 0, 0, 0)) == []


def test_the_json_keeps_to_its_schema() -> None:
    runs = {0: RUN, 2: PlainRun("nobody", 0, 0, 0, 0)}
    said = json.loads(as_json.render(replace(STALLED, plain_runs=runs)))
    Draft202012Validator(SCHEMA).validate(said)
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


@pytest.mark.parametrize(
    ("count", "every", "says"),
    [
        (33, 3.0, "every third iteration takes"),
        (2, 50.0, "2 iterations take"),
        (4, 1.0, "4 iterations take"),
        (1, 0.0, "one iteration takes"),
    ],
)
def test_slow_iterations_have_a_rhythm_only_where_three_of_them_keep_it(count: int, every: float, says: str) -> None:
    slow = SlowIterations(count, every, True, ms(100), ms(1_000), "train.py:5")
    loop = Part(LOOP, "train.py:3", time=ms(6_300), busy=0, turns=100, turn=ms(63), kinds=(slow,))
    shown = laid_out(run_report.tree(Part(WHOLE_RUN, time=ms(6_300), busy=0, parts=(loop,)), 100), 100, colour=False)
    assert f"{says} 100 ms longer, at train.py:5" in shown
