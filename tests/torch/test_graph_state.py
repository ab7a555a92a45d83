"""`keepbusy.graph` and state that no replay renews: a step that keeps some stays eager, and says what it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from graph_loops import Kept
from graph_state import BY_THE_LOOP, HIDDEN, VISIBLE, losses_in_loop, losses_with, random_numbers_of_the_system

torch = pytest.importorskip("torch")


def warned(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        returned = run()
    return returned, [str(warning.message) for warning in caught if "keepbusy" in str(warning.message)]


@pytest.mark.parametrize("program", VISIBLE, ids=lambda program: program.__name__)
def test_a_step_that_keeps_state_on_the_host_is_named_and_stays_as_it_is(program) -> None:
    kept = Kept()
    found, messages = warned(lambda: losses_with(program, kept, 12))
    assert found == losses_with(program, lambda step: step, 12)
    (message,) = messages
    assert message.startswith("keepbusy.graph runs train eagerly: at graph_state.py:")
    assert kept.graphed.report().startswith("train: 0 replayed, 0 captured, 12 eager; ")


@pytest.mark.parametrize("program", HIDDEN, ids=lambda program: program.__name__)
def test_a_replay_that_differs_from_an_eager_call_is_the_last(program) -> None:
    kept = Kept()
    found, messages = warned(lambda: losses_with(program, kept, 20))
    assert found == losses_with(program, lambda step: step, 20)
    (message,) = messages
    assert "a replay and an eager call from the same state differ in result 0 by up to " in message


def test_numbers_that_the_host_draws_are_not_taken_for_sums_in_another_order() -> None:
    """Two eager calls differ here by as much; two replays do not."""
    kept = Kept()
    _, messages = warned(lambda: losses_with(random_numbers_of_the_system, kept, 12))
    assert "a replay and an eager call from the same state differ in result 0" in messages[0]
    assert kept.graphed.report().startswith("train: 0 replayed, 1 captured, 11 eager; ")


@pytest.mark.parametrize("program", BY_THE_LOOP, ids=lambda program: program.__name__)
def test_what_the_loop_changes_takes_effect(program) -> None:
    kept = Kept()
    found, messages = warned(lambda: losses_in_loop(program, kept, 30))
    assert (found, messages) == (losses_in_loop(program, lambda step: step, 30), [])
    assert kept.graphed.replays >= 8
