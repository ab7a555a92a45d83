"""A program that is logged, without a GPU: what is noted of it, and when the profiler looks on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from warm_python import SOURCES, warm

from keepbusy.log import hostlog, kernel_windows
from keepbusy.log.kernel_windows import KernelWindows
from keepbusy.log.log_file import ROW, CallFlag, DriverLog, read_log
from keepbusy.log.program_log import FACTS, SAMPLES

pytestmark = pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="no C compiler")
BEGIN = """
import sys
from pathlib import Path
from keepbusy.log import program_log
log, why = program_log.start(Path(sys.argv[1]), with_children=True)
assert not why, why
"""


def logged(script: str, folder: Path, fresh: bool = False) -> tuple[dict, DriverLog, str]:
    """What it has left, and what it wrote to standard error. `fresh`: PyTorch is imported after the log began."""
    (folder / "script.py").write_text(f"{BEGIN}{textwrap.dedent(script)}\nlog.end()\n")
    (left := folder / "left").mkdir()
    if fresh:
        command, environment = [sys.executable, "script.py", left], {**os.environ, "PYTHONPATH": str(SOURCES)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    else:
        done = warm().python("script.py", str(left), cwd=folder)
    assert done.returncode == 0, done.stderr
    [process] = left.iterdir()
    assert (process / SAMPLES).exists()
    return json.loads((process / FACTS).read_text()), read_log(process), done.stderr


TRAINS = """
    import torch
    import keepbusy
    from torch.utils.data import DataLoader
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    def train(loader):
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()
            keepbusy.step()
    train(DataLoader(torch.ones(3, 4)))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, DriverLog, str]:
    return logged(TRAINS, tmp_path_factory.mktemp("trained"), fresh=True)


def test_what_pytorch_annotates_is_noted_with_the_lines_that_it_came_from(
    trained: tuple[dict, DriverLog, str],
) -> None:
    facts, log, said = trained
    assert facts["faults"] == []
    assert said == ""
    names = [facts["notes"][value] for value in log.rows["value"].tolist()]
    batch, step = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "Optimizer.step#SGD.step"
    one = [batch, "", "backward", "", step, "", "keepbusy.step#", ""]
    assert names == [*(one * 3), batch, ""]
    backward = int(log.rows["stack"][names.index("backward")])
    lines = [frame.function for frame in log.stacks[backward] if frame.file.endswith("script.py")]
    assert lines == ["train", "<module>"]


def test_what_loaders_do_is_known(trained: tuple[dict, DriverLog, str]) -> None:
    facts, _, _ = trained
    [loader] = facts["loaders"]
    assert (loader["batches"], loader["workers"]) == (3, 0)
    assert facts["torch"]
    assert facts["ended"] > facts["began"]


def test_the_compiler_makes_the_same_graphs(tmp_path: Path) -> None:
    compiles = """
    import torch
    from torch._dynamo.utils import counters
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())

    @torch.compile(backend="eager", fullgraph=True)
    def annotated(x):
        with torch.profiler.record_function("mine"):
            return x.sin() * 2

    @torch.compile(backend="eager")
    def step(x):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    annotated(torch.ones(3))
    for _ in range(3):
        step(torch.ones(2, 3))
    (Path(sys.argv[1]).parent / "graphs").write_text(f"{counters['stats']} {[*counters['graph_break'].values()]}")
    """
    facts, _, _ = logged(compiles, tmp_path)
    seen = (tmp_path / "graphs").read_text()
    assert "backward" in facts["notes"]
    plain = f"import sys\nfrom pathlib import Path\n{textwrap.dedent(compiles)}"
    assert warm().python("-c", plain, str(tmp_path / "left"), cwd=tmp_path).returncode == 0
    assert (tmp_path / "graphs").read_text() == seen


def test_a_child_that_is_forked_leaves_nothing_and_changes_nothing(tmp_path: Path) -> None:
    forks = f"""{TRAINS}
    import os
    if not (child := os.fork()):
        train(DataLoader(torch.ones(2, 4)))
        log.end()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    train(DataLoader(torch.ones(2, 4)))
    """
    facts, log, _ = logged(forks, tmp_path)
    assert facts["loaders"][0]["batches"] + facts["loaders"][-1]["batches"] in (5, 6, 10)
    assert (log.rows["value"] == facts["notes"].index("backward")).sum() == 5


class Windows(KernelWindows):
    """In place of the profiler there is nothing, and the clock is the test's."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.opened = self.cost = self.opening_costs = 0
        self.while_it_saves: Callable[[], object] = lambda: None

    def _open(self) -> None:
        self._profiler, self._since_opened = object(), []
        self._opened, self.opened = kernel_windows.time.perf_counter_ns(), self.opened + 1
        self.windows.append({})
        self.cost += self.opening_costs

    def _save(self) -> None:
        self.while_it_saves()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [0]
    monkeypatch.setattr(kernel_windows.time, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(kernel_windows.time, "thread_time_ns", lambda: 0)
    monkeypatch.setattr(kernel_windows, "uses_gpu", lambda: True)
    return now


class Launching:
    """A program that launches, and the thread that looks on every 50 ms."""

    def __init__(self, folder: Path, clock: list[int]) -> None:
        self.windows, self._folder, self._clock, self._count = Windows(folder), folder, clock, 0
        self.windows.windows.append({})  # as after a first one, which opens in the program's own thread

    def launch(self, calls: list[int], milliseconds: int, flags: int = 0, value: int = 0) -> None:
        self.write(calls, flags, value)
        self._clock[0] += milliseconds * 1_000_000
        self.windows.think()

    def write(self, calls: list[int], flags: int = 0, value: int = 0) -> None:
        rows = np.zeros(len(calls), ROW)
        rows["begin"], rows["call"] = np.arange(self._count + 1, self._count + 1 + len(calls)), calls
        rows["flags"], rows["value"] = flags, value
        self._count += len(calls)
        with (self._folder / "rows").open("ab") as file:
            file.write(rows.tobytes())


def test_a_window_opens_when_kernels_repeat_and_closes_after_two_iterations(tmp_path: Path, clock: list[int]) -> None:
    program, iteration = Launching(tmp_path, clock), [*range(1, 21)]
    open_for = []
    for _ in range(20):
        program.launch(iteration, 60)
        open_for.append(program.windows.is_open)
    assert program.windows.opened == 1
    assert open_for.index(True) in range(2, 6)
    assert open_for.count(True) in range(2, 5)


def test_new_kernels_are_worth_another_window_and_known_ones_are_not(tmp_path: Path, clock: list[int]) -> None:
    program = Launching(tmp_path, clock)
    for _ in range(20):
        program.launch([*range(1, 21)], 60)
    for _ in range(100):
        program.launch([*range(31, 61)], 60)
    assert program.windows.opened == 2
    for _ in range(100):
        program.launch([*range(1, 21), *range(31, 61)], 60)
    assert program.windows.opened == 2


def test_what_is_launched_while_a_window_closes_is_not_known(tmp_path: Path, clock: list[int]) -> None:
    program = Launching(tmp_path, clock)
    program.windows.while_it_saves = lambda: program.write([*range(31, 61)] * 20)
    for _ in range(20):
        program.launch([*range(1, 21)], 60)
    program.windows.while_it_saves = lambda: None
    for _ in range(100):
        program.launch([*range(31, 61)], 60)
    assert program.windows.opened == 2


def test_what_is_captured_has_not_run_and_each_graph_is_something_else(tmp_path: Path, clock: list[int]) -> None:
    program = Launching(tmp_path, clock)
    for _ in range(20):
        program.launch([*range(1, 21)], 60, flags=CallFlag.CAPTURED)
    assert program.windows.opened == 0
    for graph in (1, 2):
        for _ in range(40):
            program.launch([99] * 20, 60, flags=CallFlag.GRAPH, value=graph)
        assert program.windows.opened == graph


def test_a_short_training_after_a_long_start_is_seen(tmp_path: Path, clock: list[int]) -> None:
    """A model is built, then the optimizer imports for five seconds, then 40 iterations of 25 ms come."""
    program = Launching(tmp_path, clock)
    for _ in range(20):
        program.launch([*range(1, 21)], 25)
    opened = program.windows.opened
    for _ in range(100):
        program.launch([], 50)
    for _ in range(20):
        program.launch([*range(31, 61)], 25)
    assert program.windows.opened == opened + 1


def test_what_opening_a_window_costs_keeps_it_open_no_longer(
    tmp_path: Path, clock: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Launching(tmp_path, clock)
    program.windows.opening_costs = 20_000_000
    monkeypatch.setattr(kernel_windows.time, "thread_time_ns", lambda: program.windows.cost)
    open_for = []
    for _ in range(30):
        program.launch([*range(1, 21)], 30)
        open_for.append(program.windows.is_open)
    assert open_for.count(True) in range(2, 6)


@pytest.mark.parametrize("iterations", [5, 10, 60])
def test_iterations_repeat_whatever_was_launched_before_them(iterations: int) -> None:
    """As three layers that are built, each with the same twenty calls."""
    rows = np.zeros(60 + 100 * iterations, ROW)
    rows["call"] = [*[*range(1, 21)] * 3, *[*range(101, 201)] * iterations]
    assert kernel_windows._period(rows) == 100


def test_a_window_waits_for_kernels_that_repeat_though_others_were_launched_long_before(
    tmp_path: Path, clock: list[int]
) -> None:
    program = Launching(tmp_path, clock)
    program.launch([*range(1, 31)], 30)
    for _ in range(200):
        program.launch([], 50)
    program.launch([*range(31, 61)], 30)
    assert program.windows.opened == 0


def test_few_calls_at_a_time_are_gathered_before_the_first_window_as_well(tmp_path: Path, clock: list[int]) -> None:
    program = Launching(tmp_path, clock)
    program.windows.windows.clear()
    for _ in range(40):
        program.launch([*range(1, 13)], 50)
    assert program.windows.opened or program.windows._is_wanted  # as soon as the program's thread comes to it


def test_slow_iterations_that_launch_in_bursts_are_seen(tmp_path: Path, clock: list[int]) -> None:
    program = Launching(tmp_path, clock)
    for _ in range(20):
        program.launch([*range(1, 21)], 60)
    opened = program.windows.opened
    for _ in range(20):
        program.launch([*range(31, 61)], 30)
        for _ in range(10):
            program.launch([], 30)
    assert program.windows.opened == opened + 1


def test_windows_hold_up_little_of_a_run(tmp_path: Path, clock: list[int]) -> None:
    program = Launching(tmp_path, clock)

    def launches_ever_other_kernels(first: int) -> None:
        for number in range(first, first + 200):
            program.launch([*range(100 * number + 1, 100 * number + 31)] * 2, 1000)

    program.windows.held_up = 3_000_000_000
    launches_ever_other_kernels(0)
    assert program.windows.opened == 5
    clock[0] += 800_000_000_000
    launches_ever_other_kernels(200)
    assert program.windows.opened > 5


def test_kernels_that_never_repeat_are_recorded_all_the_same(tmp_path: Path, clock: list[int]) -> None:
    program = Launching(tmp_path, clock)
    for number in range(60):
        program.launch([*range(100 * number + 1, 100 * number + 31)], 60)
    assert program.windows.opened in range(1, 6)


def test_a_profiler_that_cannot_begin_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> None:
        raise TypeError("no such option")

    windows = KernelWindows(tmp_path)
    monkeypatch.setattr("torch.autograd.profiler.profile", fails)
    windows._is_wanted = True
    windows.open_if_wanted()
    assert windows.has_ended
    assert windows.fault == "TypeError: no such option"
    assert windows.windows == []
    windows.end()


def test_the_programs_own_profile_goes_first(tmp_path: Path) -> None:
    profiles = """
    import torch
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(3).sum()
    assert any("sum" in one.key for one in profile.key_averages())
    """
    facts, _, _ = logged(profiles, tmp_path)
    assert facts["profiled"] is True
    assert facts["windows"] == []


def test_without_a_compiler_it_is_said_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostlog, "LIBRARY", tmp_path / "none.so")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hostlog.shutil, "which", lambda _: None)
    assert hostlog.build() == "there is no C compiler; install gcc"


def test_the_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostlog, "LIBRARY", tmp_path / "none.so")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hostlog.build() == ""
    [made] = (tmp_path / "keepbusy").iterdir()
    monkeypatch.setattr(hostlog.shutil, "which", lambda _: None)
    assert hostlog.build() == ""
    assert [*made.parent.iterdir()] == [made]
