"""From looks and turns to the tree of a run. Milliseconds."""

from __future__ import annotations

import linecache
import sys
import threading
import weakref
from array import array
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from watched import MS, Watched, codes_of

from keepbusy.instrument.loop_tree import (
    innermost_loops,
    jumps_of,
    loop_of_steps,
    loops_beside,
    read_source,
    tree_of,
    turns_at,
)
from keepbusy.instrument.loops import Line
from keepbusy.instrument.processes import uses_gpu
from keepbusy.instrument.slow_turns import LookTable, slow_kinds
from keepbusy.instrument.source_loops import SourceLoops
from keepbusy.recording.run_counters import GpuShare
from keepbusy.recording.step_clock import ENDS, Marks
from keepbusy.recording.windows import whole_step
from keepbusy.timeline.model import NONE, Ints
from keepbusy.timeline.run_facts import FIRST_USE, IMPORTS, LINE, LOOP, RUN, Part

TRAIN = """\
import torch
model = build()
for epoch in range(2):
    for batch in loader:
        loss = step(batch)
        log(loss)
    save(model)
while waiting():
    poll()
print("done")
"""
STEP, LOG, SAVE, POLL = 5, 6, 7, 9


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.chdir(tmp_path)
    return Watched().program(tmp_path / "train.py", TRAIN)


def part(run: Part, place: str) -> Part:
    return next(one for one in run.within() if one.place == place)


def held_together(run: Part) -> Part:
    """The parts of the root sum to it, and no part takes less than those within."""
    assert run.kind == RUN
    assert sum(one.time for one in run.parts) == pytest.approx(run.time, abs=len(run.parts))
    for one in run.within():
        assert sum(inner.time for inner in one.parts) <= one.time
        if one.kind == LOOP:
            assert sum(line.time for line in one.lines) <= one.time + len(one.lines)
        assert [inner.began for inner in one.parts] == sorted(inner.began for inner in one.parts)
    return run


def steady(first: float, count: int, each: float) -> list[float]:
    """When such turns end."""
    return [first + each * (turn + 1) for turn in range(count)]


def two_epochs(train: Watched) -> Watched:
    """Two epochs of ten batches: 100 ms each, of which 20 ms are for the log, and 200 ms to save."""
    train.at(300, ("train", 2))
    batches = list[float]()
    for _ in range(2):
        batches += steady(train.now, 10, 100)
        for _ in range(10):
            train.at(80, ("train", STEP)).at(20, ("train", LOG))
        train.at(200, ("train", SAVE))
    train.turned("train", 4, batches).turned("train", 3, [1_500, 2_700])
    return train.at(100, ("train", 10))


def test_the_tree_of_a_training_run(train: Watched) -> None:
    run = held_together(tree_of(two_epochs(train).looks))
    assert (run.time, run.turns) == (2_800 * MS, 1)
    assert [(one.kind, one.place) for one in run.parts] == [
        (LINE, "train.py:2"),
        (LOOP, "train.py:3"),
        (LINE, "train.py:10"),
    ]
    epochs, batches = part(run, "train.py:3"), part(run, "train.py:4")
    assert (epochs.time, epochs.turns, epochs.turn) == (2_400 * MS, 2, 1_200 * MS)
    assert epochs.parts == (batches,)
    assert (batches.time, batches.turns, batches.turn) == (2_000 * MS, 20, 100 * MS)
    assert (batches.source, batches.began) == ("for batch in loader:", 300 * MS)
    assert [(one.place, one.time) for one in batches.lines] == [
        (f"train.py:{STEP}", 1_600 * MS),
        (f"train.py:{LOG}", 400 * MS),
    ]
    assert (batches.low, batches.high, batches.kinds, batches.warm_up) == (100 * MS, 100 * MS, (), 0)


def test_nobody_counted_the_turns(train: Watched) -> None:
    """As on Python 3.11: places and times are known, turns are not."""
    train.at(100, ("train", STEP)).at(100, ("train", SAVE))
    run = held_together(tree_of(train.looks))
    assert [(one.place, one.turns, one.turn) for one in run.within() if one.kind == LOOP] == [
        ("train.py:3", 0, NONE),
        ("train.py:4", 0, NONE),
    ]


def test_before_python_3_12_steps_and_batches_tell_of_turns(train: Watched) -> None:
    """A batch comes at the loop's own line, and a step ends within it: either tells, the other adds nothing."""
    two_epochs(train)
    train.looks.turns.clear()
    code = train.numbers["train"]
    ends = [round(one * MS) for one in (*steady(300, 10, 100), *steady(1_500, 10, 100))]
    train.looks.passes[Line(code, STEP)] = array("q", ends)
    train.looks.passes[Line(code, 4)] = array("q", ends[:-1])
    batches = part(held_together(tree_of(train.looks)), "train.py:4")
    assert (batches.turns, batches.low, batches.turn) == (20, 100 * MS, 100 * MS)


def test_a_run_without_looks_is_a_run() -> None:
    looks = Watched().looks
    looks.ended = 5 * MS
    run = tree_of(looks)
    assert (run.kind, run.parts, run.lines) == (RUN, (), ())


def test_time_before_the_first_look_and_after_the_last_one_has_a_place(train: Watched) -> None:
    train.at(10, ("train", 2)).at(10, ("train", 10))
    train.looks.began, train.looks.ended = -30 * MS, 70 * MS
    run = held_together(tree_of(train.looks))
    assert [(one.place, one.time) for one in run.parts] == [("train.py:2", 40 * MS), ("train.py:10", 60 * MS)]


def test_a_loop_of_a_library_stands_at_the_users_line(train: Watched, tmp_path: Path) -> None:
    trainer = "def fit(model):\n    setup()\n    while True:\n        training_step()\n"
    train.program(tmp_path / "site-packages" / "lib" / "trainer.py", trainer)
    train.program(tmp_path / "model.py", "def training_step():\n    x = 1\n    y = 2\n")
    train.turned("trainer.fit", 3, steady(200, 9, 80))
    train.at(200, ("train", 2))
    for _ in range(10):
        train.at(20, ("train", 2), ("trainer.fit", 4))
        train.at(60, ("train", 2), ("trainer.fit", 4), ("model.training_step", 3))
    run = held_together(tree_of(train.looks))
    loop = next(one for one in run.within() if one.kind == LOOP)
    assert (loop.place, loop.source) == ("train.py:2", "model = build()")
    assert loop.function == "lib/trainer.py:3 in fit"
    assert loop.time == 800 * MS
    assert loop.lines[0].place == "model.py:3"
    assert loop.lines[0].time == 600 * MS


@pytest.mark.parametrize(("counting", "told"), [(60, "hooks.py:7"), (40, "hooks.py:3")])
def test_where_a_library_calls_the_program_the_innermost_line_is_told(
    train: Watched, tmp_path: Path, counting: float, told: str
) -> None:
    """As far as most of the time agrees on it."""
    train.program(tmp_path / "site-packages" / "lib" / "net.py", "def forward(x):\n    return hook(x)\n")
    text = "def hook(x):\n    if counting:\n        count(x)\n\ndef count(x):\n    y = x.cpu()\n    histogram(y)\n"
    train.program(tmp_path / "hooks.py", text)
    for _ in range(10):
        above = ("train", STEP), ("net.forward", 2), ("hooks.hook", 3)
        train.at(counting, *above, ("hooks.count", 7)).at(90 - counting, *above, ("hooks.count", 6))
    [loop] = [one for one in tree_of(train.turned("train", 4, steady(0, 10, 90)).looks).within() if one.kind == LOOP]
    assert [(line.place, line.call, line.within) for line in loop.lines] == [("train.py:5", "forward", told)]


def test_a_loop_that_turns_once_in_each_turn_is_none(train: Watched) -> None:
    """Its lines stand among those of the loop around it."""
    train.looks.turns.clear()
    for _ in range(10):
        train.at(80, ("train", STEP)).at(20, ("train", SAVE))
    train.turned("train", 3, steady(0, 10, 100)).turned("train", 4, [turn - 20 for turn in steady(0, 10, 100)])
    run = held_together(tree_of(train.looks))
    [loop] = [one for one in run.within() if one.kind == LOOP]
    assert (loop.place, loop.turns, loop.time) == ("train.py:3", 10, 1_000 * MS)


def test_a_loop_of_a_library_that_never_went_back_is_none(train: Watched, tmp_path: Path) -> None:
    """As one that waits for a worker's batch, and looks again only if there was none."""
    text = "def get():\n    while True:\n        return wait()\n"
    train.program(tmp_path / "site-packages" / "lib" / "queue.py", text)
    for _ in range(10):
        train.at(80, ("train", STEP), ("queue.get", 3)).at(20, ("train", LOG))
    train.turned("train", 4, steady(0, 10, 100)).turned("train", 3, [1_000])
    [loop] = [one for one in held_together(tree_of(train.looks)).within() if one.kind == LOOP]
    assert [(line.place, line.time) for line in loop.lines] == [("train.py:5", 800 * MS), ("train.py:6", 200 * MS)]


def test_a_loop_that_was_counted_and_never_went_back_is_none(train: Watched) -> None:
    train.at(100, ("train", POLL)).at(100, ("train", STEP))
    assert "train.py:8" in [one.place for one in tree_of(train.looks).within() if one.kind == LOOP]
    train.turned("train", 4, steady(100, 5, 20)).turned("train", 3, [200])
    assert "train.py:8" not in [one.place for one in tree_of(train.looks).within() if one.kind == LOOP]


def test_a_generator_turns_with_the_loop_that_asks_it(train: Watched, tmp_path: Path) -> None:
    """Two loops ask it, and in neither does it turn more than once."""
    train.program(tmp_path / "fetch.py", "def batches(loader):\n    for batch in loader:\n        yield batch\n")
    for line in (STEP, POLL):
        for _ in range(10):
            train.at(20, ("train", line - 1), ("fetch.batches", 2)).at(80, ("train", line))
    train.turned("train", 4, steady(0, 10, 100)).turned("train", 8, steady(1_000, 10, 100))
    train.turned("fetch.batches", 2, [turn - 80 for turn in steady(0, 20, 100)][1:])
    run = held_together(tree_of(train.looks))
    assert [one.place for one in run.within() if one.kind == LOOP] == ["train.py:4", "train.py:8"]


def test_a_short_loop_stands_among_the_lines(train: Watched) -> None:
    """A two-hundredth part of the run is not worth a part of its own."""
    train.at(10_000, ("train", 2)).at(40, ("train", POLL))
    run = held_together(tree_of(train.looks))
    assert [(one.kind, one.place) for one in run.parts] == [(LINE, "train.py:2"), (LINE, f"train.py:{POLL}")]


def test_a_function_that_is_called_again_and_again_holds_no_loop_of_the_run(train: Watched, tmp_path: Path) -> None:
    """Its frame never stays: 20 calls of 5 ms, each of which has a loop."""
    train.program(tmp_path / "lib.py", "def crop(picture):\n    for row in picture:\n        cut(row)\n")
    code = train.numbers["lib.crop"]
    train.looks.longest_stay[code] = 1
    train.looks.entries[code] = array("q", [turn * 5 * MS for turn in range(20)])
    train.at(100, ("train", STEP), ("lib.crop", 3))
    run = held_together(tree_of(train.looks))
    assert [one.place for one in run.within() if one.kind == LOOP] == ["train.py:3", "train.py:4"]


def importing(train: Watched) -> Watched:
    return train.code(
        "import", codes_of("def _find_and_load(): pass\n", "<frozen importlib._bootstrap>")["_find_and_load"]
    )


def test_importing_stands_at_the_root_wherever_it_happens(train: Watched) -> None:
    importing(train).at(200, ("train", 1), ("import", 3)).at(100, ("train", STEP), ("import", 3))
    train.at(300, ("train", STEP))
    run = held_together(tree_of(train.looks))
    imports = next(one for one in run.parts if one.kind == IMPORTS)
    assert (imports.time, imports.began, imports.place) == (300 * MS, 0, "")
    assert part(run, "train.py:4").time == 300 * MS


def test_the_first_use_of_the_gpu_has_a_name(train: Watched) -> None:
    train.code("lazy", codes_of("def _lazy_init(): pass\n", "<torch>")["_lazy_init"])
    train.at(200, ("train", 2), ("lazy", 1)).at(100, ("train", 2))
    run = held_together(tree_of(train.looks))
    assert [(one.kind, one.time) for one in run.parts] == [(FIRST_USE, 200 * MS), (LINE, 100 * MS)]


# turns


def slow_turns(train: Watched, slow: list[int], count: int = 30) -> Part:
    """Turns of 40 ms; the slow ones spend 200 ms more at the log."""
    ends = list[float]()
    for turn in range(count):
        train.at(40, ("train", STEP))
        if turn in slow:
            train.at(200, ("train", LOG))
        ends.append(train.now)
    train.turned("train", 4, ends)
    return part(held_together(tree_of(train.looks)), "train.py:4")


def test_every_third_turn_is_slow_at_its_line(train: Watched) -> None:
    loop = slow_turns(train, list(range(2, 30, 3)))
    (slow,) = loop.kinds
    assert (slow.regular, slow.every, slow.place) == (True, 3, f"train.py:{LOG}")
    assert (slow.longer, slow.total) == (200 * MS, slow.count * 200 * MS)
    assert slow.count in (9, 10)  # the first turns may be warm-up


def test_turns_that_are_slow_at_different_lines_are_kinds_of_their_own(train: Watched) -> None:
    """Every fifth turn logs, every seventh saves; where the two meet it is the longer one's."""
    ends = list[float]()
    for turn in range(1, 71):
        train.at(40, ("train", STEP))
        train.at(200 if turn % 5 == 0 else 0, ("train", LOG))
        train.at(400 if turn % 7 == 0 else 0, ("train", POLL - 2))
        ends.append(train.now)
    train.turned("train", 3, ends)
    kinds = part(held_together(tree_of(train.looks)), "train.py:3").kinds
    assert [(one.place, one.every, one.regular, one.longer) for one in kinds] == [
        (f"train.py:{SAVE}", 7, True, 400 * MS),
        (f"train.py:{LOG}", 5, True, 200 * MS),
    ]


def test_what_python_does_once_the_program_is_over_is_its_end(train: Watched) -> None:
    for number, ends in enumerate((weakref.finalize._exitfunc, threading._shutdown)):
        train.code(f"ends {number}", ends.__code__)
    run = tree_of(train.at(100, ("train", 10)).at(40, ("ends 0", 700)).at(20, ("ends 1", 1600)).looks)
    assert [(part.place.rpartition("/")[2], part.time) for part in run.parts] == [
        ("train.py:10", 100 * MS),
        ("", 60 * MS),
    ]


def test_a_turn_that_is_slow_once_is_one(train: Watched) -> None:
    loop = slow_turns(train, [17])
    (slow,) = loop.kinds
    assert (slow.count, slow.longer, slow.place) == (1, 200 * MS, f"train.py:{LOG}")


def test_even_turns_are_not_slow(train: Watched) -> None:
    assert slow_turns(train, []).kinds == ()


def test_the_first_turn_is_warm_up(train: Watched) -> None:
    loop = slow_turns(train, [0])
    assert (loop.warm_up, loop.warm_up_time) == (1, 200 * MS)
    assert loop.kinds == ()


def test_the_time_between_two_runs_of_a_loop_is_no_turn(train: Watched) -> None:
    """Two epochs, and 200 ms between the batches of the first one and of the second."""
    batches = part(tree_of(two_epochs(train).looks), "train.py:4")
    assert (batches.low, batches.high) == (100 * MS, 100 * MS)
    assert batches.kinds == ()


def test_the_last_turn_of_a_while_does_not_jump_back(train: Watched) -> None:
    train.at(50, ("train", 2)).at(1_000, ("train", POLL))
    train.turned("train", 8, steady(50, 9, 100))
    loop = part(held_together(tree_of(train.looks)), "train.py:8")
    assert (loop.turns, loop.turn) == (10, 100 * MS)


def test_a_while_that_is_begun_anew_has_a_last_turn_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five episodes of four moves."""
    monkeypatch.chdir(tmp_path)
    text = "for episode in range(5):\n    reset()\n    while not done:\n        move()\n"
    run = Watched().program(tmp_path / "play.py", text)
    jumps, episodes = list[float](), list[float]()
    for _ in range(5):
        run.at(20, ("play", 2))
        jumps += steady(run.now, 3, 20)
        run.at(80, ("play", 4))
        episodes.append(run.now)
    run.turned("play", 1, episodes).turned("play", 3, jumps)
    tree = held_together(tree_of(run.looks))
    assert (part(tree, "play.py:1").turns, part(tree, "play.py:3").turns) == (5, 20)
    assert part(tree, "play.py:3").turn == 20 * MS


def test_a_loop_that_was_counted_no_further_says_so(train: Watched) -> None:
    two_epochs(train)
    train.looks.uncounted.update(loop for loop, ends in train.looks.turns.items() if len(ends) == 20)
    run = tree_of(train.looks)
    assert (part(run, "train.py:3").at_least, part(run, "train.py:4").at_least) == (False, True)


# the GPU


def half(moments: Ints) -> np.ndarray:
    return moments / 2


def test_the_gpus_time_is_divided_as_the_hosts_is(train: Watched) -> None:
    run = held_together(tree_of(two_epochs(train).looks, half))
    assert run.busy == run.time // 2
    assert (run.clock, set(run.shares), len(run.shares)) == (train.looks.began, {50}, 240)
    assert sum(one.busy for one in run.parts) == pytest.approx(run.busy, abs=3)
    batches = part(run, "train.py:4")
    assert (batches.busy, batches.waits) == (1_000 * MS, 1_000 * MS)
    assert [one.idle for one in batches.lines] == [800 * MS, 200 * MS]


def test_where_nobody_asked_the_gpu_nothing_is_said_of_it(train: Watched) -> None:
    run = tree_of(two_epochs(train).looks)
    assert {one.busy for one in run.within()} == {NONE}
    assert {line.idle for one in run.within() for line in one.lines} == {NONE}
    assert run.shares == ()


def samples(*pairs: tuple[int, float]) -> GpuShare:
    share = GpuShare(lambda: 0)
    share.times.extend(time * MS for time, _ in pairs)
    share.shares.extend(value for _, value in pairs)
    return share


def worked(share: GpuShare, *moments: int) -> list[float]:
    return [round(float(time) / MS, 3) for time in share.busy_until(np.array(moments, np.int64) * MS)]


def test_samples_add_up_to_the_time_at_work() -> None:
    """The first one tells of the 200 ms before it."""
    share = samples((1_000, 1.0), (1_200, 0.5), (1_400, 0.0), (1_600, 1.0))
    assert worked(share, 0, 800, 900, 1_000, 1_100, 1_200, 1_400, 1_600) == [0, 0, 100, 200, 250, 300, 300, 500]
    assert worked(share, 9_000) == [500]


def test_samples_may_come_out_of_order() -> None:
    assert worked(samples((1_400, 0.0), (1_000, 1.0), (1_200, 0.5)), 1_000, 1_400) == [200, 300]


def test_a_sample_says_nothing_of_what_is_long_before_it() -> None:
    assert worked(samples((1_000, 0.0), (11_000, 1.0)), 11_000) == [1_000]


def test_one_sample_is_none() -> None:
    assert not samples((1_000, 1.0))
    assert samples((1_000, 1.0), (1_200, 1.0))


# what could be looked at closely


def test_the_loop_in_which_the_gpu_waits_longest_comes_first(train: Watched) -> None:
    two_epochs(train)
    found = innermost_loops(train.looks, half)
    assert [(one.place, one.time, one.waits) for one in found] == [
        ("train.py:4", 2_000 * MS, 1_000 * MS),
        ("train.py:3", 400 * MS, 200 * MS),
    ]
    assert len(found[0].ends) == 20
    assert all(train.looks.turns[jump] for jump in found[0].jumps)


def test_loops_are_those_of_the_source_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`keepbusy fix` runs a candidate as the file that it is to change."""
    file = tmp_path / "train.py"
    assert read_source(str(file)) == ""
    file.write_text("for one in range(3): pass\n")
    assert read_source(str(file)) == file.read_text()
    monkeypatch.setitem(linecache.cache, str(file), (5, None, ["pass\n"], str(file)))
    assert read_source(str(file)) == "pass\n"


def test_another_process_finds_the_loop_by_where_it_stands(train: Watched) -> None:
    two_epochs(train)
    sources = SourceLoops(read_source)
    for one in innermost_loops(train.looks, half):
        jumps, _ = jumps_of(one.site, train.looks, sources)
        assert jumps >= one.jumps
        loops = {sources.of_jump(train.looks.codes[code], target) for code, target in jumps}
        assert [loop.first for loop in loops if loop] == [one.site.line]
        assert jumps_of(one.site._replace(file="other.py"), train.looks, sources) == (frozenset(), frozenset())
    inner, outer = sorted(innermost_loops(train.looks, half), key=lambda one: -one.site.line)
    assert jumps_of(inner.site, train.looks, sources)[1] == jumps_of(outer.site, train.looks, sources)[0] != frozenset()


def test_the_run_knows_its_lines_that_decide_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "for step in steps:\n    if heard(step).item() == 0:\n        break\n    say(step)\n"
    run = Watched().program(tmp_path / "spell.py", text).at(300, ("spell", 2)).at(200, ("spell", 4))
    assert tree_of(run.looks).decides == ("spell.py:2",)


STARS = "for round in range(9):\n    for step in range(20):\n        for piece in pieces:\n            add(piece)\n"


@pytest.mark.parametrize(
    ("passed", "first", "step"),
    [
        (9000, 50, "stars.py:2"),
        (300, 50, None),
        (700, 600, None),
        (1300, 1300, "stars.py:3"),
        (1300, 600, "stars.py:2"),
    ],
)
def test_a_step_is_a_turn_of_the_outermost_loop_whose_turns_a_window_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed: int, first: int, step: str | None
) -> None:
    """Pieces of 5 ms, ten of which are a step, in rounds of a second; the first step takes longer."""
    monkeypatch.chdir(tmp_path)
    run = Watched().program(tmp_path / "stars.py", STARS).at(passed, ("stars", 4))
    run.turned("stars", 3, steady(0, passed // 5, 5)).turned("stars", 1, steady(0, passed // 1_000, 1_000))
    run.turned("stars", 2, [first, *steady(first, (passed - first) // 50, 50)])
    loops = innermost_loops(run.looks, half)
    assert loops[0].place == "stars.py:3"
    found = whole_step(loops)
    assert (found.place if found is not None else None) == step
    if found is not None:
        took = turns_at(found.site, run.looks, SourceLoops(read_source))
        assert set(took.tolist()) == {5 * MS if found.place == "stars.py:3" else 50 * MS}
    assert whole_step([]) is None


def test_a_loop_that_is_counted_no_further_cannot_be_looked_at(train: Watched) -> None:
    two_epochs(train)
    train.looks.uncounted.update(loop for loop, ends in train.looks.turns.items() if len(ends) == 20)
    assert [one.place for one in innermost_loops(train.looks, None)] == ["train.py:3"]


def test_what_a_loop_that_is_counted_no_further_waits_is_its_outer_loops(train: Watched) -> None:
    two_epochs(train)
    train.looks.uncounted.update(loop for loop, ends in train.looks.turns.items() if len(ends) == 20)
    [outer] = innermost_loops(train.looks, half)
    assert (outer.time, outer.waits) == (2_400 * MS, 1_200 * MS)


# Which steps are turns of the loop that trains.

ROLLOUTS = """\
for iteration in range(3):
    for move in range(20):
        act(move)
    for epoch in range(2):
        for batch in range(4):
            optimizer.step()
"""


def test_what_another_loop_does_between_two_steps_is_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 10 ms; before the first of eight, rollouts take 200 ms."""
    monkeypatch.chdir(tmp_path)
    run, marks = Watched().program(tmp_path / "ppo.py", ROLLOUTS), Marks()
    moves, batches, epochs = list[float](), list[float](), list[float]()
    for _ in range(3):
        moves += steady(run.now, 20, 10)
        run.at(200, ("ppo", 3))
        for _ in range(2):
            for end in steady(run.now, 4, 10):
                marks.table.add(round((end - 1) * MS), ENDS, marks.pauses)
                batches.append(end)
            run.at(40, ("ppo", 6))
            epochs.append(run.now)
    run.turned("ppo", 2, moves).turned("ppo", 5, batches).turned("ppo", 4, epochs).turned("ppo", 1, epochs[1::2])
    loops = innermost_loops(run.looks, None)
    around = [(run.numbers["ppo"], line) for line in (1, 4, 5)]
    trains = loop_of_steps(marks.table.host(), around, loops)
    assert trains is not None
    assert (trains.place, [one.place for one in loops_beside(trains, loops)]) == ("ppo.py:5", ["ppo.py:2"])
    assert marks.steps().took.max() == 210 * MS
    marks.others = [one.ends for one in loops_beside(trains, loops)]
    assert set(marks.steps().took.tolist()) == {10 * MS}
    assert marks.beside() == {9, 17}


def test_marks_within_a_loop_over_optimizers_are_those_of_the_loop_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Watched().program(
        tmp_path / "gan.py", "for batch in loader:\n    for one in optimizers:\n        one.step()\n"
    )
    run.at(1_000, ("gan", 3)).turned("gan", 1, steady(0, 10, 100)).turned("gan", 2, steady(0, 20, 50))
    marks = np.array([round(end * MS) - 1 for end in steady(0, 10, 100)])
    found = loop_of_steps(marks, [(run.numbers["gan"], line) for line in (1, 2)], innermost_loops(run.looks, None))
    assert found is not None
    assert found.place == "gan.py:1"


COLLECTED = """\
for epoch in range(2):
    for update in range(10):
        for row in range(2):
            collect(row)
        for batch in batches:
            batch.step()
"""


def test_what_the_loop_around_a_loop_of_one_turn_does_is_part_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Transformers' trainer does, with a loop over the batches that are accumulated."""
    monkeypatch.chdir(tmp_path)
    run = Watched().program(tmp_path / "trainer.py", COLLECTED)
    run.at(600, ("trainer", 4)).at(1_400, ("trainer", 6))
    run.turned("trainer", 3, steady(0, 40, 50)).turned("trainer", 5, [one - 2 for one in steady(0, 20, 100)])
    run.turned("trainer", 2, steady(0, 20, 100)).turned("trainer", 1, steady(0, 2, 1_000))
    marks = np.array([round(end * MS) - 3 * MS for end in steady(0, 20, 100)])
    loops = innermost_loops(run.looks, None)
    trains = loop_of_steps(marks, [(run.numbers["trainer"], line) for line in (1, 2, 5)], loops)
    assert trains is not None
    assert (trains.place, [*loops_beside(trains, loops)]) == ("trainer.py:2", [])


FILM = """\
def write(pieces):
    for piece in pieces:
        for frame in piece:
            pack(frame)
def coloured(scenes):
    for scene in scenes:
        for grey in scene:
            yield model(grey)
"""


def test_steps_within_a_generator_are_turns_of_the_loop_that_asks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose own work between two of them is no other loop's. Scenes of ten pieces of four frames."""
    monkeypatch.chdir(tmp_path)
    run, marks = Watched().program(tmp_path / "film.py", FILM), Marks()
    for end in steady(0, 60, 80):
        run.at(20, ("film.write", 2), ("film.coloured", 8)).at(60, ("film.write", 4))
        marks.table.add(round((end - 61) * MS), ENDS, marks.pauses)
    run.turned("film.write", 3, steady(5, 240, 20)).turned("film.write", 2, steady(0, 60, 80))
    run.turned("film.coloured", 7, [one - 60 for one in steady(0, 60, 80)])
    run.turned("film.coloured", 6, steady(0, 6, 800))
    loops = innermost_loops(run.looks, None)
    around = [
        (run.numbers[name], line) for name, line in (("film.write", 2), ("film.coloured", 6), ("film.coloured", 7))
    ]
    trains = loop_of_steps(marks.table.host(), around, loops)
    assert trains is not None
    assert (trains.place, [*loops_beside(trains, loops)]) == ("film.py:2", [])
    marks.others = [one.ends for one in loops if one.place == "film.py:3"]  # if it were held for another one
    assert len(marks.steps()) == 59


def test_a_program_that_is_about_to_import_pytorch_uses_no_gpu_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks from beside it may find a module of which nothing has been executed."""
    monkeypatch.setitem(sys.modules, "torch.cuda", ModuleType("torch.cuda"))
    share = GpuShare(lambda: 0)
    share.read()
    assert (uses_gpu(), share.fault, bool(share)) == (False, "", False)


def test_looks_of_which_none_met_a_turn_say_of_no_turn_where_it_was_slow() -> None:
    took = np.full(40, 10 * MS)
    took[20] = 100 * MS
    over = 1_000 * MS + np.cumsum(took)
    looks = LookTable(np.array([1, 2]) * MS, np.array([1, 1]), np.array([3, 4]))
    [kind] = slow_kinds(took, over - took, over, looks)
    assert (kind.rows.tolist(), kind.longer.tolist(), kind.place) == ([20], [90 * MS], -1)
