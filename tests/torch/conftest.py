"""Tests on the virtual GPU: eight of them, brought up once in the test process, with the host's random numbers."""

from __future__ import annotations

import gc
import os
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
from warm_python import SOURCES, Run, WarmPython, trying_out

torch = pytest.importorskip("torch")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.filterwarnings("default"))  # PyTorch's own warnings are not ours to fix


@pytest.fixture(scope="session", autouse=True)
def machine():
    """The whole process has its virtual GPUs from here on."""
    if torch.version.cuda is not None and torch.cuda.is_available():
        pytest.skip("there is a real GPU here")
    for module in ("sympy", "torch._dynamo"):  # PyTorch imports them once the shape of a result is computed
        import_module(module)
    from keepbusy.program.lines import set_launcher
    from keepbusy.runtime.graph.graphed_step import ReplayWorth
    from keepbusy.virtual.clock.real_time import UncountedWork
    from keepbusy.virtual.virtual_run import Options, start

    UncountedWork.begin = lambda _: None  # its thread would look 200 times a second for as long as there are tests
    ReplayWorth.SLOWER = float("inf")  # what takes longer here depends on what else the machine does
    set_launcher()  # pytest's forty frames are no lines of a program
    gc.freeze()
    torch.set_num_threads(1)  # a sum comes out by how many share it, and tests share the processors as it is
    with trying_out():
        start(Options(devices=8, measured=False, script_clocks=False, one_generator=True))
    from keepbusy.virtual.machine import MACHINE

    MACHINE.notes = MACHINE.costs.notes = None  # a law that fails is a failed test
    return MACHINE


@pytest.fixture(scope="module", autouse=True)
def empty_clock(machine):
    """As in a forked process: who reads the timeline of a file's tests need not go through all files before it."""
    from keepbusy.runtime.readback import readback_stream

    machine._begin()
    readback_stream.cache_clear()  # it was one of the clock before, as is PyTorch's own for captures
    torch.cuda.graph.default_capture_stream = None


@pytest.fixture
def run(tmp_path: Path, warm_python: WarmPython) -> Run:
    """Write a script and run it with `keepbusy run`, in a folder and a process of its own."""

    def run(
        source: str, *arguments: str, before: tuple[str, ...] = ("--clock", "modelled"), agent: bool = False
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(source)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCES), str(tmp_path)])}
        return warm_python.keepbusy("run", *before, "train.py", *arguments, cwd=tmp_path, env=environment, agent=agent)

    return run
