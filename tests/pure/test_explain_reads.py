"""host_sync: a read costs the lead that the host loses by it, and nothing where the host had none. Microseconds."""

from __future__ import annotations

import pytest
from build import HOME, LAUNCH, MB, SYNC, Run, loop
from told import cause, explained, harmless, names, near, told

from keepbusy.timeline.run_facts import RUN, Part

ITEM = ["aten::item", "aten::_local_scalar_dense"]


def read_then_prepare(run: Run, kernels: int = 9, prepare: float = 800) -> None:
    """So many ms on the device, a value read, and the next batch prepared only then."""
    run.launch([1_000] * kernels).sync(at=ITEM).work(prepare)


def eager(run: Run, operators: int = 100) -> None:
    """Small kernels: 25 µs of the host for each, 5 µs of the device."""
    for _ in range(operators):
        run.work(20).launch(5, at=["aten::add"])


# A read that costs


def test_a_read_costs_what_the_host_does_after_it() -> None:
    """9 ms of kernels and 0.8 ms of preparation: once the host is ahead, they overlap."""
    found = told(read_then_prepare)
    assert found.plain_step == near(9_000 + 800)
    assert names(found)[0] == "host_sync"
    assert cause(found, "host_sync").predicted.step == near(9_000)
    assert cause(found, "host_sync").count == 1
    assert found.ledger["host_sync"] == near(800 + LAUNCH + SYNC, 0.02)
    assert found.ledger["computing"] == near(9_000)


def test_without_reads_the_slower_of_host_and_device_sets_the_pace() -> None:
    """3 ms on the device; 2.8 ms on the host then hide behind them, and of 4.4 ms only the host is left."""
    found = told(lambda run: read_then_prepare(run, kernels=3, prepare=2_800))
    assert found.plain_step == near(3_000 + 2_800)
    assert cause(found, "host_sync").predicted.step == near(3_000)
    slow = told(lambda run: read_then_prepare(run, kernels=3, prepare=4_400))
    assert cause(slow, "host_sync").predicted.step == near(4_400)


def test_a_value_that_decides_what_comes_next_cannot_come_later() -> None:
    """Nobody knows how much of what it decides a GPU can do, or a batch at once: at worst nothing is gained."""
    window = loop(lambda run: run.launch([1_000] * 9).sync(at=["train.py(9): main", *ITEM]).work(800), 8)
    assert explained(window).plan[0].fix == "readback"
    run = Part(RUN, time=10**9, decides=("train.py:9",))
    (first, *_) = explained(window.change_facts(run=run)).plan
    assert (first.fix, first.predicted.step) == ("decide_on_gpu", near(9_000))
    assert first.predicted.high == near(9_800)


def test_a_sync_of_the_whole_device_is_a_read_of_nothing() -> None:
    found = told(lambda run: run.launch([1_000] * 9).sync(None, name="cudaDeviceSynchronize").work(800))
    one = cause(found, "host_sync")
    assert one.predicted.step == near(9_000)
    assert (one.fix, one.where.operator) == ("drop_sync", "cudaDeviceSynchronize")


def test_an_event_sync_costs_as_much() -> None:
    found = told(lambda run: run.launch([1_000] * 9).event_sync(at=ITEM).work(800))
    assert cause(found, "host_sync").predicted.step == near(9_000)


def test_many_reads_are_one_cause_with_a_place_each() -> None:
    def body(run: Run) -> None:
        run.launch([1_000] * 5).sync(at=["a.py(1): loss", *ITEM]).work(500)
        run.launch([1_000] * 5).sync(at=["b.py(2): accuracy", *ITEM]).work(900)

    one = cause(told(body), "host_sync")
    assert [(site.where.file, site.count) for site in one.sites] == [("b.py", 1.0), ("a.py", 1.0)]
    assert one.predicted.step == near(10_000)
    assert one.count == 2


def test_fixing_one_of_two_places_gives_back_its_share() -> None:
    """Between the two reads, 500 µs and 900 µs: each alone is worth what the host does after it."""

    def body(run: Run) -> None:
        run.launch([1_000] * 5).sync(at=["a.py(1): loss", *ITEM]).work(500)
        run.launch([1_000] * 5).sync(at=["b.py(2): accuracy", *ITEM]).work(900)

    later, earlier = cause(told(body), "host_sync").sites
    assert (later.wait, earlier.wait) == (near(900, 0.05), near(500, 0.05))


def test_a_loop_of_reads_is_read_at_once() -> None:
    """Sixty values read one by one, each by a kernel of its own: 6 + 3 + 3 + 20 µs each. Then it is one operation."""

    def body(run: Run) -> None:
        run.launch([1_000] * 4)
        for _ in range(60):
            with run.inside("metrics.py(7): update"):
                run.launch(3, at=["aten::gt"]).sync(at=ITEM).work(20)

    found = told(body)
    assert found.plain_step == near(4_000 + 60 * 32)
    assert cause(found, "host_sync").predicted.step == near(4_000 + 60 * 3, 0.03)
    assert cause(found, "host_sync").where.file == "metrics.py"
    assert found.plan[0].fix == "read_at_once"


def test_a_loop_may_read_several_values_in_each_round() -> None:
    """As a server that answers each request of a batch: its best label, and how sure it is of it."""

    def body(run: Run) -> None:
        run.launch([1_000] * 4)
        for _ in range(60):
            run.launch(3, at=["serve.py(24): answer", "aten::argmax"])
            run.sync(at=["serve.py(25): answer", *ITEM]).work(20)
            run.sync(at=["serve.py(26): answer", *ITEM]).work(20)

    found = told(body)
    [first, *_] = found.plan
    assert (first.fix, first.causes) == ("read_at_once", ("host_sync",))
    assert [str(place) for place in first.where] == ["serve.py:25"]
    assert first.predicted.step == near(4_000 + 60 * 3, 0.03)


def test_reads_between_which_the_program_goes_on_are_no_one_operation() -> None:
    """Twenty rounds of thirty launches each, and a question after each: what the host launches stays its work."""

    def body(run: Run) -> None:
        for _ in range(20):
            with run.inside("greenhouse.py(45): thresholds"):
                for _ in range(30):
                    run.launch(1, at=["aten::mul"])
                run.sync(at=ITEM).work(20)

    found = told(body)
    assert names(found)[0] == "launch_bound"
    assert "host_sync" not in names(found)


@pytest.mark.parametrize(
    ("operator", "fix"),
    [
        ("aten::item", "readback"),
        ("aten::nonzero", "keep_shapes"),
        ("aten::index", "keep_shapes"),
        ("aten::_unique2", "tell_sizes"),
        ("aten::repeat_interleave", "tell_sizes"),
    ],
)
def test_the_remedy_depends_on_what_was_called(operator: str, fix: str) -> None:
    found = told(lambda run: run.launch([1_000] * 9).sync(at=[operator]).work(800))
    assert cause(found, "host_sync").fix == fix


PRINTED = ["torch/_tensor.py(573): __repr__", "torch/_tensor_str.py(139): __init__"]
INSTALLED = ["site-packages/scorer/score.py(7): score"]
UNIQUE = ["torch/_jit_internal.py(627): fn", "torch/functional.py(971): _return_output"]


@pytest.mark.parametrize(
    ("inside", "fix"),
    [
        ([*PRINTED, "aten::masked_select"], "print_copy"),
        ([*PRINTED, *ITEM], "print_copy"),
        ([*INSTALLED, "aten::nonzero"], "call_less_often"),
        ([*INSTALLED, *ITEM], "call_less_often"),
        ([*INSTALLED, *UNIQUE, "aten::_unique2"], "call_less_often"),
        ([*UNIQUE, "aten::_unique2"], "tell_sizes"),
        (["torch/cuda/__init__.py(1040): synchronize", "cudaDeviceSynchronize"], "drop_sync"),
        ([*INSTALLED, "train.py(9): forward", "aten::nonzero"], "keep_shapes"),
    ],
)
def test_advice_about_an_operator_is_for_who_calls_it(inside: list[str], fix: str) -> None:
    """A mask in PyTorch's formatter is none of the user's, who calls `print`. `torch.unique` is PyTorch's own Python,
    and still what the user wrote."""
    found = told(lambda run: run.launch([1_000] * 9).sync(at=inside).work(800))
    assert cause(found, "host_sync").fix == fix
    assert [one.fix for one in found.plan] == [fix]


def test_what_a_library_waits_for_is_named() -> None:
    found = told(lambda run: run.launch([1_000] * 9).sync(at=[*INSTALLED, "aten::nonzero"]).work(800))
    assert "scorer/score.py:7 in score" in cause(found, "host_sync").advice
    assert found.plan[0].predicted.high == near(9_800)  # nobody knows how seldom the call would do


def test_a_small_copy_home_is_a_read() -> None:
    """`.item()` moves four bytes, and the host waits for them."""

    def body(run: Run) -> None:
        with run.inside(*ITEM):
            run.launch([1_000] * 9).copy(4, 2, HOME)
        run.work(800)

    found = told(body)
    assert names(found)[0] == "host_sync"
    assert cause(found, "host_sync").predicted.step == near(9_000)
    assert "blocking_copy" not in (*names(found), *harmless(found))


# A read that costs nothing


@pytest.mark.parametrize("reads", [4, 120])
def test_what_would_cost_something_once_launches_are_gone_is_not_called_harmless(reads: int) -> None:
    """A read after each eight launches of 30 µs: today the GPU has long been idle; between a graph's kernels, each
    would hold up what comes next."""

    def body(run: Run) -> None:
        for number in range(120):
            for _ in range(8):
                run.work(25, at=["aten::mul"]).launch(1, at=["aten::mul"])
            if number < reads:
                run.sync(at=["score.py(4): score", *ITEM])

    found = told(body)
    assert "host_sync" not in {cause for one in found.plan for cause in (*one.causes, *names(found))}
    known = [note for note in found.notes if note.startswith("host_sync at score.py:4")]
    assert harmless(found) == (["host_sync"] if reads == 4 else [])
    assert len(known) == (reads == 120)


def test_a_read_in_a_launch_bound_step_costs_nothing() -> None:
    """The device is idle when the host asks: there was no lead to lose."""
    found = told(lambda run: (eager(run), run.sync(at=ITEM)))
    assert names(found) == ["launch_bound"]
    (one,) = found.harmless
    assert (one.cause, one.count, one.where.operator) == ("host_sync", 1.0, "aten::item")
    assert one.why == "the step is launch-bound, so the host would not have been ahead anyway"


def test_a_read_that_the_host_makes_up_for_costs_nothing() -> None:
    """4 ms are enqueued in 10 µs right after the read: the device hardly waits."""
    found = told(lambda run: run.launch([1_000] * 4).sync(at=ITEM).launch([1_000] * 4))
    assert (names(found), harmless(found)) == ([], ["host_sync"])
    assert found.harmless[0].why == "the GPU has work all the time"


def test_a_sync_of_an_idle_stream_costs_nothing() -> None:
    found = told(lambda run: run.launch([1_000] * 4).sync(99).work(300))
    assert names(found) == []


def test_a_wait_for_much_data_is_no_read() -> None:
    """32 MB brought home and waited for: that is the copy's doing."""
    found = told(lambda run: run.launch([1_000] * 4).copy(32 * MB, 3_000, HOME).work(900))
    assert "host_sync" not in names(found)
    assert names(found)[0] == "blocking_copy"


def test_what_distributions_check_is_one_change_however_many_lines_make_them() -> None:
    def body(run: Run) -> None:
        run.launch([1_000] * 4)
        for line in (21, 25, 26):
            run.sync(at=[f"vae.py({line}): forward", "torch/distributions/distribution.py(76): __init__", *ITEM]).work(
                600
            )
            run.launch([20] * 2)

    [fix] = told(body).plan
    assert (fix.fix, {place.line for place in fix.where}) == ("drop_checks", {21, 25, 26})
