"""The plan of a whole run, from its tree of loops, its loaders and its steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from build import HOME, MS, US, Run, loop
from diagnoses import HEALTHY
from hypothesis import given
from planned_runs import ITEM, TREE, places, run_of, shortened, use
from told import explained

from keepbusy.causes.places import Where
from keepbusy.explain import explain
from keepbusy.explain.diagnosis import Diagnosis, LoopDiagnosis, PlannedFix, Prediction
from keepbusy.explain.run_plan import CAPTURING, plan_of_run, with_loader
from keepbusy.report import terminal, verdict
from keepbusy.report.run_report import planned_rows
from keepbusy.timeline.busy_file import from_bytes, load, to_bytes
from keepbusy.timeline.model import Lane, Spans, Timeline
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
    UnevenLoop,
)


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


def test_a_graph_costs_the_run_its_capture_and_its_comparisons_once() -> None:
    """Of 40 iterations of 5 ms, 37 are replayed, in 1 ms each. The first three and the 4th, 8th, 16th and 32nd are
    compared: each takes another 9 ms. To capture it takes 5 ms."""
    graph = replace(shortened(5, 1), fix="graph", reason="It is launched alike each time.")
    told = of_120_steps(plan=(), loops=(LoopDiagnosis("train.py:70", 40, replace(HEALTHY, plan=(graph,))),))
    [once] = [one for one in plan_of_run(told, ()) if one.fix == "graph"]
    assert (once.run_gain, once.once) == (37 * 4 * MS, 7 * 9 * MS + 5 * MS)
    again = replace(told, loops=(LoopDiagnosis("train.py:70", 40, replace(HEALTHY, plan=(replace(once, loop=""),))),))
    [twice] = [one for one in plan_of_run(again, ()) if one.fix == "graph"]
    assert twice == once  # a loop's own plan may know it already
    [row] = planned_rows(replace(told, plan=(once,)))
    assert row.run_before - row.run_after == once.run_gain - once.once


def test_a_line_of_the_verdict_shows_a_difference() -> None:
    """The last ones that do not are left out; all of them are counted, and stand in the whole report."""
    plan = (shortened(30, 20), *(replace(shortened(20, after), fix="readback") for after in (19.98, 19.97)))
    rows = [line for line in verdict.render(of_120_steps(plan=plan)).splitlines() if line[:3] in ("1  ", "2  ", "3  ")]
    assert len(rows) == 1


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
