"""The queue of a loader: how many workers keep up, and what they save. Microseconds, or as it says."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from build import MS
from diagnoses import HEALTHY
from hypothesis import given
from planned_runs import places, run_of, use

from keepbusy.explain.run_plan import plan_of_run, with_loader
from keepbusy.timeline.run_facts import (
    LOOP,
    LoaderUse,
    Part,
    UnevenLoop,
)


def test_the_smallest_number_that_keeps_up() -> None:
    assert use().iteration == 84 * MS
    assert use().enough() == 6
    assert use().enough() * use().iteration >= use().in_worker > (use().enough() - 1) * use().iteration


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
    assert loader.iteration == 24 * MS
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
