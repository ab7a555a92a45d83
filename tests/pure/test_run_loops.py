"""The tree of a run on the virtual clock: turns counted as they pass, times of the clock itself."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest
from virtual_programs import clock, operator

from keepbusy.explain import explain
from keepbusy.program.lines import LIBRARY, USER, Places, holds_loop, kind_of
from keepbusy.program.loops.iteration_counts import VIRTUAL_LIMIT, IterationCounter
from keepbusy.program.loops.log_gaps import LogGaps
from keepbusy.program.loops.run_loops import GapSamples, LoopEvidence, with_loops
from keepbusy.timeline.model import NONE, FrameKind, Timeline
from keepbusy.timeline.run_facts import IMPORTS, LINE, LOOP, Part
from keepbusy.timeline.steps import commands_between, whole_steps

COUNTS = sys.version_info >= (3, 12)
"""Else turns are read off the lines that call the device, and are told where two statements call in each of them."""


class Program:
    """A file that runs on a clock of its own, on which all takes what it says: `op(host, device)`, in nanoseconds."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "train.py"
        self.clock = clock()
        self.stream = self.clock.default_stream()
        self.counter = IterationCounter(self.moment, VIRTUAL_LIMIT)
        self.places = Places(self.clock.place)

    def moment(self) -> int:
        return self.clock.first_thread.moment()

    def op(self, host: int, device: int = 0, wait: bool = False) -> bool:
        place = self.places.current_place(sys._getframe(1))
        self.clock.work(host, "", place)
        if device:
            self.clock.begin("aten::mm", place)
            self.clock.launch(self.stream, [("kernel", device)])
            if wait:
                self.clock.sync_stream(self.stream)
            self.clock.end()
        return True

    def annotated(self, name: str, host: int = 100, device: int = 50) -> None:
        """An operator within something that has a name, as an optimizer's step or a pass backward."""
        place = self.places.current_place(sys._getframe(2))
        self.clock.enter(FrameKind.ANNOTATION, name, place)
        operator(self.clock, self.stream, device, place=place)
        self.clock.work(host, "", place)
        self.clock.leave()

    def backward(self) -> None:
        self.annotated("backward")

    def step(self) -> None:
        self.annotated("Optimizer.step#SGD.step")

    def forward(self) -> None:
        """Of a module that is called anew."""
        self.annotated("Forward#Layer")

    def run(self, text: str) -> Part:
        self.file.write_text(text, encoding="utf-8")
        self.counter.begin()
        try:
            names = {"op": self.op, "backward": self.backward, "step": self.step, "forward": self.forward}
            exec(compile(text, str(self.file), "exec"), names)
        finally:
            self.counter.end()
        return self.tree()

    def evidence(self, **known: Any) -> LoopEvidence:
        return LoopEvidence(self.places.lines, self.clock.first_thread.lane, self.counter.counted, **known)

    def told(self, announced: bool = False) -> Timeline:
        return with_loops(self.clock.timeline(), self.evidence(is_announced=announced))

    def tree(self) -> Part:
        run = self.told().facts.run
        assert run is not None
        return run


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.chdir(tmp_path)
    return Program(tmp_path)


def loops(run: Part) -> dict[str, int]:
    """Of each loop how often it turned. The parts of the root sum to it, and none holds more than it takes."""
    assert sum(part.time for part in run.parts) == pytest.approx(run.time, abs=len(run.parts))
    for part in run.within():
        assert sum(inner.time for inner in part.parts) <= part.time
    return {part.place: part.turns for part in run.within() if part.kind == LOOP}


def test_epochs_batches_and_what_lies_beside(program: Program) -> None:
    run = program.run("""\
op(1000)
for epoch in range(3):
    for batch in range(5):
        op(100)
        op(100, 50)
    op(500)
op(300)
""")
    assert loops(run) == {"train.py:2": 3 if COUNTS else 0, "train.py:3": 15}
    begin, epochs, end = run.parts
    assert (begin.kind, begin.place, begin.time) == (LINE, "train.py:1", 1_000)
    assert (end.kind, end.place, end.time) == (LINE, "train.py:7", 300)
    [batches] = epochs.parts
    assert (batches.time, batches.turn) == (15 * 222, 222)  # to launch takes the host 22
    assert epochs.time == batches.time + 3 * 500
    assert batches.busy < 15 * 50  # what the last launch of an epoch enqueued runs beside what follows
    assert run.busy == 15 * 50


def test_every_turn_counts_however_the_loop_ends(program: Program) -> None:
    run = program.run("""\
left = 6
while left:
    op(100)
    left -= 1
    op(200)
for turn in range(10):
    op(100)
    if turn % 2:
        continue
    op(100)
for turn in range(9):
    op(100)
    op(100)
    if turn == 5:
        break
""")
    # a turn that breaks off does not go back; of two in a row that call from one line alone, one would be seen
    assert loops(run) == {"train.py:2": 6, "train.py:6": 10 if COUNTS else 0, "train.py:11": 5 if COUNTS else 6}


def test_a_loop_is_found_however_deep_the_calls_in_it_go(program: Program) -> None:
    run = program.run("""\
def branch(depth):
    op(100, 50)
    if depth:
        branch(depth - 1)
    op(100, 50)
for batch in range(8):
    op(100)
    branch(90)
    op(100)
""")
    assert loops(run) == {"train.py:6": 8}


def test_a_loop_over_one_call_is_counted_where_python_counts(program: Program) -> None:
    run = program.run("""\
def train():
    for batch in range(4):
        op(300)
        op(100, 20)
for epoch in range(3):
    train()
""")
    assert loops(run) == {"train.py:5": 3 if COUNTS else 0, "train.py:2": 12}


def test_layers_of_a_model_are_no_loop_of_the_run(program: Program) -> None:
    """Each pass through them is short against the run."""
    run = program.run("""\
def model():
    for layer in range(4):
        op(5, 10)
        op(5, 10)
for step in range(50):
    model()
    op(10)
""")
    assert loops(run) == {"train.py:5": 50 if COUNTS else 0}


def test_statements_over_several_lines_turn_once(program: Program) -> None:
    run = program.run("""\
for step in range(8):
    found = [
        op(10),
        op(20),
        op(15),
        op(
            op(1),
        ),
    ]
    op(30)
""")
    assert loops(run) == {"train.py:1": 8}
    assert run.parts[0].turn == 10 + 20 + 15 + 1 + 1 + 30


def test_slow_turns_are_found_with_their_beat_and_their_line(program: Program) -> None:
    run = program.run("""\
for step in range(40):
    op(100, 50)
    op(100)
    if step % 10 == 9:
        op(5000)
""")
    [loop] = run.parts
    assert (loop.turns, loop.low, loop.high) == (40, 222, 222)
    [slow] = loop.kinds
    assert (slow.count, slow.every, slow.regular, slow.longer) == (4, 10.0, True, 5_000)
    assert slow.place == "train.py:5"


def test_a_wait_for_the_gpu_is_at_its_line_and_the_gpu_at_work(program: Program) -> None:
    run = program.run("""\
for step in range(4):
    op(10)
    op(1, 10_000, True)
""")
    [loop] = run.parts
    wait = max(loop.lines, key=lambda line: line.time)
    assert wait.place == "train.py:3"
    assert wait.time >= 40_000 > wait.idle + 39_000


def test_what_the_gpu_still_does_at_the_end_belongs_to_the_run(program: Program) -> None:
    run = program.run("op(10)\nop(10, 70_000)\n")
    assert run.time > 70_000
    assert run.parts[-1].place == ""
    assert run.busy == 70_000


def test_what_an_import_does_is_importing(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "told.py").write_text("", encoding="utf-8")
    run = program.run("""\
import sys; op(4_000)
for step in range(3):
    op(500)
    op(500)
""")
    assert [(part.kind, part.time) for part in run.parts] == [(IMPORTS, 4_000), (LOOP, 3_000)]


UNSEEN = {
    "of one line": (40, "    op(10, 5)\n    if i % 10 == 9:\n        op(1, wait=True)\n"),
    "without any call": (50, "    if i % 5 == 4:\n        op(10, 5)\n        op(10, 5)\n"),
    "that go on early": (60, "    if i < 20:\n        continue\n    op(5, 5)\n    op(6, 5)\n"),
    "with a choice in a line": (30, "    i % 3 and op(5, 5)\n    op(5, 5) if i % 3 else 0\n"),
    "of a function that returns": (40, "    learn(i)\n    learn(i)\n"),
}
SEEN = {
    "of two lines": (40, "    op(10, 5)\n    op(10, 5)\n"),
    "of a function": (40, "    act(i)\n    act(i)\n    if i % 7 == 0:\n        continue\n"),
    "within a with": (40, "    with nothing():\n        op(10, 5)\n        act(i)\n"),
    "around another loop": (
        40,
        "    op(10, 5)\n    for k in range(i % 3):\n        act(k)\n        act(k)\n    op(1)\n",
    ),
}
FUNCTIONS = """\
from contextlib import nullcontext as nothing
def learn(i):
    if i < 10:
        return
    op(10, 5)
    op(10, 5)
def act(i):
    return op(10, 5)
"""


@pytest.mark.parametrize("kind", [*UNSEEN, *SEEN])
def test_iterations_are_counted_one_and_all_or_not_at_all(program: Program, kind: str) -> None:
    count, body = (UNSEEN | SEEN)[kind]
    run = program.run(f"{FUNCTIONS}for i in range({count}):\n{body}op(9)\n")
    [loop] = [part for part in run.parts if part.kind == LOOP]
    assert loop.turns == (count if COUNTS or kind in SEEN else 0)
    assert (loop.turn > 0) == (loop.turns > 0)


def test_a_step_of_what_does_not_train_is_no_turn_over_the_layers(program: Program) -> None:
    text = """\
for token in range(20):
    op(5, 5)
    for layer in range(12):
        if not layer:
            forward()
        op(10, 50)
        op(10, 50)
    op(5)
op(9)
"""
    assert steps(program, text) == ("train.py:1", [26] * 19)


def test_a_loop_that_only_computes_is_let_go_of(program: Program) -> None:
    """Nobody wants its turns, and each would cost something."""
    run = program.run("""\
for step in range(3):
    op(100, 20)
    total = 0
    for number in range(20_000):
        total += number
    op(100)
""")
    assert loops(run) == {"train.py:1": 3}


def test_the_run_is_told_more_than_once(program: Program) -> None:
    first = program.run("for step in range(5):\n    op(100)\n    op(200, 50)\n")
    again = program.tree()
    assert first == again


# The steps of a run are the turns of the loop that trains.


def steps(program: Program, text: str) -> tuple[str, list[int]]:
    """The loop whose turns are the steps, and how many commands each has."""
    program.run(text)
    told = whole_steps(program.told())
    return told.facts.loop, commands_between(told, np.append(told.marks, len(told) - 1)).tolist()


def test_an_evaluation_after_each_epoch_is_no_part_of_a_step(program: Program) -> None:
    loop, commands = steps(
        program,
        """\
def evaluate():
    for batch in range(3):
        op(100, 400, wait=True)
        op(100, 400, wait=True)
for epoch in range(4):
    for batch in range(6):
        op(100, 50)
        backward()
        step()
    evaluate()
op(100)
""",
    )
    assert (loop, commands) == ("train.py:6", [3] * 20)  # nobody knows where the first turn of an epoch begins
    assert {part.place: part.turns for part in program.tree().within() if part.kind == LOOP} == {
        "train.py:5": 4 if COUNTS else 0,
        "train.py:6": 24,
        "train.py:2": 12,
    }
    [evaluation] = program.told().further
    assert evaluation.facts.reason is not None
    assert (evaluation.facts.reason.why, evaluation.facts.reason.place) == ("loop", "train.py:2")
    alone = whole_steps(evaluation)
    assert commands_between(alone, np.append(alone.marks, len(alone) - 1)).tolist() == [2] * len(alone.marks)


def test_two_optimizers_of_one_turn_make_one_step(program: Program) -> None:
    turn = "    op(100, 50)\n    backward()\n    step()\n    backward()\n    step()\n"
    assert steps(program, f"for batch in range(8):\n{turn}op(9)\n") == ("train.py:1", [5] * 7)


@pytest.mark.parametrize("critics", [1, 5])
def test_a_critics_turns_are_parts_of_a_step(program: Program, critics: int) -> None:
    text = f"""\
for batch in range(8):
    for critic in range({critics}):
        op(100, 50)
        backward()
        step()
    backward()
    step()
op(9)
"""
    assert steps(program, text) == ("train.py:1", [3 * critics + 2] * 7)


def test_a_loop_that_turns_once_in_each_step_is_none(program: Program) -> None:
    text = """\
for batch in range(8):
    for again in range(1):
        op(100, 50)
        backward()
        step()
op(9)
"""
    assert steps(program, text) == (f"train.py:{1 if COUNTS else 2}", [3] * 7)


def test_loops_over_micro_batches_and_over_optimizers_are_parts_of_a_step(program: Program) -> None:
    text = """\
for batch in range(8):
    for micro in range(4):
        op(100, 50)
        backward()
    for optimizer in range(10):
        step()
op(9)
"""
    assert steps(program, text) == ("train.py:1", [18] * 7)
    assert program.told().further == ()


def test_of_two_loops_that_train_in_each_epoch_one_is_looked_at(program: Program) -> None:
    text = """\
for epoch in range(3):
    for labelled in range(20):
        op(100, 50)
        backward()
        step()
    for unlabelled in range(10):
        op(100, 50)
        op(100, 50)
        backward()
        step()
op(9)
"""
    assert steps(program, text) == ("train.py:2", [3] * 57)
    assert [one.facts.reason.place for one in program.told().further if one.facts.reason] == ["train.py:6"]


def test_a_turn_of_the_loop_around_holds_no_start_up(program: Program) -> None:
    program.run("""\
op(9, 50)
op(100_000)
for epoch in range(2):
    for batch in range(10):
        op(1000, 50)
        backward()
        step()
    op(500)
op(9)
""")
    [epochs] = [one for one in explain(program.told()).loops if one.place == "train.py:3"]
    assert epochs.diagnosis.plain_step < 5_000


def test_a_trainers_loop_stands_at_the_users_line_that_leads_there(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its epochs and its batches, and not the layers within a step."""
    library = tmp_path / "site-packages" / "trainer_of_ours.py"
    library.parent.mkdir()
    library.write_text(
        "def fit(training_step, epochs, op):\n"
        "    for epoch in range(epochs):\n"
        "        op(10)\n"
        "        run_epoch(training_step, op)\n"
        "def run_epoch(training_step, op):\n"
        "    for batch in range(6):\n"
        "        op(10)\n"
        "        training_step()\n"
        "def layers(op):\n"
        "    for layer in range(3):\n"
        "        op(100, 50)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(library.parent))
    monkeypatch.delitem(sys.modules, "trainer_of_ours", raising=False)
    text = """\
from trainer_of_ours import fit, layers
def training_step():
    layers(op)
    backward()
    step()
op(50)
fit(training_step, 4, op)
op(60)
"""
    loop, commands = steps(program, text)
    assert (loop, commands) == ("train.py:7 (trainer_of_ours.py:6 in run_epoch)", [5] * 20)
    begins, fit, ends = program.tree().parts
    assert (begins.place, ends.place) == ("train.py:6", "train.py:8")
    assert (fit.place, fit.source) == ("train.py:7", "fit(training_step, 4, op)")
    assert (fit.function, fit.turns) == ("trainer_of_ours.py:2 in fit", 4 if COUNTS else 0)
    [batches] = fit.parts
    assert (batches.place, batches.function, batches.turns) == ("train.py:7", "trainer_of_ours.py:6 in run_epoch", 24)
    assert {line.place for line in batches.lines} == {"trainer_of_ours.py:7", "train.py:3", "train.py:4", "train.py:5"}
    assert batches.parts == ()


TRAINER = """\
def fit(model, epochs, batches, op):
    evaluate(model, 1, op)
    for epoch in range(epochs):
        op(10)
        run_epoch(model, batches, op)
def run_epoch(model, batches, op):
    for batch in range(batches):
        op(10)
        model.training_step()
        if batch + 1 == batches:
            evaluate(model, 5, op)
def evaluate(model, batches, op):
    for batch in range(batches):
        op(3_000)
        model.validation_step()
"""
TRAINED = """\
from trainer_that_evaluates import fit
class Model:
    def training_step(self):
        op(1_000, 50)
        backward()
        step()
    def validation_step(self):
        op(2_000, 20)
fit(Model(), 4, 12, op)
op(60)
"""


@pytest.fixture
def evaluated(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A trainer evaluates the model within the last turn of an epoch, in fewer turns than it trains."""
    library = tmp_path / "site-packages" / "trainer_that_evaluates.py"
    library.parent.mkdir()
    library.write_text(TRAINER, encoding="utf-8")
    monkeypatch.syspath_prepend(str(library.parent))
    monkeypatch.delitem(sys.modules, library.stem, raising=False)
    program.run(TRAINED)
    return program


def test_a_trainers_evaluation_is_a_loop_of_its_own(evaluated: Program) -> None:
    """Though it turns less often than the loop in which it stands; what turned before that is not counted with it."""
    fit = next(part for part in evaluated.tree().parts if part.kind == LOOP and part.parts)
    [training] = fit.parts
    [evaluation] = training.parts
    assert [(part.place, part.turns, part.passes) for part in (fit, training, evaluation)] == [
        ("train.py:9", 4, 1) if COUNTS else ("train.py:9", 0, NONE),
        ("train.py:9", 48, 4),
        ("train.py:9", 20, 4),
    ]
    assert evaluation.function == "trainer_that_evaluates.py:13 in evaluate"


def test_loops_of_a_trainer_at_one_line_are_not_taken_for_each_other(evaluated: Program) -> None:
    told = explain(evaluated.told())
    assert told.loop == "train.py:9 (trainer_that_evaluates.py:7 in run_epoch)"
    assert told.steps_of_run == 48
    [evaluation] = told.loops
    assert evaluation.place == "train.py:9 (trainer_that_evaluates.py:13 in evaluate)"
    assert evaluation.turns == 20
    assert 5_000 <= evaluation.diagnosis.plain_step < 6_000
    rows = {one.loop: one.predicted.step + one.gain for one in reversed(told.plan)}  # of each loop the first row
    assert rows == {"": told.plain_step, evaluation.place: evaluation.diagnosis.plain_step}


def test_what_the_program_says_of_its_steps_counts_for_more(program: Program) -> None:
    program.run("for batch in range(8):\n    op(100, 50)\n    backward()\n    step()\n    step()\n")
    told = program.told(announced=True)
    assert (told.facts.loop, len(told.marks)) == ("", 16)


def test_time_of_which_a_look_tells_stands_at_its_line_in_its_loop(program: Program) -> None:
    """Between two calls the program was at a line that called nothing: a sample says so, and nobody knows how often."""
    program.run("""\
def main():
    for batch in range(100):
        op(1000)
        op(200, 50)
        op(100, 50)
main()
""")
    timeline = program.clock.timeline()
    exact = np.array(
        [": main" not in timeline.names[name] or "(3)" not in timeline.names[name] for name in timeline.frames.name]
    )
    run = with_loops(timeline, program.evidence(exact=exact)).facts.run
    assert run is not None
    assert loops(run) == {"train.py:2": 100}
    [loop] = [part for part in run.parts if part.kind == LOOP]
    assert loop.time >= 100 * 1300
    assert loop.lines[0].place == "train.py:3"
    assert loop.lines[0].time == 100 * 1000


# a long run of which stretches are not recorded


class LongProgram(Program):
    """Its clock is that of what is recorded: `op` within a stretch that is left out makes the real time pass alone."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.left_out_so_far = 0
        self.begins, self.ends = list[int](), list[int]()
        self.times, self.chains = list[int](), list[tuple[tuple[CodeType, int], ...]]()

    def moment(self) -> int:
        return super().moment() + self.left_out_so_far

    def op(self, host: int, device: int = 0, wait: bool = False, recorded: bool = True) -> bool:
        if recorded:
            return super().op(host, device, wait)
        if not self.begins or self.ends[-1] != self.moment():
            self.begins.append(self.moment())
            self.ends.append(self.moment())
        self.times.append(self.moment())
        lines = [(frame.f_code, line) for frame, line in traceback.walk_stack(sys._getframe(1))]
        kinds = [LIBRARY if holds_loop(code) else USER for code, _ in lines]
        kept = [one for one, kind in zip(lines, kinds, strict=True) if kind_of(one[0].co_filename) in (USER, kind)]
        self.chains.append(tuple(reversed(kept)))
        self.left_out_so_far += host
        self.ends[-1] = self.moment()
        return True

    def told(self, announced: bool = False) -> Timeline:
        samples = GapSamples(LogGaps(self.begins, self.ends), np.array(self.times), self.chains)
        return with_loops(self.clock.timeline(), self.evidence(gap_samples=samples))


LONG = """\
op(1000)
for batch in range(100):
    op(200, 50, recorded=not 20 <= batch < 90)
    op(100, recorded=not 20 <= batch < 90)
for batch in range(10):
    op(300, 222, recorded=batch < 5)
"""


@pytest.mark.skipif(not COUNTS, reason="nothing is left out where Python does not count")
def test_a_tree_is_of_the_whole_run_and_steps_are_of_what_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = LongProgram(tmp_path)
    run = program.run(LONG)
    assert loops(run) == {"train.py:2": 100, "train.py:5": 10}
    first, second = (part for part in run.parts if part.kind == LOOP)
    recorded, left_out = 222 + 100, 200 + 100  # to launch takes the host 22
    assert (first.time, second.time) == (30 * recorded + 70 * left_out, 5 * 322 + 5 * 300)
    assert run.time == program.moment() + 222 + 10  # what the GPU still does
    assert first.busy == pytest.approx(30 * 50 + 70 * 50 * left_out / recorded, rel=0.1)
    assert second.busy == pytest.approx(4 * 222 * (1 + 300 / 322), rel=0.1)  # of the fifth when nothing is recorded
    told = program.told()
    assert told.spans.end.max() < run.time
    assert len(told.marks_of(0)) == 30
