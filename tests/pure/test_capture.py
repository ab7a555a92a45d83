"""What CUDA graphs hold of a step, on hand-built timelines. Microseconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
from build import MB, Run, loop
from told import TRAIN, told

from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.fixes import FIXES, source
from keepbusy.fixes import capture as capturing
from keepbusy.fixes.capture import Capture, capture_of, host_change_lines
from keepbusy.fixes.source.constants import ConstantsAtLine
from keepbusy.timeline.model import Direction, Kind

ITEM = ["aten::item", "aten::_local_scalar_dense"]
PREPARE = "data.py(3): prepare"


def capture(body: Callable[[Run], Any]) -> Capture:
    def within(run: Run) -> None:
        with run.inside(TRAIN):
            body(run)

    return capture_of(CauseInputs(loop(within, 8)), FIXES)


def launches(run: Run, number: int = 20, **more: Any) -> Run:
    for _ in range(number):
        run.work(20, at=["aten::add"]).launch(5, at=["aten::add"], **more)
    return run


def test_graphs_end_where_the_host_has_something_of_its_own_to_do() -> None:
    def body(run: Run) -> None:
        run.copy(MB, 100, at=["aten::copy_"])
        launches(launches(run).work(3_000, at=[PREPARE]))

    found = capture(body)
    assert found.share == pytest.approx(40 / 41, abs=0.01)
    assert not found.waits.any()
    timeline = loop(body, 8)
    kinds = timeline.spans.kind[capture_of(CauseInputs(timeline), FIXES).rows]
    in_graphs = [(kinds == kind).sum() for kind in (Kind.LAUNCH, Kind.KERNEL)]
    assert in_graphs == [9 * 2 * 19] * 2  # one launch of each is that of the graph


def test_what_a_graph_holds_is_found_without_libcst(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is needed to write fixes, and does not come with keepbusy."""
    monkeypatch.setitem(sys.modules, "libcst", None)
    for name in [name for name in sys.modules if name.startswith("keepbusy.fixes.source.")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(source, name.rpartition(".")[2])
    found = capture(lambda run: launches(launches(run).copy(MB, 100, at=["aten::copy_"])))
    assert found.share > 0.4


def test_a_mark_of_steps_ends_no_graph() -> None:
    """As an optimizer's, which steps right behind the backward pass."""

    def body(run: Run) -> None:
        launches(launches(run, 5).work(3_000, at=[PREPARE]), 20)

    assert capture_of(CauseInputs(loop(body, 8)), FIXES).share == pytest.approx(
        8 / 9
    )  # but at both ends of the recording


@pytest.mark.parametrize(("at", "share"), [("model.py(7): forward", 0.0), ("main.py(3): step", 1.0)])
def test_a_batch_may_be_copied_in_front_of_the_statement_that_takes_it(at: str, share: float) -> None:
    """`model(x.cuda())`, but not what is copied in the middle of a forward pass."""

    def body(run: Run) -> None:
        with run.inside("main.py(3): step"):
            if at == "main.py(3): step":
                run.copy(MB, 100, at=["aten::copy_"])
            with run.inside("model.py(7): forward"):
                launches(run)
                if at != "main.py(3): step":
                    run.copy(MB, 100, at=["aten::copy_"])
                launches(run)
        with run.inside("backward"):
            launches(run, 40)

    assert capture(body).share == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(("at", "file"), [("model.py(5): forward", "train.py"), (PREPARE, "model.py")])
def test_work_of_the_line_that_copies_a_batch_is_part_of_the_copy(at: str, file: str) -> None:
    """`x, y = (t.to(device) for t in batch)`, behind a read of the step before; not what prepares the batch."""

    def body(run: Run) -> None:
        with run.inside("main.py(3): step"):
            run.work(2_000, at=[at]).copy(MB, 100, at=["model.py(5): forward", "aten::copy_"])
            with run.inside("model.py(7): forward"):
                launches(run, 40)

    assert [lines.file for lines in capture(body).lines] == [file]


def test_what_is_called_between_is_captured_with_it_unless_something_in_there_stays() -> None:
    def body(run: Run) -> None:
        launches(run)
        with run.inside("model.py(7): forward"):
            launches(run, 4)
        launches(run)
        with run.inside("model.py(9): route"):
            launches(launches(run, 4).work(3_000, at=[PREPARE]), 4)

    assert capture(body).share == pytest.approx(44 / 52)


def test_reads_that_a_fix_takes_away_are_in_the_way_only_between_what_is_captured() -> None:
    middle = capture(lambda run: launches(launches(run).sync(at=ITEM)))
    assert (middle.share, middle.waits.sum()) == (1, pytest.approx(8, abs=1))
    end = capture(lambda run: launches(run, 40).sync(at=ITEM))
    assert (end.share, end.waits.sum()) == (1, 0)


def test_of_what_a_mask_chooses_again_and_again_no_graph_is_made() -> None:
    def body(run: Run) -> None:
        for _ in range(10):
            launches(run, 10).sync(at=["aten::index", "aten::nonzero"])

    assert not capture(body).waits.any()


def test_a_graph_holds_what_is_the_same_most_of_the_times() -> None:
    turns = count()

    def body(run: Run) -> None:
        launches(run, blocks=next(turns)).work(3_000, at=[PREPARE])
        launches(run, 30)

    assert capture(body).share == pytest.approx(30 / 50)


def test_a_cache_that_grows_is_captured_in_none_of_its_sizes() -> None:
    def body(run: Run) -> None:
        for size in range(10):
            launches(run, blocks=size).sync(at=ITEM).work(3_000, at=[PREPARE])

    assert capture(body).share == 0


@pytest.mark.parametrize(("between", "share"), [("data.py(3): prepare", 1.0), ("model.py(7): forward", 0.0)])
def test_a_backward_pass_is_captured_with_its_forward_pass(between: str, share: float) -> None:
    """A statement between the two may prepare the next batch and can move, but not one within the forward pass."""

    def body(run: Run) -> None:
        with run.inside("model.py(7): forward"):
            launches(run)
        with run.inside(between):
            run.work(3_000, at=[PREPARE])
            launches(run, 8 if share == 0 else 0)
        with run.inside("backward"):
            launches(run)

    assert capture(body).share == share


def test_a_backward_pass_on_a_thread_of_its_own_is_captured_with_its_forward_pass() -> None:
    """As profilers see it."""

    def body(run: Run) -> None:
        with run.inside("model.py(7): forward"):
            launches(run)
        with run.handoff(1).inside("backward") as backward:
            launches(backward)
        backward.handoff(0)

    assert capture(body).share == 1


def test_what_needs_a_value_of_the_forward_pass_does_not_move() -> None:
    def body(run: Run) -> None:
        with run.inside("model.py(7): forward"):
            launches(run)
        with run.inside(PREPARE):
            run.copy(64, 5, Direction.DEVICE_TO_HOST, at=["aten::copy_"]).work(3_000)
        with run.inside("backward"):
            launches(run)

    assert capture(body).share == 0


def test_an_evaluation_before_it_is_not_the_forward_pass_of_a_backward_pass() -> None:
    def body(run: Run) -> None:
        launches(run, 30).work(3_000, at=[PREPARE])
        with run.inside("model.py(7): forward"):
            launches(run)
        with run.inside("backward"):
            launches(run, 30)

    assert capture(body).share == 1


def test_nothing_is_captured_of_a_step_that_launches_little() -> None:
    for number in (5, 0):
        found = capture(lambda run, number=number: launches(run, number).work(100))
        assert (found.share, found.rows.any()) == (0, np.False_)


def test_the_plan_says_what_stays_outside() -> None:
    def body(run: Run) -> None:
        launches(launches(run, 60).work(3_000, at=[PREPARE]), 5)

    [fix] = [one for one in told(body).plan if one.fix == "graph"]
    assert fix.reason == "Graphs hold 92% of the launches. What data.py:3 does stays outside."


@pytest.mark.parametrize(("logged", "launching"), [(True, [7]), (False, [])])
def test_in_a_log_what_came_before_a_call_may_be_of_the_statement_before(logged: bool, launching: list[int]) -> None:
    """All of that time has the frames of the call. What came after it is the statement's own."""

    def body(run: Run) -> None:
        with run.inside("train.py(7): train", exact=True):
            launches(run.work(3_000, at=[PREPARE]))
        with run.inside("train.py(8): train", exact=True):
            launches(launches(run).work(3_000, at=[PREPARE]))

    lines = capture_of(CauseInputs(loop(body, 8).change_facts(logged=logged)), FIXES).lines
    assert [line for one in lines if one.function == "train" for line, _ in one.launching] == launching


DRAWING = """\
import random
import numpy as np

def main():
    np.random.seed(0)
    def step(x):
        return x * np.random.beta(1, 1)
    return step

class Model:
    def forward(self, x):
        x = x * 2
        return x if random.random() < 0.5 else -x
"""


def test_functions_that_draw_random_numbers_are_known_by_their_lines() -> None:
    assert host_change_lines(DRAWING) == {7: 2, 12: 1, 13: 2}
    assert host_change_lines("def broken(:") == {}


SETTING = """\
def warm_up(optimizer, step):
    optimizer.param_groups[0]["lr"] = step / 100

class Trainer:
    def train_step(self, x):
        for i, group in enumerate(self.optimizer.param_groups):
            group["lr"] *= 0.99
        return self.model(x)

def train(model, x):
    warm_up(optimizer, x.shape[0])
    optimizer.step()
    states["last"] = x

def step():
    seen["lr"] = 1
"""


def test_functions_that_set_an_optimizers_settings_are_known_with_those_that_call_them() -> None:
    assert host_change_lines(SETTING) == {2: 2, 6: 1, 7: 2, 8: 1, 11: 2, 12: 1, 13: 1}


def test_what_calls_a_function_that_draws_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No replay would draw anew."""

    def body(run: Run) -> None:
        with run.inside("main.py(3): step"):
            with run.inside("model.py(7): forward"):
                launches(run)
            with run.inside("model.py(8): forward"):
                launches(run)
        with run.inside("main.py(4): step"):
            launches(run)

    assert capture(body).share > 0.9
    forward = "\n" * 5 + "def forward(x):\n    x = x * 2\n    return x * random.random()\n"
    sources = {"model.py": forward, "main.py": ""}
    monkeypatch.setattr(capturing, "sources_at", lambda _, names: {name: sources[name] for name in names & {*sources}})
    monkeypatch.setattr(capturing, "_reached", lambda _, launches, *others: np.ones(len(launches), bool))
    capture_of.cache_clear()
    lines = {(one.file, line) for one in capture(body).lines for line, _ in one.launching}
    assert lines == {("model.py", 7), ("main.py", 4)}


@pytest.mark.parametrize(("made", "size", "share"), [(1, 64, 1.0), (0, 64, 0.25), (1, 0, 0.25)])
def test_what_is_made_of_numbers_is_copied_within_a_graph(
    made: int, size: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the forward pass and, as what it saved, by the backward pass; but not what is of another size each time."""
    sizes = count(1)

    def copy(run: Run) -> None:
        run.copy(size or next(sizes), 5, at=["aten::copy_"])

    def body(run: Run) -> None:
        with run.inside("main.py(3): step"), run.inside("model.py(7): loss"):
            launches(run)
            copy(run)
            launches(run)
        with run.inside("backward"):
            launches(run)
            copy(run)
            launches(run)

    found = {7: ConstantsAtLine(made, 0)} if made else {}
    monkeypatch.setattr("keepbusy.fixes.source.constants.constants_at", lambda _: found)
    monkeypatch.setattr(capturing, "sources_at", lambda _, names: dict.fromkeys(names & {"model.py"}, ""))
    monkeypatch.setattr(capturing, "_reached", lambda _, launches, *others: np.ones(len(launches), bool))
    capture_of.cache_clear()
    assert capture(body).share == pytest.approx(share, abs=0.03)
