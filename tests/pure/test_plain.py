"""From the recorded run to the plain one: what recording cost is taken out of the host, and of the host alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from build import MS, US, Run, loop
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import loops

from keepbusy.explain import explain
from keepbusy.explain.plain import LARGEST_COST, SLOWEST_HOST, deflate, on_an_idle_device, other_view, plain_run
from keepbusy.explain.run_plan import CAPTURING
from keepbusy.timeline.files import BadInput
from keepbusy.timeline.model import NONE, Kind, Timeline, settle
from keepbusy.timeline.replay import pace
from keepbusy.timeline.run_facts import LOOP, RUN, SCRIPT, LineTime, Part, PlainRun, WindowReason
from keepbusy.timeline.steps import whole_steps

OPERATOR = 25
"""What an operator takes of the host without a recorder, and so much again with one."""


def forward(run: Run, kernel: float = 10, operators: int = 20) -> None:
    for _ in range(operators):
        run.work(2 * OPERATOR, recording=OPERATOR * US).launch(kernel)


def launch_bound(kernel: float = 10) -> Timeline:
    """20 operators a step, each of 50 µs and a launch of 5: 1.1 ms as recorded, and 0.6 ms without a recorder."""
    return whole_steps(loop(lambda run: forward(run, kernel)))


# Taking it out


def test_the_cost_that_was_estimated_leaves_less_the_larger_it_was() -> None:
    """Half of the work was recording: a factor of 1 leaves two thirds of it, one of 2 the half."""
    timeline = launch_bound()
    work = timeline.spans.kind == Kind.WORK
    for factor, left in ((0.0, 50.0), (1.0, 50 / 1.5), (2.0, 25.0), (LARGEST_COST, 10.0)):
        assert set(deflate(timeline, factor).spans.work[work].tolist()) == {int(left * US)}


def test_marks_that_saw_the_host_alone_leave_it_no_slower() -> None:
    """The device needs 1.2 ms, so that the step of 1.2 ms says nothing of a host that was recorded at 1.1."""
    timeline = launch_bound(kernel=60)
    host = on_an_idle_device
    usual = plain_run(timeline, round(1.2 * MS))
    assert pace(host(usual.timeline)) == pytest.approx(0.767 * MS, rel=0.01)
    for alone in (0.7, 0.5):
        marks = PlainRun("optimizer", 100, round(1.2 * MS), 0, 0, host=round(alone * MS))
        plain = plain_run(timeline.change_facts(plain_runs={0: marks}), round(1.2 * MS))
        assert pace(host(plain.timeline)) == pytest.approx(alone * MS, rel=0.01)
        assert plain.step == round(1.2 * MS)
    slower = PlainRun("optimizer", 100, round(1.2 * MS), 0, 0, host=round(1.0 * MS))
    told = plain_run(timeline.change_facts(plain_runs={0: slower}), round(1.2 * MS))
    assert told.factor == usual.factor


def test_the_device_does_what_it_did() -> None:
    timeline = launch_bound()
    deflated = deflate(timeline, LARGEST_COST, SLOWEST_HOST)
    device = timeline.on_device
    np.testing.assert_array_equal(deflated.spans.work[device], timeline.spans.work[device])


def test_what_the_recorder_did_for_itself_goes() -> None:
    timeline = launch_bound()
    first = np.arange(len(timeline)) == timeline.marks[1]
    timeline = timeline.change_spans(kind=np.where(first, Kind.RECORDING, timeline.spans.kind))
    assert deflate(timeline, 0.0).spans.work[first].tolist() == [50 * US]
    assert deflate(timeline, 0.5).spans.work[first].tolist() == [0]


costs = st.lists(st.integers(0, 200_000), min_size=1, max_size=20)


@given(loops(), costs, st.floats(0, LARGEST_COST), st.floats(0, LARGEST_COST), st.floats(SLOWEST_HOST, 1))
@settings(max_examples=80)
def test_deflation_is_never_negative_and_grows_with_its_factor(
    timeline: Timeline, recording: list[int], one: float, other: float, speed: float
) -> None:
    timeline = settle(timeline).change_spans(recording=np.resize(recording, len(timeline)))
    less, more = (deflate(timeline, factor, speed).spans.work for factor in sorted((one, other)))
    positive = timeline.spans.work >= 0
    assert (more[positive] >= 0).all()
    assert (more <= less).all()
    np.testing.assert_array_equal(more[~positive], timeline.spans.work[~positive])
    np.testing.assert_array_equal(deflate(timeline, 0.0).spans.work, timeline.spans.work)


# The plain step


@pytest.mark.parametrize("plain_step", [1.09, 0.9, 0.7, 0.5, 0.35])
def test_the_unchanged_run_then_takes_the_plain_step(plain_step: float) -> None:
    plain = plain_run(launch_bound(), round(plain_step * MS))
    assert pace(plain.timeline) == pytest.approx(plain_step * MS, rel=0.005)
    assert plain.step == round(plain_step * MS)
    assert plain.ratio == pytest.approx(1.0, abs=0.005)
    assert 0 < plain.factor <= LARGEST_COST


def test_a_host_slower_than_any_recorder_makes_it_is_sped_up_altogether() -> None:
    """All that recording may have cost out, 0.3 ms are left: for 0.2 ms the host must have been faster as well."""
    plain = plain_run(launch_bound(kernel=1), round(0.2 * MS))
    assert plain.factor == LARGEST_COST
    assert pace(plain.timeline) == pytest.approx(0.2 * MS, rel=0.01)


def test_where_the_device_sets_the_pace_the_usual_cost_is_taken_out() -> None:
    """Steps of 4 ms on the device: no host, however slow, would show."""
    timeline = launch_bound(kernel=200)
    plain = plain_run(timeline, round(pace(timeline) * 1.01))
    assert plain.factor == 1.0
    assert pace(plain.timeline) == pytest.approx(pace(timeline), rel=0.001)


def test_a_recording_that_was_no_slower_keeps_its_shape() -> None:
    """A plain step longer than the recorded one, by noise: everything is as long as it must be."""
    timeline = launch_bound()
    plain = plain_run(timeline, round(1.3 * MS))
    assert plain.factor == 0.0
    assert plain.ratio == pytest.approx(1.3 * MS / pace(timeline))
    np.testing.assert_array_equal(plain.timeline.spans.work, timeline.spans.work)


def test_without_a_plain_step_the_recording_stands_for_it() -> None:
    timeline = launch_bound()
    plain = plain_run(timeline, None)
    assert (plain.timeline, plain.ratio, plain.factor) == (timeline, 1.0, 0.0)
    assert plain.step == round(pace(timeline))


@pytest.mark.parametrize("plain_step", [1, 1_000, 2 * MS])
def test_a_plain_step_shorter_than_the_device_needs_is_refused(plain_step: int) -> None:
    """4 ms of kernels a step."""
    timeline = loop(lambda run: forward(run, 200), source="rank0.json")
    with pytest.raises(BadInput) as caught:
        explain(timeline, plain_step)
    message = str(caught.value)
    assert message.startswith("rank0.json cannot have a plain step of ")
    assert "takes 4.0" in message
    assert message.endswith("measured on the same program.")


@pytest.mark.parametrize("plain_step", [None, 1_000, MS])
def test_a_run_in_which_no_time_passes_is_refused(plain_step: int | None) -> None:
    """The device's commands run backwards, and the host's calls take no time at all."""
    run = Run.of()
    for _ in range(6):
        run.step().launch(kernel=10, host=0)
    recorded = run.recorded(source="rank0.json")
    device = np.flatnonzero(recorded.on_device)
    start, end = recorded.spans.start.copy(), recorded.spans.end.copy()
    start[device], end[device] = start[device][::-1], end[device][::-1]
    with pytest.raises(BadInput, match=r"^rank0.json shows steps in which no time passes, .* record it again\.$"):
        explain(settle(recorded.change_spans(start=start, end=end)), plain_step)


@given(st.floats(0.25, 1.5))
@settings(max_examples=40)
def test_any_plain_step_that_can_be_is_reached(plain_step: float) -> None:
    plain = plain_run(launch_bound(), round(plain_step * MS))
    assert plain.ratio * pace(plain.timeline) == pytest.approx(plain_step * MS, rel=1e-3)
    assert (plain.timeline.spans.work >= 0).all()


# The other view


def test_the_other_view_slows_the_host_evenly() -> None:
    """Half of the operators cost nothing to record; under the other view they, too, were faster without a recorder."""
    timeline = launch_bound()
    cheap = np.cumsum(timeline.spans.kind == Kind.WORK) % 2 == 0
    timeline = timeline.change_spans(recording=np.where(cheap, 0, timeline.spans.recording))
    plain = plain_run(timeline, round(0.9 * MS))
    other = other_view(timeline, plain)
    work = timeline.spans.kind == Kind.WORK
    assert len(set(plain.timeline.spans.work[work].tolist())) == 2
    assert len(set(other.timeline.spans.work[work].tolist())) == 1
    assert pace(other.timeline) == pytest.approx(0.9 * MS, rel=0.005)


def test_there_is_no_other_view_of_a_run_that_was_taken_as_it_is() -> None:
    timeline = launch_bound()
    plain = plain_run(timeline, None)
    assert other_view(timeline, plain) is plain


# Several ranks


def test_what_differs_now_and_then_between_ranks_is_noise() -> None:
    """Each rank is 3 ms late in one step of six: the plain run has no such steps, for the late one changes."""
    run = Run.of(ranks=2)
    for step in range(7):
        for rank in run.ranks:
            run.on(rank).step().work(200 + 3_000 * (step == 2 + rank)).launch(kernel=100)
        run.collective(wire=50)
        for rank in run.ranks:
            run.on(rank).sync(None)
    timeline = whole_steps(run.timeline())
    plain = plain_run(timeline, round(0.31 * MS))
    late = plain.timeline.spans.work[plain.timeline.spans.kind == Kind.WORK]
    assert np.ptp(late) < 20 * US
    assert plain.ratio == pytest.approx(1.0, abs=0.1)


def test_a_collective_whose_peer_was_no_longer_recorded_takes_what_its_like_take() -> None:
    """The last one waits 40 ms for a rank that closes its window: that is no work of any step."""
    run = Run.of(ranks=2)
    for _ in range(5):
        for rank in run.ranks:
            run.on(rank).step().work(100).launch(kernel=100)
        run.collective(wire=50)
        for rank in run.ranks:
            run.on(rank).sync(None)
    timeline = run.timeline()
    parts = np.flatnonzero(timeline.spans.kind == Kind.COLLECTIVE)
    last, work, meeting = parts[-2:], timeline.spans.work.copy(), timeline.spans.meeting.copy()
    work[last[0]], meeting[last] = 40 * MS, NONE
    cut = timeline.change_spans(work=work, meeting=meeting)
    assert plain_run(cut, None).timeline.spans.work[last].tolist() == [50 * US, 50 * US]
    assert plain_run(timeline, None).timeline.spans.work.tolist() == timeline.spans.work.tolist()
    met_nobody = np.where(timeline.spans.kind == Kind.COLLECTIVE, NONE, meeting)
    alone = timeline.change_spans(work=work, meeting=met_nobody)
    assert plain_run(alone, None).timeline.spans.work[last[0]] == 40 * MS


# A sample of the plain step


def part_of_a_step(step: float, busy: float = 0.1, body: Callable[[Run], None] = forward) -> Timeline:
    """The first turn of one that takes `step` ms when it is plain; in its loop the GPU is at work for a share."""
    marks = PlainRun("optimizer", 100, round(step * MS), 0, 0)
    took = round(100 * step * MS)
    tree = Part(LOOP, "train.py:7", time=took, busy=round(busy * took), turns=100, turn=round(step * MS))
    run = Part(RUN, time=2 * took, busy=tree.busy, parts=(tree,))
    return loop(body, steps=1, one_turn=True, plain_runs={0: marks}, run=run, loop="train.py:7")


def test_a_part_of_a_step_is_a_sample_of_the_plain_one() -> None:
    """Of 0.77 ms, once the recorder is taken out, all goes but the kernels' 0.2: of 60 ms as large a share."""
    said = explain(part_of_a_step(60))
    assert (said.plain_step, said.plain_given, said.steps_of_run) == (60 * MS, True, 100)
    [fix] = said.plan
    assert fix.predicted.step / said.plain_step == pytest.approx(0.2 / 0.77, rel=0.1)
    assert fix.predicted.low <= 0.1 * said.plain_step
    assert fix.predicted.high > 0.9 * said.plain_step
    assert fix.run_gain == (100 - CAPTURING) * fix.gain  # the first turns are what the graph is made of
    assert any("Savings are estimated from the recorded part" in note for note in said.notes)


@pytest.mark.parametrize(
    ("of_lines", "gain"),
    [
        ({8: 0.5, 9: 0.5}, 0.5),  # as much as was recorded of each
        ({8: 0.2, 9: 0.8}, 0.8),  # the window closed early in the second line
        ({8: 0.25, 9: 0.25, 12: 0.5}, 0.25),  # nobody saw what the third one does
        ({7: 1.0}, 0.5),  # the tree knows of none of them apart
    ],
)
def test_the_run_tells_how_much_of_a_turn_each_line_of_a_part_is(of_lines: dict[int, float], gain: float) -> None:
    """Recorded were 20 ms of launches, and as much work of the host at the next line; a turn takes 100."""

    def body(run: Run) -> None:
        with run.inside("train.py(8): main", exact=True):
            for _ in range(400):
                run.work(45).launch(1)
        with run.inside("train.py(9): main", exact=True):
            run.work(20_000, at=["data.py(3): load"]).launch(10)

    part = part_of_a_step(100, body=body)
    [tree] = part.facts.run.parts
    lines = tuple(LineTime(f"train.py:{line}", round(share * tree.time)) for line, share in of_lines.items())
    run = replace(part.facts.run, parts=(replace(tree, lines=lines),))
    told = explain(part.change_facts(run=run))
    [fix] = [one for one in told.plan if "host_work" in one.causes]
    assert fix.alone == pytest.approx(gain * 100 * MS, rel=0.02)
    assert sum(told.ledger.values()) == told.plain_step == 100 * MS
    assert told.ledger.get("unknown", 0) == pytest.approx(of_lines.get(12, 0) * 100 * MS, abs=MS)


@pytest.mark.parametrize(("line", "known"), [(7, True), (99, False)], ids=["its loop", "beside its loop"])
def test_a_window_on_a_script_within_one_loop_of_the_run_is_one_on_that_loop(line: int, known: bool) -> None:
    """An optimizer holds the loop: nobody marks its turns, and a window was opened before it was known to be one."""

    def body(run: Run) -> None:
        with run.inside(f"train.py({line}): main", exact=True):
            forward(run)

    part = part_of_a_step(60, body=body)
    script = part.change_facts(loop="", plain_runs={}, reason=WindowReason(SCRIPT, since=2 * MS))
    said = explain(script)
    assert (said.loop, said.one_turn) == (("train.py:7", False) if known else ("", True))
    assert (said.plain_step == 60 * MS, said.steps_of_run == 100) == (known, known)
    assert [fix.fix for fix in said.plan] == (["graph"] if known else [])


@given(st.floats(0.3, 300), st.floats(0, 1))
@settings(max_examples=20, deadline=None)
def test_no_step_becomes_shorter_than_its_gpu_is_at_work(step: float, busy: float) -> None:
    told = explain(part_of_a_step(step, busy))
    for one in told.plan:
        assert one.predicted.low <= one.predicted.step <= one.predicted.high <= told.plain_step
        assert one.predicted.step >= 0.99 * busy * told.plain_step
    assert sum(one.run_gain for one in told.plan) <= 1.01 * (1 - busy) * told.run.parts[0].time


def test_a_recording_whose_work_is_too_long_is_laid_on_the_step_that_was_measured() -> None:
    """The device needs 1.2 ms where a step of the run took 0.7: the sample stands for those, less surely."""
    timeline = launch_bound(kernel=60)
    own = explain(timeline.change_facts(plain_step=round(0.7 * MS)))
    assert (own.plain_step, own.plain_given) == (round(0.7 * MS), True)
    assert any("1.7 times as long as the plain step, more than recording explains" in note for note in own.notes)
    with pytest.raises(BadInput, match="cannot have a plain step"):
        explain(timeline, plain_step=round(0.7 * MS))


def test_where_many_turns_take_far_longer_the_mean_is_what_one_takes() -> None:
    """Half of them wait for the queue of the device, so what a turn usually takes is less than its kernels."""
    timeline = launch_bound(kernel=60)
    tree = Part(LOOP, "train.py:7", time=130 * MS, turns=100, turn=round(1.3 * MS))
    known = timeline.change_facts(plain_step=round(0.7 * MS), loop="train.py:7", run=tree)
    assert explain(known).plain_step == pytest.approx(pace(timeline), rel=0.01)
    short = replace(tree, turn=round(0.75 * MS))
    assert explain(known.change_facts(run=short)).plain_step == round(0.7 * MS)


def test_where_no_step_was_timed_the_loop_tells_what_a_turn_takes() -> None:
    """As where a run is so short that the window and the warm-up are most of it."""
    tree = Part(LOOP, "train.py:7", time=70 * MS, turns=100, turn=round(0.7 * MS))
    run = Part(RUN, time=100 * MS, parts=(tree,))
    none = {0: PlainRun("optimizer", 0, 0, 0, 0)}
    told = explain(launch_bound().change_facts(loop="train.py:7", run=run, plain_runs=none))
    assert (told.plain_step, told.plain_given, told.steps_of_run) == (round(0.7 * MS), True, 100)


def test_a_loop_too_quick_for_the_tree_turned_as_often_as_the_one_around_it_has_time_for() -> None:
    """Marks that were given up have counted a tenth of its turns."""

    def body(run: Run) -> None:
        with run.inside("train.py(90): main", "train.py(47): spell", exact=True):
            forward(run)

    outer = Part(LOOP, "train.py:45", function="spell", time=70 * MS, turns=10)
    others = (Part(LOOP, "train.py:88", function="main", time=90 * MS, turns=2), replace(outer, place="train.py:60"))
    run = Part(RUN, time=100 * MS, parts=(replace(others[0], parts=(outer, others[1])),))
    marks = {0: PlainRun("forward", 10, round(0.7 * MS), 0, 0)}
    timeline = loop(body, run=run, loop="train.py:46", plain_step=round(0.7 * MS), plain_runs=marks)
    assert explain(timeline).steps_of_run == 100


def test_a_run_knows_its_own_plain_step_and_where_that_does_not_fit_the_recorded_steps_are_told() -> None:
    timeline = launch_bound()
    own = explain(timeline.change_facts(plain_step=round(0.7 * MS)))
    assert (own.plain_step, own.plain_given) == (round(0.7 * MS), True)
    misfit = explain(timeline.change_facts(plain_step=round(0.05 * MS)))
    assert (misfit.plain_step, misfit.plain_given) == (explain(timeline).plain_step, False)
    assert any("cannot have a plain step of 0.05 ms" in note for note in misfit.notes)
    with pytest.raises(BadInput, match=r"0\.05 ms"):
        explain(timeline, plain_step=round(0.05 * MS))
