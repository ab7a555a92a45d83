"""Programs of a few lines, and exactly the timeline that they must give."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import cast

import pytest
from virtual_programs import clock, operator, rows

from keepbusy.timeline.model import Direction, FrameKind, Kind, LinkKind
from keepbusy.timeline.replay import replay
from keepbusy.virtual.clock import real_time
from keepbusy.virtual.clock.captures import BEGINNING
from keepbusy.virtual.clock.engine import Clock
from keepbusy.virtual.clock.host_thread import HostThread
from keepbusy.virtual.costs.device import read

IN, OUT = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST


def test_a_new_thread_begins_now_even_with_the_number_of_one_that_has_ended() -> None:
    """Python gives the number of an ended thread to the next one."""
    on = clock()
    begun: list[tuple[int, int]] = []

    def work() -> None:
        begun.append((threading.get_ident(), on.now()))
        operator(on, on.default_stream(), 10)

    for wait in (1_000, 2_000, 3_000):
        on.work(wait)
        thread = threading.Thread(target=work, name="worker")
        thread.start()
        thread.join()
    assert [reached for _, reached in begun] == [1_000, 3_000, 6_000]
    timeline = on.timeline()
    workers = [lane for lane in timeline.lanes if lane.name == "worker"]
    assert len(workers) == len({number for number, _ in begun})
    again = replay(timeline)
    assert (again.spans.start == timeline.spans.start).all()
    assert (again.spans.end == timeline.spans.end).all()


def test_two_operators_run_one_after_the_other() -> None:
    on = clock()
    stream = on.default_stream()
    operator(on, stream, 100)
    operator(on, stream, 50)
    assert rows(on.timeline()) == [
        ("host", "work", 0, 5),
        ("host", "launch", 5, 15),
        ("stream 7", "kernel", 25, 125),  # 20 after the launch began
        ("host", "work", 15, 20),
        ("host", "launch", 20, 30),
        ("stream 7", "kernel", 127, 177),  # 2 after the one before
    ]


def test_a_full_queue_holds_the_launch_up() -> None:
    on = clock()
    stream = on.default_stream()
    for _ in range(5):
        operator(on, stream, 1_000)
    launches = [row for row in rows(on.timeline()) if row[1] == "launch"]
    assert launches[3] == ("host", "launch", 50, 60)
    assert launches[4] == ("host", "launch", 65, 1035)  # the first of four commands ended at 1025


def test_a_sync_returns_when_its_stream_has_caught_up() -> None:
    on = clock()
    stream, other = on.default_stream(), on.new_stream()
    operator(on, other, 9_000)
    operator(on, stream, 100)
    on.sync_stream(stream)
    assert rows(on.timeline())[-1] == ("host", "sync", 30, 144)
    on.sync_device()
    assert rows(on.timeline())[-1] == ("host", "sync", 144, 9029)


def test_reading_a_value_waits_for_what_stands_before_it() -> None:
    on = clock()
    stream = on.default_stream()
    operator(on, stream, 100)
    on.begin("aten::equal")
    on.copy(stream, OUT, 10, pinned=True)
    on.end()
    assert rows(on.timeline())[3:] == [
        ("host", "work", 15, 20),
        ("host", "launch", 20, 30),
        ("stream 7", "copy", 127, 133),
        ("host", "sync", 30, 137),
    ]


@pytest.mark.parametrize(
    ("direction", "size", "pinned", "non_blocking", "blocks", "work"),
    [
        (IN, 1_000, True, True, False, 105),
        (IN, 1_000, True, False, True, 105),
        (IN, 1_000, False, True, True, 1_005),
        (IN, 1_000, False, False, True, 1_005),
        (IN, 100, False, True, False, 15),  # staged: the driver has taken the bytes along
        (IN, 100, False, False, True, 15),
        (OUT, 1_000, True, True, False, 105),
        (OUT, 1_000, True, False, True, 105),
        (OUT, 100, False, True, True, 55),
        (OUT, 1_000, False, True, True, 505),
    ],
)
def test_which_copies_block(
    direction: Direction, size: int, pinned: bool, non_blocking: bool, blocks: bool, work: int
) -> None:
    on = clock()
    stream = on.default_stream()
    operator(on, stream, 5_000)
    on.copy(stream, direction, size, pinned, non_blocking)
    timeline = on.timeline()
    copy = next(timeline[row] for row in range(len(timeline)) if timeline[row].kind == Kind.COPY)
    assert (copy.start, copy.work) == (5_027, work)
    assert (on.now() > copy.end) == blocks
    assert (timeline[len(timeline) - 1].kind == Kind.SYNC) == blocks


def test_memory_that_was_never_touched_comes_home_slowly() -> None:
    on = clock()
    on.copy(on.default_stream(), OUT, 1_000, fresh=1_000)
    assert max(one[3] for one in rows(on.timeline())) == 20 + 5 + 2_000 + 4


def test_two_streams_share_a_copy_engine() -> None:
    on = clock()
    one, other = on.default_stream(), on.new_stream()
    for stream in (one, other):
        on.copy(stream, IN, 1_000, pinned=True, non_blocking=True)
    on.copy(other, OUT, 1_000, pinned=True, non_blocking=True)
    copies = [row for row in rows(on.timeline()) if row[1] == "copy"]
    assert copies == [("stream 7", "copy", 20, 125), ("stream 8", "copy", 127, 232), ("stream 8", "copy", 234, 339)]


def test_a_stream_waits_for_an_event_of_another() -> None:
    on = clock()
    one, other = on.default_stream(), on.new_stream()
    operator(on, one, 500)
    on.wait(other, on.record(one))
    operator(on, other, 10)
    timeline = on.timeline()
    assert rows(timeline)[-1] == ("stream 8", "kernel", 527, 537)
    order = timeline.links.take(timeline.links.kind == LinkKind.ORDER)
    assert [timeline[row].name for row in (*order.source, *order.target)] == ["kernel", "kernel"]


def test_waits_pass_on_through_a_stream_that_does_nothing() -> None:
    on = clock()
    one, two, three = on.default_stream(), on.new_stream(), on.new_stream()
    operator(on, one, 500)
    on.wait(two, on.record(one))
    on.wait(three, on.record(two))
    operator(on, three, 10)
    assert rows(on.timeline())[-1] == ("stream 9", "kernel", 527, 537)
    on.sync_stream(two)
    assert on.now() == 529


def test_events_tell_the_time_on_the_device() -> None:
    on = clock()
    stream = on.default_stream()
    before = on.record(stream)
    operator(on, stream, 1_000)
    after = on.record(stream)
    assert on.elapsed(before, after) == pytest.approx(1_000, abs=30)
    assert not on.query(after)
    assert not on.idle(stream)
    on.sync_moment(after)
    assert on.query(after)
    assert on.idle(stream)
    assert on.query(BEGINNING)


def test_somebody_who_polls_gets_there() -> None:
    on = clock()
    stream = on.default_stream()
    operator(on, stream, 1_000)
    done, polls = on.record(stream), 0
    while not on.query(done):
        polls += 1
    assert 900 < polls < 1_100


def test_the_backward_thread_takes_over_and_hands_back() -> None:
    on = clock()
    stream, main = on.default_stream(), on.host()
    operator(on, stream, 10)

    def backward() -> None:
        on.hand_over(main)
        operator(on, stream, 10)
        handed.append(on.host())

    handed: list[object] = []
    thread = threading.Thread(target=backward, name="backward")
    thread.start()
    thread.join()
    on.hand_over(handed[0])  # type: ignore[arg-type]
    operator(on, stream, 10)
    timeline = on.timeline()
    hosts = [row for row in rows(timeline) if row[0] == "host"]
    assert hosts == [
        ("host", "work", 0, 5),
        ("host", "launch", 5, 15),
        ("host", "work", 15, 23),  # there it takes two dispatches and a half, at another price
        ("host", "launch", 23, 33),
        ("host", "work", 33, 38),
        ("host", "launch", 38, 48),
    ]
    assert [lane.name for lane in timeline.lanes if lane.device is None] == ["MainThread", "backward"]
    assert int((timeline.links.kind == LinkKind.HANDOFF).sum()) == 2
    again = replay(timeline)
    assert (again.spans.start == timeline.spans.start).all()


def test_a_sync_of_one_device_leaves_the_other_alone() -> None:
    on = Clock(clock().device)
    zero, one = on.default_stream(0), on.default_stream(1)
    operator(on, zero, 9_000)
    operator(on, one, 100)
    on.sync_device(1)
    assert on.now() == 144
    on.copy_to_peer(zero, one, 1_000_000)
    operator(on, one, 10)
    timeline = on.timeline()
    copy, kernel = rows(timeline)[-4], rows(timeline)[-1]
    assert copy[:2] == ("stream 7", "copy")
    assert copy[2] == 9_027
    assert kernel[2] == copy[3] + 2
    again = replay(timeline)
    assert (again.spans.end == timeline.spans.end).all()


def test_memory_calls_of_the_driver() -> None:
    on = clock()
    operator(on, on.default_stream(), 500)
    on.allocate("cudaMalloc", 70)
    on.release("cudaFree", 60)
    assert rows(on.timeline())[-2:] == [("host", "allocate", 15, 85), ("host", "allocate", 85, 585)]


def test_a_collective_ends_with_the_last_rank() -> None:
    on = clock()
    stream = on.default_stream()
    arrivals = []

    def meet(arrival: int) -> int:
        arrivals.append(arrival)
        return 700

    on.collective(stream, "ncclDevKernel_AllReduce", wire=100, size=64, group=3, members=2, last_arrival=meet)
    timeline = on.timeline()
    assert arrivals == [20]
    assert rows(timeline)[-1] == ("stream 7", "collective", 20, 800)
    assert timeline.facts.groups == {3: 2}


def test_products_and_collectives_hold_each_other_up_where_they_run_at_the_same_time() -> None:
    """A product beside a collective takes 1.8 times as long, whichever of the two was launched first; the next
    collective makes up for what this one should have taken. Messages and other kernels stay as they are."""
    on = clock()
    stream, wire = on.default_stream(), on.new_stream()

    def took(kind: Kind) -> list[int]:
        timeline = on.timeline()
        return [timeline[row].end - timeline[row].start for row in range(len(timeline)) if timeline[row].kind == kind]

    def send(name: str, time: int) -> None:
        on.collective(wire, f"ncclDevKernel_{name}", time, 64, 3, 2, last_arrival=lambda mine: mine)

    def launch(name: str) -> None:
        on.launch(stream, [(name, 1_000)])

    send("SendRecv", 100_000)
    launch("gemm_bfloat16")
    on.sync_device()
    send("AllReduce", 100_000)
    for name in ("gemm_bfloat16", "elementwise_add", "gemm_bfloat16"):
        launch(name)
    assert took(Kind.KERNEL) == [1_000, 1_800, 1_000, 1_800]
    on.sync_device()
    on.launch(stream, [("gemm_bfloat16", 90_000)])
    send("AllReduce", 10_000)
    beside = 2 * 1_800 + 1_000
    assert took(Kind.COLLECTIVE)[1:] == [100_000, 10_000 + round(beside * (1 - 1 / 1.4))]
    on.sync_device()
    launch("gemm_bfloat16")
    assert took(Kind.KERNEL)[-2:] == [90_000, 1_000 + round(10_000 * (1 - 1 / 1.8))]


def test_ranks_that_meet_go_on_together() -> None:
    """Each process began its clock by itself."""
    on = clock()
    on.work(10)
    on.await_others("init_process_group", lambda mine: mine + 90)
    assert rows(on.timeline()) == [("host", "work", 0, 10), ("host", "work", 10, 100)]


def test_frames_lines_and_marks() -> None:
    on = clock()
    stream = on.default_stream()
    outer, inner = on.place("train.py(3): main"), on.place("train.py(3): main", "torch/nn.py(9): f")
    operator(on, stream, 10, "aten::mul", outer)
    operator(on, stream, 10, "aten::add", inner)
    for step in range(2):
        on.enter(FrameKind.ANNOTATION, f"Optimizer.step#SGD.step{step}", outer)
        operator(on, stream, 10, "aten::sub", inner)
        on.leave()
    timeline = on.timeline(source="train.py")
    frames = timeline.frames
    shown = []
    for frame in range(len(frames)):
        parent = int(frames.parent[frame])
        shown.append((timeline.names[frames.name[frame]], timeline.names[frames.name[parent]] if parent >= 0 else ""))
    assert shown == [
        ("train.py(3): main", ""),
        ("aten::mul", "train.py(3): main"),
        ("torch/nn.py(9): f", "train.py(3): main"),
        ("aten::add", "torch/nn.py(9): f"),
        ("Optimizer.step#SGD.step0", "train.py(3): main"),
        ("train.py(3): main", "Optimizer.step#SGD.step0"),
        ("torch/nn.py(9): f", "train.py(3): main"),
        ("aten::sub", "torch/nn.py(9): f"),
        ("Optimizer.step#SGD.step1", "train.py(3): main"),
        ("train.py(3): main", "Optimizer.step#SGD.step1"),
        ("torch/nn.py(9): f", "train.py(3): main"),
        ("aten::sub", "torch/nn.py(9): f"),
    ]
    assert len(timeline.marks) == 2
    assert (frames.end >= frames.start).all()
    assert timeline.facts.source == "train.py"


class Watch:
    """A clock that somebody sets."""

    def __init__(self) -> None:
        self.time = 0

    def __call__(self) -> int:
        return self.time


def test_measured_time_is_the_programs_and_not_ours() -> None:
    watch = Watch()
    on = Clock(clock().device, real=lambda: watch)
    stream = on.default_stream()
    watch.time += 100  # the program
    host = on.host()
    host.pause(7)  # the dispatcher's way to us
    on.begin("aten::mul")
    watch.time += 5_000  # we compute values
    on.launch(stream, [("kernel", 10)])
    on.end()
    host.resume()
    watch.time += 3  # less than what a dispatch costs the device's host
    on.begin("aten::mul")
    on.launch(stream, [("kernel", 10)])
    on.end()
    on.enter(FrameKind.ANNOTATION, "enumerate(DataLoader)#x.__next__")
    watch.time += 400
    on.leave()
    assert [row for row in rows(on.timeline()) if row[0] == "host"] == [
        ("host", "work", 0, 93),
        ("host", "launch", 93, 103),
        ("host", "work", 103, 108),  # what a dispatch costs the device's host
        ("host", "launch", 108, 118),
        ("host", "work", 118, 518),
    ]


def test_known_host_work_is_told_apart() -> None:
    on = clock()
    on.spend(30)
    on.work(500, "time.sleep", on.place("train.py(9): main"))
    assert rows(on.timeline()) == [("host", "work", 0, 30), ("host", "work", 30, 530)]


def test_it_stays_quick_enough_to_be_called_for_every_operator() -> None:
    on = Clock(read("h200"))
    stream = on.default_stream()
    for _ in range(70_000):  # more than one block of packed rows
        operator(on, stream, 100)
    timeline = on.timeline()
    assert len(timeline) == 210_000
    assert (timeline.spans.end[timeline.on_device] - timeline.spans.start[timeline.on_device] == 100).all()


@pytest.mark.parametrize(("pauses", "is_said"), [(1, True), (0, False)])
def test_a_long_run_that_computes_values_is_told_how_it_becomes_shorter(
    pauses: int, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(real_time, "UnseenThread", lambda work: work())
    monkeypatch.setattr(real_time, "_LONG", 0.0)
    host = cast(HostThread, SimpleNamespace(pauses=pauses))
    real_time.suggest_skipping_values(host, said.append, threading.Event())
    assert ["--values none" in one for one in said] == [True] * is_said
    over = threading.Event()
    over.set()
    real_time.suggest_skipping_values(host, said.append, over)
    assert len(said) == is_said
