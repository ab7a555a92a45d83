"""Two runs held against each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from build import loop
from diagnoses import COPY, HEALTHY, LATE, STALLED, SYNC, ms, predicted

from keepbusy.causes.places import Where
from keepbusy.explain import explain
from keepbusy.explain.comparison import Change, Comparison, compare
from keepbusy.explain.diagnosis import Diagnosis, PlannedFix
from keepbusy.report.terminal import render_comparison
from keepbusy.timeline.run_facts import RUN as RUN_KIND
from keepbusy.timeline.run_facts import Course, Part, PlainRun

MENDED = replace(
    STALLED,
    plain_step=ms(10.4),
    ledger={"computing": ms(8.3), "host_sync": ms(1.8), "unknown": ms(0.3)},
    causes=(replace(SYNC, predicted=predicted(8.7, 8.5, 9.0)),),
    predicted=predicted(8.7, 8.5, 9.0),
    sources=("after.busy",),
)


def test_a_run_is_the_same_as_itself() -> None:
    done = compare(STALLED, STALLED)
    assert not done.step.significant
    assert {change.verdict for change in done.causes} == {"unchanged"}
    assert "An iteration takes the same time within noise: 31.3 → 31.3 ms" in render_comparison(done)


def test_what_is_gone_is_said_and_held_against_its_prediction() -> None:
    done = compare(STALLED, MENDED)
    assert [(change.cause, change.verdict) for change in done.causes] == [
        ("blocking_copy", "gone"),
        ("host_sync", "unchanged"),
    ]
    assert done.predicted == COPY.predicted
    assert done.ledger["blocking_copy"].difference == -ms(20.1)
    text = render_comparison(done)
    assert "An iteration takes 31.3 → 10.4 ms, 67% shorter (noise within a run 1.3 ms)" in text
    assert "Predicted: 31.3 → 8.9 ms (8.4–10.1)." in text
    assert "gone       blocking copy · fixing it: 22.4 → 0 ms · train.py:3" in text


def test_what_is_new_is_said() -> None:
    done = compare(MENDED, STALLED)
    assert [change.verdict for change in done.causes] == ["new", "unchanged"]
    assert done.predicted is None
    assert "3.0× as long" in render_comparison(done)


def test_growing_and_shrinking() -> None:
    more = replace(STALLED, causes=(COPY, replace(SYNC, predicted=predicted(20.0, 19.0, 21.0))))
    assert _verdicts(compare(STALLED, more))["host_sync"] == "larger"
    assert _verdicts(compare(more, STALLED))["host_sync"] == "smaller"


def _verdicts(done) -> dict[str, str]:
    return {change.cause: change.verdict for change in done.causes}


def test_all_causes_gone_is_what_all_of_them_predicted() -> None:
    done = compare(STALLED, replace(HEALTHY, plain_step=ms(8.7), ledger={"computing": ms(8.7)}))
    assert done.predicted == STALLED.predicted


def test_a_difference_within_the_noise_of_both_is_no_difference() -> None:
    noise = compare(replace(STALLED, noise=ms(3)), replace(STALLED, noise=ms(4))).step.noise
    assert noise == ms(5)
    quiet = compare(replace(STALLED, noise=0), replace(STALLED, noise=0, plain_step=ms(31.5)))
    assert not quiet.step.significant


def run_of(step: float, *stretches: float, **known: Any) -> Diagnosis:
    """A run whose stretches took so long a step, one after the other."""
    known |= {"plain_step": ms(step), "ledger": {"computing": ms(step)}, "stretches": tuple(map(ms, stretches))}
    return replace(HEALTHY, noise=0, **known)


def test_what_stretches_of_one_run_differ_by_is_noise() -> None:
    """The machine is busy now and then: within each run its steps drift by more than the runs differ."""
    done = compare(run_of(150, 120, 170, 140, 155), run_of(136, 150, 120, 130, 140))
    assert done.step.noise > ms(14)
    assert not done.step.significant
    assert compare(run_of(150, 150, 151, 149, 150), run_of(136, 136, 137, 135, 136)).step.significant


def test_the_first_stretch_is_no_noise() -> None:
    """There the host runs ahead, or the program warms up: in every run, so runs don't differ by it."""
    done = compare(run_of(18, 19, 18, 18, 18), run_of(38, 10, 42, 42, 42))
    assert done.step.significant


def test_a_run_knows_what_its_stretches_took() -> None:
    """By its marks, as recorded on a GPU; or by all steps of a virtual run. Of few steps nothing is known."""
    course = Course(step=tuple(ms(10 + number // 4) for number in range(32)))
    marks = PlainRun("optimizer", 32, ms(13), ms(10), ms(17), course=course)
    window = loop(lambda run: run.launch([1_000] * 3), 6)
    assert explain(window.change_facts(plain_runs={0: marks})).stretches == tuple(ms(10 + one) for one in range(8))
    assert explain(window).stretches == ()
    steps = iter(range(100))
    virtual = loop(lambda run: run.launch([1_000 + 1_000 * (next(steps) // 8)]).sync(), 64)
    found = explain(virtual.change_facts(virtual=True)).stretches
    assert len(found) == 8
    assert sorted(found) == list(found)
    assert explain(virtual).stretches == ()


def test_of_two_single_runs_it_is_said_that_runs_may_differ_by_more() -> None:
    done = compare(run_of(150), run_of(136))
    assert "An iteration takes 150 → 136 ms, 9% shorter (noise within a run " in render_comparison(done)
    assert done.notes[-1].startswith("With one run each it is not known how much runs of the same program differ.")
    assert "compare a1.busy,a2.busy b1.busy,b2.busy" in done.notes[-1]
    same = compare(run_of(150, is_modelled=True), run_of(136, is_modelled=True))
    assert "(noise 1.5 ms)" in render_comparison(same)
    assert same.notes == ()


def test_what_repeated_runs_differ_by_is_noise() -> None:
    """Two plain runs took 124 and 150 ms: 136 and 140 are no gain."""
    done = compare([run_of(124), run_of(150)], [run_of(140), run_of(136)])
    assert not done.step.significant
    assert done.runs == (2, 2)
    assert done.notes == ()
    steady = compare([run_of(one) for one in (149, 151, 150)], [run_of(one) for one in (135, 137, 136)])
    assert (steady.step.before, steady.step.after) == (ms(150), ms(136))
    assert steady.step.significant
    assert steady.step.noise == pytest.approx(ms(2.78 * (2 / 3) ** 0.5), rel=0.01)
    assert "An iteration takes 150 → 136 ms, 9% shorter (noise 2.3 ms, of 3 and 3 runs)" in render_comparison(steady)


def test_one_side_repeated_tells_the_noise_of_both() -> None:
    assert not compare([run_of(124), run_of(150)], run_of(120)).step.significant
    assert compare([run_of(149), run_of(150), run_of(151)], run_of(120)).step.significant


@pytest.mark.parametrize(
    ("before", "after", "said"), [(False, True, "run before"), (True, False, "run after"), (False, False, "either run")]
)
def test_profiled_times_are_no_fair_comparison(before: bool, after: bool, said: str) -> None:
    done = compare(replace(STALLED, plain_given=before), replace(STALLED, plain_given=after))
    assert said in done.notes[0]


def test_other_devices_and_ranks_are_said() -> None:
    notes = " ".join(compare(HEALTHY, LATE).notes)
    assert "different devices: unknown, NVIDIA H200" in notes
    assert "different numbers of ranks: 1, 4" in notes


@pytest.mark.parametrize("width", [60, 100])
def test_the_text_fits_its_width(width: int) -> None:
    for text in (render_comparison(compare(STALLED, MENDED), width), render_comparison(compare(HEALTHY, LATE), width)):
        assert max(map(len, text.splitlines())) <= width
    assert render_comparison(compare(STALLED, MENDED), width, unicode=False).isascii()
    assert "\x1b[" in render_comparison(compare(STALLED, MENDED), width, colour=True)


# what was predicted, and what was measured

READ_LATER = PlannedFix(
    "readback", (Where("train.py", 31, "main"),), ("host_sync",), ms(3.0), predicted(28.3, 28.0, 28.6), ms(2.0), 300
)
FETCH = PlannedFix(
    "prefetch",
    (Where("train.py", 20, "main"),),
    ("blocking_copy",),
    ms(17.9),
    predicted(10.4, 10.0, 10.8),
    ms(18.0),
    1800,
)
RUN = Part(RUN_KIND, time=10_000, busy=2_000, turns=1)


def held(after: tuple[PlannedFix, ...], step: float = 10.4, run: int = 7_950) -> Comparison:
    before = replace(STALLED, plan=(READ_LATER, FETCH), run=RUN)
    return compare(before, replace(MENDED, plan=after, plain_step=ms(step), run=replace(RUN, time=run)))


def test_a_fix_is_made_once_the_plan_no_longer_asks_for_it() -> None:
    """Its line has moved by three."""
    still = replace(READ_LATER, where=(Where("train.py", 34, "main"),))
    done = held((still,), step=13.3)
    assert [(one.fix.fix, one.made) for one in done.plan] == [("readback", False), ("prefetch", True)]
    assert done.foretold is not None
    assert done.foretold.step == STALLED.plain_step - FETCH.alone  # alone, since the other one was not made
    assert (done.run_foretold, done.run) == (8_200, Change(10_000, 7_950, 100))


def test_what_a_fix_costs_once_is_no_saving() -> None:
    """As the capture and the comparisons of a graph."""
    run = Part(RUN_KIND, time=10_000)
    before = replace(STALLED, run=run, plan=(replace(FETCH, run_gain=2_000, once=500),))
    assert compare(before, replace(before, plan=(), plain_step=ms(13.3))).run_foretold == 8_500


def test_a_fix_that_is_no_longer_offered_was_not_made_where_the_step_is_longer() -> None:
    """As where a new read of a value stands in the way of a CUDA graph."""
    text = render_comparison(held((), step=33.0))
    assert "not made read the value later" in text
    assert "predicted" not in text


def test_a_script_of_another_name_is_asked_for_the_same_fix() -> None:
    """Else each fix of `before.py` would be told as made in `after.py`."""
    before = replace(STALLED, plan=(READ_LATER,), run=RUN, sources=("work/train.py",))
    still = replace(READ_LATER, where=(Where("stalled.py", 34, "main"),))
    assert not compare(before, replace(before, plan=(still,), sources=("stalled.py",))).made
    assert compare(before, replace(before, plan=(still,), sources=("other.py",))).made == (READ_LATER,)


def test_fixes_that_were_all_made_lead_where_the_plan_said() -> None:
    done = held(())
    assert done.foretold is not None
    assert done.foretold.step == STALLED.plain_step - READ_LATER.gain - FETCH.gain
    text = render_comparison(done)
    assert "made     read the value later near" in text
    assert "predicted 31.3 → 10.4 ms per iteration (10.0–10.8); measured 10.4 ms: as predicted\n" in text
    assert "predicted the run 10 → 7.9 µs; measured 8.0 µs\n" in text


@pytest.mark.parametrize(("step", "said"), [(4.0, "faster than predicted"), (25.0, "slower than predicted")])
def test_a_measurement_outside_the_prediction_is_reported(step: float, said: str) -> None:
    assert f"measured {step:.1f} ms: {said}\n" in render_comparison(held((), step))


def test_without_a_plan_no_fix_was_predicted() -> None:
    assert "predicted" not in render_comparison(compare(STALLED, MENDED))
