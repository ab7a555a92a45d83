"""What the profiler saw in a window, matched with the log of the same calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from handwritten_log import US, HandwrittenLog, keys_of

from keepbusy.log.log_file import DriverLog
from keepbusy.log.profiler_window import CallOperators, Operators, learn_from_windows

AHEAD = 5_000_000
"""Microseconds by which the profiler's clock is ahead of the log's."""
ITERATION = ((1, 3.0), (2, 5.0), (1, 4.0))
"""Grids of an iteration's kernels, and how long they take."""


def written_log(iterations: int) -> DriverLog:
    written = HandwrittenLog()
    for _ in range(iterations):
        for grid, _ in ITERATION:
            written.call("launch", grid, took=2, stack=grid)
            written.now += 40
    log = written.log()
    log.threads.append({"thread": 0, "id": 77, "since": 0})
    return log


def window(log: DriverLog, first: int, last: int, late: float = 0.0) -> list[dict[str, Any]]:
    """Of these rows. `late`: microseconds by which the clocks differ from what is said of them."""
    events: list[dict[str, Any]] = []
    for row in range(first, last):
        call, began = log.calls[int(log.rows["call"][row])], int(log.begin[row]) / US + AHEAD + late
        lasts = dict(ITERATION)[call.grid[0]]
        shape = {"correlation": row, "stream": 7, "grid": list(call.grid), "block": list(call.block)}
        args = {"correlation": row}
        events += [
            {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": began, "dur": 2, "args": args},
            {"cat": "kernel", "name": f"kernel {call.grid[0]}", "ts": began + 6, "dur": lasts, "args": shape},
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "tid": 77, "ts": began - 1, "dur": 5, "args": {}},
            {"ph": "X", "cat": "cpu_op", "name": "aten::randn", "tid": 77, "ts": began + 5, "dur": 12, "args": {}},
        ]
    return events


def learned(log: DriverLog, events: list[dict[str, Any]], folder: Path, text: str = "") -> Any:
    content = text or json.dumps({"baseTimeNanoseconds": 9_000, "traceEvents": events})
    (folder / "window0.json").write_text(content)
    wall, clock = 9_000 + AHEAD * US, 0
    return learn_from_windows(log, folder, [{"wall": wall, "clock": clock}])


@pytest.mark.parametrize("late", [0.0, 7.0, -9.0])
def test_kernels_are_timed_and_named_though_the_clocks_differ_by_less_than_an_iteration(
    late: float, tmp_path: Path
) -> None:
    log = written_log(10)
    times, _ = learned(log, window(log, 9, 21, late), tmp_path)
    assert {log.calls[call].grid[0]: took / US for (call, _, _), took in times.durations.items()} == {1: 4.0, 2: 5.0}
    assert sorted(times.names.values()) == ["kernel 1", "kernel 2"]


def test_a_kernel_whose_call_the_profiler_misses_is_known_by_the_order(tmp_path: Path) -> None:
    log = written_log(10)
    events = [
        one
        for one in window(log, 9, 21)
        if not (one["cat"] == "cuda_runtime" and one["args"]["correlation"] == 13)  # the only one of its shape, twice
    ]
    times, _ = learned(log, events, tmp_path)
    assert {log.calls[call].grid[0] for call, _, _ in times.durations} == {1, 2}


def test_the_same_call_is_made_in_the_same_operators_all_along(tmp_path: Path) -> None:
    log = written_log(10)
    _, operators = learned(log, window(log, 9, 21), tmp_path)
    keys = keys_of(log)
    assert {operators.of(key) for key in keys[1:]} == {Operators(("aten::mm",), 0)}
    [between] = {tuple(one) for one in operators.between.values()}
    assert [(one.name, one.begin, one.end) for one in between] == [("aten::randn", 3 / 40, 15 / 40)]


def test_a_kernel_is_launched_in_the_same_operators_with_a_grid_that_no_window_had(tmp_path: Path) -> None:
    log = written_log(10)
    _, operators = learned(log, window(log, 9, 21), tmp_path)
    known, other = keys_of(log)[1], len(log.calls) + 1
    operators.functions[other] = log.calls[known.call].function
    assert operators.of(known._replace(call=other)) == Operators(("aten::mm",), 0)
    assert operators.of(known._replace(call=other, stack=99)) == Operators()


def test_a_call_that_no_window_had_is_in_no_operator() -> None:
    assert CallOperators().of(keys_of(written_log(1))[0]) == Operators()


def test_of_a_damaged_window_the_whole_events_count(tmp_path: Path) -> None:
    log = written_log(10)
    bodies = [json.dumps(one)[1:-1] for one in window(log, 9, 21)]
    events = "\n  },\n  {".join([*bodies, '"name": "says \\"what" it likes"'])
    text = f'{{\n "baseTimeNanoseconds": 9000,\n "traceEvents": [\n  {{{events}'
    times, _ = learned(log, [], tmp_path, text)
    assert len(times.durations) == 2


def test_a_window_that_is_not_there_teaches_nothing(tmp_path: Path) -> None:
    times, operators = learn_from_windows(written_log(3), tmp_path, [{"wall": 0, "clock": 0}])
    assert not times.durations
    assert not operators.around
