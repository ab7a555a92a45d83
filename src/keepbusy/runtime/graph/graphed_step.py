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

from keepbusy.runtime.graph.capture import Uncapturable
from keepbusy.runtime.graph.captured_call import Aside, Call, Recorded, detached, record
from keepbusy.runtime.graph.participants import Gradients
from keepbusy.runtime.graph.rehearsal import Rehearsal
from keepbusy.runtime.graph.user_lines import depth_of_user

# The graphs of one step: which of them stands in for a call, and when another one is captured.

KINDS = 8
"""How many kinds of call (shapes, constants, modes) may get a graph; each has the memory of a step of its own."""


class Graphs:
    """A kind of call is eager when it is met, captured when it comes back, and replayed from then on."""

    def __init__(self, aside: Aside, rehearsal: Rehearsal, tally: Counter[str], tell: Callable[[str], None]) -> None:
        self._aside, self._tally, self._tell = aside, tally, tell
        self._cast, self._rates = rehearsal.cast, rehearsal.rates
        self._surroundings = rehearsal.surroundings
        self._stream = torch.cuda.current_stream()
        self._forget()
        self._capturable[rehearsal.kind] = True

    def _forget(self) -> None:
        self._places = self._surroundings.places()
        self._recorded: dict[Any, Recorded] = {}
        self._capturable: dict[Any, bool] = {}
        self._too_many = False

    def run(self, call: Call) -> Any:
        """Raises Uncapturable, with nothing done, if no call of the step can be captured."""
        self._keep_order()
        if self._rates.moved() or self._surroundings.places() != self._places:
            self._forget()
        kind = (*call.kind, *self._surroundings.kind())
        recorded = self._recorded.get(kind)
        if recorded is not None:
            self._rates.send()
            self._tally["replayed"] += 1
            return recorded.replay(call.tensors)
        match self._capturable.get(kind):
            case None:
                return self._meet(call, kind)
            case True:
                return self._capture(call, kind)
        return self._eager(call)

    def _keep_order(self) -> None:
        """All calls share memory, so a call from another stream waits for the one before."""
        current = torch.cuda.current_stream()
        if current != self._stream:
            current.wait_stream(self._stream)
            self._stream = current

    def release(self) -> None:
        """Optimizers as the user made them."""
        self._rates.count_on_host()

    def _eager(self, call: Call) -> Any:
        self._tally["eager"] += 1
        with self._rates.on_device():
            return detached(self._aside.run(call))

    def _meet(self, call: Call, kind: Any) -> Any:
        if len(self._capturable) >= KINDS:
            self._say_too_many(call, kind)
            return self._eager(call)
        self._capturable[kind] = True
        gradients = Gradients()
        with gradients.watching():
            returned = self._eager(call)
        self._surroundings.add([one.leaf for one in gradients.held()])
        self._places = self._surroundings.places()
        return returned

    def _capture(self, call: Call, kind: Any) -> Any:
        try:
            with self._rates.on_device():
                recorded = record(call, self._aside, self._cast, self._surroundings.held())
        except Uncapturable as reason:
            if not self._recorded:
                raise
            self._capturable[kind] = False
            self._tell(f"eagerly for some arguments: {reason}")
            return self._eager(call)
        self._recorded[kind] = recorded
        self._tally["captured"] += 1
        return recorded.replay_filled(call.tensors)

    def _say_too_many(self, call: Call, kind: Any) -> None:
        if not self._too_many:
            self._too_many = True
            self._tell(f"eagerly for further arguments: it keeps {KINDS} graphs, and {self._new_in(call, kind)}")

    def _new_in(self, call: Call, kind: Any) -> str:
        """What no call before had: as a rule a shape, or a setting that a schedule writes."""
        labels = [*call.labels(), *self._surroundings.labels()]
        alike = [other for other in self._capturable if len(other) == len(kind)]
        for place, label in enumerate(labels):
            if all(other[place] != kind[place] for other in alike):
                advice = "pad inputs to a few shapes" if "shape" in label else "keep it on the device, or constant"
                return f"{label} would need another; {advice}"
        return "a new mix of their arguments came"


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
