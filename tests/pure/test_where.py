"""Where: the place in the user's program, as exactly as the recording knows it, and never more exactly."""

from __future__ import annotations

import numpy as np
import pytest
from build import Run

from keepbusy.causes.places import Where, place_of
from keepbusy.timeline.frame_roles import Owner, owner_of_file
from keepbusy.timeline.model import Kind, Timeline

TRAIN = "train.py(19): main"
MODEL = "nets/model.py(40): forward"
ITEM = "aten::item"


def place(run: Run, kind: Kind = Kind.SYNC) -> Where:
    """Of the last span of a kind."""
    timeline = run.timeline()
    return place_of(timeline, int(np.flatnonzero(timeline.spans.kind == kind)[-1]))


def begun() -> Run:
    return Run.of().step().launch()


# Stacks


def test_the_users_innermost_frame_and_what_it_called() -> None:
    found = place(begun().sync(at=[TRAIN, MODEL, ITEM, "aten::_local_scalar_dense"]))
    assert (found.file, found.line, found.function) == ("nets/model.py", 40, "forward")
    assert found.operator == ITEM
    assert not found.exact
    assert str(found) == "nets/model.py:40"


def test_the_librarys_frame_stands_beside_the_users() -> None:
    """Innermost is the library's: the line is the user's, the library's call is named with it."""
    inside = ["torch/_tensor.py(1000): __contains__", "torch/_tensor.py(900): wrapper"]
    found = place(begun().sync(at=[TRAIN, *inside, ITEM]))
    assert (found.file, found.line) == ("train.py", 19)
    assert found.library == "torch/_tensor.py:900 in wrapper"


def test_what_is_known_to_be_installed_is_named_without_its_folder() -> None:
    found = place(begun().sync(at=[TRAIN, "site-packages/odesolve/steps.py(34): integrate", ITEM]))
    assert (found.file, found.line) == ("train.py", 19)
    assert found.library == "odesolve/steps.py:34 in integrate"


def test_a_library_that_calls_back_is_not_between() -> None:
    """torch calls the user's hook, which reads a value: the hook is to blame, and no library with it."""
    found = place(begun().sync(at=[TRAIN, "torch/nn/modules/module.py(1700): _call_impl", MODEL, ITEM]))
    assert (found.file, found.library) == ("nets/model.py", "")


def test_frames_that_name_no_line_are_passed_over() -> None:
    found = place(begun().sync(at=[TRAIN, "nn.Module: Linear_0", "<built-in method item of Tensor>", ITEM]))
    assert (found.file, found.line) == ("train.py", 19)


def test_a_recorded_line_is_exact() -> None:
    run = begun()
    with run.inside("train.py(31): main", exact=True):
        run.sync(at=[ITEM])
    found = place(run)
    assert (found.line, found.exact) == (31, True)


def test_without_an_operator_the_call_itself_is_named() -> None:
    found = place(begun().sync(at=[TRAIN], name="cudaDeviceSynchronize"))
    assert (found.operator, found.file) == ("cudaDeviceSynchronize", "train.py")


def test_only_library_frames_are_no_place_of_the_users() -> None:
    found = place(begun().sync(at=["torch/optim/adam.py(100): step", "aten::_foreach_add"]))
    assert found.file == ""
    assert found.library == "torch/optim/adam.py:100 in step"
    assert "aten::_foreach_add" in str(found)


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("train.py", False),
        ("src/train.py", False),
        ("/home/me/code/net.py", False),
        ("my_torch_code/net.py", False),
        ("torch/nn/modules/linear.py", True),
        ("torch.py", True),
        ("transformers/trainer.py", True),
        ("/usr/lib/python3.11/threading.py", True),
        ("threading.py", True),
        ("json/decoder.py", True),
        ("/opt/venv/lib/python3.12/site-packages/mine/x.py", True),
        ("/usr/lib/python3/dist-packages/x.py", True),
        ("<frozen importlib._bootstrap>", True),
        ("<string>", True),
        ("/home/me/.venv/bin/keepbusy", True),
    ],
)
def test_what_is_a_library(file: str, library: bool) -> None:
    assert (owner_of_file(file) != Owner.USER) is library


# The backward pass


def with_backward(run: Run, sequence: int = 7, forward_sequence: int = 7) -> Run:
    """A forward operator in the model, then `loss.backward()` on a thread of its own, which reads a value."""
    with run.inside(TRAIN, MODEL), run.inside("aten::index", sequence=forward_sequence):
        run.launch()
    with run.inside("trainer.py(60): finish", "torch/_tensor.py(500): backward"):
        other = run.handoff(1)
        with other.inside("autograd::engine::evaluate_function: IndexBackward0", sequence=sequence):
            other.sync(at=["aten::nonzero"])
        other.handoff(0).work(5)
    return other


def test_a_backward_operator_belongs_to_the_line_of_its_forward_part() -> None:
    found = place(with_backward(begun()))
    assert (found.file, found.line, found.operator) == ("nets/model.py", 40, "aten::nonzero")
    assert found.library == ""


def test_the_last_forward_part_of_that_number_is_meant() -> None:
    """Numbers begin anew; the call that came before this backward pass is the one."""
    run = begun()
    with run.inside("old.py(1): warm_up"), run.inside("aten::index", sequence=7):
        run.launch()
    assert place(with_backward(run)).file == "nets/model.py"


def test_without_a_forward_part_it_belongs_to_whoever_called_backward() -> None:
    found = place(with_backward(begun(), sequence=7, forward_sequence=99))
    assert (found.file, found.line) == ("trainer.py", 60)
    assert found.library == "torch/_tensor.py:500 in backward"


def test_the_backward_threads_own_frames_come_first() -> None:
    """A custom autograd function: its backward is Python of the user's."""
    run = begun()
    with run.inside("trainer.py(60): finish"):
        other = run.handoff(1)
        other.sync(at=["ops.py(12): backward", ITEM])
    assert place(other).file == "ops.py"


# Without stacks


def named(run: Run, *names: str) -> Run:
    for name in names:
        run.launch(at=[name])
    return run


def test_the_operator_and_its_neighbours() -> None:
    run = named(begun(), "aten::linear", "aten::relu")
    named(run.sync(at=[ITEM]), "aten::cat", "aten::sum")
    assert str(place(run)) == "aten::item, after aten::relu, before aten::cat"


def test_an_annotation_says_more_than_neighbours() -> None:
    run = named(begun(), "aten::linear")
    with run.inside("validation"):
        named(run.sync(at=[ITEM]), "aten::cat")
    assert str(place(run)) == "in validation"


def test_the_number_of_a_step_is_no_place() -> None:
    run = named(begun(), "aten::linear")
    with run.inside("ProfilerStep#3"):
        named(run.sync(at=[ITEM]), "aten::cat")
    assert str(place(run)) == "aten::item, after aten::linear, before aten::cat"


def test_neighbours_are_operators_of_their_own() -> None:
    """The launch inside the same operator is no neighbour of the sync in it."""
    run = named(begun(), "aten::relu")
    with run.inside("aten::nonzero"):
        run.launch(at=["aten::copy_"]).sync()
    named(run, "aten::index")
    assert str(place(run)) == "aten::nonzero, after aten::relu, before aten::index"


def test_at_the_end_of_a_recording_there_is_no_neighbour() -> None:
    run = named(begun(), "aten::relu")
    assert str(place(run.sync(at=[ITEM]))) == "aten::item, after aten::relu"


def test_a_bare_call_is_named_as_it_is() -> None:
    assert str(place(begun().sync(name="cudaDeviceSynchronize"))) == "cudaDeviceSynchronize"


def test_neighbours_stand_on_the_same_thread() -> None:
    run = named(begun(), "aten::relu")
    other = named(run.on(thread=1).begin(0), "aten::sort")
    named(run.sync(at=[ITEM]), "aten::cat")
    named(other, "aten::topk")
    assert str(place(run)) == "aten::item, after aten::relu, before aten::cat"


def test_work_has_a_place_too() -> None:
    assert place(begun().work(900, at=[TRAIN, "aten::randn"]), Kind.WORK).operator == "aten::randn"


def frameless(timeline: Timeline) -> Timeline:
    return timeline.change_spans(frame=np.full(len(timeline), -1))


def test_a_place_nobody_knows_is_said_to_be_unknown() -> None:
    assert str(Where()) == "unknown place"
    timeline = frameless(begun().sync(at=[TRAIN]).timeline())
    assert place_of(timeline, len(timeline) - 1).file == ""
