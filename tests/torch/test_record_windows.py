"""When a recorded process opens further windows: never once the program has replayed a CUDA graph."""

from __future__ import annotations

import dis
import gzip
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pretended import pretend
from warm_python import PATIENCE

from keepbusy.instrument.loop_tree import BusyLoop, LoopSite
from keepbusy.instrument.loops import Line
from keepbusy.recording.line_log import LINES, NOTHING
from keepbusy.recording.recorded_run import _notes, _with_a_window, facts_in, timeline_in
from keepbusy.recording.recorder import STEPS_BEFORE_WINDOW, STEPS_TO_LET_GO, Run, RunOptions
from keepbusy.recording.windows import (
    LONGEST_OPEN,
    RECORDED_TURNS,
    SETTLES_WITHIN,
    SETTLING_TURNS,
    TRACE,
    Occasion,
    Window,
    _tells_of_the_device,
)
from keepbusy.timeline.files import BadInput
from keepbusy.timeline.run_facts import LOOP, SCRIPT, STALL


def stepping(run: Run, due: Callable[[int], Occasion | None], steps: int = 40) -> None:
    """So many steps of a program, in which something is always worth another look."""
    for count in range(1, steps + 1):
        run._plan.planned = due(count)
        run._on_step(count)


def always(count: int) -> Occasion:
    return Occasion(STALL, 0, 3, {"step": count + 3}, count)


@pytest.mark.parametrize("graphs", [False, True])
def test_where_graphs_are_replayed_there_is_one_window(tmp_path: Path, graphs: bool) -> None:
    run = Run(RunOptions(str(tmp_path), after=STEPS_BEFORE_WINDOW))
    run.marks._ends.replayed = graphs
    stepping(run, always, steps=STEPS_BEFORE_WINDOW + SETTLING_TURNS + RECORDED_TURNS + 5)
    assert (run.folder / TRACE).exists()
    assert (run.folder / "2" / TRACE).exists() is not graphs
    run._give_way()
    assert run.notes == []


def test_what_was_known_when_a_window_opened_is_left(tmp_path: Path) -> None:
    run = Run(RunOptions(str(tmp_path), after=STEPS_BEFORE_WINDOW))
    stepping(run, always, steps=STEPS_BEFORE_WINDOW + 1)
    assert run.window.is_open
    assert (facts_in(run.folder)["steps"], facts_in(run.folder)["closed"]) == (STEPS_BEFORE_WINDOW, False)
    run._give_way()


def busy_turn(window: Window, milliseconds: int = 1000 * PATIENCE) -> None:
    """A turn in which each line works, until the window closes or for so long."""
    until = window.clock() + milliseconds * 1_000_000
    while window.is_open and window.clock() < until:
        torch.ones(8).sum()


@pytest.mark.parametrize("turns", [0, 1])
def test_a_window_within_a_long_turn_closes_where_a_line_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    monkeypatch.setattr("keepbusy.recording.windows.LONGEST_OPEN", 10_000_000)
    told: list[int] = []
    window = Window(tmp_path, closed=lambda: told.append(1))
    window.usual, window.longest = 60_000_000, 10_000_000
    window.open(7)
    for turn in range(turns):
        window.step(8 + turn)
    busy_turn(window)
    assert (window.is_open, told) == (False, [1])
    assert (window.is_cut, window.is_part) == (True, turns == 0)
    assert [tick.number for tick in window.ticks] == [7, 8]
    assert (tmp_path / TRACE).exists()


def test_a_window_that_cannot_be_written_at_a_line_is_no_business_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepbusy.recording.windows.LONGEST_OPEN", 10_000_000)
    run = Run(RunOptions(str(tmp_path)))
    folder = tmp_path / "gone"
    window = run.window = Window(folder, closed=run._closed, guarded=run._guarded)
    window.usual, window.longest = 60_000_000, 10_000_000
    window.open(7)
    busy_turn(window)
    assert not window.is_open
    assert "Recording failed" in run.notes[-1]


def test_where_turns_cease_to_come_before_it_has_settled_it_leaves_nothing(tmp_path: Path) -> None:
    """As where a program has trained, and goes on without steps."""
    window = Window(tmp_path)
    window.longest = 10_000_000
    window.open(7)
    busy_turn(window)
    assert (window.is_open, window.ticks, list(tmp_path.iterdir())) == (False, [], [])


@pytest.mark.parametrize("memory", [False, True])
def test_memory_is_noted_where_it_is_asked_for(patient: None, tmp_path: Path, memory: bool) -> None:
    """What this machine takes of its own, as if it were a device's: the profiler tells of both alike."""
    run = Run(RunOptions(str(tmp_path), after=STEPS_BEFORE_WINDOW, memory=memory))
    compute(run, range(1, STEPS_BEFORE_WINDOW + WINDOW + 1))
    run.leave()
    pretend(run.folder / TRACE)
    told = (run.folder / TRACE).read_text().replace('"Device Type": 0', '"Device Type": 1')
    (run.folder / TRACE).write_text(told)
    held = timeline_in(run.folder, {}).memory
    size = 4 * 512 * 512
    assert ({size, -size} <= set(held.size.tolist())) == memory


def test_the_last_word_is_not_taken_back(tmp_path: Path) -> None:
    """The thread beside the program writes, too, and may be late."""
    run = Run(RunOptions(str(tmp_path)))
    run._steps = 26
    run.leave()
    run._steps = 40
    run.leave(run={}, loaders=[])
    last = facts_in(run.folder)
    run._steps = 39
    run.leave()
    assert facts_in(run.folder) == last
    assert (last["steps"], last["loaders"]) == (40, [])


def test_what_goes_wrong_at_the_end_is_no_end_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(RunOptions(str(tmp_path)))
    monkeypatch.setattr(run, "_tree", lambda: 1 // 0)
    run.begin()
    run.end()
    last = facts_in(run.folder)
    assert (last["run"], last["loaders"]) == (None, [])
    assert "ZeroDivisionError" in last["notes"][0]


@pytest.mark.parametrize(
    "part", ["marks.end", "share.read", "loops.end", "loaders.used", "others.end", "_give_way", "leave", "unfollow"]
)
def test_whatever_fails_at_the_end_the_rest_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """As where the disk is full, or the GPU has failed."""
    run = Run(RunOptions(str(tmp_path)))
    run.begin()
    owner, _, name = part.rpartition(".")
    undone = getattr(run, owner) if owner else run
    whole = getattr(undone, name)
    monkeypatch.setattr(undone, name, lambda *_, **__: 1 // 0)
    run.end()
    assert (run.is_going_on, facts_in(run.folder) == {}) == (False, part == "leave")
    whole()


def test_a_window_does_not_wait_for_a_device_that_never_comes_to_an_end(
    patient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a rank's whose peer has died: its collective never ends, and the program must."""
    run = Run(RunOptions(str(tmp_path), after=STEPS_BEFORE_WINDOW))
    run.begin()
    try:
        compute(run, range(1, STEPS_BEFORE_WINDOW + 2))
        window = run.window
        assert window.is_open
        ends = [False, True]
        monkeypatch.setattr(window, "_device_comes_to_an_end", lambda: ends.pop(0))
        window.close()
        assert window.is_open  # asked again at the next turn
        window.close()
        assert not window.is_open
        assert ends == []
    finally:
        run.end()


def test_at_the_end_such_a_window_is_given_up(patient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(RunOptions(str(tmp_path), after=STEPS_BEFORE_WINDOW))
    run.begin()
    compute(run, range(1, STEPS_BEFORE_WINDOW + 2))
    with monkeypatch.context() as stuck:
        stuck.setattr(run.window, "_device_comes_to_an_end", lambda: False)
        run.end()
    assert (run.window.is_open, (run.folder / TRACE).exists()) == (False, False)
    assert facts_in(run.folder)["run"] is not None
    assert sys.gettrace() is None
    run.window._close()  # this process goes on


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="lines are no longer told by sys.settrace")
def test_what_the_program_traces_itself_stays(tmp_path: Path) -> None:
    def own(*_: object) -> None: ...

    before, window = sys.gettrace(), Window(tmp_path)
    sys.settrace(None)
    try:
        window.open()
        sys.settrace(own)
        window.close()
        assert sys.gettrace() is own
    finally:
        sys.settrace(before)


def test_a_window_is_that_of_the_thread_that_opened_it(tmp_path: Path) -> None:
    """PyTorch's profiler takes the process down where another thread ends it."""
    window = Window(tmp_path)
    with ThreadPoolExecutor(1) as trainer:
        trainer.submit(window.open).result()
        for count in range(1, 2 * RECORDED_TURNS):  # those of an evaluation beside it
            window.step(count)
        window.close()
        assert (window.is_open, window.ticks) == (True, [])
        for count in range(SETTLING_TURNS + RECORDED_TURNS):
            trainer.submit(window.step, count + 1).result()
    assert not window.is_open
    assert len(window.ticks) == RECORDED_TURNS + 1


def test_a_thread_that_ends_before_its_window_closes_it(tmp_path: Path) -> None:
    told: list[bool] = []
    window = Window(tmp_path, closed=lambda: told.append(window.is_open))
    trainer = threading.Thread(target=lambda: (window.open(), window.step(1), window.step(2)))
    trainer.start()
    trainer.join()
    assert (window.is_open, told, window.is_cut) == (False, [False], True)
    assert (tmp_path / TRACE).exists()


def test_a_turn_that_waits_is_recorded_to_its_end(tmp_path: Path) -> None:
    """Little is to be closed of it."""
    window = Window(tmp_path)
    window.usual, window.longest = 60_000_000, 1_000_000
    window.open(7)
    worked = window._worked = time.thread_time_ns()
    busy_turn(window, 5)
    assert window.is_open
    assert time.thread_time_ns() - worked < LONGEST_OPEN
    window.close()
    assert window.open_for() > 0


def script(run: Run) -> None:
    run._open_script()
    torch.ones(8).sum()


def test_a_script_is_recorded_to_its_end(tmp_path: Path) -> None:
    run = Run(RunOptions(str(tmp_path)))
    script(run)
    run._give_way()
    run.leave()
    facts = facts_in(run.folder)
    assert [(look["why"], look["part"], len(look["ticks"])) for look in facts["further"]] == [(SCRIPT, True, 2)]
    told = _with_a_window(run.folder, facts)
    assert (told["further"], told["why"], (run.folder / TRACE).exists()) == ([], SCRIPT, True)
    assert _notes(told)[0].startswith("Recorded were ")


def test_a_script_that_takes_steps_after_all_is_a_run_of_steps(tmp_path: Path) -> None:
    run = Run(RunOptions(str(tmp_path), after=STEPS_BEFORE_WINDOW))
    script(run)
    stepping(run, lambda count: None)
    run.leave()
    assert (run.notes, run.window.is_open) == ([], False)
    told = _with_a_window(run.folder, facts_in(run.folder))
    assert (told["opened"], len(told["ticks"]) > 2, told["further"]) == (STEPS_BEFORE_WINDOW, True, [])
    assert "why" not in told


LOOPING = "def main():\n    prepare()\n    for batch in loader:\n        step(batch)\n    save()\n"


@pytest.mark.parametrize(("line", "one"), [(2, False), (4, False), (5, True)])
def test_a_program_is_a_script_where_no_loop_is_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: int, one: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    file = tmp_path / "main.py"
    file.write_text(LOOPING, encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(LOOPING, str(file), "exec"), names)
    run = Run(RunOptions(str(tmp_path)))
    looks = run.loops.looks
    looks.meet(names["main"].__code__)
    looks.known_chains.append((Line(0, line),))
    looks.chains.append(0)
    assert not run._is_script(1)  # it has only begun
    assert run._is_script(2_000_000_000) is one


@pytest.mark.parametrize("stays", [False, True])
def test_a_program_within_an_optimizers_own_loop_is_no_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    """Where its frame stays, as that of LBFGS does, which is called once; loops of other steps come and go."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    file = tmp_path / "main.py"
    file.write_text("def main():\n    optimizer.step(closure)\n", encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    run, step = Run(RunOptions(str(tmp_path))), torch.optim.LBFGS.step.__wrapped__.__code__  # type: ignore[attr-defined]
    looks = run.loops.looks
    for code in (names["main"].__code__, step):
        looks.meet(code)
    looks.known_chains.append((Line(0, 2), Line(1, run._sources.of(step)[0].first + 3)))
    looks.chains.append(0)
    looks.longest_stay[1] = 100 if stays else 1
    assert not run._is_script(1)
    assert run._is_script(2_000_000_000) is not stays


def test_the_loop_that_takes_the_steps_is_not_looked_at_again(tmp_path: Path) -> None:
    """Its turns may not have been counted yet while the first window was open."""
    text = "def train(step):\n    for batch in range(40):\n        step()\n"
    text += "def other():\n    for one in []:\n        pass\n"
    file = tmp_path / "train.py"
    file.write_text(text, encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(text, str(file), "exec"), names)
    run = Run(RunOptions(str(tmp_path), after=STEPS_BEFORE_WINDOW))
    count = iter(range(1, 100))
    names["train"](lambda: run._on_step(next(count)))
    run._give_way()
    codes = [names[name].__code__ for name in ("train", "other")]
    for code in codes:
        run.loops.looks.meet(code)
    jumps = [next(one.argval for one in dis.get_instructions(code) if "JUMP_BACK" in one.opname) for code in codes]
    nowhere, none = LoopSite("", "", 0, 0), np.zeros(0, np.int64)
    loops = [BusyLoop(frozenset([(code, jumps[code])]), nowhere, "", 0, 0, none) for code in (0, 1)]
    assert [run._is_unseen(one) for one in loops] == [False, True]


ROLLOUTS = """\
import torch

def collect(run):
    for iteration in range(200):
        for move in range(8):
            torch.ones(64, 64) @ torch.ones(64, 64)
            wait(0.001)
        wait(0.02)
        if run.closed():
            break
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="turns are counted since Python 3.12")
def test_what_lies_between_two_runs_of_a_loop_is_none_of_its_turns(
    patient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the update after each rollout, which takes far longer than a move."""
    monkeypatch.chdir(tmp_path)
    Path("rollouts.py").write_text(ROLLOUTS, encoding="utf-8")
    names: dict[str, Any] = {"wait": time.sleep}
    exec(compile(ROLLOUTS, str(tmp_path / "rollouts.py"), "exec"), names)
    run = Run(RunOptions(str(tmp_path)))
    run.closed = lambda: bool(run._further) and not run.window.is_open  # type: ignore[attr-defined]
    code = names["collect"].__code__
    site = LoopSite(code.co_filename, code.co_name, code.co_firstlineno, 5)
    run.loops.looks.meet(code)
    run._plan.planned = Occasion(LOOP, 1, 20, {"place": "rollouts.py:5"}, loop=site, usual=1_200_000)
    run._plan_windows(run.clock())
    try:
        names["collect"](run)
    finally:
        run.loops.end()
    run.leave()
    assert run.notes == []
    [look] = facts_in(run.folder)["further"]
    took = [(last[1] - first[1]) / 1e6 for first, last in itertools.pairwise(look["ticks"])]
    assert len(took) == 20
    assert 2 <= len(look["beside"]) <= 3
    assert {later - one for one, later in itertools.pairwise(look["beside"])} == {8}
    assert all(took[row] >= 20 for row in look["beside"])  # others may take as long on a busy machine


def test_a_turn_that_a_librarys_lines_have_slowed_is_looked_at_again_without_them(
    patient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a turn that is usually over by then only its beginning was seen."""
    run = Run(RunOptions(str(tmp_path), after=STEPS_BEFORE_WINDOW))
    monkeypatch.setattr(run.marks, "plain_step", lambda *near: SETTLES_WITHIN)
    stepping(run, lambda count: None, STEPS_BEFORE_WINDOW)
    first = run.window
    busy_turn(first, 3 * SETTLES_WITHIN // 1_000_000)
    assert first.is_open
    first.cut()
    run._closed()
    assert (first.is_open, first.is_slow, run.window is first) == (False, True, False)
    details = [window._log.detail(pytest.approx.__code__) for window in (Window(tmp_path), run.window)]
    assert details == [LINES, NOTHING]
    assert run.notes == []


WINDOW = SETTLING_TURNS + RECORDED_TURNS
TRACES = Path(__file__).parents[1] / "snapshots" / "traces"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns alone say when a window closes, and another one is granted, on a busy machine, too."""
    monkeypatch.setattr("keepbusy.recording.recorder.is_granted", lambda *_: True)
    for name in ("is_available", "is_initialized"):  # the profiler asks no device that there is not
        monkeypatch.setattr(torch.cuda, name, lambda: False)
    for name in ("LONGEST_OPEN", "WHOLE_TURNS_AFTER"):
        monkeypatch.setattr(f"keepbusy.recording.windows.{name}", 1 << 60)


@pytest.fixture
def deaf(patient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A process whose GPU makes tensors, of which its profiler tells nothing."""
    made = itertools.count(1)
    monkeypatch.setattr("keepbusy.recording.windows.allocations_so_far", lambda: next(made))
    return Run(RunOptions(str(tmp_path), after=STEPS_BEFORE_WINDOW))


def compute(run: Run, counts: range) -> None:
    for count in counts:
        torch.ones(512, 512) @ torch.ones(512, 512)
        run._on_step(count)


def test_a_window_that_saw_nothing_of_a_gpu_at_work_is_opened_anew(deaf: Run) -> None:
    """On a real GPU the second one sees it: CUPTI has let go of what an earlier profile had left of it."""
    over = STEPS_BEFORE_WINDOW + WINDOW
    compute(deaf, range(1, over + STEPS_TO_LET_GO))
    assert not deaf.window.is_open
    again = over + STEPS_TO_LET_GO + SETTLING_TURNS
    compute(deaf, range(over + STEPS_TO_LET_GO, over + STEPS_TO_LET_GO + WINDOW + 9))
    deaf.leave()
    left = facts_in(deaf.folder)
    assert deaf.notes == []
    assert [tick[0] for tick in left["ticks"]] == [*range(again, again + RECORDED_TURNS + 1)]
    assert deaf._first.is_blind  # and not a third time
    assert left["closed"]
    pretend(deaf.folder / TRACE)
    assert timeline_in(deaf.folder, {}).on_device.any()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_window_of_unusual_turns_alone_is_opened_anew(
    patient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """As where it opens while an epoch begins. Ranks could not agree on another step."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    run = Run(RunOptions(str(tmp_path), after=STEPS_BEFORE_WINDOW))
    monkeypatch.setattr(run.marks, "plain_step", lambda *near: 1_000)
    over = STEPS_BEFORE_WINDOW + WINDOW
    compute(run, range(1, over + STEPS_TO_LET_GO + WINDOW + 9))
    run.leave()
    first = over + STEPS_TO_LET_GO + SETTLING_TURNS if ranks == 1 else STEPS_BEFORE_WINDOW + SETTLING_TURNS
    assert [tick[0] for tick in facts_in(run.folder)["ticks"]] == [*range(first, first + RECORDED_TURNS + 1)]
    assert run._first.saw_others  # and not a third time
    assert run.notes == []


def test_a_program_that_ends_before_the_second_first_window_keeps_the_first(
    patient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(RunOptions(str(tmp_path), after=STEPS_BEFORE_WINDOW))
    monkeypatch.setattr(run.marks, "plain_step", lambda *near: 1_000)
    compute(run, range(1, STEPS_BEFORE_WINDOW + WINDOW + 2))
    assert not run._first.ticks  # another one is to come
    run.leave()
    assert [tick[0] for tick in facts_in(run.folder)["ticks"]] == [*range(*SEEN)]
    pretend(run.folder / TRACE)
    assert timeline_in(run.folder, {}).facts.recorded == tuple(range(*SEEN))


SEEN = STEPS_BEFORE_WINDOW + SETTLING_TURNS, STEPS_BEFORE_WINDOW + WINDOW + 1


@pytest.mark.parametrize("graphs", [False, True])
def test_where_forward_passes_come_before_training_its_steps_are_looked_at(
    patient: None, tmp_path: Path, graphs: bool
) -> None:
    """As where a model is evaluated first: what it does then is no step of the program."""
    run = Run(RunOptions(str(tmp_path), after=STEPS_BEFORE_WINDOW))
    run.marks._ends.replayed = graphs
    run.is_going_on = True
    run._hook_in()
    model, trains = torch.nn.Linear(8, 8), 2 * STEPS_BEFORE_WINDOW + WINDOW
    for _ in range(STEPS_BEFORE_WINDOW + WINDOW):
        model(torch.ones(4, 8))
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(trains):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    for part in (run.marks, run.others, run.loaders):
        part.end()
    run.leave()
    before = STEPS_BEFORE_WINDOW + WINDOW
    left = facts_in(run.folder)
    assert run.marks.since == before
    assert left["opened"] == STEPS_BEFORE_WINDOW + (0 if graphs else before)  # where they are replayed, once
    assert left["ticks"][0][0] == left["opened"] + SETTLING_TURNS
    assert run.marks.steps().mark[0] == before + 1  # the first optimizer's step began before anybody listened to it
    assert run.notes == []


@pytest.mark.parametrize("graphs", [False, True])
def test_where_the_profiler_stays_deaf_the_program_is_not_said_to_have_run_nothing(deaf: Run, graphs: bool) -> None:
    """Where graphs are replayed there is no second look."""
    deaf.marks._ends.replayed = graphs
    compute(deaf, range(1, STEPS_BEFORE_WINDOW + WINDOW + 1))
    deaf.leave()
    with pytest.raises(BadInput, match=r"^train\.py launched work, but CUPTI reported nothing of it"):
        timeline_in(deaf.folder, {"source": "train.py"})


@pytest.mark.parametrize("name", sorted(path.name for path in TRACES.glob("*.gz")))
def test_real_traces_tell_of_the_device(tmp_path: Path, name: str) -> None:
    trace = tmp_path / TRACE
    trace.write_bytes(gzip.decompress((TRACES / name).read_bytes()))
    assert _tells_of_the_device(trace)


def test_cupti_stays_while_the_programs_own_profiler_begins(
    patient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would let go in the middle of what that one records."""
    from torch.autograd import profiler

    ended: list[str] = []
    end = profiler._disable_profiler
    monkeypatch.setattr(profiler, "_disable_profiler", lambda: (ended.append(os.environ["TEARDOWN_CUPTI"]), end())[1])
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    run = Run(RunOptions(str(tmp_path), after=STEPS_BEFORE_WINDOW))
    run.begin()
    try:
        stepping(run, lambda count: None, STEPS_BEFORE_WINDOW + 1)
        assert run.window.is_open
        with profiler.profile(use_kineto=True):
            assert not run.window.is_open
            torch.ones(8).sum()
    finally:
        run.end()
    assert ended == ["0", "1"]
