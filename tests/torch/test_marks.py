"""Marks of real programs on the virtual GPU: what is a step, what the lead is, and that nothing else changes."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from warm_python import PATIENCE, SOURCES, warm

import keepbusy
from keepbusy.instrument.loader_uses import KEPT_TURNS, Loaders
from keepbusy.recording.run_counters import Pauses, without_processor
from keepbusy.recording.step_clock import SETTLING_MARKS, SILENT_AFTER, Cuda, Marks
from keepbusy.timeline.run_facts import FiguresFile, PlainRun

MS = 1_000_000


class Program:
    """Marks on the machine's own clock."""

    def __init__(self, machine: object) -> None:
        self.told: list[int] = []
        self.program = machine.clock  # type: ignore[attr-defined]
        self.marks = Marks(self.told.append, clock=self.program.now)

    def __enter__(self) -> Program:
        self.marks.begin()
        return self

    def __exit__(self, *error: object) -> None:
        self.marks.end()

    def works(self, time: int) -> None:
        self.program.work(time)

    def ended(self) -> PlainRun:
        torch.cuda.synchronize()
        self.marks.end()
        return self.marks.run()


@pytest.fixture
def program(machine: object) -> Iterator[Program]:
    with Program(machine) as running:
        yield running


def trainer(
    width: int = 8, kind: type[torch.optim.Optimizer] = torch.optim.SGD
) -> tuple[nn.Module, Callable[[], None]]:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda()
    optimizer = kind(model.parameters(), lr=0.01)
    x = torch.ones(4, 8, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return model, step


def test_each_optimizer_step_is_one(program: Program) -> None:
    _, step = trainer()
    for _ in range(10):
        step()
    assert program.told == list(range(1, 11))
    run = program.ended()
    assert run.marked_by == "optimizer"
    assert run.steps + run.warm_up == 9  # between ten marks


def test_a_mark_stands_in_the_stream_that_is_current_then(machine: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch is asked for the object of each stream once, and for its number at each mark."""
    asked, current = [], torch.cuda.current_stream
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: current().stream_id, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda number: asked.append(number) or current(number))
    torch.ones(1, device="cuda")
    device, other = Cuda(), torch.cuda.Stream()
    assert device.ready()
    events = [device.new_event() for _ in range(4)]
    for event, stream in zip(events, (current(), other, current(), other), strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000_000 if stream is other else 1_000)
            device.set(event)
    current().synchronize()
    assert [event.query() for event in events] == [True, False, True, False]
    assert asked == [0, 0]


def test_gradient_accumulation_is_one_step(program: Program) -> None:
    model, _ = trainer()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(5):
        for _ in range(4):
            model(torch.ones(4, 8, device="cuda")).sum().backward()
        optimizer.step()
    assert program.marks.count == 5


def test_two_optimizers_take_one_step_together(program: Program) -> None:
    steps = [trainer()[1], trainer()[1]]
    for _ in range(10):
        for step in steps:
            step()
    assert program.marks.count == 10


def test_a_step_that_the_scaler_skips_has_ended_all_the_same(program: Program) -> None:
    model, _ = trainer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(8):
        optimizer.zero_grad()
        loss = model(torch.full((4, 8), float("inf") if step == 3 else 1.0, device="cuda")).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert program.marks.count == 8


def test_without_an_optimizer_forward_passes_are_steps(program: Program) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).cuda(), torch.ones(4, 8, device="cuda")
    with torch.no_grad():
        for _ in range(100):
            model(x)
    assert program.marks.count == 100
    assert program.ended().marked_by == "forward"
    assert nn.ReLU.__call__ is nn.Linear.__call__  # only the outermost kind is looked at by now


def test_forward_passes_of_a_training_run_are_none(program: Program) -> None:
    plain = nn.Module.__call__
    model, step = trainer()
    assert nn.Module.__call__ is not plain  # it was put back as soon as an optimizer was made
    model(torch.ones(4, 8, device="cuda"))
    assert program.marks.count == 0
    step()
    assert program.marks.count == 1


def test_the_programs_own_word_counts_for_more(program: Program) -> None:
    _, step = trainer()
    for _ in range(6):
        step()
        step()
        keepbusy.step()
    run = program.ended()
    assert run.marked_by == "step"
    assert program.marks.count == 2 + 6
    assert run.steps + run.warm_up == 1 + 5  # one of the optimizer's, and then the program's own


def test_a_step_that_is_captured_whole_is_heard_by_its_replays(program: Program) -> None:
    _, step = trainer()
    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(SILENT_AFTER + 20):
        graph.replay()
    assert program.marks.count == 4 + 21  # the optimizer is trusted for a while
    assert program.ended().marked_by == "graph"
    assert program.marks.replays_graphs


def test_the_lead_is_what_the_timeline_says(machine: object) -> None:
    """The host launches products faster than the device works them off, and reads nothing: it runs ahead ever more."""
    big = torch.ones(1024, 1024, device="cuda")
    torch.cuda.synchronize()
    began, *ends = (torch.cuda.Event(enable_timing=True) for _ in range(41))
    with Program(machine) as program:
        began.record()
        start, true = program.program.now(), []
        for end in ends:
            big @ big
            end.record()
            true.append(start - program.program.now())
            keepbusy.step()
        torch.cuda.synchronize()
        keepbusy.step()
    true = [since + 1e6 * began.elapsed_time(end) for since, end in zip(true, ends, strict=True)]
    lead = program.marks.steps().lead
    assert lead[:-1] == pytest.approx(true[1:], abs=10_000)
    assert lead[-1] < 10_000  # the last one found the device idle
    assert true[-1] > 300_000


def test_a_device_that_waits_gives_no_lead(program: Program) -> None:
    small = torch.ones(8, device="cuda")
    for _ in range(40):
        small = small + 1
        program.works(2 * MS)
        keepbusy.step()
    run = program.ended()
    assert run.no_lead == 1
    assert run.lead < 50_000


def test_input_waits_are_timed(program: Program) -> None:
    class Slow(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> torch.Tensor:
            program.works(MS)
            return torch.ones(8)

    for batch in torch.utils.data.DataLoader(Slow(), batch_size=2):
        batch.cuda()
        program.works(3 * MS)
        keepbusy.step()
    run = program.ended()
    assert run.input == pytest.approx(2 * MS, rel=0.1)
    assert run.step == pytest.approx(5 * MS, rel=0.1)


def test_input_that_another_thread_fetches_holds_up_nobody(program: Program) -> None:
    loader = torch.utils.data.DataLoader(torch.ones(40, 8), batch_size=2)
    fetched = threading.Thread(target=lambda: list(loader))
    fetched.start()
    fetched.join()
    assert program.marks.pauses.now["input"] == 0


def test_checkpoints_are_timed(program: Program) -> None:
    for step in range(60):
        program.works(5 * MS)
        if step % 20 == 19:
            torch.save(torch.ones(4), Slowly(program))
        keepbusy.step()
    (stall,) = program.ended().stalls
    assert (stall.what, stall.count, stall.every) == ("checkpoint", 3, 20.0)


def test_the_collector_is_timed(program: Program) -> None:
    gc.callbacks.insert(len(gc.callbacks) - 1, lambda *_: program.works(30 * MS))
    gc.collect()
    del gc.callbacks[-2]
    assert program.marks.pauses.now["garbage collection"] >= 30 * MS


def test_a_loader_within_a_loader_is_one_wait(program: Program) -> None:
    class Inner(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            program.works(MS)
            return torch.ones(8)

    class Outer(Inner):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.cat(list(torch.utils.data.DataLoader(Inner())))

    began = program.program.now()
    list(torch.utils.data.DataLoader(Outer()))
    assert 16 * MS <= program.marks.pauses.now["input"] <= program.program.now() - began


class Slowly(io.BytesIO):
    """A disk that takes 50 ms for whatever is written."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def write(self, data: object) -> int:
        self.program.works(50 * MS)
        return super().write(data)  # type: ignore[arg-type]


def test_everything_is_put_back(machine: object) -> None:
    def touched() -> list[object]:
        from torch.optim import optimizer
        from torch.utils.data import dataloader

        return [
            nn.Module.__call__, torch.save, torch.amp.GradScaler.step, torch.optim.Optimizer.__init__,
            dataloader._BaseDataLoaderIter.__next__, dataloader.DataLoader.__iter__,
            dict(optimizer._global_optimizer_post_hooks), list(gc.callbacks), list(keepbusy.instrument.ENDED),
        ]  # fmt: skip

    before = touched()
    with Program(machine) as program:
        for _ in range(3):
            trainer()[1]()
        assert touched() != before
    program.marks.end()
    assert touched() == before


def test_what_somebody_else_has_replaced_meanwhile_is_left_to_him(machine: object) -> None:
    original = torch.save
    with Program(machine):
        ours = torch.save

        def theirs(*args: object, **kwargs: object) -> None:
            ours(*args, **kwargs)

        torch.save = theirs
    assert torch.save is theirs
    torch.save = original


def test_the_programs_random_numbers_and_results_are_its_own(machine: object) -> None:
    def trained() -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(3)
        model, step = trainer(kind=torch.optim.Adam)
        for _ in range(5):
            step()
        return [one.detach().sum().item() for one in model.parameters()], torch.get_rng_state()

    alone = trained()
    with Program(machine):
        marked = trained()
    assert marked[0] == alone[0]
    assert torch.equal(marked[1], alone[1])


def test_modules_and_optimizers_are_pickled_without_us(program: Program) -> None:
    model, step = trainer()
    step()
    bare = nn.Linear(4, 4)
    bare(torch.ones(4))
    for one in (model, bare, torch.optim.SGD(bare.parameters(), lr=0.1)):
        assert b"keepbusy" not in pickle.dumps(copy.deepcopy(one))


def test_what_goes_wrong_in_a_mark_does_not_reach_the_program(machine: object) -> None:
    class Broken:
        def ready(self) -> bool:
            raise RuntimeError("out of order")

    marks = Marks(device=Broken())  # type: ignore[arg-type]
    marks.begin()
    _, step = trainer()
    for _ in range(3):
        step()
    marks.end()
    assert marks.run().fault == "RuntimeError: out of order"


def test_what_goes_wrong_in_who_is_told_does_not_either(machine: object) -> None:
    def bad(_count: int) -> None:
        raise ValueError("mine")

    marks = Marks(bad)
    marks.begin()
    _, step = trainer()
    for _ in range(3):
        step()
    marks.end()
    assert marks.fault == "ValueError: mine"
    assert marks.count == 1  # which ends the marks


def test_an_interrupt_is_the_programs_own(machine: object) -> None:
    def interrupted(_count: int) -> None:
        raise KeyboardInterrupt

    marks = Marks(interrupted)
    marks.begin()
    _, step = trainer()
    with pytest.raises(KeyboardInterrupt):
        step()
    marks.end()


def test_steps_looked_at_closely_are_no_plain_ones(program: Program) -> None:
    for step in range(120):
        program.works(25 * MS if 50 <= step < 60 else 10 * MS)
        keepbusy.step()
        if step in (49, 59 - SETTLING_MARKS):  # as who looks does, once a step has ended; it takes a while to be over
            program.marks.look_closely(step == 49)
    run = program.ended()
    assert program.marks.plain_step() == pytest.approx(10 * MS, rel=0.01)
    assert run.steps + run.warm_up == 119 - 10


def test_a_run_is_steady_or_it_is_not(program: Program) -> None:
    assert not program.marks.are_steady()
    for _ in range(20):
        program.works(10 * MS)
        keepbusy.step()
    assert program.marks.are_steady()
    for work in (40 * MS, 10 * MS):  # the device tells of a step once the next one has ended
        program.works(work)
        keepbusy.step()
    assert not program.marks.are_steady()


def test_a_processor_that_others_take_is_counted(machine: object, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = iter([5 * MS, 5 * MS + 250 * MS])
    monkeypatch.setattr("keepbusy.recording.step_clock.without_processor", lambda thread: next(waited))
    with Program(machine) as program:
        for _ in range(101):
            program.works(10 * MS)
            keepbusy.step()
    assert program.marks.run().delayed == pytest.approx(0.25, rel=0.01)


def test_linux_counts_how_long_a_thread_had_no_processor() -> None:
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("nobody counts it here")
    assert 0 <= without_processor(threading.get_native_id()) <= without_processor(threading.get_native_id())
    assert without_processor(2**30) == -1


def test_of_very_many_turns_a_loader_keeps_means_of_neighbours(machine: object) -> None:
    """Every turn that waits for nothing takes 5 ms, but each 100th takes 2 s."""
    now = [0]
    loaders, pauses = Loaders(clock=lambda: now[0]), Pauses(lambda: now[0])
    pauses.came = loaders.came
    loaders.begin()
    pauses.begin()
    try:
        for number, _ in enumerate(DataLoader(range(3 * KEPT_TURNS))):
            now[0] += 2_000 * MS if number % 100 == 0 else 5 * MS
    finally:
        loaders.end()
        pauses.end()
    [use] = loaders.used()
    assert (use.batches, use.passes, use.each, len(use.turns)) == (3 * KEPT_TURNS, 1, 4, (3 * KEPT_TURNS - 1) // 4)
    assert use.turn == 5 * MS
    assert max(use.turns) == (2_000 + 3 * 5) * MS // 4


class OwnFiles(IterableDataset):  # type: ignore[type-arg]
    """Each worker reads files of its own, and there are two."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        about = get_worker_info()
        assert about is not None
        return iter(torch.ones(6 if about.id < 2 else 0, 3))


def test_workers_that_gave_batches_are_counted(machine: object) -> None:
    loaders, pauses = Loaders(clock=time.perf_counter_ns), Pauses(time.perf_counter_ns)
    pauses.came = loaders.came
    loaders.begin()
    pauses.begin()
    try:
        assert len(list(DataLoader(OwnFiles(), num_workers=3, batch_size=2))) == 6
    finally:
        loaders.end()
        pauses.end()
    [use] = loaders.used()
    assert (use.workers, use.busy, use.idle, use.batches) == (3, 2, 1, 6)


def test_whoever_looks_on_finds_the_latest_figures(machine: object, tmp_path: Path) -> None:
    clock = iter(range(0, 10**12, MS))
    marks = Marks(clock=lambda: next(clock), live=tmp_path / "live")
    marks.begin()
    for _ in range(100):
        keepbusy.step()
    marks.leave_figures()
    marks.end()
    figures = FiguresFile(tmp_path / "live").read()
    assert figures is not None
    assert figures.steps == 100
    assert 0 < figures.low <= figures.step <= figures.high


COMPILED = """\
import torch
from torch import nn
from keepbusy.recording.step_clock import Marks

marks = Marks()
marks.begin()
model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager", fullgraph=True)
calls = torch.compile(lambda x: model(x) + 1, backend="eager", fullgraph=True)
x = torch.ones(2, 4)
for _ in range(3):
    model(x)
print(marks.count)
for _ in range(3):
    calls(x)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = torch.compile(lambda: optimizer.step(), backend="eager")
before = marks.count
for _ in range(3):
    model(x).sum().backward()
    step()
print(marks.count - before, torch._dynamo.utils.counters["stats"]["unique_graphs"])
marks.end()
"""
"""PyTorch's compiler, on the CPU: the virtual GPU passes it by."""


def mentions_us(text: str) -> bool:
    """Whether our sources stand in it; a clone's folder may have any name, ours too."""
    return str(SOURCES / "keepbusy") in text or "keepbusy." in text.replace(str(SOURCES), "")


def test_what_is_compiled_is_compiled_as_ever() -> None:
    """The compiler does not see the wrapper around the outermost call, nor what stands behind the optimizer's hook."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=PATIENCE, env=environment
    )
    assert done.stdout.splitlines() == ["3", "3 3"], done.stderr
    assert not mentions_us(done.stderr)


FAILS = """\
import torch

class Bad(torch.nn.Module):
    def forward(self, x):
        torch.save(x, "/nowhere/at/all.pt")

Bad()(torch.ones(1))
"""


def test_an_error_of_the_programs_shows_nothing_of_ours(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILS)
    code = (
        "import sys; from pathlib import Path; from keepbusy.instrument import script; "
        "from keepbusy.recording.step_clock import Marks; "
        "Marks().begin(); sys.exit(script.run_file(Path(sys.argv[1]), []))"
    )
    done = warm().python("-c", code, str(tmp_path / "train.py"), cwd=tmp_path)
    assert done.returncode == 1
    assert "RuntimeError: Parent directory" in done.stderr
    assert ", line 7, in <module>" in done.stderr
    assert not mentions_us(done.stderr)
