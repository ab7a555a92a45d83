"""Data races on the virtual GPU: who uses which memory, and what orders it."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from keepbusy.timeline.races import READ_EARLY, REFILLED, REUSED, STREAMS, DataRace
from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.pytorch.backward_streams import ForwardStreams

LARGE = 1 << 20


@pytest.fixture(autouse=True)
def nothing_pending(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What other tests have left behind is done, and what their threads chose is forgotten."""
    monkeypatch.setattr(MACHINE, "forward_streams", ForwardStreams())
    torch.cuda.synchronize()
    MACHINE.memory.accesses.races.clear()
    MACHINE.memory.accesses.counts.clear()
    yield
    torch.cuda.synchronize()


def kinds() -> list[str]:
    return [race.kind for race in MACHINE.races()]


def only() -> DataRace:
    (race,) = MACHINE.races()
    return race


def ones(*shape: int) -> Tensor:
    made = torch.ones(*shape, device="cuda")
    torch.cuda.synchronize()
    return made


# streams


def test_a_stream_that_does_not_wait_races_and_the_missing_call_is_said() -> None:
    side = torch.cuda.Stream()
    x = torch.ones(100, device="cuda")
    with torch.cuda.stream(side):
        y = x * 2
    race = only()
    assert (race.kind, race.first.writes, race.second.writes, race.size) == (STREAMS, True, False, 400)
    assert (race.first.stream, race.second.stream) == ("the default stream", "side")
    assert race.call == "side.wait_stream(torch.cuda.default_stream())"
    line = int(race.second.place.rpartition(":")[2])
    assert race.at == race.second.place
    assert int(race.first.place.rpartition(":")[2]) == line - 2
    del y


def test_the_timeline_calls_streams_as_races_do_where_a_name_is_of_one_stream() -> None:
    nobody_elses = torch.cuda.Stream()
    of_a_list = [made() for made in (torch.cuda.Stream, torch.cuda.Stream)]
    x = ones(100)
    for stream in (nobody_elses, *of_a_list):
        with torch.cuda.stream(stream):
            x.add_(1)
    assert (only().first.stream, only().second.stream) == ("nobody_elses", "of_a_list[0]")
    names = {lane.name for lane in MACHINE.timeline().lanes if lane.device == 0}
    assert {"default stream", "nobody_elses", "of_a_list[0]", "of_a_list[1]"} <= names


def test_a_name_of_two_streams_stands_for_none() -> None:
    def made_on() -> Tensor:
        twice = torch.cuda.Stream()
        with torch.cuda.stream(twice):
            return torch.ones(1, device="cuda")

    made_on(), made_on()
    assert "twice" not in {lane.name for lane in MACHINE.timeline().lanes}


def test_an_event_that_was_recorded_in_between_is_what_to_wait_for() -> None:
    side, x = torch.cuda.Stream(), ones(100)
    with torch.cuda.stream(side):
        x.add_(1)
        done = torch.cuda.Event()
        done.record()
    x.sum()
    assert only().call == "torch.cuda.current_stream().wait_event(done)"


@pytest.mark.parametrize(
    "order", ["stream", "event", "join", "device", "event on the host", "query", "through a third"]
)
def test_what_orders_two_streams(order: str) -> None:
    side, third, main, done = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.Event()
    x = ones(LARGE)
    with torch.cuda.stream(side):
        x.add_(1)
        done.record()
    if order == "stream":
        main.wait_stream(side)
    elif order == "event":
        main.wait_event(done)
    elif order == "join":
        side.synchronize()
    elif order == "device":
        torch.cuda.synchronize()
    elif order == "event on the host":
        done.synchronize()
    elif order == "query":
        while not done.query():
            pass
    else:
        third.wait_event(done)
        main.wait_stream(third)
    x.sum()
    assert kinds() == []


def test_an_event_is_waited_for_as_it_was_recorded_last() -> None:
    side, done, x = torch.cuda.Stream(), torch.cuda.Event(), ones(100)
    done.record(side)
    with torch.cuda.stream(side):
        x.add_(1)
    torch.cuda.current_stream().wait_event(done)  # recorded before the addition
    x.sum()
    assert kinds() == [STREAMS]


def test_two_streams_may_read_the_same() -> None:
    side, x = torch.cuda.Stream(), ones(100)
    with torch.cuda.stream(side):
        x.sum()
    x.sum()
    assert kinds() == []


@pytest.mark.parametrize(
    ("first", "second", "races"),
    [
        (slice(0, 50), slice(50, 100), False),
        (slice(0, 51), slice(50, 100), True),
        (slice(0, 100, 2), slice(1, 100, 2), False),
        (slice(0, 100, 2), slice(0, 100, 4), True),
        (slice(0, 100, 2), slice(51, 52), False),
        (slice(0, 100, 2), slice(52, 53), True),
    ],
)
def test_views_race_where_they_share_elements(first: slice, second: slice, races: bool) -> None:
    side, x = torch.cuda.Stream(), ones(100)
    with torch.cuda.stream(side):
        x[first].add_(1)
    x[second].add_(1)
    assert bool(kinds()) == races


def test_columns_of_a_matrix_are_apart() -> None:
    side, x = torch.cuda.Stream(), ones(10, 10)
    with torch.cuda.stream(side):
        x[:, :5].add_(1)
    x[:, 5:].add_(1)
    assert kinds() == []
    x[:, 4:].add_(1)
    assert kinds() == [STREAMS]


def test_lists_of_tensors_and_results_that_are_given_are_used_too() -> None:
    side, many, out = torch.cuda.Stream(), [ones(8) for _ in range(3)], ones(8)
    with torch.cuda.stream(side):
        torch._foreach_add_(many, 1)
    torch.add(many[2], 1, out=out)
    assert [race.second.writes for race in MACHINE.races()] == [False]
    with torch.cuda.stream(side):
        out.sum()
    assert len(kinds()) == 2


# backward passes


def test_a_backward_pass_runs_on_the_streams_of_its_forward_pass() -> None:
    side, weight, seen = torch.cuda.Stream(), ones(10).requires_grad_(), []
    with torch.cuda.stream(side):
        y = weight * 2
    torch.cuda.current_stream().wait_stream(side)
    loss = (y * 3).sum()
    y.register_hook(lambda _gradient: seen.append(torch.cuda.current_stream()))
    loss.backward()
    assert seen == [side]
    assert torch.cuda.current_stream() != side
    weight.grad.sum()  # the caller's stream has waited
    assert kinds() == []


def test_a_first_gradient_is_ordered_as_the_call_is() -> None:
    side, weight, gradient = torch.cuda.Stream(), ones(10).requires_grad_(), torch.empty(10, device="cuda")
    with torch.cuda.stream(side):
        y = weight * 2
    gradient.fill_(1)
    y.backward(gradient)  # from the caller's stream, for which the operation waits
    assert kinds() == []
    gradient.fill_(2)
    with torch.cuda.stream(side):
        (weight * 2).backward(gradient)
    assert kinds() == [STREAMS]


def in_another_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_thread_that_only_copied_on_its_stream_orders_no_backward_pass() -> None:
    side, copies, weight = torch.cuda.Stream(), torch.cuda.Stream(), ones(10).requires_grad_()
    gradient, pinned = ones(10), torch.ones(10, pin_memory=True)

    def load() -> None:
        with torch.cuda.stream(copies):
            pinned.cuda(non_blocking=True)

    in_another_thread(load)
    gradient.fill_(2)
    with torch.cuda.stream(side):
        (weight * 2).backward(gradient)
    assert kinds() == [STREAMS]


@pytest.mark.parametrize("leaves", [True, False])
def test_operations_of_another_thread_are_taken_to_be_ordered(leaves: bool) -> None:
    side, weight, results = torch.cuda.Stream(), ones(10).requires_grad_(), []

    def forward() -> None:
        if leaves:
            with torch.cuda.stream(side):
                results.append(weight * 2)
        else:
            torch.cuda.set_stream(side)
            results.append(weight * 2)

    in_another_thread(forward)
    torch.cuda.current_stream().wait_stream(side)
    results[0].sum().backward()
    weight.grad.sum()
    assert kinds() == []


def test_a_module_trained_on_a_side_stream_is_one_order() -> None:
    side, model = torch.cuda.Stream(), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 8, device="cuda")).sum().backward()
            optimizer.step()
    assert kinds() == []


# memory that is freed


def test_memory_that_is_given_out_again_may_still_be_read() -> None:
    side = torch.cuda.Stream()
    x = ones(LARGE)
    with torch.cuda.stream(side):
        total = x.sum()
    del x
    y = torch.zeros(LARGE, device="cuda")
    race = only()
    assert (race.kind, race.after, race.call) == (REUSED, True, "tensor.record_stream(side)")
    assert race.at == race.first.place
    del y, total


@pytest.mark.parametrize("safe", ["recorded", "waited", "kept"])
def test_memory_that_another_stream_is_done_with(safe: str) -> None:
    side = torch.cuda.Stream()
    x = ones(LARGE)
    with torch.cuda.stream(side):
        total = x.sum()
        if safe == "recorded":
            x.record_stream(side)
    kept = x if safe == "kept" else None
    del x
    if safe == "waited":
        torch.cuda.current_stream().wait_stream(side)
    y = torch.zeros(LARGE, device="cuda")
    assert kinds() == []
    del y, total, kept


# pinned memory


def test_pinned_memory_is_filled_while_a_copy_reads_it() -> None:
    staged, x = torch.empty(100, pin_memory=True), torch.empty(100, device="cuda")
    for number in range(3):
        staged.fill_(number)
        x.copy_(staged, non_blocking=True)
    race = only()
    assert (race.kind, race.times, race.second.stream) == (REFILLED, 2, "")
    assert race.call == "torch.cuda.current_stream().synchronize()"


def test_a_copy_that_blocks_or_was_waited_for_leaves_pinned_memory_free() -> None:
    staged, x = torch.empty(100, pin_memory=True), torch.empty(100, device="cuda")
    x.copy_(staged)
    staged.fill_(1)
    x.copy_(staged, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    copied.synchronize()
    staged[:] = 2
    assert kinds() == []


def test_memory_that_is_not_pinned_is_staged() -> None:
    staged, x = torch.empty(100), torch.empty(100, device="cuda")
    x.copy_(staged, non_blocking=True)
    staged.fill_(1)
    assert kinds() == []


@pytest.mark.parametrize("way", ["slice", "copyto", "out", "fill", "in place"])
@pytest.mark.parametrize("waits", [False, True])
def test_pinned_memory_is_written_through_an_array(way: str, waits: bool) -> None:
    staged, x = torch.zeros(100, pin_memory=True), torch.empty(100, device="cuda")
    array = staged.numpy()
    x.copy_(staged, non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    if way == "slice":
        array[:] = 7
    elif way == "copyto":
        np.copyto(array, np.full(100, 7, np.float32))
    elif way == "out":
        np.add(array, 7, out=array)
    elif way == "fill":
        array.fill(7)
    else:
        array += 7
    torch.cuda.synchronize()
    assert kinds() == ([] if waits else [REFILLED])
    assert all(race.second.place == "" and race.at == race.first.place for race in MACHINE.races())  # five do so here


def test_the_only_statement_that_writes_into_the_array_is_named() -> None:
    staged, x = torch.zeros(2, 100, pin_memory=True), torch.empty(100, device="cuda")
    rows = staged.numpy()
    x.copy_(staged[0], non_blocking=True)
    rows[0] = 7
    torch.cuda.synchronize()
    race = only()
    assert race.at == race.second.place
    assert int(race.at.rpartition(":")[2]) == int(race.first.place.rpartition(":")[2]) + 1


def test_a_copy_back_into_the_same_pinned_memory_is_in_order() -> None:
    staged, x = torch.zeros(100, pin_memory=True), torch.empty(100, device="cuda")
    x.copy_(staged, non_blocking=True)
    x.add_(1)
    staged.copy_(x, non_blocking=True)
    torch.cuda.synchronize()
    assert kinds() == []


def read_by_sum(host: Tensor) -> object:
    return host.sum()


def read_by_list(host: Tensor) -> object:
    return host.tolist()


def read_by_number(host: Tensor) -> object:
    return float(host[0])


def read_by_text(host: Tensor) -> object:
    return str(host)


def read_by_pickle(host: Tensor) -> object:
    return pickle.dumps(host)


@pytest.mark.parametrize("read", [read_by_sum, read_by_list, read_by_number, read_by_text, read_by_pickle])
def test_a_copy_to_the_host_is_read_before_it_is_done(read: object) -> None:
    x = ones(100)
    host = x.to("cpu", non_blocking=True)
    read(host)  # type: ignore[operator]
    assert set(kinds()) == {READ_EARLY}


def test_form_is_no_value() -> None:
    host = ones(100).to("cpu", non_blocking=True)
    view = host.view(10, 10)[2:].t()
    assert (view.shape, host.is_pinned(), len(host)) == ((10, 8), True, 100)
    torch.empty_like(host)
    host.cuda(non_blocking=True)  # in the order of the stream
    assert kinds() == []
    torch.cuda.synchronize()
    host.sum()
    assert kinds() == []


# graphs


def test_a_graph_uses_at_each_replay_what_was_captured() -> None:
    side, graph, x = torch.cuda.Stream(), torch.cuda.CUDAGraph(), ones(100)
    with torch.cuda.graph(graph):
        y = x * 2
    torch.cuda.synchronize()
    assert kinds() == []
    graph.replay()
    with torch.cuda.stream(side):
        x.fill_(3)
    race = only()
    assert (race.first.writes, race.second.writes, race.second.stream) == (False, True, "side")
    del y


# what was reported without reason


def test_an_evaluation_reads_the_running_means() -> None:
    norm, x, first, second = nn.BatchNorm1d(8).cuda(), ones(4, 8), torch.cuda.Stream(), torch.cuda.Stream()
    norm.eval()
    torch.cuda.synchronize()
    for stream in (first, second):
        with torch.cuda.stream(stream):
            norm(x)
    assert kinds() == []
    norm.train()
    with torch.cuda.stream(first):
        norm(x)
    with torch.cuda.stream(second):
        norm(x)
    assert STREAMS in kinds()


def test_rows_that_are_chosen_by_an_index_may_be_others() -> None:
    table, side, rows = ones(100, 8), torch.cuda.Stream(), torch.arange(10, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        table.index_select(0, rows)
    table.index_copy_(0, rows + 10, table.new_ones(10, 8))
    assert kinds() == []
    table.zero_()
    assert kinds() == [STREAMS]


def test_a_broadcast_view_touches_what_it_repeats() -> None:
    table, side = ones(64, 4), torch.cuda.Stream()
    with torch.cuda.stream(side):
        table[:, 0].add_(1)
    table[:, 1:2].expand(64, 4).sum()
    assert kinds() == []


def test_large_views_of_other_columns() -> None:
    table, side = ones(1024, 1024), torch.cuda.Stream()
    for _ in range(40):
        with torch.cuda.stream(side):
            table[:, :512].add_(1)
        table[:, 512:].add_(1)
    assert kinds() == []


def test_a_backward_pass_within_one_goes_on_where_that_is() -> None:
    side, layer, x = torch.cuda.Stream(), nn.Linear(8, 8).cuda(), ones(4, 8).requires_grad_()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
    torch.cuda.current_stream().wait_stream(side)
    y.sum().backward()
    assert kinds() == []


def test_a_hook_may_choose_the_stream_of_the_caller() -> None:
    side, main, x, seen = torch.cuda.Stream(), torch.cuda.current_stream(), ones(8).requires_grad_(), []

    def hook(_gradient: Tensor) -> None:
        seen.append(torch.cuda.current_stream())
        with torch.cuda.stream(main):
            seen.append(torch.cuda.current_stream())
        seen.append(torch.cuda.current_stream())

    with torch.cuda.stream(side):
        y = x * 2
    y.register_hook(hook)
    main.wait_stream(side)
    y.sum().backward()
    assert seen == [side, main, side]


def test_another_thread_copies_while_a_graph_is_captured() -> None:
    x, buffer, side, graph = ones(8), ones(8), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    pinned = torch.zeros(8, pin_memory=True)

    def load() -> None:
        with torch.cuda.stream(side):
            buffer.copy_(pinned, non_blocking=True)

    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = x * 2
        in_another_thread(load)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        buffer.sum()
    graph.replay()
    assert kinds() == []
    del y


def test_what_the_allocator_asks_orders_nothing_for_the_program() -> None:
    side = torch.cuda.Stream()
    x = ones(LARGE)
    with torch.cuda.stream(side):
        y = x * 2
        x.record_stream(side)
    del x
    for _ in range(50):
        torch.ones(16, device="cuda")
    y.sum()
    assert kinds() == [STREAMS]
