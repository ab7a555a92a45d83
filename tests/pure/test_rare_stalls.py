"""What comes only now and then is found whatever its rhythm, and nothing is made up of noise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from marked_runs import IN_LOOP, LOOP, MAIN, MS, run, steps

from keepbusy.recording.turn_times import StepLooks, plain_run

SAVE, EVALUATE = "train.py(41): main", "train.py(55): main"


def noisy(count: int, step: float = 10.0, noise: float = 0.05, seed: int = 0) -> np.ndarray:
    return step * np.random.default_rng(seed).lognormal(0, noise, count)


def test_a_checkpoint_every_hundred_steps() -> None:
    took = noisy(1000)
    rare = np.arange(50, 1000, 100)
    took[rare] += 812
    done = run(steps(took), saves=dict.fromkeys(rare, 811), seen=dict.fromkeys(rare, (MAIN, SAVE)))
    (stall,) = done.stalls
    assert (stall.what, stall.count, stall.every, stall.regular) == ("checkpoint", 10, 100.0, True)
    assert stall.time == pytest.approx(812 * MS, rel=0.01)
    assert stall.share == pytest.approx(8120 / (10_000 + 8120), rel=0.01)
    assert stall.lines == (MAIN, SAVE)
    assert done.step == pytest.approx(10 * MS, rel=0.01)


@given(
    period=st.integers(4, 300),
    times=st.integers(2, 40),
    longer=st.floats(1.5, 100),
    noise=st.floats(0, 0.1),
    seed=st.integers(0, 100),
)
def test_a_rare_stall_is_found_whatever_its_period(
    period: int, times: int, longer: float, noise: float, seed: int
) -> None:
    count = period * times + period // 2
    took = noisy(count, 10, noise, seed)
    rare = np.arange(period - 1, count, period)
    took[rare] += 10 * longer
    share = rare.size * 10 * longer / took.sum()
    assume(count > 40 and share > 0.01)
    rest = [one for one in run(steps(took)).stalls if one.share > 0.2 * share]
    assert [(one.every, one.regular) for one in rest] == [(float(period), True)]
    assert rest[0].time == pytest.approx(10 * longer * MS, rel=0.3)


@given(count=st.integers(1, 2000), noise=st.floats(0, 0.15), seed=st.integers(0, 10_000), step=st.floats(0.1, 1000))
def test_noise_has_no_stalls(count: int, noise: float, seed: int, step: float) -> None:
    assume(count >= 100 or noise <= 0.05)  # of few uneven steps one may take a hundredth of the run by chance
    done = run(steps(noisy(count, step, noise, seed)))
    assert done.stalls == ()
    assert done.low <= done.step * 1.01
    assert done.high >= done.step * 0.99 or count < 20


@given(st.lists(st.floats(0.001, 10_000), max_size=60))
def test_whatever_the_steps_the_figures_are_sound(took: list[float]) -> None:
    done = run(steps(took))
    assert done.steps + done.warm_up == len(took)
    assert 0 <= done.low <= done.high
    assert all(one.share <= 1 and one.time > 0 and one.count > 0 for one in done.stalls)
    assert sum(one.total for one in done.stalls) <= sum(took) * MS
    assert sum(len(part) for part in (done.course.step, done.course.longest, done.course.lead)) <= 3 * 512


def test_steps_that_change_over_the_run_are_no_stalls() -> None:
    grown = np.concatenate([noisy(512, 10), noisy(512, 40, seed=1)])
    assert run(steps(grown)).stalls == ()


def test_steps_that_take_turns_are_no_stalls() -> None:
    assert run(steps([10, 18] * 200)).stalls == ()


def test_the_first_steps_are_warm_up_and_no_stalls() -> None:
    done = run(steps([4000, 900, 300, *noisy(200)]))
    assert done.warm_up == 3
    assert done.warm_up_time == 5200 * MS
    assert done.stalls == ()


def test_a_close_look_makes_no_plain_steps() -> None:
    took, plain = noisy(300), np.ones(300, bool)
    took[100:110], plain[100:110] = 25, False
    done = run(steps(took, plain))
    assert (done.steps, done.stalls) == (290, ())
    assert done.step == pytest.approx(10 * MS, rel=0.01)


def test_two_places_are_two_stalls() -> None:
    took = noisy(1000)
    saved, evaluated = np.arange(99, 1000, 100), np.arange(249, 1000, 250)
    took[saved] += 300
    took[evaluated] += 5000
    seen = dict.fromkeys(saved, (MAIN, SAVE)) | dict.fromkeys(evaluated, (MAIN, EVALUATE, "eval.py(7): evaluate"))
    done = run(steps(took), seen=seen)
    assert [one.lines[1] for one in done.stalls] == [EVALUATE, SAVE]
    assert [one.every for one in done.stalls] == [250.0, 100.0]


def test_a_function_that_works_at_many_lines_is_named_where_it_is_called() -> None:
    took = noisy(1000)
    rare = np.arange(99, 1000, 100)
    took[rare] += 500
    seen = {step: (MAIN, EVALUATE, f"eval.py({7 + step % 3}): evaluate") for step in rare}
    seen |= {rare[0]: (MAIN, EVALUATE), rare[1]: (MAIN, EVALUATE), rare[2]: (MAIN, EVALUATE)}
    (stall,) = run(steps(took), seen=seen).stalls
    assert stall.lines == (MAIN, EVALUATE)
    assert stall.count == 10


def test_one_that_is_seen_at_several_lines_of_its_function_is_one() -> None:
    took = noisy(1000)
    rare = np.arange(49, 1000, 50)
    took[rare] += 500
    seen = {step: (MAIN, EVALUATE, f"eval.py({7 + number % 2}): evaluate") for number, step in enumerate(rare)}
    (stall,) = run(steps(took), seen=seen).stalls
    assert (stall.lines, stall.every, stall.is_foreseen, stall.count) == ((MAIN, EVALUATE), 50.0, True, 20)


def test_a_stall_is_told_at_its_line_though_the_rest_of_its_steps_takes_long_as_on_a_busy_machine() -> None:
    """So do three fifths of the looks into them not agree on any line; and looks come a hundred milliseconds apart."""
    took = noisy(1000)
    rare = np.arange(60, 1000, 100)
    took[rare] += 250
    lines = steps(took)
    chains = [
        IN_LOOP,
        (MAIN, "train.py(33): main"),
        (MAIN, "train.py(35): main"),
        (MAIN, EVALUATE, "eval.py(7): evaluate"),
    ]
    times = np.sort(np.concatenate([(lines.ended - lines.host)[rare] + late * MS for late in (2, 100, 130, 200)]))
    ordinary = lines.ended[5:60] - 5 * MS
    known = StepLooks(
        np.concatenate([ordinary, times]),
        np.full(len(ordinary) + len(times), 100 * MS),
        np.concatenate([np.arange(len(ordinary)) % 3, np.tile([3, 0, 1, 3], len(rare))]),
        chains,
        [""] * 4,
    )
    (stall,) = plain_run(lines, "optimizer", looks=known).stalls
    assert (stall.lines, stall.every, stall.count) == (chains[3], 100.0, 10)


def test_where_two_beats_meet_neither_loses_its_own() -> None:
    took = noisy(1000)
    saved, evaluated = np.arange(39, 1000, 40), np.arange(49, 1000, 50)
    took[saved] += 86
    took[evaluated] += 106
    seen = dict.fromkeys(saved, (MAIN, SAVE)) | dict.fromkeys(evaluated, (MAIN, EVALUATE, "eval.py(7): evaluate"))
    seen |= dict.fromkeys(range(199, 1000, 200), (MAIN, SAVE))
    saves = dict.fromkeys(saved, 86.0)
    told = {one.every: one for one in run(steps(took), seen=seen, saves=saves).stalls}
    assert set(told) == {40.0, 50.0}
    assert (told[40.0].count, told[40.0].what) == (25, "checkpoint")
    assert (told[50.0].count, told[50.0].what) == (15, "")  # where the two meet, the turn is the other's
    assert told[50.0].time == pytest.approx(106 * MS, rel=0.05)
    assert all(one.is_foreseen for one in told.values())


def test_a_slow_step_after_a_stall_breaks_no_beat() -> None:
    took = noisy(1000)
    rare = np.arange(99, 1000, 100)
    took[rare] += 500
    took[rare[2:6] + 1] += 30
    stall = run(steps(took), seen=dict.fromkeys(rare, (MAIN, EVALUATE))).stalls[0]
    assert (stall.count, stall.every, stall.is_foreseen) == (10, 100.0, True)


def test_looks_that_came_too_late_take_no_stall_away() -> None:
    took = noisy(1000)
    rare = np.arange(99, 1000, 100)
    took[rare] += 500
    (stall,) = run(steps(took), seen=dict.fromkeys(rare[2:], (MAIN, EVALUATE))).stalls
    assert (stall.lines, stall.count) == ((MAIN, EVALUATE), 10)


def test_what_stalls_further_in_is_known_by_the_loops_line_too() -> None:
    took = noisy(1000)
    rare = np.arange(99, 1000, 100)
    took[rare] += 500
    chain = (MAIN, EVALUATE, "eval.py(3): evaluate", "eval.py(9): score")
    (stall,) = run(steps(took), seen=dict.fromkeys(rare, chain)).stalls
    assert (stall.lines, stall.lines[stall.loop]) == (chain, EVALUATE)


@pytest.mark.parametrize("outer", [(), (MAIN,)])
def test_a_loop_that_is_busy_at_many_lines_is_known_by_its_function(outer: tuple[str, ...]) -> None:
    """As where a step is one third forward, backward and optimizer each: no line has most of the time."""
    took = noisy(1000)
    rare = np.arange(99, 1000, 100)
    took[rare] += 500
    seen = {step: (*outer, f"train.py({31 + step % 3}): main") for step in range(1000)}
    seen |= dict.fromkeys(rare, (*outer, EVALUATE, "eval.py(3): evaluate"))
    (stall,) = run(steps(took), seen=seen).stalls
    assert stall.lines == (*outer, EVALUATE, "eval.py(3): evaluate")
    assert stall.lines[stall.loop] == EVALUATE
    assert stall.loop >= 0


def test_the_loop_itself_is_no_place() -> None:
    """Where one look saw no more than the loop, the others' places stand apart all the same."""
    took = noisy(1000)
    saved, evaluated = np.arange(99, 1000, 100), np.arange(49, 1000, 100)
    took[[*saved, *evaluated]] += 500
    seen = dict.fromkeys(saved, (MAIN, SAVE)) | dict.fromkeys(evaluated, (MAIN, EVALUATE))
    seen |= dict.fromkeys([*saved[:3], *evaluated[:3]], (MAIN,))
    assert {one.lines for one in run(steps(took), seen=seen).stalls} >= {(MAIN, SAVE), (MAIN, EVALUATE)}


def test_a_pause_that_makes_up_the_stall_is_its_reason() -> None:
    took = noisy(600)
    collected, waited = range(59, 600, 60), range(29, 600, 60)
    took[list(collected)] += 80
    took[list(waited)] += 120
    paused = steps(took, collector=dict.fromkeys(collected, 78.0), waited=dict.fromkeys(waited, 119.0))
    seen = {step: (MAIN, LOOP, f"model.py({step}): forward") for step in collected}
    told = {one.what: one for one in run(paused, seen=seen).stalls}
    assert set(told) == {"garbage collection", "input"}
    assert told["garbage collection"].count == 10  # one stall, wherever it came
    assert told["garbage collection"].lines == ()


def test_long_steps_without_rhythm_are_told_only_when_they_matter() -> None:
    took, lots = noisy(2000), noisy(2000)
    places = np.random.default_rng(3).choice(2000, 40, replace=False)
    took[places[:6]] += 12
    lots[places] += 60
    assert run(steps(took)).stalls == ()
    (stall,) = run(steps(lots)).stalls
    assert (stall.count, stall.regular, stall.lines) == (40, False, ())
    assert run(steps(lots), delayed=0.2).stalls == ()  # other work had the processor


def test_a_processor_that_others_take_explains_no_stall_that_has_a_rhythm() -> None:
    took = noisy(1000)
    took[99::100] += 300
    assert run(steps(took), delayed=0.5).stalls[0].every == 100.0
