"""The host: launches, input, memory calls and work of its own that keep the device waiting. Microseconds."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from build import LAUNCH, MS, US, Run, loop
from told import TRAIN, cause, explained, harmless, names, near, told

from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.explain import explain
from keepbusy.timeline.edit import GRAPH_SAVES
from keepbusy.timeline.model import Direction, Kind
from keepbusy.timeline.run_facts import LoaderUse, PlainRun

SINGLE = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
MANY = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def eager(run: Run, operators: int = 100, kernel: float = 5) -> None:
    """25 µs of the host for each kernel."""
    for _ in range(operators):
        run.work(20, at=["aten::add"]).launch(kernel, at=["aten::add"])


# launch_bound


def test_a_launch_bound_step_becomes_its_kernels() -> None:
    """100 kernels of 5 µs, 25 µs apart. In a graph they follow each other, and the gaps between them shrink."""
    found = told(eager)
    assert found.plain_step == near(100 * 25)
    assert names(found) == ["launch_bound"]
    one = cause(found, "launch_bound")
    assert one.predicted.step == near(100 * (5 + 1 - GRAPH_SAVES / 1_000), 0.02)
    assert (one.count, one.fix) == (100.0, "graph")
    assert found.ledger["computing"] == near(500)
    assert found.ledger["launch_bound"] == near(100 * (25 - 5 - 1 + GRAPH_SAVES / 1_000), 0.02)


def test_a_graph_of_larger_kernels_saves_nothing() -> None:
    """Kernels of 200 µs: the host is ahead anyway."""
    found = told(lambda run: eager(run, 20, 200))
    assert (names(found), found.harmless) == ([], ())


def test_a_graph_does_not_take_away_what_is_no_launch() -> None:
    """3 ms of the user's own Python, then 2.5 ms of launches: the Python stays."""

    def body(run: Run) -> None:
        run.work(3_000, at=["data.py(3): tokenize"])
        eager(run)

    found = told(body)
    assert found.plain_step == near(3_000 + 2_500)
    assert cause(found, "launch_bound").predicted.step == near(3_000, 0.02)
    assert cause(found, "host_work").predicted.step == near(2_500, 0.02)
    assert found.predicted.step == near(513, 0.05)


@pytest.mark.parametrize(("replayed_at", "causes"), [(8, []), (9, ["launch_bound"])])
def test_what_the_line_of_a_graph_launches_besides_is_the_graph_s_own(replayed_at: int, causes: list[str]) -> None:
    """Its inputs are copied to it, and its results out of it: no second graph and no compiler takes these away."""

    def replayed(run: Run) -> None:
        with run.inside("train.py(8): main", exact=True):
            for _ in range(40):
                run.launch(5, host=20)
            with run.inside(*[f"train.py({replayed_at}): main"][: replayed_at - 8], exact=True):
                run.launch([20, 20])

    assert names(told(replayed)) == causes


def test_what_the_optimizer_does_itself_is_launch_overhead() -> None:
    """Half a millisecond of Python between its launches is not the user's work."""

    def body(run: Run) -> None:
        for _ in range(6):
            run.work(500, at=["Optimizer.step#AdamW.step", "torch/optim/adamw.py(60): step"]).launch(20)

    assert names(told(body)) == ["launch_bound"]


# host_work


def test_work_of_the_host_costs_what_the_device_cannot_cover() -> None:
    """6 ms of Python and 4 ms of kernels."""
    found = told(lambda run: run.work(6_000, at=["data.py(3): tokenize"]).launch([1_000] * 4))
    assert found.plain_step == near(6_000)
    assert names(found) == ["host_work"]
    one = cause(found, "host_work")
    assert (one.where.file, one.where.line, one.count) == ("data.py", 3, 1.0)
    assert one.predicted.step == near(4_000)
    assert found.ledger["host_work"] == near(2_000)


def test_work_that_the_device_covers_costs_nothing() -> None:
    found = told(lambda run: run.work(3_000, at=["data.py(3): tokenize"]).launch([1_000] * 4))
    assert (names(found), harmless(found)) == ([], [])


def test_work_of_another_thread_is_its_own() -> None:
    """The backward pass runs elsewhere: 3 ms of the user's code there hold the device up as well."""

    def body(run: Run) -> None:
        run.launch([500] * 2)
        other = run.handoff(1)
        other.work(3_000, at=["ops.py(12): backward"]).launch([500] * 2)
        other.handoff(0)

    one = cause(told(body), "host_work")
    assert one.where.file == "ops.py"
    assert one.predicted.step == near(2_000)


# allocator


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (None, "not known of a trace"),
        ("", "was not set"),
        ("max_split_size_mb:128", "leave out max_split_size_mb"),
        ("expandable_segments:True", "segments grow already"),
    ],
)
def test_memory_that_no_free_piece_serves_asks_for_segments_that_grow(settings: str | None, says: str) -> None:
    """Sizes change, and each time operators ask the driver; nobody emptied the cache."""

    def body(run: Run) -> None:
        run.launch([1_000] * 4)
        run.allocate(400, waits=True, at=["aten::empty"]).allocate(700, name="cudaMalloc", at=["aten::empty"])

    [fix] = explained(loop(body, 8, allocator=settings)).plan
    assert (fix.fix, fix.causes) == ("expand_segments", ("allocator",))
    assert says in fix.reason


def test_memory_calls_leave_with_their_waits() -> None:
    """cudaFree waits for 4 ms of kernels and takes 0.4 ms; then cudaMalloc takes 0.7."""

    def body(run: Run) -> None:
        run.launch([1_000] * 4).allocate(400, waits=True).allocate(700, name="cudaMalloc")

    found = told(body)
    assert found.plain_step == near(4_000 + 400 + 700)
    assert names(found) == ["allocator"]
    one = cause(found, "allocator")
    assert (one.predicted.step, one.count, one.fix) == (near(4_000), 2.0, "keep_memory")
    assert found.ledger["allocator"] == near(1_100, 0.02)


def test_who_gives_memory_back_is_to_blame_for_asking_again() -> None:
    """What a call of empty_cache takes away, the lines after it ask for: longer, and oftener."""

    def body(run: Run) -> None:
        run.launch([1_000] * 4).allocate(400, waits=True, at=["train.py(78): before_step"])
        for _ in range(3):
            run.allocate(700, name="cudaMalloc", at=["train.py(67): forward", "aten::empty"])

    found = told(body)
    [fix] = found.plan
    assert (fix.fix, [str(place) for place in fix.where]) == ("keep_memory", ["train.py:78"])
    assert fix.predicted.step == near(4_000)
    assert cause(found, "allocator").count == 4.0


@pytest.mark.parametrize("operator", ["aten::nonzero", "aten::where", "aten::unique2", "cudaDeviceSynchronize"])
def test_what_calls_do_is_told_by_who_recorded_them_and_no_name_is_read(operator: str) -> None:
    """The same rows under other names, with the roles that they had: memory given back, and a wait for the device."""

    def body(run: Run) -> None:
        run.launch([1_000] * 4).allocate(400, waits=True, at=["train.py(78): before_step"])
        run.allocate(700, name="cudaMalloc", at=["train.py(67): forward", "aten::empty"])
        run.launch([1_000] * 4).sync(at=["train.py(90): choose", operator]).work(900)

    timeline = loop(body, 8)
    renamed = tuple(name if "train.py" in name else f"call {number}" for number, name in enumerate(timeline.names))
    usual, other = (explained(one).plan for one in (timeline, timeline.change(names=renamed)))
    assert [fix.named for fix in usual] == [fix.named for fix in other]
    assert len({fix.fix for fix in usual} - {"readback"}) == 2


def test_memory_calls_that_the_device_covers_cost_nothing() -> None:
    found = told(lambda run: run.allocate(700, name="cudaMalloc").launch([1_000] * 4))
    assert (names(found), harmless(found)) == ([], ["allocator"])


# input_late


def test_a_loader_in_the_process_itself_holds_the_loop_up() -> None:
    """6 ms for a batch, 2 ms on the device: eight workers make one in 0.75 ms."""
    found = told(lambda run: run.work(6_000, at=[SINGLE, "aten::stack"]).launch([1_000] * 2))
    assert found.plain_step == near(6_000 + LAUNCH)
    assert names(found) == ["input_late"]
    one = cause(found, "input_late")
    assert (one.predicted.step, one.fix) == (near(2_000), "prepare_in_workers")
    assert "num_workers=8" in one.remedy
    assert found.ledger["input_late"] == near(4_000)


def test_no_more_workers_are_counted_on_than_there_are_cores() -> None:
    """With two, a batch of 6 ms comes every 3 ms."""

    def body(run: Run) -> None:
        with run.inside(TRAIN):
            run.work(6_000, at=[SINGLE, "aten::stack"]).launch([1_000] * 2)

    own = LoaderUse("train.py:3", workers=0, prefetch=0, batches=8, waited=48 * MS, cores=2)
    one = cause(explain(loop(body, 8, loaders=(own,))), "input_late")
    assert "num_workers=2" in one.remedy
    assert one.predicted.step == near(3_000, 0.02)
    more = cause(explain(loop(body, 8, loaders=(own,)), workers=4), "input_late")
    assert "num_workers=4" in more.remedy


def test_where_most_of_a_batch_is_made_is_told() -> None:
    """Not at the loop that takes it, and not where a single row takes longest."""

    def body(run: Run) -> None:
        with run.inside(TRAIN, SINGLE):
            run.work(100)
            for _ in range(8):
                run.work(500, at=["data.py(72): clean"])
            run.work(1_000, at=["data.py(80): stack"])
        run.launch([1_000] * 2)

    assert "most of it at data.py:72, and the GPU waits" in cause(told(body), "input_late").what


@pytest.mark.parametrize(("workers", "step"), [(2, 10_000), (4, 5_000), (8, 2_500), (16, 2_000)])
def test_workers_are_no_faster_than_they_can_be(workers: int, step: float) -> None:
    """20 ms for a batch, 2 ms on the device."""
    found = told(lambda run: run.work(20_000, at=[SINGLE]).launch([1_000] * 2), workers=workers)
    assert cause(found, "input_late").predicted.step == near(step, 0.02)


def test_a_loader_that_is_quick_enough_costs_nothing() -> None:
    found = told(lambda run: run.work(1_000, at=[SINGLE]).launch([1_000] * 2))
    assert (names(found), harmless(found)) == ([], ["input_late"])


def test_too_few_workers_hold_the_loop_up() -> None:
    """A batch every 5 ms for 2 ms on the device: four times as many workers are quick enough."""
    found = told(lambda run: run.batch(5_000, at=[MANY]).launch([1_000] * 2))
    assert found.plain_step == near(5_000)
    assert names(found) == ["input_late"]
    assert cause(found, "input_late").predicted.step == near(2_000)


def test_four_times_as_many_workers_may_still_be_too_few() -> None:
    found = told(lambda run: run.batch(20_000, at=[MANY]).launch([1_000] * 2))
    assert cause(found, "input_late").predicted.step == near(5_000, 0.02)


def test_waiting_for_a_batch_is_not_reading_from_the_device() -> None:
    found = told(lambda run: run.batch(5_000, at=[MANY]).launch([1_000] * 2))
    assert "host_sync" not in (*names(found), *harmless(found))


def in_store(run: Run, rank: int = 0) -> None:
    """Batches that took its workers 3 ms each, as far as a few recorded steps can tell."""
    run.on(rank).batch(3_000, at=[MANY])
    for one in run.ranks:
        run.on(one).launch([1_000] * 2)


def fed(waits: float, step: float) -> PlainRun:
    return PlainRun("optimizer", 100, step=round(step * US), low=1, high=1 << 40, input=round(waits * US))


def test_a_loader_that_had_batches_in_store_is_as_slow_as_all_plain_steps_show() -> None:
    """A plain step takes 12 ms, 10 of which it waits for its input; the recorded ones took 3."""
    timeline = loop(in_store, plain_step=12 * MS, plain_runs={0: fed(10_000, 12_000)})
    found = explained(timeline)
    assert found.plain_step == 12 * MS
    assert names(found) == ["input_late"]
    assert cause(found, "input_late").predicted.step == near(12_000 / 4, 0.05)
    assert not [note for note in found.notes if "differ" in note]


def test_without_the_word_of_the_marks_a_loader_is_as_it_was_recorded() -> None:
    with patch("keepbusy.explain.step_analysis.fed_as_usual", lambda window, _: window):
        found = explained(loop(in_store, plain_step=12 * MS, plain_runs={0: fed(10_000, 12_000)}))
    assert found.plain_step == near(3_000)


def test_the_rank_whose_loader_is_late_is_named() -> None:
    def body(run: Run) -> None:
        in_store(run, rank=1)
        run.collective(100)

    found = told(body, ranks=2)
    assert cause(found, "input_late").what.startswith("Rank 1 waits for its loader's workers")


ENV = "ppo.py(205): main"


def in_one_statement(run: Run, back: bool = True, statement: str = ENV) -> None:
    """`envs.step(action.cpu())`, and what comes of it is copied to the GPU."""
    run.launch(500)
    with run.inside(ENV, exact=True):
        run.copy(64, 5, way=Direction.DEVICE_TO_HOST, at=["aten::to"])
        if statement == ENV:
            run.work(2_000, at=["envs.py(9): step"])
    if statement != ENV:
        with run.inside(statement, exact=True):
            run.work(2_000, at=["envs.py(9): step"])
    if back:
        run.copy(64, 5, at=["aten::to"])
    run.launch(10)


def test_what_needs_a_value_and_is_needed_cannot_go_on_beside_the_gpu() -> None:
    found = told(in_one_statement)
    fix = found.plan[0]
    assert (fix.fix, [str(place) for place in fix.where], fix.causes) == (
        "compute_on_gpu",
        ["ppo.py:205"],
        ("host_work",),
    )
    assert "needs the value that is read there" in fix.reason
    assert fix.predicted.step < found.plain_step <= fix.predicted.high + found.noise  # at worst nothing of it can go


@pytest.mark.parametrize(("operator", "fix"), [("aten::index", "keep_on_device"), ("aten::sort", "move_off_the_loop")])
def test_rows_that_are_picked_on_the_host_and_copied_could_be_picked_on_the_gpu(operator: str, fix: str) -> None:
    """`images = bank[chosen].to("cuda")`; other work before a copy makes what is copied."""

    def body(run: Run) -> None:
        run.work(4_000, at=["bank.py(28): hardest", operator])
        run.copy(50_000_000, 1_000, at=["bank.py(40): main", "aten::to"])
        run.launch(2_000)

    first = told(body).plan[0]
    assert (first.fix, [str(place) for place in first.where]) == (fix, ["bank.py:28"])


def test_a_function_that_reads_and_works_for_what_is_copied_next_is_one_statement() -> None:
    """`kept = suppress(boxes)` reads, and then compares boxes on the host; what it keeps goes back as indices."""

    def body(run: Run) -> None:
        run.launch(500)
        with run.inside("detector.py(57): forward", exact=True):
            with run.inside("detector.py(29): suppress", exact=True):
                run.copy(64, 5, way=Direction.DEVICE_TO_HOST, at=["aten::to"])
            with run.inside("detector.py(35): suppress", exact=True):
                run.work(2_000, at=["aten::maximum"])
        run.copy(64, 5, at=["aten::to"])
        run.launch(10)

    fix = told(body).plan[0]
    assert (fix.fix, [str(place) for place in fix.where]) == ("compute_on_gpu", ["detector.py:57"])


@pytest.mark.parametrize("change", [{"back": False}, {"statement": "ppo.py(206): main"}])
def test_other_work_after_a_read_can_be_put_beside_it(change: dict[str, Any]) -> None:
    """It may need the value, and nobody waits for it; or it is another statement, as the next batch's preparation."""
    found = told(lambda run: in_one_statement(run, **change))
    assert "compute_on_gpu" not in {one.fix for one in found.plan}
    assert "move_off_the_loop" in {one.fix for one in found.plan}


def test_what_pytorch_prepares_for_each_new_shape_is_not_taken_out_of_the_loop() -> None:
    """cuDNN plans attention anew for a length that it has not seen, within the operator that launches it."""

    def attends(run: Run) -> None:
        run.launch(200)
        with run.inside(TRAIN, "aten::scaled_dot_product_attention", "aten::_cudnn_attention_forward"):
            run.work(5_000).launch(200)

    [fix] = told(attends).plan
    assert (fix.fix, fix.causes) == ("pad_to_few_lengths", ("host_work",))


@pytest.mark.parametrize(("collector", "fix"), [(3_000, "collect_between_epochs"), (500, "move_off_the_loop")])
def test_work_that_takes_as_long_as_the_garbage_collector_is_the_collector(collector: int, fix: str) -> None:
    def collects(run: Run) -> None:
        run.launch(200).work(3_200, at=["train.py(31): tidy"])

    marks = {0: PlainRun("optimizer", 100, round(3.3 * MS), 0, 0, collector=collector * US)}
    assert [one.fix for one in explained(loop(collects, plain_runs=marks)).plan] == [fix]


def test_a_message_through_the_host_is_no_work_of_it() -> None:
    def exchanges(run: Run) -> None:
        run.launch(500)
        run.sync(at=[TRAIN, "aten::item"])
        run.work(2_000, at=[TRAIN, "gloo:recv"])

    [fix] = [one for one in told(exchanges).plan if one.fix == "send_from_gpu_to_gpu"]
    assert (fix.causes, fix.gain) == (("exposed_collective",), near(2_000, 0.05))
    assert "host_work" not in names(told(exchanges))


def test_of_a_compiled_program_that_ran_as_written_nothing_is_said_of_its_launches() -> None:
    def body(run: Run) -> None:
        for _ in range(50):
            run.work(20, at=["aten::add"]).launch(5, at=["aten::add"])

    assert names(told(body)) == ["launch_bound"]
    found = explained(loop(body, compiled_eagerly=True))
    assert (names(found), found.plan) == ([], ())
    assert found.ledger["launch_bound"] > 0.5 * found.plain_step


@pytest.mark.parametrize(("has_loader", "is_heavy"), [(False, True), (True, False)])
def test_what_a_loader_gives_is_not_made_of_what_was_read_before(has_loader: bool, is_heavy: bool) -> None:
    """`total += loss.item()`, then the next batch: work behind the read is no work on its value."""

    def body(run: Run) -> None:
        with run.inside(TRAIN):
            run.launch(500).copy(64, 5, way=Direction.DEVICE_TO_HOST, at=["aten::item"])
            run.work(200, at=["train.py(60): collect"])
            if has_loader:
                run.work(50, at=[SINGLE])
            run.copy(64, 5, at=["aten::to"]).launch([10] * 3)

    inputs = CauseInputs(loop(body))
    collecting = [name.endswith("(60): collect") for name in inputs.timeline.names]
    rows = np.array(collecting)[np.append(inputs.timeline.frames.name, 0)[inputs.timeline.spans.frame]]
    assert inputs.is_heavy[rows & (inputs.timeline.spans.kind == Kind.WORK)].any() == is_heavy
