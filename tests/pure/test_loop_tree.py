"""From where a program was, and the iterations of its loops, to the tree of its run. Milliseconds."""

from __future__ import annotations

import linecache
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from watched import MS, Watched, codes_of

from keepbusy.program.loops.codes import read_source
from keepbusy.program.loops.slow_iterations import PlacesInTime, slow_kinds
from keepbusy.program.loops.step_loop import innermost_loops
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
    train.iterated("train", 4, batches).iterated("train", 3, [1_500, 2_700])
    return train.at(100, ("train", 10))


def test_the_tree_of_a_training_run(train: Watched) -> None:
    run = held_together(two_epochs(train).tree())
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
    run = held_together(train.tree())
    assert [(one.place, one.turns, one.turn) for one in run.within() if one.kind == LOOP] == [
        ("train.py:3", 0, NONE),
        ("train.py:4", 0, NONE),
    ]


def test_a_run_without_looks_is_a_run() -> None:
    run = Watched(ended=5 * MS).tree()
    assert (run.kind, run.parts, run.lines) == (RUN, (), ())


def test_time_before_the_first_look_and_after_the_last_one_has_a_place(train: Watched) -> None:
    train.at(10, ("train", 2)).at(10, ("train", 10))
    train.starts[0], train.ended = 5 * MS, 70 * MS
    run = held_together(train.tree())
    assert [(one.place, one.time) for one in run.parts] == [("train.py:2", 10 * MS), ("train.py:10", 60 * MS)]


def test_a_loop_of_a_library_stands_at_the_users_line(train: Watched, tmp_path: Path) -> None:
    trainer = "def fit(model):\n    setup()\n    while True:\n        training_step()\n"
    train.program(tmp_path / "site-packages" / "lib" / "trainer.py", trainer)
    train.program(tmp_path / "model.py", "def training_step():\n    x = 1\n    y = 2\n")
    train.iterated("trainer.fit", 3, steady(200, 9, 80))
    train.at(200, ("train", 2))
    for _ in range(10):
        train.at(20, ("train", 2), ("trainer.fit", 4))
        train.at(60, ("train", 2), ("trainer.fit", 4), ("model.training_step", 3))
    run = held_together(train.tree())
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
    [loop] = [one for one in train.iterated("train", 4, steady(0, 10, 90)).tree().within() if one.kind == LOOP]
    assert [(line.place, line.call, line.within) for line in loop.lines] == [("train.py:5", "forward", told)]


def test_a_loop_that_turns_once_in_each_turn_is_none(train: Watched) -> None:
    """Its lines stand among those of the loop around it."""
    train.ends.clear()
    for _ in range(10):
        train.at(80, ("train", STEP)).at(20, ("train", SAVE))
    train.iterated("train", 3, steady(0, 10, 100)).iterated("train", 4, [turn - 20 for turn in steady(0, 10, 100)])
    run = held_together(train.tree())
    [loop] = [one for one in run.within() if one.kind == LOOP]
    assert (loop.place, loop.turns, loop.time) == ("train.py:3", 10, 1_000 * MS)


def test_a_loop_of_a_library_that_never_went_back_is_none(train: Watched, tmp_path: Path) -> None:
    """As one that waits for a worker's batch, and looks again only if there was none."""
    text = "def get():\n    while True:\n        return wait()\n"
    train.program(tmp_path / "site-packages" / "lib" / "queue.py", text)
    for _ in range(10):
        train.at(80, ("train", STEP), ("queue.get", 3)).at(20, ("train", LOG))
    train.iterated("train", 4, steady(0, 10, 100)).iterated("train", 3, [1_000])
    [loop] = [one for one in held_together(train.tree()).within() if one.kind == LOOP]
    assert [(line.place, line.time) for line in loop.lines] == [("train.py:5", 800 * MS), ("train.py:6", 200 * MS)]


def test_a_loop_that_was_counted_and_never_went_back_is_none(train: Watched) -> None:
    train.at(100, ("train", POLL)).at(100, ("train", STEP))
    assert "train.py:8" in [one.place for one in train.tree().within() if one.kind == LOOP]
    train.iterated("train", 4, steady(100, 5, 20)).iterated("train", 3, [200])
    assert "train.py:8" not in [one.place for one in train.tree().within() if one.kind == LOOP]


def test_a_generator_turns_with_the_loop_that_asks_it(train: Watched, tmp_path: Path) -> None:
    """Two loops ask it, and in neither does it turn more than once."""
    train.program(tmp_path / "fetch.py", "def batches(loader):\n    for batch in loader:\n        yield batch\n")
    for line in (STEP, POLL):
        for _ in range(10):
            train.at(20, ("train", line - 1), ("fetch.batches", 2)).at(80, ("train", line))
    train.iterated("train", 4, steady(0, 10, 100)).iterated("train", 8, steady(1_000, 10, 100))
    train.iterated("fetch.batches", 2, [turn - 80 for turn in steady(0, 20, 100)][1:])
    run = held_together(train.tree())
    assert [one.place for one in run.within() if one.kind == LOOP] == ["train.py:4", "train.py:8"]


def test_a_short_loop_stands_among_the_lines(train: Watched) -> None:
    """A two-hundredth part of the run is not worth a part of its own."""
    train.at(10_000, ("train", 2)).at(40, ("train", POLL))
    run = held_together(train.tree())
    assert [(one.kind, one.place) for one in run.parts] == [(LINE, "train.py:2"), (LINE, f"train.py:{POLL}")]


def test_a_function_that_is_called_again_and_again_holds_no_loop_of_the_run(train: Watched, tmp_path: Path) -> None:
    """Its frame never stays: 20 calls of 5 ms, each of which has a loop."""
    train.program(tmp_path / "lib.py", "def crop(picture):\n    for row in picture:\n        cut(row)\n")
    code = train.numbers["lib.crop"]
    train.calls[code] = np.arange(20) * 5 * MS
    train.at(100, ("train", STEP), ("lib.crop", 3))
    run = held_together(train.tree())
    assert [one.place for one in run.within() if one.kind == LOOP] == ["train.py:3", "train.py:4"]


def importing(train: Watched) -> Watched:
    return train.code(
        "import", codes_of("def _find_and_load(): pass\n", "<frozen importlib._bootstrap>")["_find_and_load"]
    )


def test_importing_stands_at_the_root_wherever_it_happens(train: Watched) -> None:
    importing(train).at(200, ("train", 1), ("import", 3)).at(100, ("train", STEP), ("import", 3))
    train.at(300, ("train", STEP))
    run = held_together(train.tree())
    imports = next(one for one in run.parts if one.kind == IMPORTS)
    assert (imports.time, imports.began, imports.place) == (300 * MS, 0, "")
    assert part(run, "train.py:4").time == 300 * MS


def test_the_first_use_of_the_gpu_has_a_name(train: Watched) -> None:
    train.code("lazy", codes_of("def _lazy_init(): pass\n", "<torch>")["_lazy_init"])
    train.at(200, ("train", 2), ("lazy", 1)).at(100, ("train", 2))
    run = held_together(train.tree())
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
    train.iterated("train", 4, ends)
    return part(held_together(train.tree()), "train.py:4")


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
    train.iterated("train", 3, ends)
    kinds = part(held_together(train.tree()), "train.py:3").kinds
    assert [(one.place, one.every, one.regular, one.longer) for one in kinds] == [
        (f"train.py:{SAVE}", 7, True, 400 * MS),
        (f"train.py:{LOG}", 5, True, 200 * MS),
    ]


def test_what_python_does_once_the_program_is_over_is_its_end(train: Watched) -> None:
    for number, ends in enumerate((weakref.finalize._exitfunc, threading._shutdown)):
        train.code(f"ends {number}", ends.__code__)
    run = train.at(100, ("train", 10)).at(40, ("ends 0", 700)).at(20, ("ends 1", 1600)).tree()
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
    batches = part(two_epochs(train).tree(), "train.py:4")
    assert (batches.low, batches.high) == (100 * MS, 100 * MS)
    assert batches.kinds == ()


def test_the_last_turn_of_a_while_does_not_jump_back(train: Watched) -> None:
    train.at(50, ("train", 2)).at(1_000, ("train", POLL))
    train.iterated("train", 8, steady(50, 9, 100))
    loop = part(held_together(train.tree()), "train.py:8")
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
    run.iterated("play", 1, episodes).iterated("play", 3, jumps)
    tree = held_together(run.tree())
    assert (part(tree, "play.py:1").turns, part(tree, "play.py:3").turns) == (5, 20)
    assert part(tree, "play.py:3").turn == 20 * MS


def test_a_loop_that_was_counted_no_further_says_so(train: Watched) -> None:
    two_epochs(train)
    train.incomplete.add((train.numbers["train"], 4))
    run = train.tree()
    assert (part(run, "train.py:3").at_least, part(run, "train.py:4").at_least) == (False, True)


# the GPU


def half(moments: Ints) -> np.ndarray:
    return moments / 2


def test_the_gpus_time_is_divided_as_the_hosts_is(train: Watched) -> None:
    run = held_together(two_epochs(train).tree(half))
    assert run.busy == run.time // 2
    assert (run.clock, set(run.shares), len(run.shares)) == (0, {50}, 240)
    assert sum(one.busy for one in run.parts) == pytest.approx(run.busy, abs=3)
    batches = part(run, "train.py:4")
    assert (batches.busy, batches.waits) == (1_000 * MS, 1_000 * MS)
    assert [one.idle for one in batches.lines] == [800 * MS, 200 * MS]


# loops by themselves


def test_the_loop_in_which_the_gpu_waits_longest_comes_first(train: Watched) -> None:
    two_epochs(train)
    found = innermost_loops(train.times(half))
    assert [(one.place, one.time, one.waits) for one in found] == [
        ("train.py:4", 2_000 * MS, 1_000 * MS),
        ("train.py:3", 400 * MS, 200 * MS),
    ]
    assert len(found[0].ends) == 20


def test_loops_are_those_of_the_source_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`keepbusy fix` runs a candidate as the file that it is to change."""
    file = tmp_path / "train.py"
    assert read_source(str(file)) == ""
    file.write_text("for one in range(3): pass\n")
    assert read_source(str(file)) == file.read_text()
    monkeypatch.setitem(linecache.cache, str(file), (5, None, ["pass\n"], str(file)))
    assert read_source(str(file)) == "pass\n"


def test_the_run_knows_its_lines_that_decide_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "for step in steps:\n    if heard(step).item() == 0:\n        break\n    say(step)\n"
    run = Watched().program(tmp_path / "spell.py", text).at(300, ("spell", 2)).at(200, ("spell", 4))
    assert run.tree().decides == ("spell.py:2",)


def test_a_loop_that_is_counted_no_further_cannot_be_looked_at(train: Watched) -> None:
    two_epochs(train)
    train.incomplete.add((train.numbers["train"], 4))
    assert [one.place for one in innermost_loops(train.times())] == ["train.py:3"]


def test_what_a_loop_that_is_counted_no_further_waits_is_its_outer_loops(train: Watched) -> None:
    two_epochs(train)
    train.incomplete.add((train.numbers["train"], 4))
    [outer] = innermost_loops(train.times(half))
    assert (outer.time, outer.waits) == (2_400 * MS, 1_200 * MS)


def test_where_nothing_is_known_of_a_slow_iteration_it_has_no_place() -> None:
    took = np.full(40, 10 * MS)
    took[20] = 100 * MS
    over = 1_000 * MS + np.cumsum(took)
    where = PlacesInTime(np.array([1, 2]) * MS, np.array([1, 1]), np.array([3, 4]))
    [kind] = slow_kinds(over - took, over, where)
    assert (kind.rows.tolist(), kind.longer.tolist(), kind.place) == ([20], [90 * MS], -1)
