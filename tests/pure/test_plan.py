"""The plan on hand-built timelines, the queue of a loader, and how both are told. Microseconds, or as it says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from itertools import count, pairwise
from operator import or_
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from build import HOME, MB, MS, US, Run, loop
from diagnoses import HEALTHY
from hypothesis import given
from jsonschema import Draft202012Validator
from told import H200, TRAIN, explained, near, told

from keepbusy.causes.places import Where
from keepbusy.explain import explain, without_planned
from keepbusy.explain.diagnosis import Diagnosis, Harmless, LoopDiagnosis, PlannedFix, Prediction
from keepbusy.explain.fix_search import candidates
from keepbusy.explain.run_plan import CAPTURING, plan_of_run, with_loader
from keepbusy.explain.step_analysis import StepAnalysis
from keepbusy.fixes.reading import DecideOnGpu
from keepbusy.report import as_json, run_report, terminal, verdict
from keepbusy.report.as_json import planned, run_as_json
from keepbusy.timeline.busy_file import from_bytes, load, to_bytes
from keepbusy.timeline.model import Direction, Lane, Spans, Timeline
from keepbusy.timeline.run_facts import (
    FIRST_USE,
    IMPORTS,
    LINE,
    LOOP,
    RUN,
    CutShort,
    LineTime,
    LoaderUse,
    Part,
    PlainRun,
    RunFacts,
    SlowTurns,
    UnevenLoop,
)
from keepbusy.timeline.steps import sample, whole_steps, within_loop, without_timer_reads

ITEM = ["aten::item", "aten::_local_scalar_dense"]
READ, OTHER, PREPARE = "read.py(1): read", "other.py(2): read", "data.py(3): tokenize"


def eager(run: Run, operators: int = 60) -> Run:
    for _ in range(operators):
        run.work(20, at=["aten::add"]).launch(5, at=["aten::add"])
    return run


def two_reads(run: Run) -> None:
    """Whoever makes one of them later waits at the other one."""
    run.launch([1_000] * 9).sync(at=[READ, *ITEM]).sync(at=[OTHER, *ITEM]).work(2_000)


def one_read(run: Run) -> None:
    run.launch([1_000] * 9).sync(at=[READ, *ITEM]).work(2_000, at=[PREPARE])


def read_in_the_middle(run: Run) -> None:
    eager(eager(run).sync(at=[READ, *ITEM]))


def many_faults(run: Run) -> None:
    run.copy(8 * MB, 2_000, at=["aten::copy_"])
    eager(run, 30).launch([1_000] * 2).sync(at=[READ, *ITEM]).work(1_500, at=[PREPARE])


def busy(run: Run) -> None:
    run.work(100).launch([1_000] * 9).copy(MB, 100, pinned=True, blocking=False, stream=8)


PROGRAMS = [two_reads, one_read, read_in_the_middle, many_faults, busy, eager]


def places(one: PlannedFix) -> list[str]:
    return [str(place) for place in one.where]


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
        for one in candidates(story.inputs, story.found)
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


# a loader


def use(**given: Any) -> LoaderUse:
    """Three workers, 430 ms a batch, 84 ms the rest of a turn: the program waits 60 ms for each of a hundred."""
    usual: dict[str, Any] = {"place": "train.py:40", "workers": 3, "prefetch": 2, "batches": 100, "waited": 6_430 * MS}
    times = {"began": 430 * MS, "in_worker": 430 * MS, "looped": 14_400 * MS, "cores": 16}
    return LoaderUse(**(usual | times | given))


def test_the_smallest_number_that_keeps_up() -> None:
    assert use().turn == 84 * MS
    assert use().enough() == 6
    assert use().enough() * use().turn >= use().in_worker > (use().enough() - 1) * use().turn


@pytest.mark.parametrize(("cores", "enough"), [(16, 6), (7, 6), (6, 5), (5, 4), (2, 3), (1, 3)])
def test_there_are_no_more_workers_than_cores(cores: int, enough: int) -> None:
    """One is for the program; and nobody is told to take fewer than today."""
    assert use(cores=cores).enough() == enough


def test_a_loader_that_keeps_up_has_enough() -> None:
    assert use(in_worker=100 * MS).enough() == 3


def test_of_a_loader_that_nobody_measured_nothing_is_said() -> None:
    assert use(in_worker=-1).enough() == -1
    assert use(in_worker=-1).waits_with(9) == 6_000 * MS


def test_the_slowest_part_of_the_queue_sets_the_pace() -> None:
    """Of 430 ms a batch, three workers give one each 143 ms, and five one each 86."""
    assert use().waits_with(3) == pytest.approx(99 * (430 / 3 - 84) * MS, rel=0.01)
    long = use(batches=1000, waited=60_430 * MS, looped=144_000 * MS)
    assert long.waits_with(5) == pytest.approx(1000 * (430 / 5 - 84) * MS, rel=0.05)
    assert use().waits_with(6) == 0


def test_a_turn_that_takes_long_lets_workers_fill_the_queue_and_no_more() -> None:
    """A first turn of 12 s, as where kernels are chosen: the mean turn would say that these workers keep up."""
    turns = (12_000 * MS, *[24 * MS] * 79)
    loader = use(workers=4, batches=80, in_worker=220 * MS, waited=2_300 * MS, looped=16_000 * MS, turns=turns)
    assert loader.turn == 24 * MS
    assert loader.waits_with(4) == pytest.approx((79 - 8) * (55 - 24) * MS, rel=0.1)
    assert loader.enough() == 8


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=60),
    st.integers(1, 900),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_more_workers_never_make_a_program_wait_longer(
    turns: list[int], prepares: int, workers: int, passes: int
) -> None:
    one = use(workers=workers, batches=len(turns), in_worker=prepares * MS, turns=tuple(t * MS for t in turns))
    one = replace(one, passes=passes)
    waits = [one.waits_with(number) for number in range(workers, 9)]
    assert all(after <= before for before, after in pairwise(waits))
    assert one.waits_with(workers, shorter=100 * MS) >= one.waits_with(workers)


def test_workers_take_their_time_to_start() -> None:
    """Four took 0.2 s beyond their first batch, so eight more take 0.4."""
    loader = use(workers=4, in_worker=240 * MS, began=440 * MS)
    assert loader.starting(8) == 400 * MS


def run_of(time: float, busy: float) -> Part:
    return Part(RUN, source="train.py", time=round(time * MS), busy=round(busy * MS), turns=1, turn=round(time * MS))


def test_ranks_that_meet_after_a_loop_wait_for_the_one_that_it_takes_longest() -> None:
    """Rank 0 learns seven hospitals in 10.4 s and the other in 2.8: shared evenly, each would have 6.6 s to do."""
    uneven = UnevenLoop("stay.py:64", rank=0, turns=7, longest=10_360 * MS, mean=6_565 * MS)
    inner = Part(LOOP, "stay.py:47", time=9_240 * MS, turns=1_488)
    outer = Part(LOOP, "stay.py:64", time=10_360 * MS, turns=7, parts=(inner,))
    told = replace(HEALTHY, run=replace(run_of(17_600, 9_990), parts=(outer,)), loop="stay.py:47")
    [fix] = plan_of_run(told, (), [uneven])
    assert (fix.fix, places(fix), fix.causes, fix.loop) == ("align_ranks", ["stay.py:64"], ("peer_late",), "stay.py:64")
    assert fix.run_gain == 3_795 * MS
    assert fix.predicted.step == 6_565 * MS // 7
    assert "rank 0 10.4 s, and 6.6 s in the mean" in fix.reason
    assert plan_of_run(told, (), [replace(uneven, longest=6_700 * MS)]) == ()
    assert plan_of_run(replace(told, loop="stay.py:99"), (), [uneven]) == ()


def test_more_workers_come_first_and_gain_what_the_queue_says() -> None:
    [fix] = with_loader((), [use()], replace(HEALTHY, run=run_of(26_000, 4_000)))
    assert (fix.fix, places(fix), fix.causes) == ("num_workers=6", ["train.py:40"], ("input_late",))
    assert fix.run_gain == 6_000 * MS
    assert (fix.predicted.step, fix.gain) == (84 * MS, 60 * MS)
    assert "430 ms" in fix.reason
    assert "3 workers" in fix.reason
    assert "num_workers=6" in fix.code


def test_workers_without_data_are_given_a_share() -> None:
    """Twelve at 72 ms a batch would give one each 6 ms. The run waited all the same: ten of them had no file."""
    waits = {"waited": 2_200 * MS, "began": 160 * MS, "in_worker": 72 * MS, "looped": 7_100 * MS, "batches": 170}
    loader = use(workers=12, busy=2, turns=(20 * MS,) * 169, **waits)
    [fix] = with_loader((), [loader], replace(HEALTHY, run=run_of(13_750, 5_600)))
    assert (fix.fix, places(fix), fix.run_gain) == ("share_among_workers", ["train.py:40"], 2_040 * MS)
    assert "There are 12 workers, 10 of them without data, and 16 cores." in fix.reason
    assert with_loader((), [replace(loader, busy=12)], replace(HEALTHY, run=run_of(13_750, 5_600))) == ()
    assert replace(loader, busy=-1).idle == 0


def test_of_more_workers_nothing_is_gained_beyond_what_the_gpu_waits() -> None:
    [fix] = with_loader((), [use()], replace(HEALTHY, run=run_of(26_000, 23_000)))
    assert fix.run_gain == 3_000 * MS


@pytest.mark.parametrize("uses", [[], [use(in_worker=-1)], [use(in_worker=50 * MS)], [use(waited=600 * MS)]])
def test_a_loader_that_keeps_up_is_not_in_the_plan(uses: list[LoaderUse]) -> None:
    assert with_loader((), uses, replace(HEALTHY, run=run_of(26_000, 4_000))) == ()


def test_without_a_watched_run_a_loader_says_nothing() -> None:
    assert with_loader((), [use()], HEALTHY) == ()


def test_a_run_of_which_no_turn_was_recorded_has_its_tree_and_its_plan() -> None:
    """Also of a loader that has no workers at all: what it holds up was seen by no window."""
    marks = PlainRun("optimizer", 99, step=144 * MS, low=1, high=1 << 40)
    facts = RunFacts(
        source="train.py", run=run_of(26_000, 4_000), loaders=(use(workers=0, prefetch=0),), notes=("why",)
    )
    timeline = Timeline((Lane(0, None, 0),), (), Spans.of(0), facts=replace(facts, plain_runs={0: marks}))
    found = explain(from_bytes(to_bytes(timeline)))
    assert (found.steps, found.plain_step, found.ledger, found.causes) == (0, 144 * MS, {}, ())
    [fix] = found.plan
    assert (fix.fix, fix.run_gain) == ("num_workers=6", 6_000 * MS)
    shown = terminal.render_full(found)
    assert "The run took 26.00 s" in shown
    assert "26.00 → 20.00 s" in shown
    assert "no workers" in shown
    assert "computes" not in shown
    assert "why" in shown


def test_a_script_of_which_only_the_tree_is_known_has_its_lines_in_the_plan() -> None:
    """It made its points, gave the GPU work, and took a matrix home twice; the first lines waited for nothing."""

    def line(place: str, began: int, time: int, busy: int, call: str = "") -> Part:
        lines = (LineTime(place, time * MS, (time - busy) * MS, call),)
        return Part(LINE, place=place, began=began * MS, time=time * MS, busy=busy * MS, lines=lines)

    run = Part(
        RUN,
        time=7_000 * MS,
        busy=100 * MS,
        parts=(
            Part(IMPORTS, time=3_000 * MS, busy=0),
            line("rings.py:11", 3_000, 400, 0),
            Part(FIRST_USE, began=3_400 * MS, time=200 * MS, busy=0),
            line("rings.py:23", 3_600, 2_400, 0, "median"),
            line("rings.py:30", 6_000, 100, 100),
            line("rings.py:37", 6_100, 900, 50),
        ),
    )
    found = explain(Timeline((Lane(0, None, 0),), (), Spans.of(0), facts=RunFacts(source="rings.py", run=run)))
    assert [(one.fix, places(one), one.run_gain) for one in found.plan] == [
        ("compute_on_gpu", ["rings.py:23"], 2_400 * MS),
        ("compute_on_gpu", ["rings.py:37"], 850 * MS),
    ]
    assert found.plan[1].predicted == Prediction(50 * MS, 50 * MS, 900 * MS)
    shown = " ".join(terminal.render_full(found).split())
    assert "1 compute it on the GPU at rings.py:23 2.40 → 0 s (0–2.40) · the run 7.00 → 4.60 s" in shown
    assert "in median" in shown
    assert "iteration" not in shown
    said = " ".join(verdict.render(found).split())
    assert "The GPU waits for CPU work. 1 rings.py:23 compute it on the GPU 2.40 → 0 s (0–2.40)" in said
    assert said.endswith("both: this run 7.00 → 3.75 s")
    assert verdict.summary(found).headline == "7.00 → 4.60 s for the script"
    facts = RunFacts(source="rings.py", run=run, cut_short=CutShort("ValueError", "rings.py:23"))
    raised = explain(Timeline((Lane(0, None, 0),), (), Spans.of(0), facts=facts))
    assert [places(one) for one in raised.plan] == [["rings.py:37"]]  # no advice is given for the line that raised


@pytest.mark.parametrize(
    ("beside", "ran", "fix", "place", "gain"),
    [
        (6_000, 2_000, "use_processes", "sonar.py:34", 6_100),
        (8_000, 2_000, "use_processes", "sonar.py:34", 7_000),
        (6_000, 9_500, "compute_on_gpu", "sonar.py:90", 7_000),
        (900, 2_000, "compute_on_gpu", "sonar.py:90", 7_000),
    ],
)
def test_a_line_that_waits_to_run_python_is_not_to_blame_but_the_thread_that_does(
    beside: int, ran: int, fix: str, place: str, gain: int
) -> None:
    """Not where a line's own thread was at work itself, nor where the other hardly was, nor for longer."""
    line = Part(LINE, place="sonar.py:90", began=1_000 * MS, time=8_000 * MS, busy=1_000 * MS)
    others = (LineTime("sonar.py:34", beside * MS), LineTime("sonar.py:36", 100 * MS))
    parts = (Part(FIRST_USE, time=1_000 * MS, busy=0), line)
    run = Part(RUN, time=10_000 * MS, busy=1_000 * MS, parts=parts, beside=others, ran=ran * MS)
    [found] = explain(Timeline((Lane(0, None, 0),), (), Spans.of(0), facts=RunFacts(source="sonar.py", run=run))).plan
    assert (found.fix, places(found), found.run_gain) == (fix, [place], gain * MS)


OWN_LINES = ["train.py:40", "train.py:44"]


@pytest.mark.parametrize(
    ("ran", "gpu", "lines"), [(900, 1_000, ["reader.py:12"]), (3_300, 1_000, OWN_LINES), (1_500, 1_800, OWN_LINES)]
)
def test_so_it_is_in_a_loop_at_whose_lines_the_other_thread_comes_between(ran: int, gpu: int, lines: list[str]) -> None:
    """1,000 steps of 3 ms at two lines, where Python is another thread's; or was this one's own, all the while; or it
    may have waited for the GPU."""

    def body(run: Run) -> None:
        run.launch([500]).work(2_000, at=["train.py(40): take"]).launch([500]).work(1_000, at=["train.py(44): note"])

    loop_of_steps = Part(LOOP, "train.py:38", time=3_000 * MS, busy=gpu * MS, turns=1_000)
    others = (LineTime("reader.py:12", 2_500 * MS), LineTime("reader.py:20", 900 * MS))
    run = Part(RUN, time=4_000 * MS, busy=gpu * MS, parts=(loop_of_steps,), beside=others, ran=ran * MS)
    [fix] = explained(loop(body, run=run, loop="train.py:38"), plain_step=3 * MS).plan
    assert sorted(places(fix)) == lines
    assert fix.run_gain == pytest.approx(2_000 * MS, rel=0.05)


def test_ranks_that_do_not_meet_in_the_loop_of_their_steps_are_uneven_there() -> None:
    """Each of four answers its own questions, one of them the longest; another loop, after which they meet, is even."""
    uneven = UnevenLoop("answer.py:20", rank=3, turns=400, longest=8_000 * MS, mean=5_000 * MS)
    steps = Part(LOOP, "answer.py:20", time=4_000 * MS, turns=380)
    told = replace(HEALTHY, ranks=(0, 1, 2, 3), run=replace(run_of(9_000, 5_000), parts=(steps,)), loop="answer.py:20")
    [fix] = plan_of_run(told, (), [uneven])
    assert (fix.fix, places(fix), fix.run_gain) == ("align_ranks", ["answer.py:20"], 3_000 * MS)
    assert (fix.predicted.step, fix.predicted.high) == (5_000 * MS // 400, 8_000 * MS // 400)
    assert "rank 3 8.0 s" in fix.reason


@pytest.mark.parametrize(("marked_by", "told_so"), [("forward", True), ("optimizer", False)])
def test_environments_that_are_stepped_one_after_another_could_run_as_one_batch(marked_by: str, told_so: bool) -> None:
    """100 iterations of 16 rollouts of 50 turns: each asks the net, and waits for the action. No such loop trains."""

    def body(run: Run) -> None:
        run.launch([200]).sync(at=ITEM)
        with run.inside("play.py(9): step", exact=True):
            run.launch([10]).copy(4, 2, HOME, at=ITEM).work(2_000, at=["env.py(3): physics"])
        run.copy(4, 2, at=["play.py(8): state", "aten::copy_"])

    steps = Part(LOOP, "play.py:8", time=180_000 * MS, busy=20_000 * MS, turns=80_000)
    rollouts = Part(LOOP, "play.py:6", time=181_000 * MS, busy=20_000 * MS, turns=1_600, parts=(steps,))
    whole = Part(LOOP, "play.py:3", time=190_000 * MS, busy=25_000 * MS, turns=100, parts=(rollouts,))
    run = Part(RUN, time=200_000 * MS, busy=25_000 * MS, parts=(whole,))
    marks = PlainRun(marked_by, 80_000, step=2_250 * US, low=1, high=1 << 40)
    found = explained(loop(body, run=run, loop="play.py:8", plain_runs={0: marks}), plain_step=2_250 * US)
    [fix] = [one for one in found.plan if one.fix == "compute_on_gpu"]
    known = "the 16 of the loop at play.py:6 could run as one batch: at best 180.0 → 11.2 s."
    assert fix.reason.endswith(known) == told_so


def test_the_lines_of_a_run_with_loops_are_no_plan() -> None:
    parts = (Part(LINE, place="train.py:3", time=9_000 * MS, busy=0), *TREE.parts)
    timeline = Timeline((Lane(0, None, 0),), (), Spans.of(0), facts=RunFacts(run=replace(TREE, parts=parts)))
    assert explain(timeline).plan == ()


def test_a_turn_cut_short_before_it_gave_the_gpu_anything_is_no_turn() -> None:
    """What was recorded is the end of something else; of the run its tree is told, and why there is no more."""
    run = Run.of(1).launch([100] * 9)
    run.on(0).step().work(100).on(0).step()
    marks = PlainRun("optimizer", 99, step=144 * MS, low=1, high=1 << 40)
    found = explain(run.timeline(run=run_of(26_000, 4_000), plain_runs={0: marks}))
    assert found.steps == 0
    assert found.run is not None
    assert "fewer than two whole steps" in found.notes[-1]


def test_more_workers_stand_in_the_plan_once() -> None:
    step = Prediction(10 * MS, 9 * MS, 11 * MS)
    before = PlannedFix("prepare_in_workers", (Where("train.py", 44),), ("input_late",), 5 * MS, step, 5 * MS)
    other = PlannedFix("readback", (Where("train.py", 50),), ("host_sync",), 1 * MS, step, 1 * MS)
    fix, rest = with_loader((before, other), [use()], replace(HEALTHY, run=run_of(26_000, 4_000)))
    assert (fix.fix, fix.gain, rest) == ("num_workers=6", 60 * MS, other)


def fed(step: int, turns: int, **loader: Any) -> tuple[Diagnosis, LoaderUse]:
    """A loop of so many milliseconds a step, and the loader that feeds it."""
    marks = PlainRun("optimizer", turns, step=step * MS, low=1, high=1 << 40)
    told = replace(HEALTHY, plain_step=step * MS, run=run_of(26_000, 4_000), plain_runs={0: marks}, noise=MS)
    return told, use(batches=turns, waited=500 * MS, looped=step * turns * MS, **loader)


def shortened(step: int, after: int) -> PlannedFix:
    predicted = Prediction(after * MS, after * MS, after * MS)
    return PlannedFix("prefetch", (Where("train.py", 44),), ("blocking_copy",), (step - after) * MS, predicted, 0)


def test_a_copy_behind_a_loader_that_just_keeps_up_needs_more_workers() -> None:
    """Four workers give a batch each 50 ms, and that is what the loop takes: a faster copy alone gains nothing."""
    told, loader = fed(50, 100, in_worker=200 * MS, workers=4)
    more, copy = with_loader([shortened(50, 30)], [loader], told)
    assert (more.fix, more.run_gain) == ("num_workers=7", 0)
    assert (copy.predicted.step, copy.run_gain) == (30 * MS, 2_000 * MS)


def test_where_there_are_no_more_cores_the_loader_sets_the_pace() -> None:
    told, loader = fed(50, 100, in_worker=200 * MS, workers=4, cores=6)
    more, copy = with_loader([shortened(50, 30)], [loader], told)
    assert more.fix == "num_workers=5"
    assert (copy.predicted.step, copy.gain, copy.run_gain) == (40 * MS, 10 * MS, 1_000 * MS)


def test_where_there_is_no_core_at_all_the_copy_is_no_fix() -> None:
    told, loader = fed(50, 100, in_worker=200 * MS, workers=4, cores=4)
    assert with_loader([shortened(50, 30)], [loader], told) == ()


def test_a_loader_of_another_loop_holds_up_nobody_here() -> None:
    told, loader = fed(50, 100, in_worker=200 * MS, workers=4)
    [copy] = with_loader([shortened(50, 30)], [replace(loader, batches=40)], told)
    assert copy.predicted.step == 30 * MS


def of_120_steps(**given: Any) -> Diagnosis:
    marks = PlainRun("optimizer", 118, step=30 * MS, low=1, high=1 << 40, warm_up=2)
    usual: dict[str, Any] = {"plain_runs": {0: marks}, "run": TREE}
    return replace(HEALTHY, **(usual | given))


def calibrated(**loop: Any) -> Diagnosis:
    """A loop beside that of the steps, in which the GPU is idle for 9 of 10 s at one line."""
    lines = (LineTime("range.py:32", 9_500 * MS, 8_500 * MS), LineTime("range.py:33", 500 * MS, 500 * MS))
    told: dict[str, Any] = {"function": "ranges", "time": 10_000 * MS, "busy": 1_000 * MS, "turns": 100, "lines": lines}
    beside = Part(LOOP, "range.py:30", began=TREE.time, **(told | loop))
    steps = replace(TREE.parts[1], place="train.py:29")
    run = replace(TREE, time=TREE.time + 10_000 * MS, parts=(TREE.parts[0], steps, beside))
    return of_120_steps(run=run, plain_step=180 * MS, loop="train.py:29")


def test_a_loop_that_nobody_recorded_is_told_by_its_idle_lines() -> None:
    """From nothing to all of it: what it takes is known, not what it does."""
    [fix] = plan_of_run(calibrated(), ())
    assert (fix.fix, places(fix), fix.loop) == ("compute_on_gpu", ["range.py:32"], "range.py:30")
    assert (fix.gain, fix.run_gain) == (90 * MS, 9_000 * MS)
    assert fix.predicted == Prediction(10 * MS, 10 * MS, 100 * MS)
    held = plan_of_run(calibrated(function="library/loops.py:7 in run"), ())
    assert [places(one) for one in held] == [["range.py:30"]]


def test_of_a_loop_whose_recorded_turns_are_unlike_the_others_the_run_knows_more() -> None:
    """Twelve quick turns were recorded, and then came twelve slow ones."""
    unlike = replace(calibrated(), loop="range.py:30", plain_given=False)
    assert "range.py:30" in [fix.loop for fix in plan_of_run(unlike, ())]
    assert "range.py:30" not in [fix.loop for fix in plan_of_run(replace(unlike, plain_given=True), ())]


@pytest.mark.parametrize(
    "loop",
    [{"busy": 100 * MS}, {"busy": 9_900 * MS}, {"warm_up_time": 8_800 * MS}],
    ids=["the GPU is not used", "it does not wait", "but in the first turn"],
)
def test_a_loop_in_which_nothing_waits_is_no_row(loop: dict[str, Any]) -> None:
    assert plan_of_run(calibrated(**loop), ()) == ()


def test_where_nobody_knows_which_loop_was_recorded_none_is_told() -> None:
    assert plan_of_run(replace(calibrated(), loop="range.py:77"), ()) == ()


def test_what_was_recorded_of_unusual_steps_is_not_said_of_all() -> None:
    """Two steps of 700 ms were recorded of a run whose steps take 20: each was one of a kind."""
    told = of_120_steps(plan=(shortened(700, 200),), plain_given=False, plain_step=700 * MS, steps=2)
    assert [one.run_gain for one in plan_of_run(told, ())] == [2 * 500 * MS]


def test_what_a_loop_s_own_plan_says_of_a_capture_is_said_once() -> None:
    """Its steps were counted when its own turns were explained, and are when the run's plan is made of all loops."""
    graph = replace(shortened(5, 1), fix="graph", reason="It is launched alike each time.")
    told = of_120_steps(plan=(), loops=(LoopDiagnosis("train.py:70", 40, replace(HEALTHY, plan=(graph,))),))
    [once] = [one for one in plan_of_run(told, ()) if one.fix == "graph"]
    assert once.reason == f"It is launched alike each time. The first {CAPTURING} iterations run uncaptured."
    again = replace(told, loops=(LoopDiagnosis("train.py:70", 40, replace(HEALTHY, plan=(replace(once, loop=""),))),))
    [twice] = [one for one in plan_of_run(again, ()) if one.fix == "graph"]
    assert twice.reason == once.reason


def test_what_saves_the_run_most_comes_first() -> None:
    own = replace(HEALTHY, plan=(replace(shortened(5, 1), fix="readback"),))
    told = of_120_steps(plan=(shortened(30, 28),), loops=(LoopDiagnosis("train.py:70", 640, own),))
    plan = plan_of_run(told, ())
    assert [one.loop for one in plan] == ["train.py:70", ""]
    assert [one.run_gain for one in plan] == [640 * 4 * MS, 240 * MS]


def test_of_a_loop_no_more_is_saved_than_it_took_beside_what_its_gpu_computes() -> None:
    """A turn of 31.3 ms, of which 1 ms is computing once it is fixed, is said to be taken 640 times within a second."""
    own = replace(HEALTHY, plan=(shortened(5, 1),))
    loop = Part(LOOP, place="train.py:70", time=1_000 * MS, busy=990 * MS, turns=640)
    told = replace(HEALTHY, loops=(LoopDiagnosis("train.py:70", 640, own),), run=replace(TREE, parts=(loop,)))
    assert [one.run_gain for one in plan_of_run(told, ())] == [pytest.approx(1_000 * MS * (1 - 1 / 31.3), abs=1)]


def test_a_graph_is_captured_once_however_often_its_loop_is_run() -> None:
    """As of an evaluation: the captured function stands beside the one that holds the loop, and stays."""
    steps = Part(LOOP, place="train.py:55", function="evaluate", time=2_400 * MS, turns=480)
    folds = Part(LOOP, place="train.py:74", function="main", time=2_500 * MS, turns=5, parts=(steps,))
    run = replace(TREE, time=2_500 * MS, busy=100 * MS, parts=(folds,))
    graph = replace(shortened(5, 1), fix="graph", causes=("launch_bound",))
    told = replace(HEALTHY, plain_step=5 * MS, ledger={"computing": MS // 10}, plan=(graph,), run=run)
    told = replace(told, loop=steps.named, plain_runs={0: PlainRun("optimizer", 480, step=5 * MS, low=1, high=MS)})
    [fix] = plan_of_run(told, ())
    assert fix.run_gain == (480 - CAPTURING) * 4 * MS


def test_what_the_gpu_does_when_the_host_has_left_the_loop_is_the_loops_still() -> None:
    """The host runs ten turns of 10 ms in 20 ms and waits behind them: nine tenths of all ten can go."""
    ahead = Part(LOOP, place="late.py:21", began=5 * MS, time=20 * MS, turns=10)
    run = Part(RUN, time=105 * MS, parts=(ahead,))
    steps = replace(HEALTHY, plain_step=10 * MS, ledger={"computing": MS}, loop="late.py:21", run_steps=10)
    plan = plan_of_run(replace(steps, plan=(shortened(10, 1),), run=run), ())
    assert [one.run_gain for one in plan] == [90 * MS]


@given(
    st.lists(st.integers(0, 4_000), min_size=4, max_size=4),
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60), st.integers(1, 900)), min_size=2, max_size=2),
    st.integers(1, 31),
)
def test_after_all_fixes_a_run_still_has_what_lies_beside_its_loops_and_what_is_computed_in_them(
    times: list[int], turns: list[tuple[int, int, int]], computing: int
) -> None:
    """Whatever recorded turns are said to take and to save: a loop, one within it and one after it are all there is."""
    start_up, inner, beside, other = (time * MS for time in times)
    nested = Part(LOOP, place="ppo.py:192", time=inner, turns=turns[0][2])
    outer = Part(LOOP, place="ppo.py:185", began=start_up, time=inner + beside, turns=31, parts=(nested,))
    last = Part(LOOP, place="ppo.py:300", began=start_up + outer.time, time=other, turns=turns[1][2])
    run = Part(RUN, time=start_up + outer.time + other, parts=(Part(LINE, "a.py:1", time=start_up), outer, last))
    ledger = {"computing": computing * MS}
    loops = tuple(
        LoopDiagnosis(place, count, replace(HEALTHY, ledger=ledger, plan=(shortened(after + less, after),)))
        for place, (less, after, count) in zip(("ppo.py:192", "ppo.py:300"), turns, strict=True)
    )
    steps = replace(HEALTHY, ledger=ledger, plan=(shortened(90, 40),), loop="ppo.py:185", run_steps=31)
    plan = plan_of_run(replace(steps, run=run, loops=loops), ())
    saved = {
        place: sum(one.run_gain for one in plan if one.loop == place) for place in ("", "ppo.py:192", "ppo.py:300")
    }
    assert all(one.run_gain >= 0 for one in plan)
    for part, gain in (
        (nested, saved["ppo.py:192"]),
        (outer, saved["ppo.py:192"] + saved[""]),
        (last, saved["ppo.py:300"]),
    ):
        assert gain <= part.time
    computed = min(31 * computing * MS, computing * MS / HEALTHY.plain_step * outer.time)
    assert run.time - sum(saved.values()) >= start_up + computed - 1


def test_a_loop_within_the_step_does_not_ask_for_the_same_again() -> None:
    own = replace(HEALTHY, plan=(shortened(5, 1),))
    told = replace(HEALTHY, plan=(shortened(30, 28),), loops=(LoopDiagnosis("train.py:70", 640, own),), run=TREE)
    [fix] = plan_of_run(told, ())
    assert fix.loop == "train.py:70"


def test_what_saves_nothing_of_the_run_is_no_row_unless_another_one_needs_it() -> None:
    small = replace(shortened(30, 29), fix="drop_sync", run_gain=MS)
    large = replace(shortened(29, 9), fix="readback", run_gain=9_000 * MS)
    text = " ".join(terminal.render_full(replace(HEALTHY, run=TREE, plan=(small, large))).split())
    assert "1 read the value later" in text
    assert "1 more would save less than 78.0 ms of this run: remove the synchronization." in text
    once = replace(small, fix="compile", gain=MS, reason="Compiling takes some 20 s, once.")
    text = " ".join(terminal.render_full(replace(HEALTHY, run=TREE, plan=(once, large))).split())
    assert "In a longer run it may save 1.0 ms per iteration. Compiling takes some 20 s, once." in text
    needed = replace(large, needs=(small.named,))
    assert "more would save" not in terminal.render_full(replace(HEALTHY, run=TREE, plan=(small, needed)))


def test_a_cause_asks_for_as_many_workers_as_the_plan() -> None:
    told = explain(load(Path(__file__).parents[1] / "gpu" / "truth" / "public" / "mnist.busy"))
    [workers] = [one for one in told.plan if one.fix.startswith("num_workers=")]
    [late] = [one for one in told.causes if one.cause == "input_late"]
    assert late.remedy == workers.code
    assert "four times" not in late.advice


def test_where_steps_are_not_the_plain_ones_their_fixes_ask_for_no_workers() -> None:
    """Two unusual steps were recorded: that they could be shorter says nothing of the turns that take batches."""
    own = replace(HEALTHY, plan=(shortened(700, 200),), plain_given=False, steps=2, run=run_of(26_000, 4_000))
    first, *_ = with_loader(own.plan, [use()], own)
    assert first.fix == "num_workers=6"


# how it is told

TREE = Part(
    RUN,
    source="train.py",
    time=26_000 * MS,
    busy=4_000 * MS,
    turns=1,
    turn=26_000 * MS,
    parts=(
        Part(FIRST_USE, time=2_000 * MS, busy=0, turns=1, lines=(LineTime("train.py:9", 2_000 * MS, 0),)),
        Part(
            LOOP,
            place="train.py:64",
            source="for batch in loader:",
            function="main",
            began=2_000 * MS,
            time=24_000 * MS,
            busy=4_000 * MS,
            turns=100,
            at_least=True,
            turn=240 * MS,
            low=84 * MS,
            high=251 * MS,
            warm_up=2,
            warm_up_time=700 * MS,
            kinds=(SlowTurns(33, 3.0, True, 195 * MS, 6_435 * MS, "train.py:64"),),
            lines=(LineTime("train.py:64", 10_000 * MS, 9_000 * MS, "__next__"),),
            parts=(Part(LINE, place="train.py:70", time=1),),
        ),
    ),
)  # fmt: skip


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
