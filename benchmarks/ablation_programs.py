"""Programs whose loops are known because they were written that way: `ablation.py` runs each on a virtual GPU while one
threshold is switched off. What has to be said of it stands beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

SEED = 12
PROGRAMS: dict[str, Program] = {}


@dataclass(frozen=True)
class Told:
    """What was said of one run."""

    run: dict[str, Any]
    """The tree of loops."""

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


@dataclass(frozen=True)
class Program:
    run: Callable[[], object]
    is_right: Callable[[Told], bool]


def program(is_right: Callable[[Told], bool]) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def registered(run: Callable[[], object]) -> Callable[[], object]:
        PROGRAMS[run.__name__] = Program(run, is_right)
        return run

    return registered


def product(depth: int) -> None:
    """A model of so many layers, in a loop of its own."""
    import torch

    x = torch.zeros(64, 64, device="cuda")
    for _layer in range(depth):
        x = x @ x


@program(lambda told: told.turns("for batch") == 60 and len(told.sources) == 1)
def layers() -> None:
    """A training loop whose model goes through forty layers."""
    for batch in range(60):
        product(40 + 0 * batch)
        product(1)


@program(lambda told: told.turns("for batch") == 240 and len(told.sources) == 2)
def short_epochs() -> None:
    """A short run, in which an epoch lasts a few milliseconds."""

    def train() -> None:
        for batch in range(80):
            product(4 + 0 * batch)
            product(1)

    for epoch in range(3):
        train()
        product(1 + 0 * epoch)


@program(lambda told: told.turns("for token") == 2_500 and len(told.sources) == 2)
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
