"""`keepbusy.graph` and state that no replay renews: a step that keeps some stays eager, and says what it is."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from graph_loops import Kept, batches, net, whole
from graph_state import (
    BOUND_ANEW,
    BY_THE_LOOP,
    HIDDEN,
    IN_PLACE,
    VISIBLE,
    losses_in_loop,
    losses_with,
    random_numbers_of_the_system,
)

torch = pytest.importorskip("torch")

from keepbusy.runtime.graph import replay_check  # noqa: E402
from keepbusy.runtime.graph.captured_call import StepCall  # noqa: E402
from keepbusy.runtime.graph.graphed_step import graph  # noqa: E402
from keepbusy.runtime.graph.host_state import HostState  # noqa: E402
from keepbusy.runtime.graph.names_read import StepNames  # noqa: E402
from keepbusy.runtime.graph.participants import Participants  # noqa: E402
from keepbusy.runtime.graph.replay_check import WrittenTensors, is_compared, replay_compared  # noqa: E402

SWEEP = pytest.mark.sweep(room="runtime")
SWEPT = {
    *("average_in_a_dict", "random_state_of_numpy", "random_of_python", "counter_in_a_list"),
    *("number_of_an_object", "number_of_a_module", "object_that_is_replaced"),
}
"""What the others hold in one place more: in a list of an object, deep in it, in a dict of it, in a closure."""


def each(programs: list[Any]) -> Any:
    given = [pytest.param(one, marks=SWEEP if one.__name__ in SWEPT else (), id=one.__name__) for one in programs]
    return pytest.mark.parametrize("program", given)


def warned(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        returned = run()
    return returned, [str(warning.message) for warning in caught if "keepbusy" in str(warning.message)]


@each(VISIBLE)
def test_a_step_that_keeps_state_on_the_host_is_named_and_stays_as_it_is(program) -> None:
    kept = Kept()
    found, messages = warned(lambda: losses_with(program, kept, 5))
    assert found == losses_with(program, lambda step: step, 5)
    (message,) = messages
    assert message.startswith("keepbusy.graph runs train eagerly: at graph_state.py:")
    assert kept.graphed.report().startswith("train: 0 replayed, 0 captured, 5 eager; ")


@each(HIDDEN)
def test_a_replay_that_differs_from_an_eager_call_is_the_last(program) -> None:
    kept = Kept()
    found, messages = warned(lambda: losses_with(program, kept, 9))
    assert found == losses_with(program, lambda step: step, 9)
    (message,) = messages
    assert "a replay and an eager call from the same state differ in result 0 by up to " in message


@each(IN_PLACE)
def test_state_on_the_device_is_renewed_once_a_call(program) -> None:
    """Also where a replay is compared with an eager call: both begin with what there was."""
    kept = Kept()
    found, messages = warned(lambda: losses_with(program, kept, 9))
    assert (found, messages) == (losses_with(program, lambda step: step, 9), [])
    assert kept.graphed.replays == 6


def test_numbers_that_the_host_draws_are_not_taken_for_sums_in_another_order() -> None:
    """Two eager calls differ here by as much; two replays do not."""
    kept = Kept()
    _, messages = warned(lambda: losses_with(random_numbers_of_the_system, kept, 5))
    assert "a replay and an eager call from the same state differ in result 0" in messages[0]
    assert kept.graphed.report().startswith("train: 0 replayed, 1 captured, 4 eager; ")


@each(BOUND_ANEW)
def test_what_a_step_binds_anew_is_bound_by_each_replay(program) -> None:
    kept = Kept()
    found, messages = warned(lambda: losses_with(program, kept, 10))
    assert (found, messages) == (losses_with(program, lambda step: step, 10), [])
    assert kept.graphed.replays >= 5


def averaged(wrap: Callable[[Any], Any]) -> tuple[list[Any], SimpleNamespace]:
    """The averages as the loop finds them after each call: some are kept, one is written to, one is another tensor."""
    holder, found = SimpleNamespace(average=torch.zeros(4, device="cuda")), []

    def train(x: torch.Tensor) -> None:
        holder.average = holder.average * 0.5 + x

    step = wrap(train)
    for turn in range(16):
        step(torch.full((4,), float(turn), device="cuda"))
        found.append(holder.average)
        if turn == 9:
            holder.average.data.zero_()
        if turn == 12:
            holder.average = torch.ones(4, device="cuda")
    return [one.tolist() for one in found], holder


def test_what_is_bound_anew_is_the_programs_own() -> None:
    kept = Kept()
    (found, _), messages = warned(lambda: averaged(kept))
    assert (found, messages) == (averaged(lambda step: step)[0], [])
    assert kept.graphed.replays > 8


def test_another_shape_of_what_is_bound_anew_ends_the_replays() -> None:
    kept = Kept()
    _, holder = averaged(kept)
    holder.average = torch.ones(1, device="cuda")
    _, (message,) = warned(lambda: kept.graphed(torch.ones(4, device="cuda")))
    assert message == "keepbusy.graph runs train eagerly: what it binds anew has another shape now"
    assert holder.average.tolist() == [1.5] * 4


def test_a_step_may_bind_another_shape() -> None:
    def sums(wrap: Callable[[Any], Any]) -> list[Any]:
        holder, size, found = SimpleNamespace(sums=torch.zeros(2, device="cuda")), [2], []

        def train(x: torch.Tensor) -> None:
            holder.sums = torch.ones(size[0], device="cuda") * x.sum()

        step = wrap(train)
        for turn in range(12):
            size[0] += turn == 7
            step(torch.full((4,), float(turn), device="cuda"))
            found.append(holder.sums)
        return [one.tolist() for one in found]

    kept = Kept()
    found, (message,) = warned(lambda: sums(kept))
    assert found == sums(lambda step: step)
    assert "what it binds anew has another shape now" in message
    assert kept.graphed.replays > 1


def test_a_call_that_fails_leaves_what_it_has_bound() -> None:
    def sums(wrap: Callable[[Any], Any]) -> list[Any]:
        holder, failing, found = SimpleNamespace(sum=torch.zeros(2, device="cuda")), [False], []

        def train(x: torch.Tensor) -> None:
            holder.sum = holder.sum + x
            if failing[0]:
                raise ValueError

        step = wrap(train)
        for turn in range(12):
            failing[0] = turn == 7
            with suppress(ValueError):
                step(torch.full((2,), float(turn), device="cuda"))
            found.append(holder.sum)
        return [one.tolist() for one in found]

    kept = Kept()
    found, messages = warned(lambda: sums(kept))
    assert (found, messages) == (sums(lambda step: step), [])
    assert kept.graphed.replays > 4


@each(BY_THE_LOOP)
def test_what_the_loop_changes_takes_effect(program) -> None:
    kept = Kept()
    found, messages = warned(lambda: losses_in_loop(program, kept, 14))
    assert (found, messages) == (losses_in_loop(program, lambda step: step, 14), [])
    assert kept.graphed.replays >= 6


def decoded(wrap: Callable[[Any], Any], is_shared: bool) -> list[Any]:
    """Six times a cache is made anew, and six calls write to it. What they returned, and the caches at the end."""
    holder, caches, views, found = SimpleNamespace(cache=None), [], [], []

    def decode(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        holder.cache[place] = x
        return holder.cache.cumsum(0) * x

    step = wrap(decode)
    for sample in range(6):
        holder.cache = torch.full((8,), float(sample), device="cuda")
        caches.append(holder.cache)
        views += [holder.cache[2:4]] * is_shared
        found += [
            step(torch.tensor(place + 2.0, device="cuda"), torch.tensor([place], device="cuda")) for place in range(6)
        ]
    return [one.tolist() for one in (*found, *caches, *views)]


@pytest.mark.parametrize(("is_shared", "graphs"), [(False, 1), (True, 6)])
def test_caches_that_are_made_anew_share_a_graph_if_nobody_else_uses_their_memory(is_shared, graphs) -> None:
    kept = Kept()
    found, messages = warned(lambda: decoded(kept, is_shared))
    assert (found, messages) == (decoded(lambda step: step, is_shared), [])
    assert f"{graphs} captured" in kept.graphed.report()


def test_two_caches_that_are_one_for_a_while_leave_the_graph_of_two() -> None:
    def sums(wrap: Callable[[Any], Any]) -> list[Any]:
        holder, found = SimpleNamespace(first=None, second=None), []

        def step(x: torch.Tensor) -> torch.Tensor:
            holder.first.add_(x)
            holder.second.add_(2 * x)
            return holder.first * holder.second

        run = wrap(step)
        for sample in range(5):
            holder.first = torch.full((4,), float(sample), device="cuda")
            holder.second = holder.first if sample == 1 else torch.full((4,), 2.0 * sample, device="cuda")
            found += [run(torch.full((4,), turn + 1.0, device="cuda")) for turn in range(6)]
            found += [holder.first, holder.second]
        return [value.tolist() for value in found]

    kept = Kept()
    found, messages = warned(lambda: sums(kept))
    assert (found, messages) == (sums(lambda step: step), [])
    assert "2 captured" in kept.graphed.report()


def trained_on_points(wrap: Callable[[Any], Any]) -> list[Any]:
    """Twelve times points are drawn anew, of which some gather gradients that nobody clears."""
    torch.manual_seed(0)
    model, points = net(), SimpleNamespace()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(points.inner).square().mean() + model(points.edge).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step, found = wrap(train), []
    for _ in range(12):
        points.inner = torch.randn(4, 8, device="cuda", requires_grad=True)
        points.edge = torch.randn(4, 8, device="cuda")
        found += [step() for _ in range(60)] + [points.inner.grad]
    return [one.tolist() for one in found]


def test_points_that_are_drawn_anew_get_a_new_graph_as_long_as_that_pays() -> None:
    kept = Kept()
    found, messages = warned(lambda: trained_on_points(kept))
    assert (found, messages) == (trained_on_points(lambda step: step), [])
    assert kept.graphed.calls == 12 * 60
    assert kept.graphed.replays > 12 * 45


class SumsInAnotherOrder:
    """A sum whose terms cancel, which a replay adds up in another order than a call does."""

    def __init__(self, is_off_by: float) -> None:
        numbers = torch.randn(500, generator=torch.Generator().manual_seed(0))
        self.weight = torch.cat([numbers, -numbers.flip(0)]).cuda().requires_grad_()
        self.total, self._is_off_by = torch.zeros((), device="cuda"), is_off_by

    def _added(self, parts: int) -> torch.Tensor:
        with torch.no_grad():
            return torch.stack([part.cumsum(0)[-1] for part in self.weight.chunk(parts)]).cumsum(0)[-1]

    def step(self) -> torch.Tensor:
        return self.total.copy_(self._added(1)).clone()

    def captured(self) -> Any:
        return SimpleNamespace(
            replay=lambda _: self.total.copy_(self._added(7) + self._is_off_by).clone(),
            written_to=lambda _: [],
            take_gradients=lambda: None,
        )


@pytest.mark.parametrize("is_off_by", [0, 1e-3])
def test_sums_may_be_rounded_as_with_other_weights_by_one_rounding(is_off_by) -> None:
    sums = SumsInAnotherOrder(is_off_by)
    participants, total = Participants(), sums.total
    participants.add_weights([sums.weight])
    host = HostState(participants, StepNames(lambda: total))
    written = WrittenTensors(participants, host)
    with written.watching():
        made = sums.step()
    call = StepCall((), {})
    returned, finding = replay_compared(sums.captured(), call, lambda _: sums.step(), written, host)
    assert (returned.item(), bool(finding)) == (made.item(), bool(is_off_by))


class SumsInNoOrder:
    """A kernel that adds up in another order at each call, eager or replayed: written out, as no kernel here does."""

    def __init__(self, spread: float, is_off_by: float = 0.0) -> None:
        self._random, self._spread, self._is_off_by = random.Random(0), spread, is_off_by
        self.total, self.calls = torch.zeros((), device="cuda"), 0

    def _add(self, more: float) -> torch.Tensor:
        self.total += 1 + self._random.random() * self._spread + more
        return self.total.clone()

    def step(self) -> torch.Tensor:
        self.calls += 1
        return self._add(0.0)

    def captured(self) -> Any:
        return SimpleNamespace(
            replay=lambda _: self._add(self._is_off_by), written_to=lambda _: [], take_gradients=lambda: None
        )


@pytest.mark.parametrize(("spread", "is_off_by", "is_found"), [(1e-3, 0, False), (0, 1e-3, True), (1e-3, 0.1, True)])
def test_sums_may_come_out_as_they_do_among_replays(spread, is_off_by, is_found) -> None:
    sums = SumsInNoOrder(spread, is_off_by)
    participants, total = Participants(), sums.total
    host = HostState(participants, StepNames(lambda: total))
    written = WrittenTensors(participants, host)
    with written.watching():
        sums.step()
    captured, calls = sums.captured(), sums.calls
    returned, finding = replay_compared(captured, StepCall((), {}), lambda call: call.run(sums.step), written, host)
    assert sums.calls == calls + 1  # what the step does in Python is done once
    assert (returned.item(), bool(finding)) == (sums.total.item(), is_found)  # what the eager call left


def test_which_replays_are_compared() -> None:
    assert [replay for replay in range(1, 70) if is_compared(replay)] == [1, 2, 3, 4, 8, 16, 32, 64]


def test_too_little_memory_for_a_comparison_leaves_the_step_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(wrap: Callable[[Any], Any]) -> list[float]:
        model = net()
        step = wrap(whole(model, torch.optim.SGD(model.parameters(), lr=0.1)))
        return [loss.item() for loss in [step(x, y) for x, y in batches(9)]]

    plain = losses(lambda step: step)

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(replay_check, "StepState", refuse)
    kept = Kept()
    found, messages = warned(lambda: losses(kept))
    assert found == plain
    assert messages == [
        "keepbusy.graph runs step eagerly: there is too little memory to compare a replay with an eager call"
    ]
    assert kept.graphed.report().startswith("step: 0 replayed, 1 captured, 8 eager; ")


def test_one_kind_of_call_may_draw_on_the_host_and_others_be_replayed() -> None:
    def losses(wrap: Callable[[Any], Any]) -> list[float]:
        model, source = net(), random.Random(0)
        train = whole(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def step(x: torch.Tensor, y: torch.Tensor, is_scaled: bool) -> torch.Tensor:
            loss = train(x, y).detach()
            return loss * source.random() if is_scaled else loss

        step = wrap(step)
        return [
            loss.item() for loss in [step(x, y, turn % 5 == 4 and turn > 6) for turn, (x, y) in enumerate(batches(24))]
        ]

    kept = Kept()
    found, messages = warned(lambda: losses(kept))
    assert found == losses(lambda step: step)
    assert messages == [
        "keepbusy.graph runs step eagerly for some arguments: it changes `source` on the host, where a replay does "
        "nothing; move that out of the step"
    ]
    assert kept.graphed.replays > 10


def test_state_that_is_left_alone_costs_no_memory() -> None:
    """Data on the device that a step only reads is not copied for a comparison."""
    data = torch.randn(1 << 20, device="cuda")
    step = graph(lambda x: (x + data[:3]).sum())
    for _ in range(4):
        step(torch.ones(3, device="cuda"))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        step(torch.ones(3, device="cuda"))
    assert torch.cuda.max_memory_allocated() - before < data.nbytes / 4
    assert step.report() == "<lambda>: 2 replayed, 4 compared, 1 captured, 2 eager"


def test_a_program_that_forbids_syncs_is_not_disturbed() -> None:
    model = net()
    step = graph(whole(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    inputs = [*batches(8)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x, y in inputs:
            step(x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.report() == "step: 1 replayed, 4 compared, 1 captured, 2 eager"


class Proxy:
    """As of a web framework: outside of its context every question to it is an error."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"asked for {name} outside of the context")


class DictOfItsOwn(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("not in this way")


def test_objects_that_answer_in_their_own_way_disturb_nothing() -> None:
    proxy, own = Proxy(), DictOfItsOwn(a=1)

    def train(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if (proxy, own) else x

    step = graph(train)
    assert [step(torch.ones((), device="cuda")).item() for _ in range(8)] == [2.0] * 8
    assert step.replays == 5
