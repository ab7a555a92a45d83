"""The plan that is kept beside the last run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from diagnoses import STALLED, ms, predicted

from keepbusy.causes.places import Where
from keepbusy.cli.run import plan_to_keep
from keepbusy.explain.diagnosis import LoopDiagnosis, PlannedFix
from keepbusy.explain.kept_plan import KeptPlan
from keepbusy.fixes.definition import CapturedLines
from keepbusy.report.verdict import fixed_lines
from keepbusy.timeline.run_facts import LOOP, CutShort, Part

CAPTURED = (CapturedLines("train.py", "train", ((8, 20), (9, 4)), (7, 11)),)


def essence(one: PlannedFix) -> tuple[object, ...]:
    return one.fix, [(place.file, place.line, place.exact) for place in one.where], one.captured, one.loop, one.code


def test_a_plan_comes_back_as_it_was_kept() -> None:
    where = (Where("train.py", 8, exact=True), Where("model.py", 4))
    graph = PlannedFix("graph", where, (), ms(1), predicted(30, 29, 31), ms(1), code="step()", captured=CAPTURED)
    plan = (graph, replace(graph, fix="num_workers=8", captured=(), loop="train.py:3"))
    run = replace(STALLED, plan=plan, command=("--on", "l4", "train.py"), folder="/runs", sources=("train.py",))
    kept = KeptPlan.of(run)
    again = KeptPlan.of_json(kept.as_json())
    assert [essence(one) for one in again.plan] == [essence(one) for one in plan]
    assert replace(again, plan=()) == replace(kept, plan=())


def test_what_the_report_does_not_list_is_not_kept() -> None:
    gains = {"graph": ms(300), "compile": ms(1)}
    where = (Where("train.py", 8, exact=True),)
    plan = tuple(
        PlannedFix(fix, where, (), ms(1), predicted(30, 29, 31), ms(1), run_gain=gain) for fix, gain in gains.items()
    )
    run = replace(STALLED, plan=plan, run=Part("run", time=ms(1_000)))
    assert [fix.fix for fix in plan_to_keep(run).plan] == ["graph"]


@pytest.mark.parametrize(
    ("loop", "told"),
    [
        ("train.py:3", "an iteration  30.0 → 20.0 ms, 33% shorter"),  # the loop that both runs are about, in no tree
        ("train.py:9", "an iteration  8.0 → 2.0 ms, 75% shorter"),  # what both runs counted
        ("train.py:18", "an iteration  8.0 → 6.0 ms, 25% shorter"),  # whose iterations take the GPU longer than Python
        ("train.py:99", ""),
        ("train.py:12", ""),  # most of whose iterations were not counted
        ("train.py:15", ""),  # of which none was, so what was explained may be something else
    ],
)
def test_an_iteration_is_told_of_the_loop_that_the_plan_is_about(loop: str, told: str) -> None:
    counted = Part(LOOP, "train.py:9", time=ms(20), turns=10, turn=ms(2), low=ms(2))
    partly_counted = Part(LOOP, "train.py:12", time=ms(30), parts=(replace(counted, place="train.py:12"),))
    ahead = replace(counted, place="train.py:18", time=ms(70))
    tree = Part("run", parts=(counted, partly_counted, Part(LOOP, "train.py:15", time=ms(40)), ahead))
    after = replace(STALLED, loop=loop if loop in ("train.py:3", "train.py:15") else "", plain_step=ms(20), run=tree)
    after = replace(after, loops=(LoopDiagnosis("train.py:18", 10, replace(STALLED, plain_step=ms(6))),))
    made = {"written": [("graph", "train.py:4")], "left": [], "loop": loop, "step": ms(30), "usual": ms(8), "length": 0}
    made["command"] = after.command
    rows = [row for row in fixed_lines(made, [], after) if row.startswith("an iteration")]
    assert rows == [told] * bool(told)


@pytest.mark.parametrize(
    ("command", "row"), [("train.py", ["the run       40.0 → 20.0 ms, 50% shorter"]), ("train.py --long", [])]
)
def test_the_run_is_held_against_one_of_the_same_command(command: str, row: list[str]) -> None:
    after = replace(STALLED, loop="", command=("train.py",), run=Part("run", time=ms(20)))
    made = {"written": [("graph", "train.py:4")], "left": [], "loop": "", "step": 0, "usual": 0, "length": ms(40)}
    made["command"] = command.split()
    assert fixed_lines(made, [], after)[1:] == row
    cut_short = replace(after, cut_short=CutShort("SIGTERM"))
    assert fixed_lines(made, [], cut_short)[1:] == []


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"plan": [1]}', '{"plan": [{"fix": "graph"}]}'])
def test_what_is_no_plan_is_not_taken_for_one(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        KeptPlan.of_json(text)
