"""What a further window tells: a rare step explained apart, averaged over its period; and steps that have changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from build import Run
from jsonschema import Draft202012Validator

from keepbusy.explain import explain
from keepbusy.explain.diagnosis import Diagnosis
from keepbusy.report import as_json, terminal
from keepbusy.timeline.busy_file import from_bytes, to_bytes
from keepbusy.timeline.model import Timeline
from keepbusy.timeline.run_facts import DRIFT, LOOP, RUN, STALL, Part, PlainRun, RareStall, WindowReason

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "reference" / "explain.schema.json").read_text())
MS = 1_000_000
MAIN = "train.py(90): <module>"
EVERY, LAST, LOOKED = 50, 400, 200
ORDINARY, BATCHES = 10_000, 40  # microseconds of the device in a step; batches of an evaluation


def train(run: Run) -> None:
    run.launch(kernel=ORDINARY, at=["train.py(31): main"])


def evaluate(run: Run, host: float = 500) -> None:
    train(run)
    for _ in range(BATCHES):
        run.launch(kernel=1000, at=["train.py(41): main", "train.py(9): evaluate"])
        run.sync(at=["train.py(41): main", "train.py(10): evaluate"])
        run.work(host, at=["train.py(41): main", "train.py(11): evaluate"])


def window(bodies: list[Callable[[Run], None]], first: int, **facts: object) -> Timeline:
    """Steps whose numbers follow `first`, the one that the first mark ends."""
    run = Run.of(1)
    for body in bodies:
        run.step()
        body(run)
    run.step().work(1)
    return run.timeline(device="NVIDIA H200", recorded=tuple(range(first, first + len(bodies) + 1)), **facts)


def recorded(stalls: list[Callable[[Run], None]], what: str = "", **about: object) -> Timeline:
    """A run whose evaluation comes every fiftieth step, and what a window around step 200 saw."""
    time = BATCHES * 1500 * 1000 + 300_000
    stall = RareStall(what, 8, float(EVERY), True, time, 8 * time, 0.1, (MAIN, "train.py(41): main"), last=LAST)
    run = PlainRun("optimizer", LAST, 10 * MS, 10 * MS, 10 * MS, stalls=(stall,))
    told = {"reason": WindowReason(STALL, LOOKED, stall), "plain_step": 10 * MS}
    further = window(stalls, LOOKED - 2, **{**told, **about})
    first = window([train] * 6, 10, plain_runs={0: run}, plain_step=10 * MS, source="train.py")
    return first.change(further=(further,))


def explained(timeline: Timeline) -> Diagnosis:
    return explain(timeline, plain_step=10 * MS)


def test_a_rare_step_is_explained_at_its_own_plain_time() -> None:
    said = explained(recorded([train, evaluate, train]))
    (rare,) = said.rare
    assert said.causes == ()
    assert rare.plain_step == 10 * MS + rare.stall.time
    assert sum(rare.ledger.values()) == rare.plain_step
    assert rare.causes[0].cause in ("host_sync", "host_work")
    assert {site.where.line for cause in rare.causes for site in cause.sites} <= {9, 10, 11, 41}


def test_the_gain_is_averaged_over_the_period() -> None:
    (rare,) = explained(recorded([train, evaluate, train])).rare
    best = min(cause.predicted.step for cause in rare.causes)
    saved = rare.plain_step - best
    assert 0.25 * rare.stall.time < saved <= rare.stall.time
    assert rare.gain_of(rare.predicted) == pytest.approx((rare.plain_step - rare.predicted.step) / EVERY, abs=1)


@pytest.mark.parametrize("early", [0, 2])
def test_one_that_comes_a_step_early_or_late_is_found(early: int) -> None:
    steps = [train, train, train]
    steps[early] = evaluate
    assert len(explained(recorded(steps)).rare) == 1


def test_one_that_did_not_come_is_not_explained() -> None:
    said = explained(recorded([train, train, train]))
    assert said.rare == ()
    assert said.plain_runs[0].stalls != ()
    assert "A stall was expected in step 200" in said.notes[-1]


def test_the_report_tells_it_below_the_stall() -> None:
    text = terminal.render_full(explained(recorded([train, evaluate, train])))
    lines = text.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("rarely  Every 50 steps"))
    told = " ".join(line.strip() for line in lines[at:])
    assert "fixed, such a step takes 70.3 → " in told
    assert "which saves 400 µs per step on average" in told
    assert "fix: " in told


def test_a_stall_that_is_all_computing_is_told_as_work() -> None:
    def computes(run: Run) -> None:
        train(run)
        run.launch(kernel=60_300, at=["train.py(41): main"])

    said = explained(recorded([train, computes, train]))
    assert said.rare[0].causes == ()
    assert "In step 200, which was recorded, the GPU computes 100% of the time. No fix saves much there." in " ".join(
        terminal.render_full(said).split()
    )


def test_a_checkpoint_is_written_later() -> None:
    def saves(run: Run) -> None:
        train(run)
        run.sync(at=["train.py(55): main"])
        run.work(60_000, at=["train.py(55): main"])

    (rare,) = explained(recorded([train, saves, train], what="checkpoint")).rare
    assert rare.causes[0].api == "keepbusy.save_later"


def test_what_every_step_has_is_not_told_again() -> None:
    """A sync that costs a millisecond in each step costs it in the rare one, too, and was told of already."""

    def reads(run: Run) -> None:
        train(run)
        run.sync(at=["train.py(33): main"])
        run.work(5000, at=["train.py(33): main"])

    def reads_and_computes(run: Run) -> None:
        reads(run)
        run.launch(kernel=60_300, at=["train.py(41): main"])

    base = recorded([reads, reads_and_computes, reads], plain_step=15 * MS)
    first = window([reads] * 6, 10, plain_runs=base.facts.plain_runs, plain_step=15 * MS)
    said = explain(first.change(further=base.further), plain_step=15 * MS)
    assert said.causes != ()
    assert said.rare[0].causes == ()


def test_a_rare_step_in_the_first_window_stands_apart() -> None:
    base = recorded([train, evaluate, train])
    first = window(
        [train, train, evaluate, train, train], EVERY - 3, plain_runs=base.facts.plain_runs, plain_step=10 * MS
    )
    said = explained(first)
    assert said.causes == ()
    assert said.steps == 4
    assert said.traced_step < 12 * MS
    assert any("step 50 stalled" in note for note in said.notes)


def test_steps_that_have_changed_are_explained_again() -> None:
    def grown(run: Run) -> None:
        train(run)
        run.sync(at=["train.py(33): main"])
        run.work(4000, at=["train.py(34): main"])

    later = window([grown] * 6, 700, reason=WindowReason(DRIFT, began=650), plain_step=14 * MS)
    said = explained(recorded([train, evaluate, train]).change(further=(later,)))
    assert said.later is not None
    assert (said.later.since, said.later.diagnosis.plain_step) == (650, 14 * MS)
    told = " ".join(terminal.render_full(said).split())
    assert "later From step 650 on a step takes 14.0 ms instead of 10.0 ms, 40% longer: " in told
    assert "train.py:33" in told or "train.py:34" in told
    assert "fix: torch.cuda.Event(enable_timing=True)" in told
    assert "which cost nothing before (without it 10.0 ms)" in told


def test_of_what_was_there_before_it_is_told_how_much_it_grew() -> None:
    def reads(run: Run, host: float = 3000) -> None:
        train(run)
        run.sync(at=["train.py(33): main"])
        run.work(host, at=["train.py(34): main"])

    first = window([reads] * 6, 10, plain_step=13 * MS)
    grown = window([lambda run: reads(run, 6000)] * 6, 700, reason=WindowReason(DRIFT, began=650), plain_step=16 * MS)
    told = " ".join(terminal.render_full(explain(first.change(further=(grown,)))).split())
    assert "later From step 650 on a step takes 16.0 ms instead of 13.0 ms, 23% longer: " in told
    assert "3.0 → 6.0 ms of it" in told


def grown(run: Run) -> None:
    train(run)
    run.sync(at=["train.py(33): main"])
    run.work(4000, at=["train.py(34): main"])


def test_what_lies_between_two_runs_of_a_loop_is_a_part_of_the_turn_around_it() -> None:
    """A round of an optimizer that turns eight times, and before each round points are drawn by the host, in 60 ms."""

    def draws(run: Run) -> None:
        train(run)
        for _ in range(5):
            run.launch(kernel=1_000, at=["train.py(20): main"])
        run.work(60_000, at=["train.py(20): main", "train.py(7): draw"]).launch(kernel=1_000)

    inner = Part(LOOP, "train.py:30", time=280 * 10 * MS, turns=280, turn=10 * MS, low=10 * MS)
    around = Part(LOOP, "train.py:19", time=35 * 146 * MS, turns=35, turn=146 * MS, low=146 * MS, parts=(inner,))
    run = Part(RUN, time=8_000 * MS, parts=(around,))
    steps = [train, draws, train, train, train]
    told = explain(window(steps, 1, loop="train.py:30", plain_step=10 * MS, run=run, source="train.py"))
    assert told.plain_step == 10 * MS
    assert [(one.place, one.turns) for one in told.loops] == [("train.py:19", 35)]
    [fix] = told.plan
    assert ([str(place) for place in fix.where], fix.loop) == (["train.py:7"], "train.py:19")
    assert fix.run_gain == pytest.approx(35 * 60 * MS, rel=0.1)


def test_all_of_it_goes_through_a_file_and_keeps_to_the_schema() -> None:
    kept = from_bytes(to_bytes(recorded([train, evaluate, train])))
    said = json.loads(as_json.render(explained(kept)))
    Draft202012Validator(SCHEMA).validate(said)
    (rare,) = said["rare"]
    assert rare["predicted_gain"] == pytest.approx((rare["plain_step"] - rare["predicted_step"]) / EVERY, abs=1e-3)
    assert said["later"] is None
