"""When a further window opens: before a rare stall comes again, and once steps have changed for good."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marked_runs import MAIN, MS, looks, steps

from keepbusy.instrument.loop_tree import BusyLoop, LoopSite, worth_a_look
from keepbusy.recording.turn_times import StepLooks, Steps, changed_at
from keepbusy.recording.windows import (
    KEPT_WINDOWS,
    SETTLING_TURNS,
    THINKING_ALLOWANCE,
    THINKING_SHARE,
    TOLD_AHEAD,
    TURNS_BEFORE,
    WINDOWS_ALLOWANCE,
    WINDOWS_SHARE,
    Occasion,
    SharedWindows,
    WindowPlan,
    foreseen,
)
from keepbusy.timeline.files import typed
from keepbusy.timeline.run_facts import DRIFT, LOOP, STALL, RareStall, WindowReason

EVALUATE, SAVE = (MAIN, "train.py(41): main"), (MAIN, "train.py(55): main")
THINKS_EVERY = 16


class Program:
    """Steps on paper, marked one after the other; the windows that open on the way are recorded, so not plain."""

    def __init__(self, took: np.ndarray, seen: Mapping[int, tuple[str, ...]] | None = None, cost: int = 0) -> None:
        self.took, self.seen, self.cost = took, dict(seen or {}), cost
        self.plain = np.ones(len(took), bool)
        self.count = self.asked = 0
        self.others = 0.0
        self.table = SimpleNamespace(saves={})

    def steps(self, last: int = 0) -> Steps:
        self.asked += 1
        return steps(self.took, self.plain).take(np.arange(len(self.took)) < self.count - 1)

    def looks(self) -> StepLooks:
        return looks(steps(self.took), self.seen)

    def delayed(self) -> float:
        return self.others

    def clock(self) -> int:
        return int(self.took[: self.count].sum() * MS) + self.asked * self.cost

    def windows(self, first: int = 14, costs: int = 0) -> list[Occasion]:
        """All that open from the end of the first one on, each of which costs so much."""
        plan = WindowPlan(self, self.clock, self.looks, list, worked=self.clock)  # type: ignore[arg-type]
        found: list[Occasion] = []
        closed = first
        for count in range(first, len(self.took) + 2):
            self.count = count
            if count > closed and count % THINKS_EVERY == 0:
                plan.think(self.clock(), costs * (1 + len(found)), costs, 2_000 * MS)
            occasion = plan.due(count) if count > closed else None
            if occasion is not None:
                found.append(occasion._replace(opens=count))
                closed = count + SETTLING_TURNS + occasion.turns
                self.plain[count - 1 : closed + 2] = False
        return found


def noisy(count: int, step: float = 10.0, seed: int = 0) -> np.ndarray:
    return step * np.random.default_rng(seed).lognormal(0, 0.03, count)


def stalling(count: int, every: int, longer: float = 300.0, first: int = 0) -> np.ndarray:
    """Step number n, counted from one, stalls where n is a multiple of `every`; a row is the step after a mark."""
    took = noisy(count)
    took[(first or every) - 2 :: every] += longer
    return took


def test_steps_that_go_on_as_they_were_are_left_alone() -> None:
    assert Program(noisy(1500)).windows() == []


@given(every=st.integers(25, 200), longer=st.floats(40, 1900), times=st.integers(10, 16))
@settings(max_examples=8)
def test_the_window_holds_the_step_in_which_the_stall_comes_again(every: int, longer: float, times: int) -> None:
    (look,) = Program(stalling(every * times, every, longer)).windows()
    assert look.why == STALL
    assert look.about["step"] % every == 0
    recorded = range(look.opens + SETTLING_TURNS + 1, look.opens + SETTLING_TURNS + 1 + look.turns)
    assert look.about["step"] in recorded
    assert recorded[TURNS_BEFORE] == look.about["step"]


def test_two_stalls_are_looked_at_where_each_comes_alone() -> None:
    took = stalling(1000, 40)
    took[48::50] += 500
    seen = dict.fromkeys(range(48, 1000, 50), SAVE) | dict.fromkeys(range(38, 1000, 40), EVALUATE)
    windows = Program(took, seen).windows()
    assert [look.why for look in windows] == [STALL, STALL]
    assert {look.about["step"] % 40 == 0 for look in windows} == {True, False}
    assert all((look.about["step"] % 40 == 0) != (look.about["step"] % 50 == 0) for look in windows)


def four_kinds() -> Program:
    took, seen = noisy(2500), {}
    for number, every in enumerate((51, 111, 157, 201)):
        took[every - 2 :: every] += 200 * (number + 1)
        seen |= dict.fromkeys(range(every - 2, 2500, every), (MAIN, f"train.py({60 + number}): main"))
    return Program(took, seen)


def test_there_are_few_windows_however_many_stalls() -> None:
    assert 0 < len(four_kinds().windows()) <= KEPT_WINDOWS


def test_windows_hold_the_run_up_for_no_more_than_a_hundredth_of_it() -> None:
    for cost in (50 * MS, 150 * MS, 500 * MS, 10_000 * MS):
        whole, count = four_kinds().took.sum() * MS, len(four_kinds().windows(costs=cost))
        further = cost * count
        assert cost + further <= WINDOWS_SHARE * whole or further <= max(min(cost, 600 * MS), WINDOWS_ALLOWANCE)
        assert (count > 0) == (cost < 10_000 * MS)


@pytest.mark.parametrize(
    "took",
    [
        pytest.param(stalling(1000, 100, longer=5), id="too little"),
        pytest.param(stalling(1000, 4), id="in the first window anyway"),
        pytest.param(stalling(1000, 100, longer=2500), id="too long for a trace"),
    ],
)
def test_what_is_not_worth_a_window_gets_none(took: np.ndarray) -> None:
    assert Program(took).windows() == []


def test_what_comes_without_a_rhythm_is_left_to_the_marks() -> None:
    took = noisy(2000)
    took[np.random.default_rng(5).choice(2000, 25, replace=False)] += 300
    assert Program(took).windows() == []


def test_a_lasting_change_is_looked_at_once() -> None:
    took = np.concatenate([noisy(700), noisy(900, 13, seed=1)])
    (look,) = Program(took).windows()
    assert look.why == DRIFT
    assert abs(look.about["began"] - 702) <= 20
    assert look.about["before"] == pytest.approx(10 * MS, rel=0.05)
    assert 720 < look.opens < 1000


def test_a_few_long_steps_are_a_change_where_they_take_most_of_the_time() -> None:
    """As of a calibration, whose second pass counts: twelve steps of 13 ms, and twelve of 900."""
    took = np.concatenate([noisy(13, 13), noisy(12, 900, seed=1)])
    program = Program(took)
    plan = WindowPlan(program, program.clock, program.looks, list, worked=lambda: 0)  # type: ignore[arg-type]
    program.plain[9:12] = False
    opened = 0
    for program.count in range(13, 24):
        plan.think(program.clock(), 0, 0)
        if (look := plan.due(program.count)) is not None:
            opened = program.count
            break
    assert opened <= 18
    assert (look.why, look.usual) == (DRIFT, pytest.approx(900 * MS, rel=0.05))
    assert 14 <= look.about["began"] <= 16


def test_a_change_of_the_machine_is_no_change_of_the_program() -> None:
    program = Program(np.concatenate([noisy(500), noisy(500, 13, seed=1)]))
    program.others = 0.2
    assert program.windows() == []


def test_a_slow_spell_is_no_lasting_change() -> None:
    took = np.concatenate([noisy(700), noisy(60, 20, seed=1), noisy(700, seed=2)])
    assert Program(took).windows() == []


@given(factor=st.floats(0.93, 1.07), seed=st.integers(0, 50))
def test_small_changes_are_noise(factor: float, seed: int) -> None:
    done = steps(np.concatenate([noisy(400, seed=seed), noisy(400, 10 * factor, seed=seed + 1)]))
    assert changed_at(done.took, 10 * MS) is None


def test_a_change_that_did_not_last_is_told_apart() -> None:
    program = Program(np.concatenate([noisy(400), noisy(400, 14, seed=1), noisy(2400, seed=2)]))
    plan = WindowPlan(program, program.clock, program.looks, list)  # type: ignore[arg-type]
    occasion = Occasion(DRIFT, 0, 5, {"began": 402, "before": 10 * MS})
    program.count = 800
    assert plan.share_since(occasion) == pytest.approx(14 / 24, abs=0.02)
    program.count = 3200
    assert plan.share_since(occasion) == 0


def test_a_loader_that_had_batches_in_store_at_first_is_looked_at_again() -> None:
    """Also in a run of few steps, of which every other one waits from then on."""
    later = noisy(120, 20, seed=1)
    later[::2] += 34
    (look,) = Program(np.concatenate([noisy(24, 20), later])).windows()
    assert look.why == DRIFT
    assert 24 <= look.about["began"] <= 45
    assert look.about["before"] == pytest.approx(20 * MS, rel=0.05)


def test_steps_that_differ_at_random_have_not_changed() -> None:
    took = np.random.default_rng(3).choice([18.0, 54.0], 2000, p=[0.75, 0.25])
    assert Program(took).windows() == []


def followers(folder: Path, count: int) -> tuple[WindowPlan, WindowPlan]:
    """The plan of the first rank, which has set as many marks of 10 ms as the other."""
    plans = []
    for _ in range(2):
        program = Program(stalling(2000, 100))
        program.count = count
        program.table.host = lambda last: np.arange(count)[-last:] * 10 * MS
        plans.append(WindowPlan(program, program.clock, program.looks, list, worked=lambda: 0))  # type: ignore[arg-type]
    plans[0].shared = SharedWindows(folder, plans[0].clock)
    return plans[0], plans[1]


def test_ranks_open_a_window_at_the_same_step(tmp_path: Path) -> None:
    told = SharedWindows(tmp_path, lambda: 0)
    first, other = followers(tmp_path, 1000)
    first.think(10_000 * MS, 0, 0)
    word = told.heard()
    assert word is not None
    assert json.loads(json.dumps(word)) == json.loads(json.dumps(first.planned))
    assert (word.why, told.heard()) == (STALL, None)
    assert typed(WindowReason, {"why": word.why, **word.about}).number == word.about["number"]
    assert word.opens >= 1000 + TOLD_AHEAD // (10 * MS)  # the others look for word once a second
    other.follow(word)
    assert [count for count in range(1000, 1500) if other.due(count)] == [word.opens]


def test_a_rank_that_hears_of_a_window_too_late_goes_without(tmp_path: Path) -> None:
    first, other = followers(tmp_path, 1000)
    first.think(10_000 * MS, 0, 0)
    assert first.planned is not None
    other.marks.count = first.planned.opens  # type: ignore[misc]
    other.follow(first.planned)
    assert other.planned is None


def test_a_loop_of_all_ranks_is_known_by_where_it_stands(tmp_path: Path) -> None:
    first, other = followers(tmp_path, 1000)
    told, first.loops = SharedWindows(tmp_path, other.clock), lambda: [busy_loop("train.py:9", 700)]
    first.marks.steps = lambda last: steps([])  # type: ignore[method-assign]
    first.think(10_000 * MS, 0, 0)
    word = told.heard()
    assert word is not None
    assert (word.why, word.loop, word.usual) == (LOOP, LoopSite("train.py", "main", 1, 9), 10 * MS)
    other.follow(word)
    assert other.due(word.opens) is None  # it opens at a turn
    assert other.take_loop() == word


def test_what_another_run_has_left_is_not_heard(tmp_path: Path) -> None:
    SharedWindows(tmp_path, lambda: 0).tell(Occasion(DRIFT, 0, 5, {}))
    assert SharedWindows(tmp_path, lambda: 0).heard() is None


@pytest.mark.parametrize("left", ["", "[1, 2", "{}", "[]", "7", '["drift", 0, 5, {}]', "[1, 2, 3, 4, 5, 6]"])
def test_what_is_no_word_is_not_heard(tmp_path: Path, left: str) -> None:
    (tmp_path / "windows.json").write_text(left)
    assert SharedWindows(tmp_path, lambda: 0).heard() is None


def test_a_first_rank_whose_folder_has_gone_plans_for_itself(tmp_path: Path) -> None:
    first, _ = followers(tmp_path / "gone", 1000)
    first.think(10_000 * MS, 0, 0)
    assert first.planned is not None


def test_hosts_whose_clocks_have_nothing_in_common_agree_when_a_loop_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time_ns", itertools.count(10**18, step=1000).__next__)
    told, heard = SharedWindows(tmp_path, lambda: 7 * TOLD_AHEAD), SharedWindows(tmp_path, lambda: 5)
    told.tell(Occasion(LOOP, 1, 5, {}, 0, 9 * TOLD_AHEAD, LoopSite("train.py", "main", 1, 9)))
    word = heard.heard()
    assert word is not None
    assert word.not_before - 5 == pytest.approx(2 * TOLD_AHEAD, abs=10_000)


@pytest.mark.parametrize("each", [0, 7])
def test_ranks_look_at_the_turns_in_which_they_meet(tmp_path: Path, each: int) -> None:
    """However far each host is ahead of its GPU; where nothing is told of collectives, at turns of one time."""
    now = [0]
    shared = [SharedWindows(tmp_path, lambda: now[0], lambda: each * (now[0] // (10 * MS))) for _ in range(3)]
    first, _ = followers(tmp_path, 1000)
    first.clock, first.marks.steps = lambda: now[0], lambda last: steps([])  # type: ignore[method-assign]
    first.shared, first.loops = shared[0], lambda: [busy_loop("train.py:9", 700)]
    thoughts = 0
    while first.planned is None:
        now[0] += 1000 * MS
        thoughts += 1
        first.think(10_000 * MS, 0, 0)
    assert thoughts == (3 if each else 1)  # none of them in the first second
    word = shared[1].heard()
    assert word is not None
    assert word.meets == (each * (now[0] + TOLD_AHEAD) // (10 * MS))
    now[0] += 2 * TOLD_AHEAD
    assert (shared[2].heard() is None) == bool(each)  # a rank that hears of it too late goes without


def busy_loop(place: str, waits: int, turn: int = 10) -> BusyLoop:
    site = LoopSite("train.py", "main", 1, int(place.partition(":")[2]))
    return BusyLoop(frozenset({(0, 2)}), site, place, 2 * waits * MS, waits * MS, np.arange(0, 100 * turn, turn) * MS)


def test_the_loop_in_which_the_gpu_waits_longest_is_looked_at_first_and_each_once() -> None:
    loops = [busy_loop("train.py:3", 400), busy_loop("train.py:9", 700)]
    plan = WindowPlan(Program(noisy(10)), lambda: 0, StepLooks, lambda: loops, worked=lambda: 0)  # type: ignore[arg-type]
    taken = []
    for _ in range(4):
        plan.think(2_000 * MS, 0, 0)
        taken.append(plan.take_loop())
    assert [(one.why, one.about["place"]) for one in taken if one] == [(LOOP, "train.py:9"), (LOOP, "train.py:3")]


def test_a_loop_is_worth_a_look_where_the_gpu_waits_for_a_tenth_of_what_all_loops_take() -> None:
    """However long the start-up took."""
    loops = [busy_loop("train.py:3", 400), busy_loop("train.py:9", 100), busy_loop("train.py:20", 90)]
    assert [one.place for one in worth_a_look(loops)] == ["train.py:3"]
    assert [one.place for one in worth_a_look(loops[1:])] == ["train.py:9", "train.py:20"]


def test_asking_takes_little_of_the_run() -> None:
    took = noisy(3000)
    took[np.random.default_rng(5).choice(3000, 300, replace=False)] += 10
    program = Program(took, cost=5 * MS)
    program.windows()
    assert 0 < 5 * MS * program.asked <= max(THINKING_ALLOWANCE, THINKING_SHARE * took.sum() * MS) + 10 * MS


def stall(every: int, last: int) -> RareStall:
    return RareStall("", 5, float(every), True, MS, MS, 0.1, last=last)


@given(every=st.integers(8, 500), last=st.integers(1, 5000), ahead=st.integers(1, 2000))
def test_what_is_foreseen_comes(every: int, last: int, ahead: int) -> None:
    step = foreseen(stall(every, last), last + ahead)
    assert step >= last + ahead
    assert (step - last) % every == 0
