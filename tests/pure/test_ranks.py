"""Several ranks: what each one's recorder saw, brought together into the run that it was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from build import MB, US, WIRE, Run
from hypothesis import given, settings
from strategies import loops

from keepbusy.explain import explain
from keepbusy.explain.plain import plain_run
from keepbusy.timeline.model import NONE, FrameKind, Frames, Kind, Timeline, settle
from keepbusy.timeline.races import STREAMS, DataRace, RacingUse
from keepbusy.timeline.ranks import merge, uneven_loops, where_ranks_differ
from keepbusy.timeline.replay import pace, replay
from keepbusy.timeline.run_facts import CutShort, Part, PlainRun, RunFacts, UnevenLoop
from keepbusy.timeline.steps import whole_steps

SECOND = 10**9


def alone(timeline: Timeline, rank: int, clock: int = 0, steps: slice = slice(None)) -> Timeline:
    """What this rank's own recorder saw of the run: by its own clock, and in its own window of steps."""
    marks = np.append(timeline.marks_of(rank), len(timeline))[steps]
    row = np.arange(len(timeline))
    seen = timeline.change(marks=timeline.marks_of(rank)).keep(
        (timeline.rank_of_rows == rank) & (row >= marks[0]) & (row < marks[-1])
    )
    lanes = [index for index, lane in enumerate(timeline.lanes) if lane.rank == rank]
    new = np.full(len(timeline.lanes) + 2, NONE, np.int64)
    new[lanes] = np.arange(len(lanes))
    new[-2] = -2  # EVERY_LANE stays what it is
    spans = seen.spans.change(
        lane=new[seen.spans.lane],
        awaits=new[seen.spans.awaits],
        start=seen.spans.start + clock,
        end=seen.spans.end + clock,
        meeting=np.full(len(seen), NONE),
        frame=np.full(len(seen), NONE),
    )
    groups = dict.fromkeys(np.unique(spans.group).tolist(), 2)
    facts = RunFacts(source=f"rank{rank}", groups=groups, pending_limit=timeline.facts.pending_limit)
    kept = tuple(timeline.lanes[lane] for lane in lanes)
    return settle(Timeline(kept, timeline.names, spans, seen.links, marks=seen.marks, facts=facts))


def steps_of_two(steps: int = 6, late: float = 0) -> Run:
    """Both compute for 500 µs a step, rank 1 after some host work, meet twice, and read the result."""
    run = Run.of(ranks=2)
    for _ in range(steps):
        for rank in run.ranks:
            run.on(rank).step().work(20 + late * rank).launch(kernel=500).order(7, WIRE)
        run.collective(wire=200, size=8 * MB).collective(wire=20, size=MB)
        for rank in run.ranks:
            run.on(rank).order(WIRE, 7).sync(WIRE)
    return run


def times_of(timeline: Timeline, rank: int) -> np.ndarray:
    """When each span began and ended, lane by lane."""
    rows = np.flatnonzero(timeline.rank_of_rows == rank)
    named = [timeline.lanes[lane].name for lane in timeline.spans.lane[rows]]
    order = np.lexsort((timeline.spans.start[rows], named))
    return np.stack([timeline.spans.start[rows], timeline.spans.end[rows]], axis=1)[order]


def parts_of(timeline: Timeline) -> list[list[int]]:
    """Of each meeting the ranks that took part."""
    met = np.flatnonzero(timeline.spans.meeting != NONE)
    pairs = zip(timeline.spans.meeting[met].tolist(), timeline.rank_of_rows[met].tolist(), strict=True)
    meetings: dict[int, list[int]] = {}
    for meeting, rank in sorted(pairs):
        meetings.setdefault(meeting, []).append(rank)
    return list(meetings.values())


def assert_sound(merged: Timeline) -> None:
    """Links point forward, no rank meets itself, nobody leaves before the last has come, and replay is the identity."""
    assert (merged.links.source < merged.links.target).all()
    assert all(len(set(ranks)) == len(ranks) for ranks in parts_of(merged))
    again = replay(merged)
    np.testing.assert_array_equal(again.spans.start, merged.spans.start)
    np.testing.assert_array_equal(again.spans.end, merged.spans.end)


# What comes out


def test_two_halves_make_the_run() -> None:
    whole = steps_of_two(late=300).timeline()
    merged = merge([alone(whole, 0), alone(whole, 1)])
    assert_sound(merged)
    assert len(merged) == len(whole)
    assert parts_of(merged) == [[0, 1]] * 12
    for rank in (0, 1):
        np.testing.assert_array_equal(times_of(merged, rank), times_of(whole, rank))
    assert merged.facts.sources == ("rank0", "rank1")


def test_wire_time_is_what_the_last_to_arrive_shows() -> None:
    """Rank 0 is there 300 µs earlier and waits: its part lasts 500 µs, of which 200 µs are the wire."""
    whole = steps_of_two(late=300).timeline()
    merged = merge([alone(whole, 0), alone(whole, 1)])
    large = (merged.spans.meeting != NONE) & (merged.spans.size == 8 * MB)
    lasted = (merged.spans.end - merged.spans.start)[large & (merged.rank_of_rows == 0)]
    assert set(merged.spans.work[large].tolist()) == {200 * US}
    assert lasted.min() >= 480 * US


def test_each_rank_keeps_what_marks_told_of_it() -> None:
    whole = steps_of_two().timeline()
    runs = {rank: PlainRun("optimizer", 100 + rank, 10, 9, 11) for rank in (0, 1)}
    ones = [alone(whole, rank) for rank in runs]
    merged = merge([one.change_facts(plain_runs={rank: runs[rank]}) for rank, one in enumerate(ones)])
    assert merged.facts.plain_runs == runs


def test_what_lies_beside_the_loop_on_one_rank_is_no_step_of_any() -> None:
    """As where rank 0 alone evaluates, and goes on when its last turn is over; of other loops marks say nothing."""
    run = steps_of_two(8).timeline()
    first, second = (alone(run, rank).change_facts(loop="train.py:9") for rank in (0, 1))
    second = second.change(marks=second.marks[:-1])
    both = merge([first.change_facts(beside=(2, 6)).change(further=(first,)), second])
    assert both.further == (first,)  # the other ranks wait for it
    assert (both.facts.loop, both.facts.beside) == ("train.py:9", (2,))
    assert [len(both.marks_of(rank)) for rank in both.ranks] == [7, 7]
    assert len(whole_steps(both).marks_of(0)) == 5
    other = merge([first, second.change(marks=second.marks[:-1])])
    assert (other.facts.loop, other.facts.beside, len(other.marks)) == ("", (), 14)


def test_a_race_that_all_ranks_have_is_one() -> None:
    whole = steps_of_two(late=300).timeline()
    first, second = RacingUse("train.py:4", True, "side"), RacingUse("train.py:6", False, "the default stream")
    race = DataRace(STREAMS, first, second, 32, 3, "side.wait_stream(main)", "train.py:6")
    other = replace(race, second=replace(second, place="train.py:9"))
    each = ((race,), (replace(race, times=4), other))
    merged = merge([alone(whole, rank).change_facts(races=races) for rank, races in enumerate(each)])
    assert merged.facts.races == (replace(race, times=7), other)


def test_the_rank_that_failed_first_ended_the_run() -> None:
    whole = steps_of_two(late=300).timeline()
    ends = (CutShort("RuntimeError", "train.py:8", ended=7), CutShort("ValueError", "train.py:5", ended=3))
    merged = merge([alone(whole, rank).change_facts(cut_short=end) for rank, end in enumerate(ends)])
    assert merged.facts.cut_short == replace(ends[1], rank=1)


def test_one_rank_is_left_as_it_is() -> None:
    timeline = alone(steps_of_two().timeline(), 1)
    assert merge([timeline]) is timeline


@pytest.mark.parametrize("numbered", [False, True])
def test_the_profilers_numbers_tell_which_steps_of_hosts_with_other_clocks_are_one(numbered: bool) -> None:
    """The second rank's window begins a step later. Its clock is a second behind and its steps are alike."""
    whole = steps_of_two().timeline()
    ones = [alone(whole, 0, steps=slice(0, 5)), alone(whole, 1, clock=SECOND, steps=slice(1, 6))]
    merged = merge([with_numbers(one, first) if numbered else one for first, one in enumerate(ones)])
    assert_sound(merged)
    assert parts_of(merged) == [[0, 1]] * (6 if numbered else 8)


def with_numbers(timeline: Timeline, first: int) -> Timeline:
    """As the profiler names its steps."""
    marks = np.unique(timeline.marks)
    begins, steps = timeline.spans.start[marks], len(marks)
    frames = Frames.of(
        steps,
        lane=timeline.spans.lane[marks],
        kind=np.full(steps, FrameKind.ANNOTATION),
        name=np.arange(steps) + len(timeline.names),
        start=begins,
        end=np.append(begins[1:], timeline.spans.end.max()),
    )
    names = (*timeline.names, *(f"ProfilerStep#{first + step}" for step in range(steps)))
    return timeline.change(names=names, frames=frames)


def test_three_ranks_whose_names_and_lanes_differ() -> None:
    run = Run.of(ranks=3)
    for _ in range(4):
        for rank in run.ranks:
            mine = run.on(rank).step().launch(kernel=50, name=f"of rank {rank}")
            if rank == 2:
                mine.launch(kernel=10, stream=9)
        run.collective(wire=30)
    whole = run.timeline()
    merged = merge([alone(whole, rank) for rank in (0, 1, 2)])
    assert_sound(merged)
    assert parts_of(merged) == [[0, 1, 2]] * 4
    for rank in (0, 1, 2):
        mine = (merged.rank_of_rows == rank) & (merged.spans.kind == Kind.KERNEL)
        assert f"of rank {rank}" in {merged.names[name] for name in merged.spans.name[mine]}
        assert {merged.lanes[lane].rank for lane in merged.spans.awaits[mine & (merged.spans.awaits >= 0)]} <= {rank}


@given(loops())
@settings(max_examples=80)
def test_whatever_the_ranks_did_the_merged_run_is_sound(timeline: Timeline) -> None:
    parts = [alone(timeline, rank) for rank in timeline.ranks]
    merged = merge(parts)
    assert_sound(merged)
    assert len(merged) == sum(map(len, parts))


# Windows


@pytest.mark.parametrize("missed", [1, 3])
def test_a_window_that_began_later_is_matched_from_its_end(missed: int) -> None:
    """All steps are alike, so only the times tell which collective is which."""
    whole = steps_of_two(steps=8, late=120).timeline()
    merged = merge([alone(whole, 0), alone(whole, 1, steps=slice(missed, None))])
    assert_sound(merged)
    assert parts_of(merged) == [[0, 1]] * (2 * (8 - missed))
    lone = (merged.spans.kind == Kind.COLLECTIVE) & (merged.spans.meeting == NONE)
    assert lone.sum() == 2 * missed
    assert merged.spans.start[lone].max() < merged.spans.start[merged.spans.meeting != NONE].min()


def test_a_window_that_ended_earlier() -> None:
    whole = steps_of_two(steps=8).timeline()
    merged = merge([alone(whole, 0, steps=slice(0, 7)), alone(whole, 1)])
    assert_sound(merged)
    assert parts_of(merged) == [[0, 1]] * 12


def test_ranks_that_never_met_stay_apart() -> None:
    run = Run.of(ranks=2)
    for _ in range(3):
        for rank in run.ranks:
            run.on(rank).step().launch(kernel=10)
    whole = run.timeline()
    merged = merge([alone(whole, 0), alone(whole, 1)])
    assert_sound(merged)
    assert len(merged.meetings) == 0


# Clocks


def with_frames(timeline: Timeline) -> Timeline:
    begin = int(timeline.spans.start[0])
    frames = timeline.frames.of(1, lane=0, start=begin, end=begin + 40 * US)
    return timeline.change(frames=frames)


@pytest.mark.parametrize("clock", [3 * SECOND, -7 * SECOND])
def test_hosts_with_other_clocks(clock: int) -> None:
    whole = steps_of_two(late=300).timeline()
    merged = merge([alone(whole, 0), with_frames(alone(whole, 1, clock))])
    assert_sound(merged)
    for rank in (0, 1):
        np.testing.assert_array_equal(times_of(merged, rank), times_of(whole, rank))
    assert merged.frames.start[0] == whole.spans.start[whole.rank_of_rows == 1].min()


def test_skew_of_one_clock_is_left_alone() -> None:
    whole = steps_of_two().timeline()
    merged = merge([alone(whole, 0), alone(whole, 1, clock=20 * US)])
    assert_sound(merged)
    np.testing.assert_array_equal(times_of(merged, 1), times_of(whole, 1) + 20 * US)


def test_what_a_root_sends_says_nothing_of_clocks() -> None:
    """Most collectives are broadcasts, whose root is gone before its peers: where all meet, they leave together."""
    run = Run.of(ranks=2)
    for _ in range(6):
        for rank in run.ranks:
            run.on(rank).step().work(5_000 + 600 * rank).launch(kernel=50)
        run.collective(wire=100, name="ncclDevKernel_Broadcast").collective(wire=100, name="ncclDevKernel_Broadcast")
        run.collective(wire=200, size=8 * MB)
    whole = run.timeline()
    sends = (whole.rank_of_rows == 0) & (whole.spans.size == MB)
    sent = whole.change_spans(end=np.where(sends, whole.spans.start + 10 * US, whole.spans.end))
    merged = merge([alone(sent, 0), alone(whole, 1, clock=660 * US)])
    np.testing.assert_array_equal(times_of(merged, 1), times_of(whole, 1))


# Who takes part


def with_root(steps: int = 6) -> tuple[Timeline, Timeline]:
    """Rank 0 sends its buffers and goes; rank 1 comes 600 µs later. Then both meet for their gradients."""
    run = Run.of(ranks=2)
    for _ in range(steps):
        for rank in run.ranks:
            run.on(rank).step().work(20 + 600 * rank).launch(kernel=50)
        run.collective(wire=100, name="broadcast").collective(wire=200, size=8 * MB).collective(wire=20, size=9 * MB)
        for rank in run.ranks:
            run.on(rank).sync(WIRE)
    whole = run.timeline()
    sends = (whole.rank_of_rows == 0) & (whole.spans.size == MB)
    return whole.change_spans(end=np.where(sends, whole.spans.start + 60 * US, whole.spans.end)), whole


def test_who_leaves_early_did_not_wait() -> None:
    sent, whole = with_root()
    merged = merge([alone(sent, 0), alone(whole, 1)])
    assert_sound(merged)
    assert parts_of(merged) == [[1], [0, 1], [0, 1]] * 6


def test_roots_that_leave_early_hide_no_shift() -> None:
    """A third of the pairs seems impossible under every shift: the clock they share still tells."""
    sent, whole = with_root()
    merged = merge([alone(sent, 0), alone(whole, 1, steps=slice(2, None))])
    assert [ranks for ranks in parts_of(merged) if len(ranks) > 1] == [[0, 1]] * 8


def test_sends_and_receives_meet_in_pairs() -> None:
    """A pipeline of three ranks: 0 and 1 meet, then 1 and 2, all with their neighbours only."""
    run = Run.of(ranks=3)
    for _ in range(4):
        for rank in run.ranks:
            run.on(rank).step().launch(kernel=100)
        run.collective(wire=20, ranks=(0, 1), group=1)
        run.collective(wire=20, ranks=(1, 2), group=2)
    whole = run.timeline()
    merged = merge([alone(whole, rank) for rank in run.ranks])
    assert_sound(merged)
    assert sorted(parts_of(merged)) == [[0, 1]] * 4 + [[1, 2]] * 4


def test_ranks_that_wait_in_a_circle_go_on_all_the_same() -> None:
    """One rank does group 1 before group 2, the other the other way round: these were not the same collectives."""
    run = Run.of(ranks=2)
    for _ in range(4):
        for rank in run.ranks:
            order = (1, 2) if rank == 0 else (2, 1)
            run.on(rank).step()
            for group in order:
                run.collective(wire=20, ranks=(rank,), group=group, stream=WIRE + group)
    whole = run.timeline()
    merged = merge([alone(whole, 0), alone(whole, 1)])
    assert len(merged) == len(whole)
    assert (merged.links.source < merged.links.target).all()
    assert sorted(merged.marks_of(0)) == merged.marks_of(0).tolist()
    later = replay(merged, 2)
    assert (later.spans.end >= later.spans.start).all()


def test_peers_that_were_not_recorded_are_counted() -> None:
    """Two ranks of a group of four."""
    whole = steps_of_two().timeline()
    parts = [alone(whole, rank) for rank in (0, 1)]
    parts = [one.change_facts(groups={0: 4}) for one in parts]
    merged = merge(parts)
    assert set(merged.meetings.members.tolist()) == {4}
    assert set(merged.meetings.present.tolist()) == {2}


def test_what_was_waited_for_ranks_that_are_not_here_was_recorded_too() -> None:
    """Recording doubled the 5 ms of the late rank's host, so the wait of the other one shrinks with it."""
    run = Run.of(ranks=2)
    for _ in range(6):
        for rank in run.ranks:
            work = 2_000 + 8_000 * rank
            run.on(rank).step().work(work, recording=work // 2 * US).launch(kernel=500).order(7, WIRE)
        run.collective(wire=200).collective(wire=200)
        for rank in run.ranks:
            run.on(rank).order(WIRE, 7).sync(WIRE)
    first = whole_steps(alone(run.timeline(), 0).change_facts(world=4))
    assert pace(first) == pytest.approx(10_900_000, rel=0.02)
    plain = plain_run(first, 6_000_000)
    assert pace(plain.timeline) == pytest.approx(6_000_000, rel=0.01)
    wire = plain.timeline.spans.work[plain.timeline.spans.kind == Kind.COLLECTIVE]
    assert wire.min() == pytest.approx(200_000, rel=0.1)
    assert "Other ranks were not recorded" in explain(first, 6_000_000).notes[0]


def test_of_some_ranks_it_is_said_what_cannot_be_known() -> None:
    found = explain(steps_of_two(late=2_000).timeline(world=64))
    assert found.late[0].rank == 1
    assert any("2 of the run's 64 ranks were recorded." in note for note in found.notes)


def tree(turn: int, busy: float) -> Part:
    loop = Part(
        "loop", "train.py:9", time=100 * turn * US, busy=round(100 * turn * busy * US), turns=100, turn=turn * US
    )
    return Part("run", time=110 * turn * US, parts=(loop,))


def test_where_ranks_differ_is_said_of_the_loop() -> None:
    assert list(where_ranks_differ({})) == []
    assert list(where_ranks_differ({0: tree(50_000, 0.5), 1: tree(51_000, 0.52)})) == []
    [slow] = where_ranks_differ({0: tree(50_000, 0.5), 1: tree(51_000, 0.5), 2: tree(70_000, 0.5)})
    assert slow == "train.py:9: an iteration takes 70.0 ms on rank 2, and on the others 50.0 to 51.0 ms."
    [long] = where_ranks_differ({0: tree(1_200_000, 0.5), 1: tree(2_500_000, 0.5)})
    assert long == "train.py:9: an iteration takes 2.50 s on rank 1, and on the other 1.20 s."
    [late] = where_ranks_differ({0: tree(50_000, 0.9), 1: tree(50_000, 0.5)})
    assert late.startswith("train.py:9: the GPU of rank 1 is busy 50% of the time (the other 90%): ")


def test_loops_in_no_other_that_take_one_rank_longer_are_uneven() -> None:
    assert list(uneven_loops({})) == []
    assert list(uneven_loops({0: tree(50_000, 0.5), 1: tree(51_000, 0.5)})) == []
    assert list(uneven_loops({0: tree(50_000, 0.5), 1: Part("run", time=110 * 50_000 * US)})) == []
    [one] = uneven_loops({0: tree(20_000, 0.5), 1: tree(80_000, 0.5)})
    assert one == UnevenLoop("train.py:9", 1, 100, 8_000_000 * US, 5_000_000 * US)
