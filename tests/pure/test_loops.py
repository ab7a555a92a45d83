"""Which loops a line is in, which loop a jump back belongs to, and what is noted when the program is looked at."""

from __future__ import annotations

import _thread
import gc
import sys
import threading
import weakref
from dataclasses import dataclass
from itertools import pairwise
from types import CodeType
from typing import Any

import pytest
from warm_python import PATIENCE
from watched import codes_of, loops_of_jumps, targets

from keepbusy.instrument.loops import (
    BESIDE_EVERY,
    DEEPEST,
    ENTRIES_IN_A_ROW,
    TURNS_IN_A_ROW,
    Line,
    Looks,
    LoopWatch,
    TurnCounters,
)
from keepbusy.instrument.source_loops import SourceLoops

COUNTS = sys.version_info >= (3, 12)
counting = pytest.mark.skipif(not COUNTS, reason="turns are counted from Python 3.12 on")


def around(text: str, line: int, function: str = "<module>") -> list[int]:
    loops = SourceLoops(lambda file: text)
    return [loop.first for loop in loops.around(codes_of(text)[function], line)]


# where a line stands

NESTED = """\
for epoch in range(3):
    while more():
        for batch in loader:
            train(batch)
    save()
else:
    test()
done()
"""


@pytest.mark.parametrize(
    ("line", "first_lines"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 3]), (5, [1]), (7, []), (8, [])]
)
def test_the_loops_around_a_line(line: int, first_lines: list[int]) -> None:
    """What stands under `else` is no part of a turn."""
    assert around(NESTED, line) == first_lines


DECISIONS = """\
while bound.item() > 0:
    if piece.item() == BLANK:
        break
    ended = wrong.any(
    ).item()
    if ended and tired:
        state = reset(state)
    if not finite.item():
        raise ValueError(f"turn {turn}")
    if loss.item() > worst:
        worst = turn
        print(turn)
    else:
        log.warning("better")
    weight = 1.0 if loss.item() > 2 else decay(turn)
    total += loss.item()
    if turn % 100 == 0:
        print(total)
"""


def test_lines_that_decide_what_comes_next() -> None:
    """A test, and what the next statement tests. What is only raised, said or noted can wait."""
    sources = SourceLoops(lambda file: DECISIONS)
    code = codes_of(DECISIONS)["<module>"]
    assert [line for line in range(1, 19) if sources.decides(code, line)] == [1, 2, 4, 5, 6, 15]


ON_ONE_LINE = """\
if turn % 2 == 0: print(float(y.sum()))
if turn % 2 == 0: total += y.item()
shown = float(y) if turn % 2 else 0.0
if y.item() > 0: state = reset(state)
if y > 0: state = reset(state)
while y.item() > 0: y = halve(y)
if (
    turn % 2
    and y.item() > 0
): state = reset(state)
if y.sum() > 0: print("late", y.item())
small = 1.0 if y > 2 else decay(turn)
"""


def test_a_line_decides_by_what_its_test_reads() -> None:
    """Not by what is read in the statement beside the test, which may only be said."""
    sources = SourceLoops(lambda file: ON_ONE_LINE)
    code = codes_of(ON_ONE_LINE)["<module>"]
    assert [line for line in range(1, 13) if sources.decides(code, line)] == [4, 5, 6, 8, 9, 12]


IN_A_FUNCTION = """\
for trial in range(3):
    @cached
    def train():
        for batch in loader:
            step(batch)
    class Net:
        def forward(self):
            while True:
                block()
    act = lambda: [
        one for one in many]
    train()
"""


def test_a_function_within_a_loop_has_loops_of_its_own() -> None:
    """The loop that defines it does not turn while it runs."""
    assert around(IN_A_FUNCTION, 5, "train") == [4]
    assert around(IN_A_FUNCTION, 9, "forward") == [8]
    assert around(IN_A_FUNCTION, 11, "<lambda>") == []
    assert around(IN_A_FUNCTION, 12) == [1]


def test_a_file_that_cannot_be_read_has_no_loops() -> None:
    def read(file: str) -> str:
        if file == "train.py":
            raise OSError
        return "for x in"

    loops = SourceLoops(read)
    assert loops.around(codes_of(NESTED)["<module>"], 4) == []
    assert loops.around(codes_of(NESTED, "other.py")["<module>"], 4) == []
    assert (loops.text("train.py", 1), loops.text("other.py", 1), loops.text("other.py", 2)) == ("", "for x in", "")


def test_of_a_function_its_own_lines_alone_are_read() -> None:
    """Also where it lies within a class, and where a line of it begins further out than it does."""
    text = (
        "class Net:\n    @act\n    def forward(self):\n        for x in self:\n            act(\n  x\n            )\n"
    )
    code = codes_of(text)["forward"]
    assert [loop[:2] for loop in SourceLoops(lambda file: text + "def broken(:\n").of(code)] == [(4, 7)]


def test_where_its_end_is_not_seen_the_whole_file_is_read() -> None:
    text = 'def f(xs):\n    for x in xs:\n        act(x)\n    return """\nfar out\n"""\n'
    assert [loop[:2] for loop in SourceLoops(lambda file: text).of(codes_of(text)["f"])] == [(2, 3)]


# which loop turns

LONG = "    a = b.c(d, e, f)\n" * 300
DEEPER = "        a = b.c(d, e, f)\n" * 300
JUMPS = {
    "a for": ("for x in a:\n    b()\n", {1}),
    "a while": ("while a:\n    b()\n", {1}),
    "on one line": ("while a: b()\n", {1}),
    "a test over two lines": ("while (a and\n        b):\n    c()\n", {1}),
    "a for in a for, and continue": ("for x in a:\n    if x: continue\n    for y in x:\n        b()\n", {1, 3}),
    "continue in a while": ("while a:\n    if b: continue\n    c()\n", {1}),
    "a while that begins with a for": ("while a:\n    for x in b:\n        c()\n", {1, 2}),
    "a while that begins with a while": ("while a:\n    while b:\n        c()\n        d()\n", {1, 2}),
    "an endless one that begins with a while": ("while True:\n    while b:\n        c()\n", {1, 2}),
    "endless ones": ("while True:\n    while True:\n        c()\n        if d: break\n", {1, 2}),
    "three": ("while a:\n    while b:\n        while c:\n            d()\n", {1, 2, 3}),
    "a while in a for": ("for x in a:\n    while x:\n        x = b()\n", {1, 2}),
    "else": ("for x in a:\n    b()\nelse:\n    for y in c:\n        d()\n", {1, 4}),
    "a long for": (f"for x in a:\n{LONG}", {1}),
    "a long while": (f"while x:\n{LONG}", {1}),
    "a long for in a long for": (f"for x in a:\n    for y in x:\n{DEEPER}{LONG}", {1, 2}),
}


@pytest.mark.parametrize("name", JUMPS)
def test_each_jump_back_turns_its_own_loop(name: str) -> None:
    text, first_lines = JUMPS[name]
    assert {loop.first if loop else None for loop in loops_of_jumps(text)} == first_lines


def test_a_long_body_is_reached_with_an_extended_argument() -> None:
    """Or the case above would not show what it is there for."""
    code = codes_of(JUMPS["a long for"][0])["<module>"]
    assert len(code.co_code) > 2 * 256
    assert len(targets(code)) == 1


def test_a_comprehension_is_no_turn_of_the_loop_around_it() -> None:
    """From Python 3.12 on it jumps within the same code."""
    text = "for batch in loader:\n    xs = [f(x) for x in batch]\n    train(xs)\n"
    assert [loop.first for loop in loops_of_jumps(text) if loop] == [1]
    text = "for x in [f(y) for y in z]:\n    train(x)\n"
    assert [loop.first for loop in loops_of_jumps(text) if loop] == [1]


def test_an_exception_that_is_caught_is_no_turn() -> None:
    """Python 3.12 goes back from the `except`, which it keeps at the end of the code, to what follows."""
    text = "while True:\n    try:\n        a()\n    except E:\n        b()\n    c()\n"
    assert [loop.first for loop in loops_of_jumps(text) if loop] == [1]


def test_an_async_for_turns_and_waiting_does_not() -> None:
    text = "async def f():\n    async for x in q():\n        await g(x)\n"
    assert {loop.first for loop in loops_of_jumps(text, "f") if loop} == {2}
    text = "async def f():\n    while True:\n        a()\n        await g()\n"
    assert [loop.first for loop in loops_of_jumps(text, "f") if loop] == [2]


# a look


@dataclass(eq=False)
class Frame:
    """As much of one as is looked at."""

    f_code: CodeType
    f_lineno: int
    f_back: Frame | None = None

    @property
    def f_lasti(self) -> int:
        return self.f_lineno


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


class Program:
    """A program that stands still while it is looked at."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.frame: Frame | None = None
        self.watch = LoopWatch(self.clock, lambda: self.frame)  # type: ignore[arg-type,return-value]

    def look(self, *frames: Frame, times: int = 1) -> Looks:
        """From the outside in."""
        for outer, inner in pairwise(frames):
            inner.f_back = outer
        self.frame = frames[-1] if frames else None
        for _ in range(times):
            self.clock.now += 20
            self.watch.look()
        return self.watch.looks

    def chain(self, look: int = -1) -> list[tuple[str, int]]:
        looks = self.watch.looks
        return [(looks.codes[one.code].co_name, one.line) for one in looks.known_chains[looks.chains[look]]]


@pytest.fixture
def program() -> Any:
    one = Program()
    yield one
    one.watch.end()


def code(name: str, file: str = "/home/user/train.py") -> CodeType:
    return codes_of(f"def {name}():\n    pass\n", file)[name]


def module(file: str = "/home/user/train.py") -> CodeType:
    return codes_of("pass\n", file)["<module>"]


def test_a_look_notes_the_lines_from_the_outside_in(program: Program) -> None:
    looks = program.look(Frame(module(), 9), Frame(code("train"), 4))
    assert program.chain() == [("<module>", 9), ("train", 4)]
    assert list(looks.times) == [20]


def test_equal_chains_are_kept_once(program: Program) -> None:
    frames = Frame(module(), 9), Frame(code("train"), 4)
    looks = program.look(*frames, times=3)
    frames[1].f_lineno = 5
    program.look(*frames)
    assert list(looks.chains) == [0, 0, 0, 1]
    assert looks.known_chains == [(Line(1, 9), Line(0, 4)), (Line(1, 9), Line(0, 5))]


def test_what_calls_the_script_stands_outside(program: Program) -> None:
    from keepbusy.instrument import script

    program.look(Frame(code("main"), 1), Frame(code("run_file", script.__file__), 3), Frame(module(), 9))
    assert program.chain() == [("<module>", 9)]


def test_of_what_is_hidden_the_innermost_frame_alone_is_noted(program: Program) -> None:
    """It says what the line calls into."""
    outer, inner = code("_call", "<string>"), code("_lazy_init", "<frozen torch>")
    program.look(Frame(module(), 9), Frame(outer, 2), Frame(inner, 3))
    assert program.chain() == [("<module>", 9), ("_lazy_init", 3)]


def test_what_is_imported_is_importing(program: Program) -> None:
    """Whatever a module does meanwhile; the frame says so that asked for it."""
    imports = code("_find_and_load", "<frozen importlib._bootstrap>")
    program.look(Frame(module(), 1), Frame(imports, 5), Frame(code("build", "/home/user/lib.py"), 7))
    assert program.chain() == [("<module>", 1), ("_find_and_load", 5)]
    program.look(
        Frame(module(), 1),
        Frame(imports, 5),
        Frame(module("/home/user/lib.py"), 2),
        Frame(imports, 5),
        Frame(code("build", "/home/user/deep.py"), 7),
    )
    assert program.chain() == [("<module>", 1), ("_find_and_load", 5)]


def test_of_a_deep_recursion_the_outer_frames_are_kept(program: Program) -> None:
    program.look(Frame(module(), 9), *[Frame(code("visit"), 4) for _ in range(200)])
    assert len(program.chain()) == DEEPEST
    assert program.chain()[0] == ("<module>", 9)


def test_no_frame_is_a_look_as_well(program: Program) -> None:
    """The thread has ended; its time still counts."""
    assert list(program.look().times) == [20]
    assert program.chain() == []


def test_a_frame_that_stays_is_told_from_one_that_is_called_again(program: Program) -> None:
    outer, called = Frame(module(), 9), code("step")
    looks = program.look(outer, Frame(called, 2))
    kept = [Frame(called, 2) for _ in range(4)]  # all alive, so that none lies where another lay
    for frame in kept:
        program.look(outer, frame)
    number = {one.co_name: index for index, one in enumerate(looks.codes)}
    assert looks.longest_stay[number["<module>"]] == 5
    assert looks.longest_stay[number["step"]] == 1


def test_of_a_long_run_every_other_look_goes(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepbusy.instrument.loops.KEPT_LOOKS", 8)
    looks = program.look(Frame(module(), 9), times=9)
    assert list(looks.times) == [20, 60, 100, 140, 180]
    assert len(looks.chains) == 5


def test_what_goes_wrong_while_looking_is_kept_and_not_told_there_and_the_next_look_comes() -> None:
    asked = list[int]()

    def frame() -> Any:
        asked.append(1)
        if len(asked) == 1:
            raise RuntimeError("no frames")
        watch._let_go()

    watch = LoopWatch(Clock(), frame)
    watch._every = 1
    watch._look_on()
    watch.end()
    assert watch.fault == "RuntimeError: no frames"
    assert len(watch.looks.times) == 1


def test_the_time_by_which_a_look_comes_late_passed_where_it_finds_the_program(program: Program) -> None:
    """The collector holds the interpreter, and nothing can be looked at meanwhile."""
    program.look(Frame(module(), 4))
    program.frame = Frame(module(), 9)
    program.clock.now += 220
    program.watch.look(due=program.clock.now - 200)
    assert list(program.watch.looks.times) == [20, 40]
    assert [program.chain(0)[-1][1], program.chain(1)[-1][1]] == [4, 9]


def test_the_next_look_comes_as_soon_as_it_has_to() -> None:
    """Else looks become rare, and a window of the profiler would stay open for as long."""
    waits = list[float]()

    class Stop:
        def acquire(self, timeout: float) -> bool:
            waits.append(timeout)
            return len(waits) == 4

    watch = LoopWatch(Clock(), lambda: None)
    watch._every, watch._stop = 10**9, Stop()  # type: ignore[assignment]
    soon = iter([None, 10**7, None])
    watch.meanwhile = lambda: next(soon)
    watch._look_on()
    assert [round(wait, 1) for wait in waits] == [1.0, 1.0, 0.0, 1.0]


class Held:
    """What a weak reference can tell of."""


def test_what_the_program_is_done_with_goes_at_once_though_it_was_looked_at() -> None:
    """The loader's workers end when their iterator goes, and memory is free; none of that waits for the collector."""
    watch = LoopWatch()

    def hold() -> weakref.ref[Held]:
        held = Held()
        looking = threading.Thread(target=watch.look)
        looking.start()
        looking.join()
        return weakref.ref(held)

    collects = gc.isenabled()
    gc.disable()
    try:
        assert hold()() is None
        assert not gc.isenabled()
    finally:
        if collects:
            gc.enable()
    watch.look()
    assert gc.isenabled() == collects
    watch.end()


# real counting

TURNING = """\
def train(batches, each):
    for batch in range(batches):
        each(batch)
        xs = [x for x in range(5)]
        while xs:
            xs.pop()
    return xs
"""


def counted(text: str, name: str, *arguments: Any) -> tuple[Looks, dict[int, int], TurnCounters]:
    """The turns of a function's loops, by their first line."""
    globe: dict[str, Any] = {}
    exec(compile(text, "/home/user/train.py", "exec"), globe)
    code = globe[name].__code__
    ticks = iter(range(0, 1_000_000, 10))
    looks = Looks()
    counters = TurnCounters(looks, lambda: next(ticks))
    counters.count(looks.meet(code), code)
    globe[name](*arguments)
    sources = SourceLoops(lambda file: text)
    turns: dict[int, int] = {}
    for (_, target), ends in looks.turns.items():
        loop = sources.of_jump(code, target)
        if loop is not None:
            turns[loop.first] = turns.get(loop.first, 0) + len(ends)
    return looks, turns, counters


def nothing(batch: int) -> None:
    """A step."""


@counting
def test_turns_are_counted() -> None:
    """A `for` jumps back at the end of each turn; a `while` does not at the end of its last one."""
    looks, turns, counters = counted(TURNING, "train", 7, nothing)
    counters.end()
    assert turns == {2: 7, 5: 7 * 4}
    assert [len(entered) for entered in looks.entries.values()] == [1]
    for ends in looks.turns.values():
        assert list(ends) == sorted(ends)


@counting
def test_nothing_is_counted_once_it_has_ended() -> None:
    monitoring: Any = getattr(sys, "monitoring")  # noqa: B009
    tools = [monitoring.get_tool(number) for number in range(6)]  # the virtual GPU's own may be among them
    looks, _, counters = counted(TURNING, "train", 7, nothing)
    counters.end()
    before = {loop: len(ends) for loop, ends in looks.turns.items()}
    counters.end()  # and ending twice does no harm
    globe: dict[str, Any] = {}
    exec(compile(TURNING, "/home/user/train.py", "exec"), globe)
    globe["train"](5, nothing)
    assert {loop: len(ends) for loop, ends in looks.turns.items()} == before
    assert [monitoring.get_tool(number) for number in range(6)] == tools


@counting
def test_where_every_place_for_a_tool_is_taken_nothing_is_counted() -> None:
    monitoring: Any = getattr(sys, "monitoring")  # noqa: B009
    mine = [number for number in range(6) if monitoring.get_tool(number) is None]
    for number in mine:
        monitoring.use_tool_id(number, "somebody else")
    try:
        looks, turns, counters = counted(TURNING, "train", 3, nothing)
        counters.end()
        assert (turns, looks.entries) == ({}, {})
    finally:
        for number in mine:
            monitoring.free_tool_id(number)


@counting
def test_a_loop_that_computes_in_python_is_left_alone() -> None:
    """By the clock of this test a turn takes ten nanoseconds."""
    text = "def spin(n, each):\n    for i in range(n):\n        each(i)\n"
    looks, _, counters = counted(text, "spin", 2_000, nothing)
    counters.end()
    [ends] = looks.turns.values()
    assert len(ends) == TURNS_IN_A_ROW
    assert looks.uncounted == set(looks.turns)


@counting
def test_a_function_that_is_called_again_and_again_is_left_alone() -> None:
    text = "def each(n):\n    pass\n\ndef run(n):\n    for i in range(n):\n        each(i)\n"
    globe: dict[str, Any] = {}
    exec(compile(text, "/home/user/train.py", "exec"), globe)
    looks, ticks = Looks(), iter(range(0, 1_000_000, 10))
    counters = TurnCounters(looks, lambda: next(ticks))
    counters.count(looks.meet(globe["each"].__code__), globe["each"].__code__)
    globe["run"](300)
    counters.end()
    [entered] = looks.entries.values()
    assert len(entered) == ENTRIES_IN_A_ROW
    assert looks.fleeting == {0}


def test_other_threads_count_by_what_the_processors_gave_them() -> None:
    """The thread that computed stands at its line of the program; the one that waited was given nothing."""
    names = {name: threading.Event() for name in ("there", "also", "begun", "begin", "once", "ended")}
    source = (
        "def compute():\n    there.set(); begin.wait()\n    sum(range(3_000_000)); once.set(); ended.wait()\n"
        "def rest():\n    also.set(); ended.wait()\n"
        "def foreign():\n    import threading; threading.current_thread(); begun.set(); ended.wait()\n"
    )
    exec(compile(source, "/home/user/sonar.py", "exec"), names)
    threads = [threading.Thread(target=names[one], daemon=True) for one in ("compute", "rest")]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    _thread.start_new_thread(names["foreign"], ())  # type: ignore[arg-type]
    watch = LoopWatch(Clock())
    assert all(names[one].wait(PATIENCE) for one in ("there", "also", "begun"))
    watch.look()
    names["begin"].set()
    assert names["once"].wait(PATIENCE)
    for _ in range(BESIDE_EVERY):
        watch.look()
    names["ended"].set()
    for thread in threads:
        thread.join()
    looks = watch.looks
    watch.end()
    took = {(looks.codes[line.code].co_name, line.line): time for line, time in looks.beside.items()}
    assert took.keys() >= {("compute", 3), ("rest", 5)}
    assert not [name for name, _ in took if name == "foreign"]
    assert took["compute", 3] > 10 * took["rest", 5]  # which may still have been on its way to where it waits
