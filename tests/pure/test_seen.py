"""Lines seen while a window was open: how long the program was at each, and where that stands in a trace."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keepbusy.recording.line_log import (
    ENTER,
    LEAVE,
    LINE,
    LINES,
    NOTHING,
    LineRecord,
    Log,
    follower,
)
from keepbusy.recording.recorded_run import placed, trace_offset
from keepbusy.recording.windows import Tick
from keepbusy.timeline.frame_roles import OWN_STEP, Owner, described
from keepbusy.timeline.model import Frames
from keepbusy.traces.kineto_names import Category
from keepbusy.traces.trace_file import Events, Thread, Trace

MAIN, HELPER, LIBRARY = 0, 1, 2
CODES = (("train.py", "main", 0), ("train.py", "helper", 0), ("torch/nn/utils/clip_grad.py", "clip", 35))


def seen(*entries: tuple[int, int, int, int], until: int = 1000, thread: int = 7) -> LineRecord:
    """Entries of one thread: time, what, code, line."""
    rows = [(time, thread, what, code, line) for time, what, code, line in entries]
    return LineRecord(np.array(rows, np.int64).reshape(-1, 5).T, CODES, until)


def told(one: LineRecord) -> list[tuple[str, int, int]]:
    return sorted((one.written(each.code, each.line), each.start, each.end) for each in one.stretches())


def test_a_line_lasts_until_the_next_of_its_function() -> None:
    log = seen((0, ENTER, MAIN, 0), (0, LINE, MAIN, 3), (10, LINE, MAIN, 4), (30, LEAVE, MAIN, 0))
    assert told(log) == [("train.py(3): main", 0, 10), ("train.py(4): main", 10, 30)]


def test_a_line_lasts_as_long_as_what_it_calls() -> None:
    log = seen(
        (0, ENTER, MAIN, 0), (0, LINE, MAIN, 3),
        (5, ENTER, HELPER, 0), (6, LINE, HELPER, 9), (20, LEAVE, HELPER, 0),
        (30, LINE, MAIN, 4), (40, LEAVE, MAIN, 0),
    )  # fmt: skip
    assert told(log) == [("train.py(3): main", 0, 30), ("train.py(4): main", 30, 40), ("train.py(9): helper", 6, 20)]


def test_a_function_that_an_exception_ended_is_closed_by_the_next_line_outside() -> None:
    log = seen(
        (0, ENTER, MAIN, 0), (0, LINE, MAIN, 3), (5, ENTER, HELPER, 0), (6, LINE, HELPER, 9), (20, LINE, MAIN, 4)
    )  # fmt: skip
    assert ("train.py(9): helper", 6, 20) in told(log)


def test_a_function_that_calls_itself_returns_to_itself() -> None:
    log = seen(
        (0, ENTER, HELPER, 0), (0, LINE, HELPER, 9), (10, ENTER, HELPER, 0), (11, LINE, HELPER, 8),
        (20, LEAVE, HELPER, 0), (30, LEAVE, HELPER, 0),
    )  # fmt: skip
    assert told(log) == [("train.py(8): helper", 11, 20), ("train.py(9): helper", 0, 30)]


def test_what_was_open_when_the_profiler_stopped_was_so_until_then() -> None:
    assert told(seen((0, ENTER, MAIN, 0), (0, LINE, MAIN, 3), until=70)) == [("train.py(3): main", 0, 70)]


def test_of_pytorchs_own_code_the_function_is_told() -> None:
    log = seen((0, ENTER, LIBRARY, 0), (10, LEAVE, LIBRARY, 0))
    assert told(log) == [("torch/nn/utils/clip_grad.py(35): clip", 0, 10)]


def test_a_log_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    log = seen((0, ENTER, MAIN, 0), (0, LINE, MAIN, 3), (10, LEAVE, MAIN, 0))
    log.save(tmp_path / "lines.npz")
    assert told(LineRecord.load(tmp_path / "lines.npz")) == told(log)


def trace(*rows: tuple[str, int, int]) -> Trace:
    """Operators of thread 7, by name, start and end."""
    names = tuple(dict.fromkeys(name for name, _, _ in rows))
    events = Events.of(
        len(rows),
        category=Category.OPERATOR,
        name=np.array([names.index(name) for name, _, _ in rows]),
        start=np.array([start for _, start, _ in rows]),
        end=np.array([end for _, _, end in rows]),
    )
    return Trace("window.json", events, names, (Thread("7", "7", ""),), ())


def test_lines_are_placed_in_the_traces_own_time() -> None:
    operators = trace((f"{OWN_STEP}1", 5_000, 5_100), ("aten::add", 6_000, 7_000), (f"{OWN_STEP}2", 9_000, 9_100))
    log = seen((0, ENTER, MAIN, 0), (900, LINE, MAIN, 3), (2_100, LEAVE, MAIN, 0))
    whole = placed(operators, log, [Tick(1, -100, 300), Tick(2, 3_900, 4_300)])
    line = np.flatnonzero(whole.events.category == Category.LINE)
    assert [whole.names[name] for name in whole.events.name[line]] == ["train.py(3): main"]
    assert whole.events.start[line] < 6_000
    assert whole.events.end[line] >= 7_000
    marks = np.array([name.startswith(OWN_STEP) for name in whole.names])[whole.events.name]
    assert (whole.events.category[marks] == Category.ANNOTATION).all()


@pytest.mark.parametrize("shift", [-700, 0, 1_234_567_890_123])
def test_the_clocks_are_aligned_where_no_line_begins_within_an_operator(shift: int) -> None:
    begins = np.arange(1_000, 60_000, 1_000)
    rows = [(f"{OWN_STEP}1", shift + 500, shift + 600)]
    rows += [("aten::add", shift + begin + 200, shift + begin + 900) for begin in begins.tolist()]
    found = trace_offset(trace(*rows), [Tick(1, 500 - 2_000, 500 + 2_000)], {0: begins})
    assert abs(found - shift) % 1_000 in range(901) or abs(found - shift) <= 200


def test_a_trace_without_our_marks_stays_without_lines() -> None:
    log = seen((0, ENTER, MAIN, 0), (0, LINE, MAIN, 3))
    assert not (placed(trace(("aten::add", 0, 10)), log, []).events.category == Category.LINE).any()


def program(log: Log, hot: int) -> tuple[int, int]:
    """A user's program, with a window over all of it: where its loop stands, and its end."""
    source = "def main(follow):\n    follow.begin()\n    total = 0\n    for one in range(HOT):\n        total += one\n"
    source += "    total += sum(one for one in range(HOT))\n    follow.end()\n    return total\n"
    names: dict[str, object] = {"HOT": hot}
    exec(compile(source, "/home/user/train.py", "exec"), names)
    names["main"](follower(log))  # type: ignore[operator]
    return 5, 7


def test_the_interpreter_tells_each_line_once_it_begins() -> None:
    if sys.gettrace() is not None:
        pytest.skip("somebody else traces this process")
    log = Log(count().__next__)
    program(log, 3)
    mine = [
        line for _, _, what, code, line in log.rows().tolist() if log.codes[code].co_name == "main" and what == LINE
    ]
    assert mine == [2, 3, 4, 5, 4, 5, 4, 5, 4, 6, 7]
    assert sys.gettrace() is None
    assert set(log.rows()[:, 1].tolist()) == {threading.get_native_id()}


class Held:
    """What a weak reference can tell of."""


def test_what_a_function_holds_goes_with_it_while_the_window_is_open() -> None:
    if sys.gettrace() is not None:
        pytest.skip("somebody else traces this process")
    watching = follower(Log(count().__next__))
    names: dict[str, Any] = {"Held": Held, "begin": watching.begin, "ref": weakref.ref}
    source = "def load():\n    held = Held()\n    begin()\n    return ref(held)\n"
    exec(compile(source, "/home/user/train.py", "exec"), names)
    collects = gc.isenabled()
    gc.disable()
    try:
        assert names["load"]()() is None
    finally:
        watching.end()
        if collects:
            gc.enable()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="sys.monitoring follows all threads")
def test_a_thread_that_is_not_followed_is_not_said_to_stand_still() -> None:
    """It would have been entered, and would never leave."""
    names: dict[str, threading.Event] = {"here": threading.Event(), "over": threading.Event()}
    source = "def work():\n    here.set()\n    over.wait()\n"
    exec(compile(source, "/home/user/helper.py", "exec"), names)
    other = threading.Thread(target=names["work"])  # type: ignore[arg-type]
    other.start()
    names["here"].wait()
    log = Log(count().__next__)
    program(log, 3)
    names["over"].set()
    other.join()
    assert set(log.rows()[:, 1].tolist()) == {threading.get_native_id()}


def test_a_loop_in_pure_python_does_not_fill_the_log() -> None:
    if sys.gettrace() is not None:
        pytest.skip("somebody else traces this process")
    log = Log(count().__next__)  # a clock under which everything is quick
    program(log, 50_000 if sys.version_info >= (3, 12) else 20_000)  # sys.settrace tells each of its lines
    rows = [(log.codes[code].co_name, what, line) for _, _, what, code, line in log.rows().tolist()]
    inner = sum(name == "<genexpr>" for name, _, _ in rows)
    assert inner < 10_000
    if sys.version_info >= (3, 12):
        assert len(log) < 20_000
    assert [line for name, what, line in rows if name == "main" and what == LINE][-1] == 7


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.settrace tells each line")
def test_a_batch_that_is_made_line_by_line_does_not_fill_the_log() -> None:
    """However slow its lines are, as those that call NumPy are."""
    log = Log(count(step=10_000).__next__)
    program(log, 50_000)
    assert len(log) < 40_000
    assert log.rows()[-1, [2, 4]].tolist() == [LINE, 7]


def test_the_users_code_and_packages_are_followed_by_line_and_python_not_at_all() -> None:
    """Code that reads alike is told apart by where it stands."""
    log = Log()
    files = ("/home/user/train.py", "/usr/lib/python3/site-packages/lightning/loop.py", threading.__file__)
    codes = [compile("x = 1", file, "exec") for file in files]
    assert [log.detail(code) for code in codes] == [LINES, LINES, NOTHING]


def test_the_lines_of_what_is_installed_are_told_from_the_programs_own_folders() -> None:
    """`nets/solve.py` may be either; only where it lies tells."""
    log = Log()
    for folder in ("/usr/lib/python3/site-packages", "/home/user"):
        log.number(compile("x = 1", f"{folder}/nets/solve.py", "exec"))
    lines = [log.record().written(code, 3) for code in range(2)]
    owners = described(Frames.of(2, name=np.arange(2)), lines).owner
    assert owners.tolist() == [Owner.LIBRARY, Owner.USER]
    assert lines[0] == "site-packages/nets/solve.py(3): <module>"
