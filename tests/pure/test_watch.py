"""The watch: asleep while steps come as usual, and only then awake."""

from __future__ import annotations

import sys
from types import FrameType

from keepbusy.recording.interruptions import Pauses
from keepbusy.recording.step_clock import Marked
from keepbusy.recording.step_detector import ENDS
from keepbusy.recording.watch import LONGEST_LOOK, LOOK, REST, Watch, agreed

MS = 1_000_000


class Program:
    """Steps of 10 ms on a clock of paper; where it stands is where a function below stands."""

    def __init__(self) -> None:
        self.now = 0
        self.marked = Marked()
        self.looks = 0
        self.watch = Watch(self.marked, lambda: self.now, self.frame)
        self.stands = self.training

    def frame(self) -> FrameType:
        self.looks += 1
        return self.stands()

    def training(self) -> FrameType:
        return sys._getframe()

    def saving(self) -> FrameType:
        return sys._getframe()

    def steps(self, count: int, time: int = 10 * MS) -> None:
        for _ in range(count):
            self.now += time
            self.marked.add(self.now, ENDS, Pauses(lambda: self.now))

    def sleep_until(self, moment: int) -> int:
        """Let the watch sleep and wake until then; returns how often it woke."""
        woken = 0
        while self.now < moment:
            self.now += self.watch.turn()
            woken += 1
        return woken


def test_it_looks_at_nothing_while_steps_come_as_usual() -> None:
    program = Program()
    for _ in range(200):
        program.steps(1)
        program.watch.turn()
    assert program.looks == 0
    assert program.watch.limit == 15 * MS


def test_it_wakes_rarely() -> None:
    program = Program()
    program.steps(64)
    woken, begun = 0, program.now
    wakes_at = program.now
    while program.now < begun + 1000 * MS:
        program.steps(1)
        if program.now >= wakes_at:
            wakes_at = program.now + program.watch.turn()
            woken += 1
    assert woken <= 1000 * MS / REST + 1
    assert program.looks == 0


def test_an_overdue_step_is_looked_at_less_and_less_often() -> None:
    program = Program()
    program.steps(64)
    program.watch.turn()
    program.stands = program.saving
    begun = program.now
    program.sleep_until(begun + 10_000 * MS)
    assert 10_000 * MS / LONGEST_LOOK < program.looks < 60
    program.steps(1)
    program.watch.turn()
    (seen,) = program.watch.seen.values()
    assert "saving" in seen.lines[-1]
    assert list(program.watch.seen) == [64]  # the mark that ended that step


def test_a_look_counts_for_as_long_as_it_may_have_been_so() -> None:
    """The last look often comes late, since the program holds the interpreter, and sees what follows the stall."""
    program = Program()
    program.steps(64)
    program.watch.turn()
    begun = program.now
    for moment, stands in ((30, program.saving), (200, program.saving), (499, program.training)):
        program.now, program.stands = begun + moment * MS, stands
        program.watch.turn()
    program.steps(1, time=1 * MS)
    program.watch.turn()
    (seen,) = program.watch.seen.values()
    assert "saving" in seen.lines[-1]


def test_a_stall_is_looked_at_soon() -> None:
    program = Program()
    program.steps(64)
    program.watch.turn()
    program.sleep_until(program.now + REST + 2 * LOOK)
    assert program.looks >= 1


def test_a_close_look_is_not_disturbed() -> None:
    program = Program()
    program.steps(64)
    program.watch.paused = True
    program.sleep_until(program.now + 5000 * MS)
    assert program.looks == 0


def test_before_anything_is_usual_nothing_is_overdue() -> None:
    program = Program()
    program.steps(5)
    program.sleep_until(program.now + 5000 * MS)
    assert program.looks == 0


def test_the_program_is_found_where_most_looks_agree() -> None:
    main = "train.py(90): <module>"
    looks = {(main, "train.py(41): main", "save.py(3): save"): 70, (main, "train.py(31): main"): 30}
    assert agreed(looks) == (main, "train.py(41): main", "save.py(3): save")
    assert agreed({(main, f"train.py({line}): main"): 10 for line in range(40, 50)}) == (main,)
    assert agreed({}) == ()


def test_in_the_loop_a_line_is_chosen_though_few_looks_agree() -> None:
    main = "train.py(90): <module>"
    looks = {(main, f"train.py({line}): main", f"eval.py({line}): evaluate"): line for line in (40, 41, 42)}
    assert agreed(looks, loop=(main, "train.py(31): main"))[:2] == (main, "train.py(42): main")


def test_it_ends_without_having_begun() -> None:
    Program().watch.end()
