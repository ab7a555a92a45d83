"""Explanations as a whole: the ledger, what fixing several causes gives, silence, and what holds of any timeline."""

from __future__ import annotations

from typing import Any

import pytest
from build import HOME, MB, US, WIRE, Run, loop
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import loops
from told import assert_sound, cause, explained, harmless, names, near, told

from keepbusy.causes import KINDS, findings
from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.explain import CAUSES, explain
from keepbusy.explain.diagnosis import UNFIXABLE, Diagnosis
from keepbusy.timeline.edit import Edit, apply
from keepbusy.timeline.figures import times
from keepbusy.timeline.files import BadInput
from keepbusy.timeline.model import Kind, Timeline, settle
from keepbusy.timeline.replay import pace
from keepbusy.timeline.steps import whole_steps

ITEM = ["aten::item"]


def two_faults(run: Run) -> None:
    """A blocking copy of 2 ms and, after a read, 3 ms of work; 6 ms of kernels."""
    run.copy(16 * MB, 2_000, at=["aten::to"]).launch([1_000] * 6).sync(at=ITEM).work(3_000, at=["log.py(5): write"])


# Several causes


def test_each_cause_is_fixed_alone() -> None:
    """The read costs the 3 ms after it, for what is done then could be done during the kernels."""
    found = told(two_faults)
    assert found.plain_step == near(2_000 + 6_000 + 3_000)
    steps = {name: cause(found, name).predicted.step for name in names(found)}
    assert steps["blocking_copy"] == near(6_000 + 3_000)
    assert steps["host_work"] == near(2_000 + 6_000)


def test_all_of_them_together_leave_the_kernels() -> None:
    assert told(two_faults).predicted.step == near(6_000)


@pytest.mark.parametrize(
    ("what_if", "step"),
    [
        (["host_sync", "blocking_copy"], 6_000),
        (["blocking_copy", "host_work"], 6_000),
        (["blocking_copy"], 9_000),
        (["host_work"], 8_000),
        (["allocator"], 11_000),  # there is none
    ],
)
def test_what_if_these_were_fixed(what_if: list[str], step: float) -> None:
    found = told(two_faults, what_if=what_if)
    assert found.fixed == tuple(what_if)
    assert found.predicted.step == near(step)
    assert names(found) == names(told(two_faults))


def test_what_crowds_one_link_is_not_foretold_to_help() -> None:
    """Two copies of 6 MB, one of them pinned and on a stream of its own already: the other alone is worth moving."""

    def body(run: Run) -> None:
        run.launch(20).copy(6 * MB, 800, at=["aten::to"]).copy(
            6 * MB, 124, pinned=True, blocking=False, at=["aten::to"]
        )

    found = told(body)
    alone = cause(found, "blocking_copy").predicted.step
    assert told(body, what_if=["blocking_copy", "copy_not_overlapped"]).predicted.step > alone
    assert found.predicted.step == alone


def test_two_causes_of_one_wait_do_not_gain_twice() -> None:
    """The read and the work after it: either alone takes the wait away, and so do both together."""
    found = told(lambda run: run.launch([1_000] * 9).sync(at=ITEM).work(2_000, at=["log.py(5): write"]))
    assert set(names(found)) == {"host_sync", "host_work"}
    assert cause(found, "host_sync").wait == near(2_000, 0.02)
    assert cause(found, "host_work").wait == near(2_000, 0.02)
    assert found.ledger["host_sync"] == near(2_000, 0.02)
    assert found.ledger.get("host_work", 0) < 20 * US
    assert found.predicted.step == near(9_000)


def test_among_equals_the_more_specific_cause_comes_first() -> None:
    found = told(lambda run: run.launch([1_000] * 9).sync(at=ITEM).work(2_000, at=["log.py(5): write"]))
    assert names(found)[0] == "host_sync"


def test_only_causes_can_be_fixed() -> None:
    with pytest.raises(BadInput, match=r"'gremlins' is no cause that can be fixed; the causes are host_sync, .*\.$"):
        explain(loop(two_faults), what_if=["host_sync", "gremlins"])
    assert set(KINDS) | set(UNFIXABLE) == set(CAUSES)


@pytest.mark.parametrize(
    "nonsense",
    [{"plain_step": float("nan")}, {"plain_step": "3"}, {"plain_step": 0}, {"workers": -1}, {"what_if": "host_sync"}],
    ids=str,
)
def test_nonsense_is_refused_with_a_sentence(nonsense: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"\.$|\]\.$"):
        explain(loop(two_faults), **nonsense)


def test_what_is_no_timeline_is_refused() -> None:
    with pytest.raises(BadInput, match=r"explain was given 'run.busy'; give what keepbusy.read or keepbusy.load"):
        explain("run.busy")  # type: ignore[arg-type]


# Silence


@pytest.mark.parametrize("host", [0, 300, 3_500])
def test_a_run_that_keeps_its_device_busy_gets_no_advice(host: float) -> None:
    found = told(lambda run: run.work(host, at=["data.py(3): batch"]).launch([1_000] * 4))
    assert (names(found), harmless(found)) == ([], [])
    assert found.ledger["computing"] == near(4_000)
    assert found.predicted.step == found.plain_step


def test_a_gain_within_the_noise_is_not_claimed() -> None:
    """100 µs of 10 ms: plain steps differ by more from run to run."""
    found = told(lambda run: run.launch([1_000] * 10).sync(at=ITEM).work(100))
    assert names(found) == []
    assert found.noise == near(0.03 * 10_100)


def test_what_nobody_can_name_is_unknown() -> None:
    """Kernels that begin 2 ms after the one before them, launched long ago: no span, no link, no cause."""

    def body(run: Run) -> None:
        for _ in range(4):
            run.command(run.call(7), 7, 1_000, lags=(6_000, 2_000_000, 1_000))

    found = told(body)
    assert found.plain_step == near(4 * 3_000, 0.03)
    assert found.ledger["unknown"] > 0.5 * found.plain_step
    assert found.ledger["computing"] == near(4_000)


# With a plain step


def recorded(run: Run) -> None:
    """20 operators of 100 µs, half of which is the recorder's; 0.4 ms of kernels; a read."""
    for _ in range(20):
        run.work(100, at=["aten::add"], recording=50 * US).launch(20, at=["aten::add"])
    run.sync(at=ITEM)


def test_shares_and_gains_refer_to_the_plain_step() -> None:
    traced, plain = told(recorded), told(recorded, plain_step=1_100 * US)
    assert traced.plain_step == near(2_100, 0.02)
    assert (plain.plain_step, plain.plain_given) == (1_100 * US, True)
    assert plain.ledger["computing"] == near(400)
    assert plain.ledger["launch_bound"] < traced.ledger["launch_bound"]
    assert names(traced) == names(plain) == ["launch_bound"]
    assert plain.traced_step == near(2_100, 0.03)


def test_without_one_the_reader_is_told() -> None:
    assert "--plain-step" in told(recorded).notes[0]
    assert told(recorded, plain_step=1_100 * US).notes == ()


def test_a_plain_step_of_something_else_is_doubted() -> None:
    assert any("same program" in note for note in told(recorded, plain_step=4_000 * US, steps=3).notes)


def test_few_steps_of_many_are_said_to_be_few() -> None:
    def body(run: Run) -> None:
        for _ in range(200):
            run.launch(2)

    found = told(body, steps=400)
    assert found.steps == 400
    assert any("of the 400 steps" in note for note in found.notes)


# Whatever was recorded


@given(loops(), st.none() | st.floats(0.8, 1.4))
@settings(max_examples=40)
def test_every_explanation_is_sound(timeline: Timeline, share: float | None) -> None:
    timeline = settle(timeline)
    step = None if share is None else max(1, round(share * pace(whole_steps(timeline))))
    diagnosis = explanation_of(timeline, step)
    if diagnosis is not None:
        assert_sound(diagnosis)
        assert diagnosis == explanation_of(timeline, step)


def explanation_of(timeline: Timeline, plain_step: int | None) -> Diagnosis | None:
    """None where the plain step is one that this run cannot have."""
    try:
        return explain(timeline, plain_step)
    except BadInput:
        return None


@given(loops())
@settings(max_examples=20)
def test_fixing_everything_is_at_least_as_good_as_fixing_one_thing(timeline: Timeline) -> None:
    found = explained(settle(timeline))
    for one in found.causes:
        assert found.predicted.step <= one.predicted.step


programs = st.lists(
    st.one_of(
        st.builds(lambda time: lambda run: run.work(time, at=["data.py(3): f"]), st.integers(0, 3_000)),
        st.builds(lambda time: lambda run: run.launch(time), st.integers(1, 2_000)),
        st.builds(lambda times: lambda run: run.launch(times), st.lists(st.integers(1, 300), min_size=2, max_size=6)),
        st.builds(lambda size: lambda run: run.copy(size, size / 8_000, at=["aten::to"]), st.integers(4, 32 * MB)),
        st.builds(lambda size: lambda run: run.copy(size, size / 8_000, HOME), st.integers(4, 32 * MB)),
        st.builds(
            lambda size: lambda run: run.copy(size, size / 50_000, pinned=True, blocking=False), st.integers(4, 32 * MB)
        ),
        st.builds(lambda: lambda run: run.sync(at=ITEM)),
        st.builds(lambda: lambda run: run.sync(None)),
        st.builds(lambda time: lambda run: run.allocate(time, waits=True), st.integers(10, 900)),
        st.builds(lambda time: lambda run: run.batch(time), st.integers(1, 3_000)),
        st.builds(lambda time: lambda run: run.work(time, at=["aten::randn"]), st.integers(0, 3_000)),
        st.builds(lambda: lambda run: run.order(7, 8).launch(50, stream=8).order(8, 7)),
    ),
    min_size=1,
    max_size=10,
)


def written(program: list, run: Run) -> None:
    run.launch(100)
    for act in program:
        act(run)


@given(programs, st.integers(2, 6))
@settings(max_examples=40)
def test_any_program_is_explained(program: list, steps: int) -> None:
    found = told(lambda run: written(program, run), steps=steps)
    for one in found.causes:
        assert found.predicted.step <= one.predicted.step


@given(programs)
@settings(max_examples=20)
def test_computing_is_what_the_kernels_take(program: list) -> None:
    """On one stream nothing overlaps: their sum is exact, whatever the host does."""
    timeline = loop(lambda run: written(program, run))
    whole = whole_steps(timeline)
    busy = int(whole.spans.work[whole.spans.kind == Kind.KERNEL].sum()) / 6
    two_streams = len({lane for lane in whole.lanes if lane.device is not None}) > 1
    assert explained(timeline).ledger["computing"] == pytest.approx(busy, abs=2 if not two_streams else 0.2 * busy)


@given(programs)
@settings(max_examples=20)
def test_an_edit_never_makes_a_run_longer(program: list) -> None:
    """Each fix alone, and none at all."""
    scene = CauseInputs(whole_steps(loop(lambda run: written(program, run))))
    before = pace(scene.timeline)
    for name, finding in findings(scene).items():
        assert pace(apply(scene.timeline, finding.edit)) <= before + 5 * US, name
    assert pace(apply(scene.timeline, Edit.nothing(scene.timeline))) == before


@given(programs)
@settings(max_examples=20)
def test_ranks_that_do_the_same_have_nobody_to_blame(program: list) -> None:
    run = Run.of(ranks=2)
    for _ in range(5):
        for rank in run.ranks:
            written(program, run.on(rank).step())
            run.on(rank).order(7, WIRE)
        run.collective(50, 4 * MB)
    found = explained(run.timeline(device="NVIDIA H200"))
    assert found.late == ()
    assert "peer_late" not in names(found)


def test_how_often_something_comes() -> None:
    assert [times(one) for one in (0.1, 0.6, 0.8, 1.2, 2, 12)] == [
        *("once in 10 iterations", "once in 2 iterations", "once per iteration", "once per iteration"),
        *("twice per iteration", "12 times per iteration"),
    ]
