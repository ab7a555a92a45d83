"""Marks on the device and the lead they tell, on paper."""

from __future__ import annotations

import numpy as np
import pytest
from clocks import LAUNCH, PaperDevice
from hypothesis import given
from hypothesis import strategies as st

from keepbusy.recording.run_counters import Pauses
from keepbusy.recording.step_clock import (
    CLOCK_DRIFT,
    ENDS,
    EVENT_EVERY,
    EVENTS_IN_FLIGHT,
    KEEPS_UP_FOR,
    DeviceMarks,
    Marks,
    MarkTable,
    StepSource,
    leads,
    steps_of,
    where_it_keeps_up,
)
from keepbusy.timeline.model import NONE

MS = 1_000_000


def loop(device: PaperDevice, steps: int, host: int, work: int, sync_every: int = 0) -> tuple[DeviceMarks, MarkTable]:
    """A program that launches `work` and takes `host` for it, a mark at the end of each step."""
    table = MarkTable()
    marks, pauses = DeviceMarks(table, device, device.clock), Pauses(device.clock)
    for step in range(steps):
        for _ in range(10):
            device.work(host // 10)
            device.launch(work // 10)
        if sync_every and step % sync_every == sync_every - 1:
            device.sync()
        table.add(device.now, ENDS, pauses)
        marks.set(step, device.now)
    return marks, table


def told(table: MarkTable) -> np.ndarray:
    _, host, _, _, _, times, *bounds = table.columns()
    return where_it_keeps_up(host, times, leads(host, times, *bounds))[1]


def passed(table: MarkTable) -> np.ndarray:
    return table.columns()[5]


def test_where_the_device_waits_for_the_host_there_is_no_lead() -> None:
    device = PaperDevice(ahead=12 * MS)
    _, table = loop(device, 50, host=10 * MS, work=2 * MS)
    lead = told(table)
    assert lead[lead != NONE].max() < 1 * MS  # of which the last launch takes a fifth


def test_where_the_device_is_slower_the_host_runs_ahead() -> None:
    device = PaperDevice(ahead=-7 * MS)
    marks, table = loop(device, 30, host=1 * MS, work=10 * MS)
    device.now = device.done + LAUNCH
    marks.read_all()
    lead = told(table)
    assert lead[0] != NONE
    assert np.abs(lead - np.array(device.true_lead)).max() <= 5 * LAUNCH + 1 * MS


def test_the_steps_are_the_devices_though_it_has_not_done_the_last_ones() -> None:
    """A short run whose host is far ahead: its own steps are those of a queue that fills."""
    device = PaperDevice()
    _, table = loop(device, 40, host=2 * MS, work=10 * MS)
    steps = steps_of(table)
    assert 3 <= len(steps) < 0.5 * 40
    assert np.abs(steps.took - 10 * MS).max() <= 10 * LAUNCH


def test_no_event_is_made_a_step_and_none_is_waited_for() -> None:
    device = PaperDevice()
    _, table = loop(device, 2000, host=5 * MS, work=5 * MS)
    assert device.made <= 4
    assert device.asked < 2.5 * 2000
    assert len(passed(table)) == 2000


def test_a_device_that_falls_far_behind_costs_marks_and_not_memory() -> None:
    device = PaperDevice()
    marks, table = loop(device, 2 * EVENTS_IN_FLIGHT, host=1 * MS, work=100 * MS)
    assert device.made == EVENTS_IN_FLIGHT
    device.now = device.done + LAUNCH
    marks.read_all()
    marks.read_all()
    lead = told(table)
    assert (lead[:EVENTS_IN_FLIGHT] != NONE).all()
    assert (lead[EVENTS_IN_FLIGHT + 10 : -10] == NONE).mean() > 0.9  # but for those set as one came free


def test_a_device_that_waits_for_its_host_has_an_event_now_and_then_and_its_steps_are_told_all_the_same() -> None:
    device, quick = PaperDevice(drift=CLOCK_DRIFT / 2), 100
    _, table = loop(device, quick, host=10 * MS, work=MS // 2)
    assert len(device.true_lead) == KEEPS_UP_FOR + 1 + -(-(quick - KEEPS_UP_FOR - 1) // EVENT_EVERY)
    steps = steps_of(table)
    assert len(steps) >= quick - 1 - EVENT_EVERY
    assert np.abs(steps.took - 10 * MS).max() <= LAUNCH
    assert steps.lead.max() <= MS // 20 + LAUNCH


def test_the_little_that_a_device_is_behind_differs_from_step_to_step_and_is_no_reason_for_an_event() -> None:
    """As after an optimizer's last kernels: some tenths of a millisecond of ten."""
    device, table = PaperDevice(), MarkTable()
    marks, pauses = DeviceMarks(table, device, device.clock), Pauses(device.clock)
    for step in range(200):
        device.work(10 * MS)
        device.launch((step * 7 % 5) * MS // 12)
        table.add(device.now, ENDS, pauses)
        marks.set(step, device.now)
    assert len(device.true_lead) < 70
    assert np.abs(steps_of(table).took - 10 * MS).max() <= MS // 2


def test_where_the_device_falls_behind_each_mark_has_an_event_again() -> None:
    device, quick, slow = PaperDevice(), 60, 60
    table = MarkTable()
    marks, pauses = DeviceMarks(table, device, device.clock), Pauses(device.clock)
    for step in range(quick + slow):
        device.work(5 * MS)
        device.launch(MS // 50 if step < quick else 8 * MS)
        table.add(device.now, ENDS, pauses)
        marks.set(step, device.now)
    device.now = device.done + LAUNCH
    marks.read_all()
    assert (passed(table)[quick + EVENT_EVERY + 1 :] != NONE).all()
    steps = steps_of(table)
    assert len(steps) >= quick + slow - 2 * EVENT_EVERY
    assert np.abs(steps.took[steps.mark < quick - EVENT_EVERY] - 5 * MS).max() <= LAUNCH
    assert np.abs(steps.took[steps.mark > quick + EVENT_EVERY + 1] - 8 * MS).max() <= LAUNCH


def test_nothing_gets_into_a_graph_that_is_captured() -> None:
    device = PaperDevice(capturing=True)
    _, table = loop(device, 5, host=1 * MS, work=1 * MS)
    assert (device.made, device.asked) == (0, 0)
    assert passed(table).tolist() == [NONE] * 5


def test_a_device_that_sleeps_is_not_woken() -> None:
    device = PaperDevice(awake=False)
    loop(device, 5, host=1 * MS, work=1 * MS)
    assert (device.made, device.asked) == (0, 0)


@given(
    host=st.integers(1, 30),
    work=st.integers(1, 30),
    sync_every=st.integers(0, 5),
    ahead=st.integers(-(10**15), 10**15),
    drift=st.floats(-0.5 * CLOCK_DRIFT, 0.5 * CLOCK_DRIFT),
)
def test_the_lead_is_what_it_was(host: int, work: int, sync_every: int, ahead: int, drift: float) -> None:
    """But for the time from setting a mark to the device that is idle, and a tenth of a step where it never is."""
    device = PaperDevice(ahead=ahead, drift=drift)
    marks, table = loop(device, 60, host * MS, work * MS, sync_every)
    device.now = max(device.now, device.done) + LAUNCH
    marks.read_all()
    lead, (known,) = told(table), np.nonzero(passed(table) != NONE)
    assert (lead[: known[-1]] >= 0).all()
    assert known[-1] > 60 - EVENT_EVERY - 1
    true = np.array(device.true_lead)
    within = 2 * CLOCK_DRIFT * np.ptp(table.host()) + 2 * LAUNCH + max(0, true.min())
    assert np.abs(lead[known] - true).max() <= within


@given(st.lists(st.integers(1, 40), min_size=2, max_size=80))
def test_marks_never_decrease(work: list[int]) -> None:
    device = PaperDevice()
    table = MarkTable()
    marks, pauses = DeviceMarks(table, device, device.clock), Pauses(device.clock)
    for step, time in enumerate(work):
        device.work(10 * MS)
        device.launch(time * MS)
        table.add(device.now, ENDS, pauses)
        marks.set(step, device.now)
    device.now = device.done + LAUNCH
    marks.read_all()
    times = passed(table)
    assert (np.diff(times) >= 0).all()
    assert (times != NONE).all()


def test_of_a_long_run_the_older_half_of_the_marks_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that the device has still to pass."""
    monkeypatch.setattr("keepbusy.recording.step_clock.KEPT_MARKS", 8)
    device = PaperDevice()
    marks, table = loop(device, 21, host=1 * MS, work=100 * MS)
    device.now = device.done + LAUNCH
    marks.read_all()
    number, host, *_ = table.columns()
    assert (table.count, number.tolist(), table.last) == (21, list(range(16, 21)), host[-1])
    assert np.diff(passed(table)).tolist() == [100 * MS] * 4
    assert table.columns(2).tolist() == table.columns()[:, -2:].tolist()
    table.disown()
    assert len(steps_of(table)) == 0


def test_the_share_without_a_processor_is_of_the_time_until_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not until the last mark: what a program does after its steps is waited for, too."""
    device = PaperDevice()
    monkeypatch.setattr("keepbusy.recording.step_clock.without_processor", lambda _: device.now // 4)
    marks = Marks(clock=device.clock)
    marks._ends.source, marks._allocations.due = StepSource.STEP, 1 << 62
    for _ in range(3):
        device.work(10 * MS)
        marks._mark(ENDS)
    device.work(1_000 * MS)
    assert marks.delayed() == pytest.approx(0.25, abs=0.001)
