"""`graph`: a training step captured once as a CUDA graph, and replayed from then on.

    step = keepbusy.graph(train_step)
    for batch in loader:
        losses.append(step(batch))

The step may be all of it (forward, backward, optimizer) or forward and backward alone. Its first calls are eager and
count like any other. A step that cannot be captured runs eagerly for good, and one warning names the line.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from keepbusy.runtime.aside import Aside
from keepbusy.runtime.call import Call
from keepbusy.runtime.capture import Uncapturable
from keepbusy.runtime.graphs import Graphs
from keepbusy.runtime.lines import depth_of_user
from keepbusy.runtime.rehearsal import Rehearsal

P = ParamSpec("P")
R = TypeVar("R")


def graph(step: Callable[P, R]) -> Graphed[P, R]:
    """The step, captured as a CUDA graph and replayed: one launch in place of many. Without CUDA, the step itself."""
    return Graphed(step)


class Graphed(Generic[P, R]):
    """Called like the step. What it returns is the caller's to keep: no later call changes it."""

    def __init__(self, step: Callable[P, R]) -> None:
        functools.update_wrapper(self, step)
        self._step = step
        self._name = getattr(step, "__name__", type(step).__name__)
        self._why = ""
        self._tally: Counter[str] = Counter()
        self._run: Callable[[Call], Any] | None = None
        self._call: Callable[..., Any] = self._first

    def __call__(self, *arguments: P.args, **options: P.kwargs) -> R:
        return self._call(*arguments, **options)

    @property
    def replays(self) -> int:
        """How many calls were replayed."""
        return self._tally["replayed"]

    def report(self) -> str:
        """How its calls were run, and why not otherwise."""
        counts = ", ".join(f"{self._tally[name]} {name}" for name in ("replayed", "captured", "eager"))
        return f"{self._name}: {counts}" + (f"; {self._why}" if self._why else "")

    def _first(self, *arguments: Any, **options: Any) -> Any:
        """Whether there is a GPU is asked when there is something to do."""
        if not torch.cuda.is_available():
            self._call = self._eager
        else:
            self._aside = Aside(self._step)
            self._rehearsal = Rehearsal(self._aside)
            self._call = self._rehearse
        return self._call(*arguments, **options)

    def _eager(self, *arguments: Any, **options: Any) -> Any:
        self._tally["eager"] += 1
        return self._step(*arguments, **options)

    def _rehearse(self, *arguments: Any, **options: Any) -> Any:
        self._tally["eager"] += 1
        rehearsal = self._rehearsal
        returned = rehearsal.run(Call(arguments, options))
        if rehearsal.finding:
            self._give_up(rehearsal.finding)
        elif rehearsal.over:
            self._graphs = Graphs(self._aside, rehearsal, self._tally, self._tell)
            self._call = self._replay
        return returned

    def _replay(self, *arguments: Any, **options: Any) -> Any:
        try:
            return self._graphs.run(Call(arguments, options))
        except Uncapturable as reason:
            self._graphs.release()
            self._give_up(str(reason))
        return self._eager(*arguments, **options)

    def _give_up(self, reason: str) -> None:
        self._tell(f"eagerly: {reason}")
        self._call = self._eager

    def _tell(self, what: str) -> None:
        self._why = f"keepbusy.graph runs {self._name} {what}"
        warnings.warn(self._why, stacklevel=depth_of_user())
