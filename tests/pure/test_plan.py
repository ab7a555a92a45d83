"""The plan of a step, on hand-built timelines. Microseconds, or as it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from itertools import count
from operator import or_
from typing import Any

import pytest
from build import HOME, MB, US, Run, loop
from planned_runs import ITEM, OTHER, PREPARE, READ, TREE, busy, places, two_reads
from told import H200, TRAIN, explained, near, told

from keepbusy.explain.fix_search import candidates
from keepbusy.explain.step_analysis import StepAnalysis
from keepbusy.fixes.reading import DecideOnGpu
from keepbusy.report import terminal
from keepbusy.timeline.model import Direction
from keepbusy.timeline.steps import sample, whole_steps, within_loop, without_timer_reads


def eager(run: Run, operators: int = 60) -> Run:
    for _ in range(operators):
        run.work(20, at=["aten::add"]).launch(5, at=["aten::add"])
    return run


def one_read(run: Run) -> None:
    run.launch([1_000] * 9).sync(at=[READ, *ITEM]).work(2_000, at=[PREPARE])


def read_in_the_middle(run: Run) -> None:
    eager(eager(run).sync(at=[READ, *ITEM]))


def many_faults(run: Run) -> None:
    run.copy(8 * MB, 2_000, at=["aten::copy_"])
    eager(run, 30).launch([1_000] * 2).sync(at=[READ, *ITEM]).work(1_500, at=[PREPARE])


PROGRAMS = [two_reads, one_read, read_in_the_middle, many_faults, busy, eager]


def test_two_waits_behind_one_another_are_one_set() -> None:
    found = told(two_reads)
    assert found.plain_step == near(9_000 + 2_000)
    [fix] = found.plan
    assert (fix.fix, {*places(fix)}) == ("readback", {"read.py:1", "other.py:2"})
    assert fix.predicted.step == near(9_000)
    assert fix.gain == fix.alone == near(2_000, 0.02)


def four_waits(run: Run) -> None:
    """More behind one another than are tried in all combinations. Tokenizing would fit beside the kernels."""
    run.copy(8 * MB, 200, at=["train.py(2): load", "aten::copy_"])
    for line in (3, 4, 5):
        run.launch([10]).sync(at=[f"train.py({line}): read", *ITEM])
    run.work(3_000, at=[PREPARE]).launch([1_000] * 9)


def objects_and_reads(run: Run) -> None:
    """Features go home and others come back, and the loss is read, before crops are cut on the host."""
    run.copy(8 * MB, 200, HOME, at=["bank.py(3): gather", "aten::copy_"])
    run.copy(8 * MB, 200, at=["bank.py(4): gather", "aten::copy_"])
    run.launch([10]).sync(at=[READ, *ITEM]).launch([10]).sync(at=[OTHER, *ITEM])
    run.work(3_000, at=[PREPARE]).launch([1_000] * 9)


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        (four_waits, {"train.py:2", "train.py:3", "train.py:4", "train.py:5"}),
        (objects_and_reads, {"bank.py:3", "bank.py:4", "read.py:1", "other.py:2"}),
    ],
)
def test_host_work_that_would_fit_beside_the_gpu_is_not_blamed_for_the_waits_that_keep_it_apart(
    body: Callable[[Run], Any], lines: set[str]
) -> None:
    found = told(body)
    assert found.plan[-1].predicted.step == near(9_000, 0.08)
    assert {place for one in found.plan for place in places(one)} == lines
    assert all(len(one.needs) == len(found.plan) - 1 for one in found.plan)
    assert "host_work" not in {cause for one in found.plan for cause in one.causes}


def test_what_saves_nothing_yet_says_with_what_it_does() -> None:
    said = terminal.render_full(told(four_waits), width=160).partition("What to do")[2]
    rows = [one.strip().rpartition("   ")[2] for one in said.splitlines() if one[:1].isdigit()][:2]
    assert rows[0] == "only with 2"
    assert re.match(r"12\.\d → 9\.\d ms per iteration", rows[1])
    assert "alone it saves nothing; it goes together with 1\n" in said


def test_of_two_fixes_that_are_called_alike_neither_goes_together_with_itself() -> None:
    """As where a trace knows the function alone: two reads in it stand at one place."""
    found = told(four_waits)
    first, last = replace(found.plan[0], needs=()), found.plan[-1]
    alike = replace(last, fix=first.fix, where=first.where, needs=(first.named,))
    said = terminal.render_full(replace(found, plan=(first, alike)), width=160)
    assert "alone it saves nothing; it goes together with 1\n" in said


def test_what_gains_something_in_a_set_is_not_called_harmless() -> None:
    found = told(two_reads)
    mine = {(cause, str(place)) for one in found.plan for cause in one.causes for place in one.where}
    assert not {(one.cause, str(one.where)) for one in found.harmless} & mine


def test_either_of_two_is_said() -> None:
    """The host waits for the value and then prepares: without the read, or without the preparation, it keeps up."""
    found = told(one_read)
    first = found.plan[0]
    assert (first.fix, places(first)) == ("readback", ["read.py:1"])
    assert first.instead == ("move_off_the_loop at data.py:3",)
    assert len(found.plan) == 1


def test_launches_are_captured_once_nothing_waits_between_them() -> None:
    found = told(read_in_the_middle)
    assert [one.fix for one in found.plan] == ["graph"]  # the other alone gains nothing here
    assert found.plan[0].needs == ("readback at read.py:1",)
    assert found.plan[0].predicted.step == near(120 * 5, 0.1)


def test_a_read_at_the_end_of_a_step_does_not_stand_in_the_way_of_a_graph() -> None:
    found = told(lambda run: eager(run, 120).sync(at=[READ, *ITEM]))
    assert found.plan[0].fix == "graph"
    assert found.plan[0].needs == ()


def test_what_forbids_a_graph_is_named_with_what_does_away_with_it() -> None:
    """Python branches on values again and again. The paragraph promises no more than the plan, which expects a fifth of
    what launching takes."""

    def routed(run: Run) -> None:
        for number in range(180):
            run.work(20).launch(5)
            if number % 5 == 0:
                run.sync(at=[f"moe.py({60 + number % 2}): route", *ITEM])

    found = explained(loop(routed, 8, device=H200, run=replace(TREE, decides=("moe.py:60", "moe.py:61"))))
    cause = next(one for one in found.causes if one.cause == "launch_bound")
    assert "in its middle (18 times per iteration at moe.py:60 and 1 more)" in cause.advice
    assert DecideOnGpu.advice.advice in cause.advice
    text = terminal.render_full(found, width=160)
    assert text.count(" · without it ") == len(found.causes) - 1


@pytest.mark.parametrize("trains", [True, False])
def test_a_loop_that_only_asks_a_model_is_no_training_step(trains: bool) -> None:
    node = "autograd::engine::evaluate_function: AddBackward0"

    def turn(run: Run) -> None:
        for _ in range(120):
            run.work(20).launch(5, at=["serve.py(7): main", *([node] if trains else []), "aten::add"])

    assert ("train_step" in told(turn).plan[0].code) == trains


@pytest.mark.parametrize("every", [4, 2])
def test_what_some_steps_launch_beyond_the_others_is_no_hindrance(every: int) -> None:
    """As a loss that is printed now and then, or an update of every second step: each kind gets its graph."""
    turns = count()

    def printing(run: Run) -> None:
        eager(run, 120)
        if next(turns) % every == every - 1:
            run.launch(5, at=["aten::item"])

    assert any(one.fix == "graph" for one in told(printing).plan)


@pytest.mark.parametrize("known", [True, False])
def test_kernels_on_as_much_data_as_a_value_says_are_no_graph(known: bool) -> None:
    """`count = int(mask.sum())`, and then as much is computed as the mask chooses: grids tell, where they are known."""
    turns = count(100)

    def chosen(run: Run) -> None:
        blocks = next(turns) if known else 0
        eager(run, 60)
        run.sync(at=[READ, *ITEM])
        for _ in range(60):
            run.work(20).launch(5, blocks=blocks)

    fixes = [one.fix for one in told(chosen).plan]
    assert ("graph" in fixes) == (not known)
    assert ("compile" in fixes) == known


@pytest.mark.parametrize(("size", "said"), [(75, True), (60, False)])
def test_a_state_that_is_kept_on_the_host_between_turns_is_told(size: int, said: bool) -> None:
    """A pool of states: some are copied to the GPU, and what became of them goes back."""

    def drawn(run: Run) -> None:
        run.copy(75 * MB, 9_000, at=["pool.py(42): main", "aten::to"])
        run.launch(2_000)
        run.copy(size * MB, 9_000, way=Direction.DEVICE_TO_HOST, at=["pool.py(49): main", "aten::to"])

    reasons = {fix.reason for fix in told(drawn).plan}
    assert any("If it is the same data, keep it there" in one for one in reasons) == said


def test_a_busy_gpu_has_no_plan() -> None:
    assert told(busy).plan == ()


@pytest.mark.parametrize("body", PROGRAMS)
def test_a_plan_only_goes_down(body: Callable[[Run], Any]) -> None:
    found = told(body)
    steps = [found.plain_step, *(one.predicted.step for one in found.plan)]
    assert steps == sorted(steps, reverse=True)
    for before, one in zip(steps, found.plan, strict=False):
        assert one.gain == pytest.approx(before - one.predicted.step, abs=max(US, found.noise))
        assert one.predicted.low <= one.predicted.step <= one.predicted.high


@pytest.mark.parametrize("body", PROGRAMS)
def test_a_plan_ends_where_all_its_fixes_lead(body: Callable[[Run], Any]) -> None:
    """Replayed at once, without any search."""

    def within(run: Run) -> None:
        with run.inside(TRAIN):
            body(run)

    timeline = loop(within, 8, device=H200)
    story = StepAnalysis.of(sample(whole_steps(without_timer_reads(within_loop(timeline)), None)), None, 8)
    plan = explained(timeline).plan
    planned = {(one.fix, place) for one in plan for place in places(one)}
    needed = [need for one in plan for need in one.needs if " at " in need]
    chosen = [
        one.edit
        for one in candidates(story.inputs, story.findings)
        if {(one.fix.name, str(place)) for place in one.where} <= planned or one.named in needed
    ]
    assert len(chosen) >= len(plan)
    if plan:
        assert plan[-1].predicted == story.forecast.predict(reduce(or_, chosen))


def test_a_set_is_found_whatever_stands_first() -> None:
    """The order of the causes in the timeline decides nothing."""

    def other_way_round(run: Run) -> None:
        run.launch([1_000] * 9).sync(at=[OTHER, *ITEM]).sync(at=[READ, *ITEM]).work(2_000)

    one, other = told(two_reads), told(other_way_round)
    assert one.plan[-1].predicted.step == near(other.plan[-1].predicted.step / US, 0.001)
