"""Copies: blocking ones, ones that stand in line with the compute, and tensors that need not have been on the host."""

from __future__ import annotations

import pytest
from build import HOME, IN, MB, Run, loop
from told import TRAIN, cause, explained, harmless, names, near, told

from keepbusy.report import terminal
from keepbusy.timeline.model import Direction

TO = ["aten::to", "aten::copy_"]
PINNED = 52.0
"""Bytes a nanosecond that a pinned copy reaches on H200, where the run itself shows none."""


def pinned(size: int) -> float:
    """Microseconds."""
    return size / PINNED / 1_000 + 2


def test_what_goes_to_pinned_memory_between_kernels_could_go_beside_them() -> None:
    """Waves that are kept on the host until they are wanted again; no batch, so there is nothing to prefetch."""

    def keeps(run: Run) -> None:
        run.launch(1_000)
        run.copy(48 * MB, 1_000, way=Direction.DEVICE_TO_HOST, pinned=True, blocking=False, at=[TRAIN, "aten::copy_"])

    [fix] = told(keeps).plan
    assert (fix.fix, fix.causes) == ("copy_beside", ("copy_not_overlapped",))
    assert fix.predicted.step == near(1_000)


@pytest.mark.parametrize("sharded", [True, False])
def test_shards_that_live_on_the_host_are_one_change(sharded: bool) -> None:
    """FSDP with CPUOffloadPolicy: gradients travel home, where the optimizer steps, and what it stepped comes back."""
    copies = ["train.py(63): main", "FSDP::post_backward (blocks.9)" if sharded else "aten::_to_copy", *TO]

    def offloaded(run: Run) -> None:
        run.launch([1_000] * 8).copy(16 * MB, 2_000, way=HOME, at=copies)
        run.work(3_000, at=["train.py(64): main", "Optimizer.step#AdamW.step"]).copy(16 * MB, 2_000, at=copies)

    fixes = {one.fix for one in explained(loop(offloaded, 8)).plan}
    assert (fixes == {"keep_parameters_on_gpu"}) == sharded


@pytest.mark.parametrize(("pinned", "cause"), [(False, "blocking_copy"), (True, "copy_not_overlapped")])
def test_activations_that_the_host_keeps_for_the_backward_pass_are_one_change(pinned: bool, cause: str) -> None:
    """`save_on_cpu`: what each of two layers keeps goes there and comes back; without that only kernels are left."""

    def saved(run: Run) -> None:
        for _ in range(2):
            run.launch([1_000] * 2)
            run.copy(32 * MB, 2_000, HOME, pinned=pinned, blocking=not pinned, at=["aten::_to_copy", *TO])
        with run.inside("train.py(10): main", "backward"):
            for _ in range(2):
                run.copy(32 * MB, 2_000, pinned=pinned, blocking=not pinned, at=["aten::_to_copy", *TO])
                run.launch([1_000] * 2)

    [fix] = told(saved).plan
    assert (fix.fix, fix.causes) == ("keep_activations", (cause,))
    assert fix.predicted.step == near(8_000)
    assert {str(place) for place in fix.where} == {"train.py:9", "train.py:10"}
    assert ("pin_memory=True" in fix.code) == (not pinned)
    assert fix.reason.startswith("67.1 MB per step leave the GPU and come back for the backward pass.")


def test_what_is_copied_within_a_backward_pass_need_not_have_left() -> None:
    def fetched(run: Run) -> None:
        with run.inside("backward"):
            run.copy(32 * MB, 2_000, at=TO).launch([1_000] * 8)

    assert [one.fix for one in told(fetched).plan] == ["prefetch"]


# Blocking


def test_a_blocking_copy_costs_itself_and_the_lead() -> None:
    """16 MB at pageable speed, then 8 ms of kernels that cannot be enqueued before: pinned and ahead, it disappears."""
    found = told(lambda run: run.copy(16 * MB, 2_000, at=TO).launch([1_000] * 8))
    assert found.plain_step == near(2_000 + 8_000)
    assert names(found) == ["blocking_copy"]
    one = cause(found, "blocking_copy")
    assert one.predicted.step == near(8_000)
    assert (one.fix, one.count, one.where.operator) == ("prefetch", 1.0, "aten::to")
    assert one.what == "16.8 MB per iteration are copied while Python waits (once per iteration)."
    assert found.ledger["blocking_copy"] == near(2_000)


def test_it_also_costs_the_work_that_could_not_be_done_ahead() -> None:
    """Copy, kernels, and 1.5 ms of the host after them: the host is still busy when the device has caught up."""
    found = told(lambda run: run.work(900).copy(16 * MB, 2_000, at=TO).launch([1_000] * 2).sync(99))
    assert cause(found, "blocking_copy").predicted.step == near(2_000)


def test_a_copy_that_is_fetched_ahead_is_no_faster_than_itself() -> None:
    """0.2 ms of kernels for 16 MB: the link is what remains."""
    found = told(lambda run: run.copy(16 * MB, 2_000, at=TO).launch([100] * 2))
    assert cause(found, "blocking_copy").predicted.step == near(pinned(16 * MB), 0.02)
    assert found.ledger["copying"] == near(pinned(16 * MB) - 200, 0.05)


def test_results_brought_home_wait_a_step_behind() -> None:
    found = told(lambda run: run.launch([1_000] * 8).copy(32 * MB, 3_000, HOME, at=TO).work(500))
    assert found.plain_step == near(8_000 + 3_000 + 500)
    assert cause(found, "blocking_copy").predicted.step == near(8_000)


def test_many_small_copies_in() -> None:
    """Forty of 4 kB, 100 kernels after them: each of them stops the host until the device has caught up."""

    def body(run: Run) -> None:
        run.launch([100] * 10)
        for _ in range(40):
            run.copy(4_096, 3, at=TO).work(10)
        run.launch([100] * 10)

    found = told(body)
    assert names(found)[0] == "blocking_copy"
    assert cause(found, "blocking_copy").count == 40
    assert cause(found, "blocking_copy").predicted.step == near(2_000, 0.05)


@pytest.mark.parametrize(
    ("made", "is_pinned", "fix"),
    [
        ("aten::zeros", False, "keep_on_device"),
        ("envs.py(9): step", False, "copy_without_waiting"),
        ("envs.py(9): step", True, "prefetch"),  # memory that CUDA reads later
    ],
)
def test_a_small_copy_is_not_waited_for_or_made_where_it_is_needed(made: str, is_pinned: bool, fix: str) -> None:
    """Only what is made of nothing can be made on the GPU: what an environment says cannot."""

    def body(run: Run) -> None:
        for _ in range(10):
            run.launch([300]).work(200, at=[made]).copy(4_096, 3, pinned=is_pinned, at=TO)

    found = told(body)
    assert cause(found, "blocking_copy").fix == fix
    assert cause(found, "blocking_copy").predicted.step == near(3_000, 0.03)


# In line


def test_a_copy_in_line_costs_its_own_time() -> None:
    """Pinned and asynchronous, and yet the kernels wait for it on their own stream."""
    found = told(lambda run: run.copy(16 * MB, 322, pinned=True, blocking=False, at=TO).launch([1_000] * 3))
    assert found.plain_step == near(322 + 3_000)
    assert names(found) == ["copy_not_overlapped"]
    assert cause(found, "copy_not_overlapped").predicted.step == near(3_000)
    assert found.ledger["copy_not_overlapped"] == near(322, 0.02)


def test_on_a_stream_of_its_own_that_is_waited_for_at_once_it_costs_the_same() -> None:
    def body(run: Run) -> None:
        run.order(7, 9).copy(16 * MB, 322, pinned=True, blocking=False, stream=9, at=TO)
        run.order(9, 7).launch([1_000] * 3)

    found = told(body)
    assert found.plain_step == near(322 + 3_000)
    assert cause(found, "copy_not_overlapped").predicted.step == near(3_000)


def test_a_copy_ahead_on_a_stream_of_its_own_costs_nothing() -> None:
    """Fetched during the compute of the step before, it is seen and harmless."""

    def body(run: Run) -> None:
        run.launch([1_000] * 3).copy(16 * MB, 322, pinned=True, blocking=False, stream=9, at=TO)
        run.order(9, 7)

    found = told(body)
    assert found.plain_step == near(3_000)
    assert (names(found), harmless(found)) == ([], [])


def test_a_copy_within_the_device_computes_nothing() -> None:
    found = told(lambda run: run.copy(512 * MB, 300, Direction.DEVICE_TO_DEVICE, blocking=False).launch([1_000] * 3))
    assert names(found) == []
    assert found.ledger["computing"] == near(3_000)
    assert found.ledger["copying"] == near(300)


# Made on the host


@pytest.mark.parametrize(
    ("operator", "line"),
    [
        ("aten::randn", "torch.randn(shape, "),
        ("aten::zeros", "torch.zeros(..., "),
        ("aten::arange", "torch.arange(..., "),
        ("aten::normal_", "torch.randn(shape, "),
        ("aten::bernoulli_", "torch.randn(shape, "),
    ],
)
def test_a_tensor_made_on_the_host_need_not_be_copied(operator: str, line: str) -> None:
    """6 ms to make it, 2 ms to copy it, 4 ms of kernels: made on the device, only the kernels are left."""
    found = told(lambda run: run.work(6_000, at=[operator]).copy(16 * MB, 2_000, at=TO).launch([1_000] * 4))
    assert found.plain_step == near(6_000 + 2_000)
    assert names(found)[0] == "made_on_host"
    assert cause(found, "made_on_host").predicted.step == near(4_000)
    assert cause(found, "made_on_host").remedy.startswith(f'{line}device="cuda")')
    assert cause(found, "blocking_copy").predicted.step == near(6_000)


def test_what_is_only_reshaped_afterwards_was_made_all_the_same() -> None:
    def body(run: Run) -> None:
        run.work(5_000, at=["aten::rand"]).work(1_000, at=["aten::mul"]).copy(16 * MB, 2_000, at=TO).launch([1_000] * 4)

    assert cause(told(body), "made_on_host").predicted.step == near(4_000)


@pytest.mark.parametrize("operator", ["aten::bmm", "aten::nms", "torchvision::roi_align", "aten::sort"])
def test_what_was_computed_on_the_host_was_not_made_there(operator: str) -> None:
    """It needs its input; nobody knows whether the device could have it."""
    found = told(lambda run: run.work(6_000, at=[operator]).copy(16 * MB, 2_000, at=TO).launch([1_000] * 4))
    assert "made_on_host" not in (*names(found), *harmless(found))
    assert cause(found, "host_work").predicted.step == near(2_000 + 4_000)


def test_random_numbers_that_stay_on_the_host_are_not_copied() -> None:
    """Something else is copied, after other work."""

    def body(run: Run) -> None:
        run.work(3_000, at=["aten::randperm"]).work(3_000, at=["aten::index"])
        run.copy(16 * MB, 2_000, at=TO).launch([1_000] * 4)

    assert "made_on_host" not in names(told(body))


def test_a_small_tensor_is_cheap_wherever_it_is_made() -> None:
    found = told(lambda run: run.work(5, at=["aten::arange"]).copy(512, 2, IN, at=TO).launch([1_000] * 4))
    assert "made_on_host" not in names(found)


def test_states_that_a_checkpoint_brings_home_are_written_later() -> None:
    """`torch.save` of what lies on the GPU: 40 MB, each tensor copied and waited for."""

    def body(run: Run) -> None:
        run.launch([1_000] * 4)
        with run.inside("torch/serialization.py(957): save"):
            for _ in range(4):
                run.copy(10 * MB, 1_000, HOME, at=["aten::to", "aten::copy_"])

    assert {one.fix for one in told(body).plan} == {"save_later"}


@pytest.mark.parametrize(("is_pinned", "fix"), [(True, "drop_sync"), (False, "pin_memory")])
def test_memory_of_a_script_that_is_pinned_already_is_not_to_be_pinned(is_pinned: bool, fix: str) -> None:
    """Who waits for the copy has asked to."""
    run = Run.of(1).step()
    with run.inside(TRAIN):
        run.copy(200 * MB, 20_000, pinned=is_pinned).work(9_000).launch([5_000]).sync()
    assert cause(explained(run.timeline(one_turn=True)), "blocking_copy").fix == fix


def test_a_script_without_iterations_is_described_without_them() -> None:
    """Its plan and its causes say what the whole script does."""
    run = Run.of(1).step()
    with run.inside(TRAIN):
        run.copy(200 * MB, 20_000).work(9_000).launch([5_000]).sync()
    script = explained(run.timeline(one_turn=True))
    assert cause(script, "blocking_copy").what.startswith("210 MB are copied while Python waits (once)")
    text = terminal.render_full(script)
    assert " for the script" in text
    assert "iteration" not in text
