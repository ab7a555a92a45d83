"""Whole steps: what repeats in a recording, cut where a step begins, and counted right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from build import MB, US, Run, loop
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import loops

from keepbusy.timeline.files import BadInput
from keepbusy.timeline.model import NONE, Kind, LinkKind, Timeline, settle
from keepbusy.timeline.replay import pace, replay
from keepbusy.timeline.run_facts import CutShort, PlainRun, RunFacts, WindowReason
from keepbusy.timeline.steps import (
    by_pattern,
    period,
    rare_steps,
    repetition,
    sample,
    whole_steps,
    within_loop,
    without_broken_off,
    without_timer_reads,
)


def steps_of(timeline: Timeline, rank: int = 0) -> int:
    return len(timeline.marks_of(rank))


def launches(timeline: Timeline) -> int:
    return int((timeline.spans.kind == Kind.LAUNCH).sum())


def kernels(run: Run, count: int) -> Run:
    for _ in range(count):
        run.launch(kernel=20)
    return run


# Cutting


def cut_short(run: Run, raised: str, **facts: Any) -> Timeline:
    return run.timeline(virtual=True, cut_short=CutShort("ValueError", raised, (raised, "train.py:3")), **facts)


def five_iterations() -> Run:
    run = Run.of()
    for _ in range(5):
        run.step()
        for line in (4, 5):
            with run.inside(f"train.py({line}): main", exact=True):
                run.launch(20)
    return run


@pytest.mark.parametrize(
    ("loop", "steps"),
    [("train.py:3", 4), ("train.py:3 (trainer.py:7 in fit)", 4), ("train.py:9", 5), ("", 5)],
)
def test_an_iteration_that_was_not_finished_is_none(loop: str, steps: int) -> None:
    """Where the run broke off, its loop was left as at the end of an iteration: only Python's end comes after."""
    timeline = cut_short(five_iterations().step().work(100), "train.py:5", loop=loop)
    assert steps_of(without_broken_off(timeline)) - 1 == steps
    assert steps_of(without_broken_off(timeline.change_facts(cut_short=None))) - 1 == 5


def test_an_iteration_that_has_only_begun_ends_the_one_before() -> None:
    assert steps_of(without_broken_off(cut_short(five_iterations(), "train.py:5", loop="train.py:3"))) == 5


PROOF = "keepbusy/runtime/graph/replay_check.py(99): _copy"


@pytest.mark.parametrize(("replays", "kept"), [(9, 9), (3, 3), (2, 7)])
def test_an_iteration_in_which_a_graph_is_proven_stands_for_no_other(replays: int, kept: int) -> None:
    """As long as there are others: here five of a run, and then those that only replay. The last has no next one."""
    run = Run.of()
    for iteration in range(5 + replays + 1):
        run.step()
        with run.inside("train.py(4): main", exact=True):
            run.launch([20, 20])
            if iteration < 5:
                kernels(run, 3)
                with run.inside(PROOF, exact=True):
                    kernels(run, 30)
    whole = whole_steps(run.timeline(virtual=True, loop="train.py:3"))
    assert steps_of(whole) == kept
    assert launches(whole) == kept if replays > 2 else launches(whole) > kept


def lines_of_a_script(*lines: int) -> Run:
    run = Run.of()
    for line in lines:
        with run.inside(f"train.py({line}): <module>", exact=True):
            run.launch(20)
    return run


def test_of_a_script_the_line_that_raised_is_left_out() -> None:
    """All that it called, and none of the lines before it."""
    run = lines_of_a_script(1, 2, 3)
    with run.inside("train.py(3): <module>", "lib/loop.py(7): f", exact=True):
        run.launch(20).sync(at=["aten::item"])
    kept = without_broken_off(cut_short(run.work(100), "train.py:3"))
    assert (launches(kept), np.count_nonzero(kept.on_device)) == (2, 2)


def test_a_line_that_was_fine_before_stays() -> None:
    """Nothing was recorded of the visit in which it raised."""
    assert launches(without_broken_off(cut_short(lines_of_a_script(3, 4), "train.py:3"))) == 2


def test_what_stands_before_the_first_mark_and_after_the_last_is_left_out() -> None:
    run = Run.of().work(5_000).launch(kernel=900)
    for _ in range(5):
        kernels(run.step(), 3)
    whole = whole_steps(run.timeline())
    assert (steps_of(whole), launches(whole)) == (4, 12)


def test_what_follows_a_loop_until_it_is_entered_again_is_none_of_its_turns() -> None:
    """Rollouts of three turns, and between them an update of 90 launches, which lengthens the last turn's mark."""
    run = Run.of()
    for turn in range(7):
        kernels(run.step().work(100), 3)
        if turn == 3:
            kernels(run, 90)
    window = run.timeline().change_facts(reason=WindowReason("loop", place="ppo.py:192"))
    whole = whole_steps(within_loop(window))
    assert (steps_of(whole), launches(whole)) == (5, 15)
    assert pace(whole) < pace(whole_steps(window)) / 2
    assert within_loop(window.change_facts(reason=None)).facts.beside == ()  # of steps the recorder knows it


def test_each_launch_keeps_its_command_whenever_it_ran() -> None:
    """The device is three steps behind when the window is cut: 30 launches and 30 kernels, not those that ran in it."""
    whole = whole_steps(loop(lambda run: kernels(run, 10).launch(kernel=2_000), steps=4))
    assert launches(whole) == int(whole.on_device.sum()) == 44
    cut = whole.spans.end[whole.rows_of(whole.spans.lane[whole.marks[0]])].max()
    assert (whole.spans.start[whole.on_device] > cut).any()


def test_what_is_cut_away_leaves_no_link_behind() -> None:
    whole = whole_steps(loop(lambda run: run.launch(kernel=50).order(7, 8).launch(kernel=50, stream=8)))
    assert (whole.links.source < whole.links.target).all()
    assert whole.links.target.max() < len(whole)


def test_what_one_step_releases_in_the_next_goes_round() -> None:
    """Two streams take turns, 700 µs and 300 µs, across the border of the step: the first waits for the last."""

    def turns(run: Run) -> None:
        run.launch(kernel=700).order(7, 8).launch(kernel=300, stream=8).order(8, 7)

    for steps in (2, 9):
        whole = whole_steps(loop(turns, steps=steps))
        assert (whole.links.source > whole.links.target).sum() == 1
        assert pace(whole) == pytest.approx(1_002_000, rel=0.001)


def test_what_goes_round_belongs_to_the_same_part_of_the_step() -> None:
    """A link to a kernel that the first step does not begin with is none of its own."""
    run = Run.of()
    for step in range(5):
        run.step().launch(kernel=700, name="first" if step < 4 else "other")
        run.order(7, 8).launch(kernel=300, stream=8).order(8, 7)
    whole = whole_steps(run.timeline())
    assert (whole.links.source < whole.links.target).all()


def test_the_timers_that_ddp_reads_in_its_first_steps_hold_no_step_up() -> None:
    run = Run.of()
    for _ in range(6):
        with run.inside("DistributedDataParallel.forward"):
            run.step().launch(kernel=900).event_sync()
            with run.inside("model.py(3): forward"):
                run.work(100).event_sync()  # the program's own
    plain = without_timer_reads(run.timeline())
    waits = plain.spans.kind[plain.links.target[plain.links.kind == LinkKind.ORDER]]
    assert len(waits) == (plain.spans.kind == Kind.SYNC).sum() == 6
    assert plain.facts.notes == ("DDP waits for the GPU to read its own timers in its first ten steps: left out here.",)
    others = loop(lambda run: run.launch().sync())
    assert without_timer_reads(others) is others


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_two_whole_steps_are_the_least(steps: int) -> None:
    run = Run.of()
    for _ in range(steps):
        kernels(run.step(), 10)
    run.launch(kernel=3)
    with pytest.raises(BadInput, match=r"^on paper shows fewer than two whole steps; record at least three") as caught:
        whole_steps(run.timeline().change(facts=RunFacts(source="on paper", pending_limit=1_000)))
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize("one_turn", [False, True])
def test_the_only_step_of_a_long_one_runs_into_the_next(one_turn: bool) -> None:
    """A window of 0.3 s holds one: without its wait the host runs ahead into the next, as it would in the program."""
    run = Run.of()
    for _ in range(2):
        run.step().work(20_000).launch(kernel=130_000).sync()
    known = PlainRun("optimizer", 200, 150 * 1_000_000, 150 * 1_000_000, 151 * 1_000_000)
    recorded = run.timeline(plain_runs={0: known}, plain_step=150 * 1_000_000, one_turn=one_turn)
    step = whole_steps(recorded, 150 * 1_000_000)
    assert steps_of(step) == 1
    assert not step.facts.one_turn
    assert pace(step) == pytest.approx(150e6, rel=0.01)
    assert pace(step.keep(step.spans.kind != Kind.SYNC)) == pytest.approx(130e6, rel=0.01)


def test_steps_that_launch_nothing_are_no_steps() -> None:
    run = Run.of()
    for _ in range(6):
        run.step().work(100)
    run.launch(kernel=50)
    with pytest.raises(BadInput, match="fewer than two whole steps"):
        whole_steps(run.timeline())


def test_a_short_step_in_the_middle_is_a_step() -> None:
    run = Run.of()
    for count in (10, 10, 2, 10, 10, 10):
        kernels(run.step(), count)
    assert steps_of(whole_steps(run.timeline())) == 5


# Several marks a step


def test_two_optimizers_that_take_turns_make_one_step() -> None:
    run = Run.of()
    for turn in range(9):
        kernels(run.step(), (10, 4)[turn % 2])
    whole = whole_steps(run.timeline())
    assert (steps_of(whole), launches(whole)) == (4, 56)


@pytest.mark.parametrize(
    ("counts", "length"),
    [
        ([10, 10, 10, 10], 1),
        ([10, 4, 10, 4, 10], 2),
        ([10, 4, 10, 4], 1),  # seen once each: nobody knows
        ([9, 9, 3, 9, 9, 3, 9], 3),
        ([100, 101, 100, 101, 100], 1),  # no difference worth the name
        ([10, 4, 7, 2, 9], 1),
        ([5], 1),
        ([], 1),
    ],
)
def test_the_period_of_counts(counts: list[int], length: int) -> None:
    assert period(np.array(counts), np.zeros(len(counts))) == length


def test_two_optimizers_make_one_step_of_a_loop_without_a_pattern() -> None:
    """Sentences of any length, then the steps of an encoder and a decoder: no two iterations launch the same."""
    run = Run.of()
    for count in (30, 12, 25, 41, 18, 33):
        for line, launched in ((8, 2), (9, count)):
            with run.inside("train.py(20): main", f"train.py({line}): train"):
                kernels(run.step(), launched)
    whole = whole_steps(run.timeline())
    assert (steps_of(whole), launches(whole)) == (5, 30 + 12 + 25 + 41 + 18 + 5 * 2)


def test_a_plain_step_may_hold_several_marks() -> None:
    """Two marks a plain step (micro-batches, say): steps of 1 ms, and a plain step of 2 ms."""
    timeline = loop(lambda run: run.launch(kernel=998), steps=8)
    assert steps_of(whole_steps(timeline)) == 8
    assert steps_of(whole_steps(timeline, plain_step=2_000_000)) == 4
    assert steps_of(whole_steps(timeline, plain_step=1_400_000)) == 8


def test_a_plain_step_never_holds_so_many_marks_that_one_step_is_left() -> None:
    timeline = loop(lambda run: run.launch(kernel=998), steps=8)
    assert steps_of(whole_steps(timeline, plain_step=4_000_000)) == 2
    assert steps_of(whole_steps(timeline, plain_step=8_000_000)) >= 2


# Ranks


def test_ranks_are_cut_by_the_same_steps() -> None:
    """Rank 1 began to record a step later: the last steps are those that both have."""
    run = Run.of(ranks=2)
    for step in range(6):
        for rank in run.ranks:
            if step or rank == 0:
                run.on(rank).step().launch(kernel=100)
    whole = whole_steps(run.timeline())
    assert steps_of(whole, 0) == steps_of(whole, 1) == 4
    for rank in (0, 1):
        assert (whole.rank_of_rows == rank).sum() == 8


def test_a_rank_without_marks_is_no_rank_of_a_loop() -> None:
    run = Run.of(ranks=2)
    for _ in range(6):
        run.step().launch(kernel=100)
    run.on(1).work(10)
    with pytest.raises(BadInput, match="fewer than two whole steps"):
        whole_steps(run.timeline())


# Without marks


def unmarked(timeline: Timeline) -> Timeline:
    return timeline.change(marks=np.zeros(0, np.int64))


def forward(run: Run) -> None:
    """Seven launches of five kinds of kernel, then the host prepares the next batch."""
    for name in ("embed", "norm", "gemm", "norm", "gemm", "loss", "adam"):
        run.launch(kernel=30, name=name)
    run.work(400)


def test_a_run_without_marks_is_cut_where_it_begins_anew() -> None:
    timeline = unmarked(loop(forward, steps=8))
    marked = by_pattern(timeline)
    assert set(np.diff(launched_before(marked))) == {7}
    whole = whole_steps(timeline)
    assert launches(whole) == 7 * steps_of(whole)
    assert steps_of(whole) >= 6


def launched_before(timeline: Timeline) -> np.ndarray:
    """Of each mark, how many launches stand before it."""
    return np.cumsum(timeline.spans.kind == Kind.LAUNCH)[timeline.marks]


def test_such_a_step_begins_after_the_longest_pause() -> None:
    marked = by_pattern(unmarked(loop(forward, steps=8)))
    rows = marked.marks
    assert {marked.names[name] for name in marked.spans.name[rows + 1]} == {"embed"}


def test_what_is_launched_before_the_loop_is_no_step() -> None:
    run = Run.of()
    for name in ("random", "random", *["gemm"] * 9):
        run.launch(kernel=500, name=name)
        run.sync()
    marked = by_pattern(run.timeline())
    assert {marked.names[name] for name in marked.spans.name[marked.marks + 1]} == {"gemm"}
    assert len(marked.marks) == 9


def test_a_run_that_does_not_repeat_has_no_steps() -> None:
    run = Run.of()
    for number in range(40):
        run.launch(kernel=30, name=f"kernel {number}")
    with pytest.raises(BadInput, match="fewer than two whole steps"):
        whole_steps(run.timeline())


def products(run: Run, count: int) -> Run:
    for _ in range(count):
        run.launch(kernel=500, name="gemm")
    return run


@pytest.mark.parametrize("after", [0, 3])
def test_turns_to_warm_up_are_not_what_a_script_is_about(after: int) -> None:
    """Twenty products, a copy that holds all up, and then perhaps more of the same."""
    script = products(products(Run.of(), 20).sync().copy(64 * MB, 8_000), after).launch(kernel=700, name="sum").sync()
    whole = whole_steps(script.timeline(virtual=True))
    assert whole.facts.one_turn
    assert launches(whole) == 22 + after


def test_what_computes_nothing_has_no_steps() -> None:
    script = Run.of()
    for _ in range(20):
        script.work(100).copy(MB, 1_000)
    assert not whole_steps(script.timeline()).facts.one_turn
    assert whole_steps(script.timeline(virtual=True)).facts.one_turn


def test_waits_before_the_turns_do_not_make_a_script_of_a_loop() -> None:
    script = products(Run.of().copy(64 * MB, 18_000), 20).sync().launch(kernel=10, name="sum").sync()
    whole = whole_steps(script.timeline(virtual=True))
    assert not whole.facts.one_turn
    assert steps_of(whole) > 10


@given(st.lists(st.integers(0, 5), min_size=2, max_size=12), st.integers(4, 10))
@settings(max_examples=60)
def test_what_is_repeated_is_found(once: list[int], times: int) -> None:
    """The true period, or a shorter one if the sequence itself has one that fits."""
    names = np.array(once * times)
    length = repetition(names)
    if len(names) >= 6:
        assert 0 < length <= len(once)
        assert (names[length:] == names[:-length]).mean() > 0.7


@pytest.mark.parametrize("names", [[], [1, 1, 1], list(range(50))])
def test_what_is_not_repeated_is_not_found(names: list[int]) -> None:
    assert repetition(np.array(names, np.int64)) == 0


# Device steps and host steps


def test_more_device_steps_than_host_steps() -> None:
    """Work that was queued before the window began: commands without a launch, of three more steps."""
    run = Run.of().launch(kernel=[500] * 30)
    for _ in range(5):
        run.step().launch(kernel=[500] * 10)
    timeline = run.timeline()
    orphans = timeline.change(links=timeline.links.take(np.flatnonzero(timeline.links.source > 0)))
    whole = whole_steps(settle(orphans))
    assert steps_of(whole) == 4
    assert pace(whole) == pytest.approx(10 * 501_000, rel=0.01)


def test_fewer_device_steps_than_host_steps() -> None:
    """The host was ahead when the recording stopped, and the last steps of the device are absent altogether."""
    run = Run.of()
    for step in range(8):
        run.step()
        kernels(run, 10) if step < 6 else [run.call(7) for _ in range(10)]
    whole = whole_steps(run.timeline())
    assert steps_of(whole) == 6
    assert int(whole.on_device.sum()) == 60


# Few enough steps


def test_a_sample_takes_steps_evenly_from_the_fastest_to_the_slowest() -> None:
    run = Run.of()
    for step in range(101):
        run.step().work(100 + step).launch(kernel=10)
    whole = whole_steps(run.timeline())
    few = sample(whole, most_rows=36)
    assert steps_of(few) == 12
    worked = few.spans.work[few.marks]
    assert (np.diff(worked) > 0).all()
    assert worked.mean() == pytest.approx(whole.spans.work[whole.marks].mean(), rel=0.02)
    np.testing.assert_array_equal(worked, whole.spans.work[few_rows(whole, worked)])


def few_rows(whole: Timeline, worked: np.ndarray) -> np.ndarray:
    return np.array([int(np.flatnonzero(whole.spans.work == one)[0]) for one in worked])


def test_a_sample_of_a_short_run_is_the_run() -> None:
    whole = whole_steps(loop(forward))
    assert sample(whole) is whole


@pytest.mark.parametrize("every", [29, 60, 140, 300])
def test_a_sample_has_its_share_of_steps_that_take_far_longer(every: int) -> None:
    """What is saved now and then is neither missed nor counted more often than it was done."""
    run = Run.of()
    for step in range(900):
        run.step().work(1_000 if step % every == every // 2 else 20).launch(kernel=10)
    whole = whole_steps(run.timeline())
    few = sample(whole, most_rows=len(whole) // 9)
    assert len(few) < len(whole) // 2
    assert pace(few) == pytest.approx(pace(whole), rel=0.1)


def test_one_step_in_very_many_that_takes_far_longer_is_no_part_of_a_small_sample() -> None:
    """It would count for many times its share: without it, the mean is nearer."""
    run = Run.of()
    for step in range(900):
        run.step().work(1_000 if step == 400 else 20).launch(kernel=10)
    whole = whole_steps(run.timeline())
    few = sample(whole, most_rows=len(whole) // 90)
    assert steps_of(few) < 60
    assert pace(few) == pytest.approx(pace(whole), rel=0.1)


def test_rare_steps_that_take_far_longer_may_stand_apart() -> None:
    run = Run.of()
    for step in range(900):
        run.step().work(1_000 + step if step % 100 == 50 else 20).launch(kernel=10)
    whole = whole_steps(run.timeline())
    others = sample(whole, apart=True)
    assert steps_of(others) == steps_of(whole) - 9
    assert others.spans.work[others.marks].max() < 100 * US
    rare, count = rare_steps(whole, most_rows=6) or (None, 0)
    assert (count, rare and steps_of(rare)) == (9, 4)
    long = Run.of()
    for step in range(900):
        long.step()
        for _ in range(200 if step % 100 == 50 else 1):
            long.work(20)
        long.launch(kernel=10)
    whole = whole_steps(long.timeline())
    rare, count = rare_steps(whole, most_rows=len(whole) // 8) or (None, 0)  # what is rare is most of the run
    assert (count, rare and steps_of(rare)) == (9, 4)
    often = Run.of()
    for step in range(100):
        often.step().work(1_000 if step % 10 == 5 else 20).launch(kernel=10)
    assert rare_steps(whole_steps(often.timeline())) is None


def test_a_step_is_no_longer_for_those_that_are_left_out_after_it() -> None:
    run = Run.of()
    for step in range(200):
        run.step().work(1_000 if step in (50, 90, 91) else 20).launch(kernel=10)
    whole = run.timeline().change_facts(beside=(90, 91, *range(120, 150)))
    assert rare_steps(whole_steps(whole)) is None  # one is left


def test_a_sample_keeps_the_same_steps_of_every_rank() -> None:
    run = Run.of(ranks=2)
    for step in range(41):
        for rank in run.ranks:
            run.on(rank).step().work(10 + step)
        run.collective(wire=50)
    few = sample(whole_steps(run.timeline()), most_rows=60)
    assert steps_of(few, 0) == steps_of(few, 1) == 10
    np.testing.assert_array_equal(few.spans.work[few.marks_of(0)], few.spans.work[few.marks_of(1)])
    assert (np.bincount(few.spans.meeting[few.spans.meeting != NONE])[np.unique(few.spans.meeting[2:])] != 1).all()


@given(loops())
@settings(max_examples=60)
def test_whole_steps_can_be_replayed(timeline: Timeline) -> None:
    whole = whole_steps(settle(timeline))
    counts = [steps_of(whole, rank) for rank in whole.ranks]
    assert min(counts) == max(counts) >= 2
    later = replay(whole, 3)
    assert (later.spans.end >= later.spans.start).all()
    assert pace(whole) > 0


def test_a_script_that_ends_before_its_first_kernel_is_explained() -> None:
    """It ended before its first kernel, and its weights had been copied one after the other."""
    script = Run.of()
    for _ in range(15):
        script.copy(MB, 40)
    assert len(whole_steps(script.timeline(virtual=True)).spans.kind)
