"""The graphs of one step: which of them stands in for a call, and when another one is captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from keepbusy.runtime.aside import Aside
from keepbusy.runtime.call import Call, detached
from keepbusy.runtime.capture import Uncapturable
from keepbusy.runtime.gradients import Gradients
from keepbusy.runtime.recorded import Recorded, record
from keepbusy.runtime.rehearsal import Rehearsal

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
