"""Readings on a real GPU: right whatever the streams do, without a wait, with flat memory."""

from __future__ import annotations

import pytest
import torch

import keepbusy
from keepbusy.runtime import Readings
from keepbusy.runtime.readback import ScalarReadback, readback_stream

SPIN = 100_000_000
"""Cycles: about fifty milliseconds."""
DEVICE = torch.device("cuda", 0)


def overwrite_freed_memory() -> None:
    for _ in range(64):
        torch.full((1 << 18,), -1.0, device=DEVICE)
        torch.full((1,), -1.0, device=DEVICE)


@pytest.mark.parametrize("shape", [(), (2,)], ids=["written by the device", "copied"])
def test_ten_thousand_values_are_right_bit_for_bit_when_nothing_is_in_time(shape: tuple[int, ...]) -> None:
    """Device and copies come late, the sources are overwritten and freed at once."""
    values = torch.randn((10_000, *shape), dtype=torch.float64).view(torch.int64)
    on_device, readings = values.to(DEVICE), []
    for place in range(len(values)):
        if place % 1000 == 0:
            torch.cuda._sleep(SPIN)
            with torch.cuda.stream(readback_stream(DEVICE)):
                torch.cuda._sleep(SPIN)
        value = on_device[place].clone()
        readings.append(keepbusy.readback(value))
        value.fill_(7)
        del value
    assert torch.equal(torch.stack([reading.tensor for reading in readings]), values)


def test_the_device_writes_numbers_home_itself() -> None:
    """Not a copy that waits for the copy engine: the large one is still under way when the number is there."""
    assert isinstance(keepbusy.readback(torch.ones((), device=DEVICE))._sent, ScalarReadback)
    large, side = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE), torch.cuda.Stream()
    home, done = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        home.copy_(large, non_blocking=True)
        done.record()
    assert float(keepbusy.readback(torch.full((), 2.5, device=DEVICE))) == 2.5
    assert not done.query()
    done.synchronize()


@pytest.mark.parametrize("shape", [(3, 5), (1 << 20,), (1 << 24,)])
def test_a_reading_keeps_its_value_when_the_source_is_overwritten_and_freed(shape: tuple[int, ...]) -> None:
    late = False
    for spin in (SPIN, 10 * SPIN, 100 * SPIN):  # a busy host is given more time
        value = torch.randn(shape, device=DEVICE)
        expected = value.cpu()
        with torch.cuda.stream(readback_stream(DEVICE)):
            torch.cuda._sleep(spin)
        reading = keepbusy.readback(value)
        value.fill_(-1)
        del value
        overwrite_freed_memory()
        late = not reading.ready
        assert torch.equal(reading.tensor, expected)
        if late:
            break
    assert late


def test_reading_back_does_not_wait_for_the_device() -> None:
    loss = torch.ones((), device=DEVICE)
    keepbusy.readback(loss).item()
    torch.cuda._sleep(4 * SPIN)
    readings = [keepbusy.readback(loss + step) for step in range(200)]
    assert not readings[0].ready
    assert [int(reading) for reading in readings] == list(range(1, 201))


def test_a_value_comes_home_while_the_device_goes_on() -> None:
    """It waits for its own event, not for what was launched after it."""
    loss = torch.ones((), device=DEVICE)
    reading = keepbusy.readback(loss)
    torch.cuda._sleep(4 * SPIN)
    done = torch.cuda.Event()
    done.record()
    assert float(reading) == 1.0
    assert not done.query()
    done.synchronize()


def test_memory_stays_flat_however_long_readings_are_kept() -> None:
    loss, kept = torch.ones((), device=DEVICE), []
    for step in range(6000):
        kept.append(keepbusy.readback(loss))
        if step == 1000:
            torch.cuda.synchronize()
            keepbusy.readback(loss)
            before, pinned = torch.cuda.memory_reserved(), host_allocations()
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == before
    assert host_allocations() <= pinned + 8
    assert sum(map(float, kept)) == 6000


def host_allocations() -> int:
    stats = getattr(torch.cuda, "host_memory_stats", dict)()
    return int(stats.get("num_host_alloc", 0))


def test_training_gives_the_losses_of_the_plain_loop() -> None:
    def losses(read: object) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found = []
        for _ in range(50):
            x = torch.randn(32, 64, device=DEVICE)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x).float().pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(read(loss))
        return [float(loss) for loss in found]

    assert losses(keepbusy.readback) == losses(lambda loss: loss.item())


def test_the_static_output_of_a_graph_is_read_between_replays() -> None:
    x, total = torch.zeros((), device=DEVICE), torch.zeros((), device=DEVICE)

    def step() -> None:
        total.copy_(x * 2 + 1)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    readings = []
    for value in range(100):
        x.fill_(value)
        graph.replay()
        readings.append(keepbusy.readback(total))
    assert [int(reading) for reading in readings] == [2 * value + 1 for value in range(100)]


def test_a_capture_is_refused_in_one_sentence() -> None:
    x, graph = torch.zeros((), device=DEVICE), torch.cuda.CUDAGraph()
    keepbusy.readback(x)
    with pytest.raises(RuntimeError, match="readback\\(\\) was called while a CUDA graph"), torch.cuda.graph(graph):
        keepbusy.readback(x)
    assert keepbusy.readback(x).item() == 0


def test_no_stream_is_waited_for_by_a_loop_with_readings() -> None:
    readings, weight = Readings(), torch.ones(64, 64, device=DEVICE)
    readings.add(loss=weight.sum(), scale=1.0)
    readings.means(last=True)
    readings.reset()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(10):
            readings.add(loss=(weight * step).mean(), largest=weight.max(), scale=2.0)
            assert readings.nonfinite() == []
            readings.means()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert readings.means(last=True) == {"loss": 4.5, "largest": 1.0, "scale": 2.0}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_values_of_several_devices_travel_at_once() -> None:
    values = {index: torch.tensor(index + 0.5, device=f"cuda:{index}") for index in range(torch.cuda.device_count())}
    assert {index: float(reading) for index, reading in keepbusy.readback(values).items()} == {
        index: index + 0.5 for index in values
    }
