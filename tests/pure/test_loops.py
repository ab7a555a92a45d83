"""Which loops a line is in, which loop a jump back belongs to, and what is noted when the program is looked at."""

from __future__ import annotations

import _thread
import gc
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from warm_python import PATIENCE
from watched import codes_of, loops_of_jumps, targets

from keepbusy.fix.source.in_memory import StandIns
from keepbusy.program.loops.codes import Line
from keepbusy.program.loops.iteration_counts import CALLS_IN_A_ROW, LIMIT, IterationCounter
from keepbusy.program.loops.source_loops import SourceLoops
from keepbusy.program.loops.stack_samples import BESIDE_EVERY, DEEPEST, StackSampler, StackSamples

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
        return "" if file == "train.py" else "for x in"

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
    assert [loop[:2] for loop in SourceLoops(lambda file: text + "def broken(:\n").around(code, 5)] == [(4, 7)]


def test_where_its_end_is_not_seen_the_whole_file_is_read() -> None:
    text = 'def f(xs):\n    for x in xs:\n        act(x)\n    return """\nfar out\n"""\n'
    assert [loop[:2] for loop in SourceLoops(lambda file: text).around(codes_of(text)["f"], 3)] == [(2, 3)]


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


@pytest.mark.parametrize("rest", ["        print(loss)", ""], ids=["the last line is the same", "the last line went"])
def test_a_loop_whose_body_is_rewritten_turns_where_its_source_has_it(tmp_path: Path, rest: str) -> None:
    own = "def train(batches):\n    for batch in batches:\n        loss = model(batch)\n        loss.backward()\n"
    own += "        print(loss)\n"
    made = f"def train(batches):\n    for batch in batches:\n        loss = step(batch)\n{rest}\n"
    file = str(tmp_path / "train.py")
    whole = StandIns({file: made}, {file: [1, 2, 3, 5]}).compiled(own.encode(), file)
    (code,) = (one for one in whole.co_consts if isinstance(one, CodeType))
    found = [SourceLoops(lambda _: own).of_jump(code, target) for target in targets(code)]
    assert [loop.first for loop in found if loop] == [2]


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
    """A program that stands still while it is sampled."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.frame: Frame | None = None
        self.sampler = StackSampler(self.clock, lambda: self.frame)  # type: ignore[arg-type,return-value]

    def sample(self, *frames: Frame, times: int = 1) -> StackSamples:
        """From the outside in."""
        for outer, inner in pairwise(frames):
            inner.f_back = outer
        self.frame = frames[-1] if frames else None
        for _ in range(times):
            self.clock.now += 20
            self.sampler.sample()
        return self.sampler.samples

    def chain(self, sample: int = -1) -> list[tuple[str, int]]:
        samples = self.sampler.samples
        lines = samples.known_chains[samples.chains[sample]]
        return [(samples.codes.objects[line.code].co_name, line.line) for line in lines]


@pytest.fixture
def program() -> Any:
    one = Program()
    yield one
    one.sampler.end()


def code(name: str, file: str = "/home/user/train.py") -> CodeType:
    return codes_of(f"def {name}():\n    pass\n", file)[name]


def module(file: str = "/home/user/train.py") -> CodeType:
    return codes_of("pass\n", file)["<module>"]


def test_a_sample_notes_the_lines_from_the_outside_in(program: Program) -> None:
    samples = program.sample(Frame(module(), 9), Frame(code("train"), 4))
    assert program.chain() == [("<module>", 9), ("train", 4)]
    assert list(samples.times) == [20]


def test_equal_chains_are_kept_once(program: Program) -> None:
    frames = Frame(module(), 9), Frame(code("train"), 4)
    samples = program.sample(*frames, times=3)
    frames[1].f_lineno = 5
    program.sample(*frames)
    assert list(samples.chains) == [0, 0, 0, 1]
    assert samples.known_chains == [(Line(1, 9), Line(0, 4)), (Line(1, 9), Line(0, 5))]


def test_what_calls_the_script_stands_outside(program: Program) -> None:
    from keepbusy.program import script

    program.sample(Frame(code("main"), 1), Frame(code("run_file", script.__file__), 3), Frame(module(), 9))
    assert program.chain() == [("<module>", 9)]


def test_of_what_is_hidden_the_innermost_frame_alone_is_noted(program: Program) -> None:
    """It says what the line calls into."""
    outer, inner = code("_call", "<string>"), code("_lazy_init", "<frozen torch>")
    program.sample(Frame(module(), 9), Frame(outer, 2), Frame(inner, 3))
    assert program.chain() == [("<module>", 9), ("_lazy_init", 3)]


def test_what_is_imported_is_importing(program: Program) -> None:
    """Whatever a module does meanwhile; the frame says so that asked for it."""
    imports = code("_find_and_load", "<frozen importlib._bootstrap>")
    program.sample(Frame(module(), 1), Frame(imports, 5), Frame(code("build", "/home/user/lib.py"), 7))
    assert program.chain() == [("<module>", 1), ("_find_and_load", 5)]
    program.sample(
        Frame(module(), 1),
        Frame(imports, 5),
        Frame(module("/home/user/lib.py"), 2),
        Frame(imports, 5),
        Frame(code("build", "/home/user/deep.py"), 7),
    )
    assert program.chain() == [("<module>", 1), ("_find_and_load", 5)]


def test_of_a_deep_recursion_the_outer_frames_are_kept(program: Program) -> None:
    program.sample(Frame(module(), 9), *[Frame(code("visit"), 4) for _ in range(200)])
    assert len(program.chain()) == DEEPEST
    assert program.chain()[0] == ("<module>", 9)


def test_no_frame_is_a_sample_as_well(program: Program) -> None:
    """The thread has ended; its time still counts."""
    assert list(program.sample().times) == [20]
    assert program.chain() == []


def test_of_a_long_run_every_other_sample_goes(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepbusy.program.loops.stack_samples.KEPT_SAMPLES", 8)
    samples = program.sample(Frame(module(), 9), times=9)
    assert list(samples.times) == [20, 60, 100, 140, 180]
    assert len(samples.chains) == 5


def test_what_goes_wrong_while_sampling_is_kept_and_the_next_sample_comes() -> None:
    asked = list[int]()

    def frame() -> Any:
        asked.append(1)
        if len(asked) == 1:
            raise RuntimeError("no frames")
        sampler._let_go()

    sampler = StackSampler(Clock(), frame)
    sampler._every = 1
    sampler._sample_on()
    sampler.end()
    assert sampler.fault == "RuntimeError: no frames"
    assert len(sampler.samples.times) == 1


def test_the_time_by_which_a_sample_comes_late_passed_where_it_finds_the_program(program: Program) -> None:
    """The collector holds the interpreter, and nothing can be sampled meanwhile."""
    program.sample(Frame(module(), 4))
    program.frame = Frame(module(), 9)
    program.clock.now += 220
    program.sampler.sample(due=program.clock.now - 200)
    assert list(program.sampler.samples.times) == [20, 40]
    assert [program.chain(0)[-1][1], program.chain(1)[-1][1]] == [4, 9]


def test_the_next_sample_comes_as_soon_as_it_has_to() -> None:
    """Else samples become rare, and a window of the profiler would stay open for as long."""
    waits = list[float]()

    class Stop:
        def acquire(self, timeout: float) -> bool:
            waits.append(timeout)
            return len(waits) == 4

    sampler = StackSampler(Clock(), lambda: None)
    sampler._every, sampler._stop = 10**9, Stop()  # type: ignore[assignment]
    soon = iter([None, 10**7, None])
    sampler.meanwhile = lambda: next(soon)
    sampler._sample_on()
    assert [round(wait, 1) for wait in waits] == [1.0, 1.0, 0.0, 1.0]


class Held:
    """What a weak reference can tell of."""


def test_what_the_program_is_done_with_goes_at_once_though_it_was_sampled() -> None:
    """The loader's workers end when their iterator goes, and memory is free; none of that waits for the collector."""
    sampler = StackSampler()

    def hold() -> weakref.ref[Held]:
        held = Held()
        looking = threading.Thread(target=sampler.sample)
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
    sampler.sample()
    assert gc.isenabled() == collects
    sampler.end()


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


def counted(text: str, name: str, *arguments: Any) -> tuple[IterationCounter, dict[int, int], int]:
    """The iterations of a function's loops, by their first line; and the number of its code."""
    globe: dict[str, Any] = {}
    exec(compile(text, "/home/user/train.py", "exec"), globe)
    code = globe[name].__code__
    ticks = iter(range(0, 10_000_000, 10))
    counter = IterationCounter(lambda: next(ticks))
    counter.begin()
    globe[name](*arguments)
    globe[name](*arguments)
    counter.end()
    sources = SourceLoops(lambda file: text)
    iterations: dict[int, int] = {}
    number = counter.counts.codes.number(code)
    for (owner, target), ends in counter.counts.ends.items():
        loop = sources.of_jump(code, target) if owner == number else None
        if loop is not None:
            assert list(ends) == sorted(ends)
            iterations[loop.first] = iterations.get(loop.first, 0) + len(ends)
    return counter, iterations, number


def nothing(batch: int) -> None:
    """A step."""


@counting
def test_iterations_are_counted() -> None:
    """A `for` jumps back at the end of each iteration; a `while` does not at the end of its last one."""
    counter, iterations, number = counted(TURNING, "train", 7, nothing)
    assert iterations == {2: 2 * 7, 5: 2 * 7 * 4}
    assert len(counter.counts.calls[number]) == 1  # the first call is missing


@counting
def test_iterations_of_a_function_that_is_running_are_counted() -> None:
    text = "def train(begin):\n    for batch in range(7):\n        if batch == 2:\n            begin()\n"
    globe: dict[str, Any] = {}
    exec(compile(text, "/home/user/train.py", "exec"), globe)
    counter = IterationCounter(lambda: 0)
    globe["train"](counter.begin)
    counter.end()
    number = counter.counts.codes.number(globe["train"].__code__)
    assert [len(ends) for (owner, _), ends in counter.counts.ends.items() if owner == number] == [5]


@counting
def test_nothing_is_counted_once_it_has_ended() -> None:
    monitoring: Any = getattr(sys, "monitoring")  # noqa: B009
    tools = [monitoring.get_tool(number) for number in range(6)]  # the virtual GPU's own may be among them
    counter, _, _ = counted(TURNING, "train", 7, nothing)
    before = {loop: len(ends) for loop, ends in counter.counts.ends.items()}
    counter.end()  # and ending twice does no harm
    globe: dict[str, Any] = {}
    exec(compile(TURNING, "/home/user/train.py", "exec"), globe)
    globe["train"](5, nothing)
    assert {loop: len(ends) for loop, ends in counter.counts.ends.items()} == before
    assert [monitoring.get_tool(number) for number in range(6)] == tools


AT_EXIT = """
import atexit, sys

atexit.register(lambda: print([sys.monitoring.get_tool(number) for number in range(6)]))
import keepbusy.program.loops.iteration_counts

class Kept:
    def __del__(self):
        def is_called_first_when_modules_have_gone(): pass
        is_called_first_when_modules_have_gone()

sys.kept = Kept(), keepbusy.program.loops.iteration_counts  # `sys` is cleared last
keepbusy.program.loops.iteration_counts.IterationCounter(lambda: 0).begin()
"""


@counting
def test_nothing_is_counted_while_python_ends() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{[None] * 6}\n", "")


@counting
def test_where_every_place_for_a_tool_is_taken_nothing_is_counted() -> None:
    monitoring: Any = getattr(sys, "monitoring")  # noqa: B009
    mine = [number for number in range(6) if monitoring.get_tool(number) is None]
    for number in mine:
        monitoring.use_tool_id(number, "somebody else")
    try:
        counter, iterations, _ = counted(TURNING, "train", 3, nothing)
        assert (iterations, counter.counts.calls, counter.counted) == ({}, {}, None)
    finally:
        for number in mine:
            monitoring.free_tool_id(number)


@counting
def test_a_loop_that_computes_in_python_is_left_alone() -> None:
    """By the clock of this test an iteration takes ten nanoseconds."""
    text = "def spin(n, each):\n    for i in range(n):\n        each(i)\n"
    counter, iterations, number = counted(text, "spin", 2_000, nothing)
    assert iterations == {2: LIMIT[1]}
    assert [owner for owner, _ in counter.counts.incomplete] == [number]


@counting
def test_a_function_that_is_called_again_and_again_is_left_alone() -> None:
    text = (
        "def each(n):\n    for i in range(2):\n        pass\n\ndef run(n):\n    for i in range(n):\n        each(i)\n"
    )
    globe: dict[str, Any] = {}
    exec(compile(text, "/home/user/train.py", "exec"), globe)
    ticks = iter(range(0, 1_000_000, 10))
    counter = IterationCounter(lambda: next(ticks))
    counter.begin()
    globe["run"](300)
    counter.end()
    number = counter.counts.codes.number(globe["each"].__code__)
    assert len(counter.counts.calls[number]) == CALLS_IN_A_ROW
    assert counter.counts.fleeting == {number}


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
    sampler = StackSampler(Clock())
    assert all(names[one].wait(PATIENCE) for one in ("there", "also", "begun"))
    sampler.sample()
    names["begin"].set()
    assert names["once"].wait(PATIENCE)
    for _ in range(BESIDE_EVERY):
        sampler.sample()
    names["ended"].set()
    for thread in threads:
        thread.join()
    samples = sampler.samples
    sampler.end()
    took = {(samples.codes.objects[line.code].co_name, line.line): time for line, time in samples.beside.items()}
    assert took.keys() >= {("compute", 3), ("rest", 5)}
    assert not [name for name, _ in took if name == "foreign"]
    assert took["compute", 3] > 10 * took["rest", 5]  # which may still have been on its way to where it waits
