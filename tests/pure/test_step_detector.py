"""Several optimizers, one step: the round in which each of them has stepped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepbusy.recording.step_clock import BEGINS, ENDS, GOES_ON, PATIENCE, Rounds


def ends(*who: int) -> list[int]:
    rounds = Rounds()
    return [rounds.ended(one) for one in who]


def test_one_optimizer_ends_a_step_each_time() -> None:
    assert ends(7, 7, 7) == [BEGINS, ENDS, ENDS]


def test_two_in_turn_end_a_step_together() -> None:
    assert ends(*[1, 2] * 4)[2:] == [ENDS, GOES_ON] * 3  # the first step teaches that there are two


def test_a_critic_may_step_more_often_than_its_generator() -> None:
    told = ends(*[1, 1, 1, 1, 1, 2] * 6)
    assert told[12:] == [GOES_ON] * 5 + [ENDS] + ([GOES_ON] * 5 + [ENDS]) * 3


def test_an_optimizer_that_is_not_used_any_more_is_forgotten() -> None:
    told = ends(*[1] * 20, *[2] * 20)
    assert told[20:] == [GOES_ON] * PATIENCE + [BEGINS] + [ENDS] * (20 - PATIENCE - 1)


@pytest.mark.parametrize("every", [PATIENCE + 1, 3 * PATIENCE])
def test_one_that_steps_rarely_is_no_part_of_a_round(every: int) -> None:
    """As an optimizer of averages, or a generator whose critics have a loop of their own."""
    a_round = [1] * every + [2]
    assert ends(*a_round * 8)[-2 * len(a_round) :] == ([ENDS] * every + [GOES_ON]) * 2


def test_where_two_train_in_turn_each_has_its_steps() -> None:
    a_phase = [1] * 20 + [2] * 20
    told = ends(*a_phase * 4)
    for begin in range(20, len(told), 20):
        assert told[begin : begin + 20] == [GOES_ON] * PATIENCE + [BEGINS] + [ENDS] * (19 - PATIENCE)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True), st.integers(3, 12))
def test_a_round_that_repeats_gives_one_step_a_round(order: list[int], times: int) -> None:
    told = ends(*order * times)
    assert told[len(order) :].count(ENDS) == times - 1
    assert told.count(BEGINS) == 1


def test_one_that_is_no_more_is_not_waited_for() -> None:
    """As where each fit makes an optimizer of its own."""
    rounds, told = Rounds(), []
    for who in range(6):
        told.append(rounds.ended(who))
        rounds.forget(who)
    assert told == [BEGINS] + [ENDS] * 5


def test_one_that_lives_on_and_steps_no_more_holds_up_those_made_anew_for_a_while() -> None:
    rounds = Rounds()
    assert rounds.ended(100) == BEGINS
    told = []
    for who in range(20):
        told.append(rounds.ended(who))
        rounds.forget(who)
    assert told == [GOES_ON] * PATIENCE + [BEGINS] + [ENDS] * (19 - PATIENCE)
