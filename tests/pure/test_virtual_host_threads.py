"""Host time: the program's own where it counts, PyTorch's dispatches at least, and nothing of ours."""

from __future__ import annotations

import os
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from keepbusy.virtual.clock import real_time
from keepbusy.virtual.clock.host_thread import HOOK_LIMIT, NOISE_LIMIT, HostThread
from keepbusy.virtual.clock.real_time import HostTime, PlaceSampler, UncountedWork
from keepbusy.virtual.clock.rows import Rows

US = 1_000


class Watch:
    """A clock that somebody sets."""

    def __init__(self) -> None:
        self.time = 0

    def __call__(self) -> int:
        return self.time


def thread(real: Watch | None) -> HostThread:
    return HostThread(Rows(), lane=0, real=real)


def operator(host: HostThread, watch: Watch, program: int, least: int = 10 * US, ours: int = 900 * US) -> int:
    """The program runs, calls us, and we compute: what is written down for it."""
    watch.time += program
    host.pause()
    watch.time += ours
    spent = host.take_dispatch_time("train.py:3", least)
    host.resume()
    return spent


def test_a_dispatch_takes_what_it_takes_there_and_more_work_counts() -> None:
    watch = Watch()
    host = thread(watch)
    assert operator(host, watch, 4 * US) == 10 * US
    assert operator(host, watch, 2 * NOISE_LIMIT) == 2 * NOISE_LIMIT


def test_of_a_short_stretch_the_shortest_of_the_last_passes_counts() -> None:
    """A cold cache and a busy neighbour lengthen one pass, not all of them."""
    watch = Watch()
    host = thread(watch)
    assert [operator(host, watch, us * US) for us in (40, 90, 300, 80, 85, 95)] == [
        one * US for one in (40, 40, 40, 80, 80, 80)
    ]


def test_while_pytorch_is_at_work_by_itself_its_time_is_modelled() -> None:
    watch = Watch()
    host = thread(watch)
    host.in_library = True
    assert operator(host, watch, 2 * NOISE_LIMIT) == 10 * US
    assert operator(host, watch, 2 * HOOK_LIMIT) == 2 * HOOK_LIMIT  # a hook that reads a file
    watch.time += NOISE_LIMIT
    host.pause()
    assert host.take_border_time() == 0
    host.in_library = False
    host.unwritten_time = 0
    host.resume()
    assert operator(host, watch, 20 * US) == 20 * US


def test_what_a_row_shows_already_is_part_of_the_dispatch() -> None:
    watch = Watch()
    host = thread(watch)
    watch.time += 7 * US
    assert host.take_border_time() == 7 * US
    assert operator(host, watch, 1 * US) == 3 * US
    watch.time += 25 * US
    assert host.take_border_time() == 25 * US
    host.unwritten_time -= 30 * US  # more than the program has had since then was ours
    assert operator(host, watch, 1 * US) == 0
    assert operator(host, watch, 1 * US) == 10 * US


def test_views_add_to_the_dispatch_and_our_own_part_is_left_out() -> None:
    watch = Watch()
    host = thread(watch)
    host.modelled_time += 6 * US
    assert operator(host, watch, 1 * US) == 16 * US
    watch.time += 55 * US
    host.unwritten_time -= 30 * US
    host.pause(overhead=5 * US)
    assert host.take_dispatch_time("elsewhere", 10 * US) == 20 * US


def test_a_look_at_the_program_parts_its_time() -> None:
    watch = Watch()
    host = thread(watch)
    watch.time += 2 * NOISE_LIMIT
    host.pause()
    assert host.take_time_until(NOISE_LIMIT) == NOISE_LIMIT
    assert host.take_time_until(NOISE_LIMIT) == 0  # it was told already
    assert host.take_dispatch_time("here", 10 * US) == NOISE_LIMIT


def test_without_a_clock_only_modelled_time_passes() -> None:
    host = thread(None)
    host.modelled_time += 30
    assert host.take_border_time() == 30
    host.modelled_time += 5
    assert host.take_dispatch_time("here", 10) == 15


def test_the_clock_of_a_thread_that_has_ended_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes over from it asks its clock once more; what it waited for a core is what it was."""

    def gone(*_: int) -> bytes:
        raise ProcessLookupError(3, "No such process")

    time = HostTime()
    waited = time._waited
    monkeypatch.setattr(os, "pread", gone)
    assert time.without_core() == waited


@pytest.mark.parametrize("content", [None, b"", b"its own", b"all of its own"])
def test_the_program_may_close_what_its_clock_reads(content: bytes | None, tmp_path: Path) -> None:
    """And have a file of its own by that number."""
    time = HostTime()
    waited, number = time._waited, time._file
    os.close(number)
    if content is not None:
        (tmp_path / "own").write_bytes(content)
        own = os.open(tmp_path / "own", os.O_RDONLY)
        os.dup2(own, number)
    for _ in range(2):
        assert time.without_core() >= waited
    assert time._file == -1
    if content is not None:
        assert os.read(number, 99) == content
        os.close(number)
        os.close(own)


def place_in(file: str) -> tuple[CodeType, int]:
    """An instruction of that file's third line."""
    code = compile("import sys\n\nframe = sys._getframe()", file, "exec")
    return code, next(begin for begin, _, line in code.co_lines() if line == 3)


def seen(moves: bool = False, pauses: int = 0, file: str = "/work/loader.py") -> UncountedWork:
    """A program that is seen a hundred times, once the clock runs, with 5 ms of a processor each time."""
    host = thread(None)
    host.work(1 * US)
    host.pauses = pauses
    looks = UncountedWork(host)
    for _ in range(101):
        looks.see([place_in(file)], 5_000 * US)
        host.work(US if moves else 0)
    return looks


def test_work_on_which_a_modelled_clock_stands_still_is_told() -> None:
    assert "leaves out at least 0.5 s" in seen().sentence()
    assert "loader.py:3 (0.5 s)" in seen().sentence()


@pytest.mark.parametrize(
    "given",
    [
        {"moves": True},  # it calls operators
        {"pauses": 1},  # we compute their values
        {"file": "<frozen importlib._bootstrap>"},
        {"file": real_time.__file__},
    ],
)
def test_what_the_clock_counts_or_is_ours_is_not(given: dict[str, Any]) -> None:
    assert seen(**given).sentence() == ""


def test_a_loaders_workers_are_at_work_side_by_side() -> None:
    looks = UncountedWork(thread(None))
    looks.add_batches([1_500_000 * US, 2_500_000 * US], workers=4)
    assert "leaves out at least 1.0 s" in looks.sentence()
    assert "chiefly the loader's workers (1.0 s)" in looks.sentence()


def sampler_of_this_thread(place: Any = lambda frame: frame.f_lineno) -> tuple[PlaceSampler, HostThread]:
    time = HostTime()
    host = HostThread(Rows(), lane=0, real=time)
    return PlaceSampler(host, time, place), host


def test_where_the_program_is_within_a_call_of_ours_is_none_of_its_lines() -> None:
    sampler, host = sampler_of_this_thread()
    host.pause()
    sampler.sample()
    assert sampler.take() == (0, [])
    host.resume()
    sampler.sample()
    assert len(sampler.take()[1]) == 1


def test_what_the_program_does_during_a_look_is_not_what_the_look_cost() -> None:
    """On a busy machine it may be a whole stretch of its work, and all of it was once taken off."""

    def work_meanwhile(_: Any) -> int:
        return sum(range(400_000)) and 7

    sampler, _ = sampler_of_this_thread(work_meanwhile)
    begun = real_time.perf_counter_ns()
    sampler.sample()
    took = real_time.perf_counter_ns() - begun
    cost, [(_, place)] = sampler.take()
    assert place == 7
    assert cost < took / 2


def test_the_program_is_looked_at_before_anything_lets_it_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a file gives the interpreter to the program, which on a busy machine was at its next line afterwards."""
    sampler, _ = sampler_of_this_thread(lambda _: line)
    line = 7

    def read_meanwhile(*_: Any) -> bytes:
        nonlocal line
        line = 8
        return b"0 0 0"

    monkeypatch.setattr(os, "pread", read_meanwhile)
    sampler.sample()
    assert [place for _, place in sampler.take()[1]] == [7]
