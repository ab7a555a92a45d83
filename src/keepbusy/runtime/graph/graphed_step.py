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
from keepbusy.runtime.graph.captured_call import CapturedCall, EagerStream, StepCall, capture_call, detached
from keepbusy.runtime.graph.rehearsal import Rehearsal
from keepbusy.runtime.graph.user_lines import depth_of_user

GRAPHS_PER_STEP = 8
"""So many kinds of call (shapes, constants, modes) may get a graph; each has the memory of a step of its own."""


class StepGraphs:
    """The graphs of one step. A kind of call is eager at first, captured when it comes back, replayed from then on."""

    def __init__(
        self, eager: EagerStream, rehearsal: Rehearsal, tally: Counter[str], warn: Callable[[str], None]
    ) -> None:
        self._eager_stream, self._tally, self._warn = eager, tally, warn
        self._participants, self._rates, self._key = rehearsal.participants, rehearsal.rates, rehearsal.key
        self._stream = torch.cuda.current_stream()
        self._forget()
        self._capturable[rehearsal.kind] = True

    def _forget(self) -> None:
        self._addresses = self._key.addresses()
        self._captured: dict[Any, CapturedCall] = {}
        self._capturable: dict[Any, bool] = {}
        self._full = False

    def run(self, call: StepCall) -> Any:
        """Raises Uncapturable, with nothing done, if no call of the step can be captured."""
        current = torch.cuda.current_stream()
        if current != self._stream:  # all calls share memory, so a call from another stream waits for the one before
            current.wait_stream(self._stream)
            self._stream = current
        if self._rates.moved() or self._key.addresses() != self._addresses:
            self._forget()
        kind = (*call.kind, *self._key.kind())
        captured = self._captured.get(kind)
        if captured is not None:
            self._rates.send()
            self._tally["replayed"] += 1
            return captured.replay(call.tensors)
        match self._capturable.get(kind):
            case None:
                return self._first(call, kind)
            case True:
                return self._capture(call, kind)
        return self._eager(call)

    def release(self) -> None:
        """Optimizers as the user made them."""
        self._rates.count_on_host()

    def _eager(self, call: StepCall) -> Any:
        self._tally["eager"] += 1
        with self._rates.on_device():
            return detached(self._eager_stream.run(call))

    def _first(self, call: StepCall, kind: Any) -> Any:
        if len(self._capturable) >= GRAPHS_PER_STEP:
            self._warn_full(call, kind)
            return self._eager(call)
        self._capturable[kind] = True
        with self._participants.watching() as gradients:
            returned = self._eager(call)
        self._key.add([one.leaf for one in gradients.held()])
        self._addresses = self._key.addresses()
        return returned

    def _capture(self, call: StepCall, kind: Any) -> Any:
        try:
            with self._rates.on_device():
                captured = capture_call(call, self._eager_stream, self._participants, self._key.held())
        except Uncapturable as reason:
            if not self._captured:
                raise
            self._capturable[kind] = False
            self._warn(f"eagerly for some arguments: {reason}")
            return self._eager(call)
        self._captured[kind] = captured
        self._tally["captured"] += 1
        return captured.replay_filled(call.tensors)

    def _warn_full(self, call: StepCall, kind: Any) -> None:
        if not self._full:
            self._full = True
            self._warn(
                f"eagerly for further arguments: it keeps {GRAPHS_PER_STEP} graphs, and {self._new_in(call, kind)}"
            )

    def _new_in(self, call: StepCall, kind: Any) -> str:
        """What no call before had: as a rule a shape, or a setting that a schedule writes."""
        labels = [*call.labels(), *self._key.labels()]
        same_parts = [other for other in self._capturable if len(other) == len(kind)]
        for place, label in enumerate(labels):
            if all(other[place] != kind[place] for other in same_parts):
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
        self._run: Callable[[StepCall], Any] | None = None
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
            self._eager_stream = EagerStream(self._step)
            self._rehearsal = Rehearsal(self._eager_stream)
            self._call = self._rehearse
        return self._call(*arguments, **options)

    def _eager(self, *arguments: Any, **options: Any) -> Any:
        self._tally["eager"] += 1
        return self._step(*arguments, **options)

    def _rehearse(self, *arguments: Any, **options: Any) -> Any:
        self._tally["eager"] += 1
        rehearsal = self._rehearsal
        returned = rehearsal.run(StepCall(arguments, options))
        if rehearsal.finding:
            self._give_up(rehearsal.finding)
        elif rehearsal.over:
            self._graphs = StepGraphs(self._eager_stream, rehearsal, self._tally, self._warn)
            self._call = self._replay
        return returned

    def _replay(self, *arguments: Any, **options: Any) -> Any:
        try:
            return self._graphs.run(StepCall(arguments, options))
        except Uncapturable as reason:
            self._graphs.release()
            self._give_up(str(reason))
        return self._eager(*arguments, **options)

    def _give_up(self, reason: str) -> None:
        self._warn(f"eagerly: {reason}")
        self._call = self._eager

    def _warn(self, what: str) -> None:
        self._why = f"keepbusy.graph runs {self._name} {what}"
        warnings.warn(self._why, stacklevel=depth_of_user())
