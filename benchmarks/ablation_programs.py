"""Programs of some seconds each, whose loops, stalls and changes are known because they were written that way.

`ablation.py` records each while one threshold is switched off; what has to be told of it stands beside it. They sleep
where others compute, so that many run on one machine without changing each other's times, and need no GPU.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

SEED = 12
PROGRAMS: dict[str, Program] = {}


@dataclass(frozen=True)
class Told:
    """What the recorder left of one run."""

    marks: dict[str, Any]
    """What the plain steps tell."""
    run: dict[str, Any]
    """The tree of loops."""
    windows: list[dict[str, Any]]
    """The first one, and the further ones with why they were opened."""
    held_up: float
    took: float
    """Seconds."""

    def loops(self, part: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        for inner in (part or self.run)["parts"]:
            if inner["kind"] == "loop":
                yield inner
            yield from self.loops(inner)

    def turns(self, source: str) -> int:
        """Of the loop whose line begins so; 0 where none was told."""
        return next((loop["turns"] for loop in self.loops() if loop["source"].startswith(source)), 0)

    @property
    def sources(self) -> set[str]:
        return {loop["source"] for loop in self.loops()}

    @property
    def stalls(self) -> list[dict[str, Any]]:
        return self.marks["stalls"]

    def stall(self, what: str = "", function: str = "") -> dict[str, Any]:
        """The one of this reason, or at a line of this function."""
        at = (one for one in self.stalls if one["what"] == what or (function and function in str(one["lines"])))
        return next(at, {"every": 0, "regular": False, "count": 0})

    def opened_for(self, why: str) -> list[dict[str, Any]]:
        return [one for one in self.windows if one.get("why") == why]


@dataclass(frozen=True)
class Program:
    run: Callable[[], object]
    is_right: Callable[[Told], bool]
    says: str = field(default="")
    is_virtual: bool = False  # runs on a virtual GPU: only its tree is told


def program(
    is_right: Callable[[Told], bool], is_virtual: bool = False
) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def registered(run: Callable[[], object]) -> Callable[[], object]:
        PROGRAMS[run.__name__] = Program(run, is_right, (run.__doc__ or "").strip(), is_virtual)
        return run

    return registered


def stepper() -> Callable[[float], None]:
    """A step of so many milliseconds, whose end an optimizer tells."""
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

    def step(milliseconds: float) -> None:
        time.sleep(milliseconds / 1e3)
        optimizer.step()

    return step


def near(value: float, wanted: float, share: float = 0.1) -> bool:
    return abs(value - wanted) <= share * wanted


def few_windows(told: Told) -> bool:
    """The first one saw whole turns, and all of them kept within what they may take."""
    return len(told.windows[0]["ticks"]) >= 3 and told.held_up <= max(0.35, 0.011 * told.took)


# the tree of loops


@program(
    lambda told: told.turns("for epoch") == 4 and near(told.turns("for batch"), 320) and told.turns("for held") > 90
)
def epochs() -> None:
    """Training within epochs, and a validation after each."""
    step = stepper()

    def validate() -> None:
        for held in range(30):
            time.sleep(0.006 + 0 * held)

    for epoch in range(4):
        for batch in range(80):
            step(6 + 0 * (epoch + batch))
        validate()


@program(lambda told: told.sources == {"for batch in range(700):"})
def short_calls() -> None:
    """Each step calls functions whose own loops are no loops of the run."""
    step = stepper()

    def augment() -> int:
        total = 0
        for flip in range(4):
            time.sleep(0.0006)
            total += flip
        return total

    for batch in range(700):
        augment()
        step(2 + 0 * batch)
        augment()


@program(lambda told: told.turns("for request") == 40 and near(told.turns("while token"), 800, 0.15))
def requests() -> None:
    """A server: tokens within requests, by a `while` in a function of its own."""

    def answer() -> None:
        token = 0
        while token < 20:
            time.sleep(0.005)
            token += 1

    for request in range(40):
        answer()
        time.sleep(0.003 + 0 * request)


@program(lambda told: told.sources == {"for batch in range(600):"} and near(told.turns("for batch"), 600, 0.05))
def settings() -> None:
    """A loop of three short turns before the one that matters."""
    step = stepper()
    for path in range(3):
        time.sleep(0.003 + 0 * path)
    for batch in range(600):
        step(7 + 0 * batch)


@program(
    lambda told: (
        len(told.sources) == 1 and any(loop["kinds"] and near(loop["kinds"][0]["every"], 12) for loop in told.loops())
    )
)
def slow_turns() -> None:
    """No steps at all, and every twelfth turn is slow at a line of its own."""

    def flush() -> None:
        time.sleep(0.09)

    for row in range(240):
        time.sleep(0.01)
        if row % 12 == 11:
            flush()


@program(lambda told: len(told.sources) == 1 and not any(loop["kinds"] for loop in told.loops()))
def uneven_turns() -> None:
    """No steps; turns take what they take, and none is of another kind."""
    draw = random.Random(SEED)
    for _row in range(350):
        time.sleep(draw.uniform(0.006, 0.013))


@program(lambda told: near(told.turns("for batch"), 200) and told.took < 12)
def counting() -> None:
    """Steps, and in each of them a loop that computes in Python; counting its turns would slow it down."""
    step = stepper()
    total = 0
    for batch in range(200):
        number = 0
        while number < 60_000:
            number += 1
        step(4)
        total += batch


# what comes only now and then


@program(
    lambda told: (
        near(told.stall(function="evaluate")["every"], 40, 0.03)
        and told.stall(function="evaluate")["regular"]
        and bool(told.opened_for("stall"))
        and few_windows(told)
    )
)
def evaluation() -> None:
    """Every fortieth step is followed by an evaluation of 70 ms."""
    step = stepper()

    def evaluate() -> None:
        time.sleep(0.07)

    for batch in range(1, 1001):
        if batch % 40 == 0:
            evaluate()
        step(6)


@program(
    lambda told: (
        near(told.stall(function="evaluate")["every"], 30, 0.05)
        and near(told.stall("checkpoint")["every"], 70, 0.05)
        and len(told.stalls) == 2
        and len(told.opened_for("stall")) >= 1
    )
)
def two_beats() -> None:
    """An evaluation every thirtieth step, a checkpoint every seventieth."""
    import torch

    class Slowly:
        def __reduce__(self) -> tuple[type, tuple[()]]:
            time.sleep(0.11)
            return object, ()

    step = stepper()

    def evaluate() -> None:
        time.sleep(0.05)

    for batch in range(1, 1101):
        if batch % 30 == 0:
            evaluate()
        if batch % 70 == 0:
            torch.save(Slowly(), "/dev/null")
        step(6)


@program(lambda told: near(told.stall("garbage collection")["every"], 25, 0.05) and not told.opened_for("stall"))
def garbage() -> None:
    """Garbage is collected every 25th step, at whatever line; of it the marks know all."""
    step = stepper()
    kept = [[number] for number in range(400_000)]
    gc.disable()
    for batch in range(1, 601):
        step(5)
        if batch % 25 == 0:
            gc.collect()
    del kept


@program(lambda told: near(told.stall("input")["every"], 50, 0.05))
def slow_input() -> None:
    """A loader whose every fiftieth batch takes 60 ms."""
    from torch.utils.data import DataLoader, Dataset

    class Records(Dataset[int]):
        def __len__(self) -> int:
            return 700

        def __getitem__(self, index: int) -> int:
            time.sleep(0.06 if index % 50 == 49 else 0.001)
            return index

    step = stepper()
    for _ in DataLoader(Records(), batch_size=1):
        step(5)


@program(lambda told: not told.stalls and not told.opened_for("stall") and not told.opened_for("drift"))
def uneven() -> None:
    """Steps of 3 to 9 ms, without a pattern."""
    step = stepper()
    draw = random.Random(SEED)
    for _batch in range(900):
        step(draw.uniform(3, 9))


@program(lambda told: near(told.marks["step"] / 1e6, 4.3, 0.12) and not told.opened_for("stall"))
def every_third() -> None:
    """Every third step takes three times as long: that is how this program goes."""
    step = stepper()
    for batch in range(700):
        step(12 if batch % 3 == 2 else 4)


@program(lambda told: not any(one["regular"] for one in told.stalls) and not told.opened_for("drift"))
def slow_spell() -> None:
    """Somewhere in the middle every fourth of 60 steps was slow, and then never again."""
    step = stepper()
    for batch in range(900):
        step(40 if 400 <= batch < 460 and batch % 4 == 0 else 5)


@program(
    lambda told: (
        near(told.stall(function="prune")["every"], 60, 0.06) and 6 <= told.stall(function="prune")["count"] <= 16
    )
)
def growing() -> None:
    """Steps that grow from 4 to 12 ms over the run, and every sixtieth is slow."""
    step = stepper()

    def prune() -> None:
        time.sleep(0.06)

    for batch in range(1, 901):
        if batch % 60 == 0:
            prune()
        step(4 + 8 * batch / 900)


# the plain step, and what changes for good


@program(
    lambda told: near(told.marks["step"] / 1e6, 5.3, 0.12) and 4 <= told.marks["warm_up"] <= 8 and few_windows(told)
)
def warming_up() -> None:
    """The first six steps take 60 ms."""
    step = stepper()
    for batch in range(500):
        step(60 if batch < 6 else 5)


@program(lambda told: near(told.windows[0]["plain_step"] / 1e6, 5.3, 0.12) and told.windows[0]["ticks"][0][0] >= 12)
def late_warm_up() -> None:
    """The first twelve steps take from 40 ms down to what all others take."""
    step = stepper()
    for batch in range(500):
        step(max(5, 40 - 3 * batch))


@program(
    lambda told: len(told.opened_for("drift")) == 1 and near(told.opened_for("drift")[0]["about"]["began"], 400, 0.1)
)
def drifting() -> None:
    """From the four hundredth step on a step takes twice as long."""
    step = stepper()
    for batch in range(1100):
        step(5 if batch < 400 else 10)


@program(lambda told: not told.opened_for("drift") and not told.stalls)
def slower_for_a_while() -> None:
    """A hundred steps take a third longer; afterwards they are as before."""
    step = stepper()
    for batch in range(1000):
        step(6.6 if 500 <= batch < 600 else 5)


# which loop is looked at


@program(
    lambda told: (
        [one["about"]["place"].rsplit(":", 1)[0] for one in told.opened_for("loop")] != []
        and all(
            loop["source"].startswith("for page")
            for loop in told.loops()
            if loop["place"] in {one["about"]["place"] for one in told.opened_for("loop")}
        )
    )
)
def another_loop() -> None:
    """Training, and then a loop without steps that takes as long."""
    step = stepper()
    for _batch in range(300):
        step(6)
    for page in range(900):
        time.sleep(0.008 + 0 * page)


@program(lambda told: not told.opened_for("loop") and few_windows(told))
def hardly_another_loop() -> None:
    """The loop without steps is a twentieth of the run."""
    step = stepper()
    for _page in range(40):
        time.sleep(0.008)
    for _batch in range(900):
        step(6)


@program(lambda told: len(told.windows[0]["ticks"]) >= 2 and told.held_up <= 0.35)
def long_turns() -> None:
    """Turns of 0.4 s."""
    step = stepper()
    for _batch in range(24):
        for _micro in range(20):
            time.sleep(0.018)
        step(20)


# on a virtual GPU


def product(depth: int) -> None:
    """A model of so many layers, in a loop of its own."""
    import torch

    x = torch.zeros(64, 64, device="cuda")
    for _layer in range(depth):
        x = x @ x


@program(lambda told: told.turns("for batch") == 60 and len(told.sources) == 1, is_virtual=True)
def layers() -> None:
    """A training loop whose model goes through forty layers."""
    for batch in range(60):
        product(40 + 0 * batch)
        product(1)


@program(lambda told: told.turns("for batch") == 240 and len(told.sources) == 2, is_virtual=True)
def short_epochs() -> None:
    """A short run, in which an epoch lasts a few milliseconds."""

    def train() -> None:
        for batch in range(80):
            product(4 + 0 * batch)
            product(1)

    for epoch in range(3):
        train()
        product(1 + 0 * epoch)


@program(lambda told: told.turns("for token") == 2_500 and len(told.sources) == 2, is_virtual=True)
def long_calls() -> None:
    """A run of seconds, whose inner loop is in a call that lasts less than a twentieth of it."""

    def answer() -> None:
        for token in range(100):
            product(30 + 0 * token)
            product(1)

    for _request in range(25):
        answer()
        product(1)


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]].run()
