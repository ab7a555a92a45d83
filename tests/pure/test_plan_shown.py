"""How plans, trees and what they save are told: in reports, as JSON, and in saved runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from build import MS, loop
from diagnoses import HEALTHY
from jsonschema import Draft202012Validator
from planned_runs import TREE, places, shortened, two_reads, use
from told import H200, explained, told

from keepbusy.causes.places import Where
from keepbusy.explain import without_planned
from keepbusy.explain.diagnosis import Diagnosis, Harmless, PlannedFix, Prediction
from keepbusy.explain.run_plan import plan_of_run, with_loader
from keepbusy.report import as_json, run_report, terminal
from keepbusy.report.as_json import planned, run_as_json
from keepbusy.timeline.busy_file import from_bytes, to_bytes
from keepbusy.timeline.run_facts import (
    LOOP,
    RUN,
    Part,
    PlainRun,
)


def test_the_tree_as_json() -> None:
    said = json.loads(json.dumps(run_as_json(TREE)))
    assert (said["kind"], said["time"], said["busy"], said["turns"]) == ("run", 26.0, 4.0, 1)
    first, batches = said["parts"]
    assert (first["kind"], first["where"]) == ("first use of the GPU", "")
    assert (batches["turns"], batches["turn"], batches["low"], batches["high"]) == (100, 240.0, 84.0, 251.0)
    assert batches["warm_up"] == {"turns": 2, "time": 0.7}
    assert batches["kinds"][0]["every"] == 3.0
    assert batches["lines"] == [{"where": "train.py:64", "time": 10.0, "idle": 9.0, "call": "__next__"}]
    assert (batches["parts"][0]["busy"], batches["parts"][0]["turns"]) == (None, None)
    assert run_as_json(None) is None


MARKS = PlainRun("optimizer", 98, step=1, low=1, high=1 << 40, warm_up=2)


def watched(**facts: Any) -> Diagnosis:
    return explained(loop(two_reads, 8, device=H200, run=TREE, plain_runs={0: MARKS}, **facts))


@pytest.mark.parametrize(("place", "steps"), [("train.py:64", 100), ("", 0)])
def test_of_a_loop_without_an_optimizer_its_turns_are_the_steps_of_the_run(place: str, steps: int) -> None:
    found = explained(loop(two_reads, 8, device=H200, run=TREE, loop=place))
    assert found.steps_of_run == steps
    gains = [one.run_gain for one in found.plan]
    assert gains == ([one.gain * steps for one in found.plan] if steps else [-1] * len(gains))


def test_the_plan_as_json_says_where_the_run_stands_after_each() -> None:
    found = replace(watched(), plain_given=True)
    found = replace(found, plan=plan_of_run(found, ()))
    rows = planned(found)
    assert [row["fix"] for row in rows] == ["readback"]
    assert [row["where"] for row in rows] == [places(one) for one in found.plan]
    assert rows[-1]["predicted"]["after"] == pytest.approx(9.0, rel=0.01)
    gains = [one.gain for one in found.plan]
    assert [row["run"] and row["run"]["after"] for row in rows] == [
        pytest.approx(26.0 - 100 * sum(gains[: count + 1]) / 1e9, abs=0.002) for count in range(len(gains))
    ]
    assert [row["gain"] for row in rows] == [pytest.approx(gain / 1e6) for gain in gains]


def test_what_more_workers_save_is_the_runs_own() -> None:
    plan = with_loader((), [use()], replace(HEALTHY, run=TREE))
    [row] = planned(replace(HEALTHY, plan=plan, run=TREE))
    assert (row["run"], row["gain"]) == ({"before": 26.0, "after": 20.0}, 60.0)


def test_where_the_run_was_not_watched_nothing_is_said_of_it() -> None:
    assert {row["run"] for row in planned(told(two_reads))} == {None}


def test_the_plan_and_the_tree_keep_to_the_schema() -> None:
    reference = Path(__file__).parents[2] / "docs" / "reference" / "explain.schema.json"
    said = json.loads(as_json.render(watched()))
    Draft202012Validator(json.loads(reference.read_text())).validate(said)
    assert said["run"]["parts"][1]["where"] == "train.py:64"
    assert len(said["plan"]) == 1


def test_a_run_and_its_loaders_come_back_from_a_file() -> None:
    timeline = loop(two_reads, 8, device=H200, run=TREE, loaders=(use(), use(in_worker=-1)))
    again = from_bytes(to_bytes(timeline))
    assert (again.facts.run, again.facts.loaders) == (TREE, timeline.facts.loaders)


def test_a_run_that_was_watched_is_explained_with_its_tree_and_its_loader() -> None:
    timeline = loop(two_reads, 8, device=H200, run=TREE, loaders=(use(),))
    found = explained(timeline)
    assert found.run == TREE
    assert [one.fix for one in found.plan] == ["num_workers=6", "readback"]
    assert found.plan[0].run_gain == 6_000 * MS


@pytest.mark.parametrize(("busy", "seconds", "planned"), [(0, 9, True), (0, 1, False), (2_000, 9, False)])
def test_a_loop_that_prepares_for_long_is_planned_if_the_gpu_is_not_used_in_it(
    busy: int, seconds: int, planned: bool
) -> None:
    time = seconds * 1_000 * MS
    long = Part(LOOP, place="data.py:54", function="normalise", time=time, busy=busy * MS, turns=64, turn=time // 64)
    run = replace(TREE, parts=(long, *TREE.parts))
    found = explained(loop(two_reads, 8, device=H200, run=run, loop="train.py:64"))
    prepared = [one for one in found.plan if one.fix == "prepare_once"]
    assert [one.run_gain for one in prepared] == ([long.time] if planned else [])


def test_only_what_is_planned_leaves_the_harmless_ones() -> None:
    found = told(two_reads)
    some = [replace(one, causes=("allocator",)) for one in found.plan]
    assert without_planned(found.harmless, some) == found.harmless


def test_a_loader_that_the_run_waits_for_is_not_said_to_cost_nothing() -> None:
    """The few recorded steps had batches in store; the plan speaks of the run's loader, where it is made."""
    seen = Harmless("input_late", Where("train.py", 64, exact=True), 1.0, "the step is launch-bound")
    late = with_loader((), [use(workers=1)], replace(HEALTHY, run=TREE))
    assert without_planned([seen], late) == ()
    assert without_planned([seen], told(two_reads).plan) == (seen,)
    assert "There is 1 worker and 16 cores." in late[0].reason


def test_what_the_plan_saves_of_a_long_run() -> None:
    """2.4 of the 24 seconds of its loop, on two GPUs."""
    plan = (replace(shortened(30, 6), run_gain=2_400 * MS),)
    told = replace(HEALTHY, plan=plan, run=TREE, ranks=(0, 1))
    said = run_report.of_a_long_run(told, 50, 2.5)
    assert said == "The plan saves 5.0 of 50 hours, 10.0 hours of 2 GPUs, worth 25.00 at 2.5 per GPU hour."


def test_without_the_whole_run_a_step_stands_for_it() -> None:
    told = replace(HEALTHY, plan=(shortened(30, 24),), plain_step=30 * MS)
    assert run_report.of_a_long_run(told, 10) == "The plan saves 2.0 of 10 hours."


def test_an_empty_plan_saves_nothing_of_any_run() -> None:
    assert "it saves nothing" in run_report.of_a_long_run(HEALTHY, 10)


def test_a_fix_in_a_trainers_loop_is_told_as_its_setting() -> None:
    """The user's one line leads there: the plan says where in the library, and what to set."""
    step, here = (
        Prediction(60 * MS, 59 * MS, 61 * MS),
        Where("lora.py", 141, library="transformers/trainer.py:1847 in run"),
    )
    rows = (
        PlannedFix("prepare_in_workers", (here,), ("input_late",), 9 * MS, step, 9 * MS, 900 * MS),
        PlannedFix("move_off_the_loop", (here,), ("host_work",), 5 * MS, step, 5 * MS, 90 * MS),
    )
    held = Part(LOOP, place="lora.py:141", function="transformers/trainer.py:1805 in run", time=1_000 * MS, turns=100)
    told = replace(HEALTHY, plan=rows, run=Part(RUN, time=2_000 * MS, parts=(held,)))
    first, second = plan_of_run(told, ())
    assert first.code == "TrainingArguments(dataloader_num_workers=4, dataloader_persistent_workers=True)"
    assert (second.code, second.reason) == ("", "")  # of this the trainer has no setting
    text = " ".join(terminal.render_full(replace(told, plan=(first, second))).split())
    assert f"in transformers/trainer.py:1847 in run The trainer sets it: {first.code} 2 " in text
    elsewhere = replace(told, run=Part(RUN, time=2_000 * MS, parts=(replace(held, function="main"),)))
    assert plan_of_run(elsewhere, ()) == rows
