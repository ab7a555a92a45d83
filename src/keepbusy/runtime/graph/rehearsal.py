"""The first calls of a step: eager training steps like any other, which show what a graph would have to hold.

1. Libraries load, optimizers make their state; modules and optimizers are met.
2. The host's state is read before and after. What differs, a replay would leave undone.
3. If something differed, the step is traced to find the line. If not, optimizers count on the device from here on.

Results are like those of a replay: without the graph of their gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from keepbusy.runtime.graph.captured_call import EagerStream, StepCall, constants_of, detached, differentiable
from keepbusy.runtime.graph.graph_key import GraphKey
from keepbusy.runtime.graph.host_state import HostState, StateKey, first_change
from keepbusy.runtime.graph.learning_rates import LearningRates
from keepbusy.runtime.graph.names_read import names_of
from keepbusy.runtime.graph.participants import Participants
from keepbusy.runtime.graph.user_lines import LineTracer


class Rehearsal:
    """Runs them. `finding` says why the step cannot be captured, once that is known."""

    def __init__(self, eager: EagerStream) -> None:
        self.participants, self.finding = Participants(), ""
        self._eager, self._names = eager, names_of(eager.step)
        self._calls = [self._first_call, self._second_call, self._third_call]
        self._differs: StateKey | None = None
        self._returned: tuple[Any, Any] = (None, None)

    @property
    def over(self) -> bool:
        return not self._calls

    def run(self, call: StepCall) -> Any:
        """One eager call."""
        returned = self._calls[0](call)
        del self._calls[0]
        return returned

    def _first_call(self, call: StepCall) -> Any:
        with self.participants.watching() as gradients:
            returned = self._eager.run(call)
        self._returned = (call.kind, constants_of(returned))
        distributed = [type(one).__name__ for one in self.participants.modules if _talks_to_other_ranks(one)]
        if distributed:
            self.finding = f"it runs {distributed[0]}, whose collectives are not captured"
        elif differentiable(returned) and not gradients.held():
            self.finding = "its backward pass comes later, where a replay has no part; call backward inside the step"
        return returned if self.finding else detached(returned)

    def _second_call(self, call: StepCall) -> Any:
        self._host = HostState(self.participants, self._names)
        before = self._host.read()
        with self.participants.watching() as self._gradients:
            returned = detached(self._eager.run(call))
        self._differs = first_change(before, self._host.read())
        kind, first = self._returned
        second = constants_of(returned)
        if kind == call.kind and first != second:
            self.finding = f"it returned {first} first and {second} then, which no replay would renew"
        return returned

    def _third_call(self, call: StepCall) -> Any:
        if self._differs is not None:
            return self._find_line(call, self._differs)
        self.rates = LearningRates(self.participants.optimizers)
        self.key = GraphKey(self.participants, self._names, self.rates)
        self.key.add([one.leaf for one in self._gradients.held()])
        del self._gradients
        self.rates.count_on_device()
        self.kind = (*call.kind, *self.key.kind())
        with self.rates.on_device():
            return detached(self._eager.run(call))

    def _find_line(self, call: StepCall, differs: StateKey) -> Any:
        """What changes once and not again was made when it was first needed, or by another thread."""
        before = self._host.read()
        tracer = LineTracer(lambda: self._host.read()[differs])
        returned = detached(tracer.run(lambda: self._eager.run(call)))
        if self._host.read()[differs] == before[differs]:
            self._differs = None
            self._calls.append(self._third_call)
            return returned
        at, what = f"at {tracer.found} " if tracer.found else "", differs[0]
        self.finding = f"{at}it changes {what} on the host, where a replay does nothing; move that out of the step"
        return returned


def _talks_to_other_ranks(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.parallel.DistributedDataParallel) or hasattr(module, "set_requires_all_reduce")
