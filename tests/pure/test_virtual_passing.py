"""Host time: the program's own where it counts, PyTorch's dispatches at least, and nothing of ours."""

from __future__ import annotations

from keepbusy.virtual.clock.host_time import HOOK, SHORT, Passing

US = 1_000


class Watch:
    """A clock that somebody sets."""

    def __init__(self) -> None:
        self.time = 0

    def __call__(self) -> int:
        return self.time


def operator(passing: Passing, watch: Watch, program: int, least: int = 10 * US, ours: int = 900 * US) -> int:
    """The program runs, calls us, and we compute: what is written down for it."""
    watch.time += program
    passing.come()
    watch.time += ours
    spent = passing.due("train.py:3", least)
    passing.go()
    return spent


def test_a_dispatch_takes_what_it_takes_there_and_more_work_counts() -> None:
    watch = Watch()
    passing = Passing(watch)
    assert operator(passing, watch, 4 * US) == 10 * US
    assert operator(passing, watch, 2 * SHORT) == 2 * SHORT


def test_of_a_short_stretch_the_shortest_of_the_last_passes_counts() -> None:
    """A cold cache and a busy neighbour lengthen one pass, not all of them."""
    watch = Watch()
    passing = Passing(watch)
    assert [operator(passing, watch, us * US) for us in (40, 90, 300, 80, 85, 95)] == [
        one * US for one in (40, 40, 40, 80, 80, 80)
    ]


def test_while_pytorch_is_at_work_by_itself_its_time_is_modelled() -> None:
    watch = Watch()
    passing = Passing(watch)
    passing.alone = True
    assert operator(passing, watch, 2 * SHORT) == 10 * US
    assert operator(passing, watch, 2 * HOOK) == 2 * HOOK  # a hook that reads a file
    watch.time += SHORT
    passing.come()
    assert passing.at_border() == 0
    passing.alone = False
    passing.ends_alone()
    passing.go()
    assert operator(passing, watch, 20 * US) == 20 * US


def test_what_a_row_shows_already_is_part_of_the_dispatch() -> None:
    watch = Watch()
    passing = Passing(watch)
    watch.time += 7 * US
    assert passing.at_border() == 7 * US
    assert operator(passing, watch, 1 * US) == 3 * US
    assert operator(passing, watch, 1 * US) == 10 * US


def test_views_add_to_the_dispatch_and_our_own_part_is_left_out() -> None:
    watch = Watch()
    passing = Passing(watch)
    passing.spent += 6 * US
    assert operator(passing, watch, 1 * US) == 16 * US
    watch.time += 55 * US
    passing.excuse(30 * US)
    passing.come(overhead=5 * US)
    assert passing.due("elsewhere", 10 * US) == 20 * US


def test_a_look_at_the_program_parts_its_time() -> None:
    watch = Watch()
    passing = Passing(watch)
    watch.time += 2 * SHORT
    passing.come()
    assert passing.until(SHORT) == SHORT
    assert passing.show(SHORT) == SHORT
    assert passing.until(SHORT) == 0  # it was told already
    assert passing.due("here", 10 * US) == SHORT


def test_without_a_clock_only_modelled_time_passes() -> None:
    passing = Passing(None)
    passing.spent += 30
    assert passing.at_border() == 30
    passing.spent += 5
    assert passing.due("here", 10) == 15
