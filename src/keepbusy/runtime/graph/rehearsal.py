"""The first calls of a step: eager training steps like any other, which show what a graph would have to hold.

1. Libraries load, optimizers make their state; modules and optimizers are met.
2. The host's state is read before and after. What differs, a replay would leave undone.
3. If something differed, the step is traced to find the line. If not, optimizers count on the device from here on.

Results are like those of a replay: without the graph of their gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from keepbusy.runtime.graph.captured_call import Aside, Call, constants_of, detached, differentiable
from keepbusy.runtime.graph.graph_key import Surroundings
from keepbusy.runtime.graph.host_state import HostState, Key, changed
from keepbusy.runtime.graph.learning_rates import Rates
from keepbusy.runtime.graph.names_read import names_of
from keepbusy.runtime.graph.participants import Cast, Gradients
from keepbusy.runtime.graph.user_lines import Tracer


class Rehearsal:
    """Runs them. `finding` says why the step cannot be captured, once that is known."""

    def __init__(self, aside: Aside) -> None:
        self.cast, self.finding = Cast(), ""
        self._aside, self._names = aside, names_of(aside.step)
        self._acts = [self._meet, self._watch, self._prepare]
        self._differs: Key | None = None
        self._returned: tuple[Any, Any] = (None, None)

    @property
    def over(self) -> bool:
        return not self._acts

    def run(self, call: Call) -> Any:
        """One eager call."""
        returned = self._acts[0](call)
        del self._acts[0]
        return returned

    def _meet(self, call: Call) -> Any:
        gradients = Gradients()
        with self.cast.meeting(), gradients.watching():
            returned = self._aside.run(call)
        self._returned = (call.kind, constants_of(returned))
        self.finding = self._crowded() or self._open(returned, gradients)
        return returned if self.finding else detached(returned)

    def _watch(self, call: Call) -> Any:
        self._host = HostState(self.cast, self._names)
        before, self._gradients = self._host.read(), Gradients()
        with self.cast.meeting(), self._gradients.watching():
            returned = detached(self._aside.run(call))
        self._differs = changed(before, self._host.read())
        self.finding = self._unsteady(call, returned)
        return returned

    def _crowded(self) -> str:
        sharing = [type(one).__name__ for one in self.cast.modules if _talks_to_other_ranks(one)]
        return f"it runs {sharing[0]}, whose collectives are not captured" if sharing else ""

    def _open(self, returned: Any, gradients: Gradients) -> str:
        if not differentiable(returned) or gradients.held():
            return ""
        return "its backward pass comes later, where a replay has no part; call backward inside the step"

    def _unsteady(self, call: Call, returned: Any) -> str:
        """A number that the step makes on the host is the same in every replay."""
        kind, before = self._returned
        found = constants_of(returned)
        steady = kind != call.kind or before == found
        return "" if steady else f"it returned {before} first and {found} then, which no replay would renew"

    def _prepare(self, call: Call) -> Any:
        if self._differs is not None:
            return self._trace(call, self._differs)
        self.rates = Rates(self.cast.optimizers)
        self.surroundings = Surroundings(self.cast, self._names, self.rates)
        self.surroundings.add([one.leaf for one in self._gradients.held()])
        del self._gradients
        self.rates.count_on_device()
        self.kind = (*call.kind, *self.surroundings.kind())
        with self.rates.on_device():
            return detached(self._aside.run(call))

    def _trace(self, call: Call, differs: Key) -> Any:
        """What changes once and not again was made when it was first needed, or by another thread."""
        before = self._host.read()
        tracer = Tracer(lambda: self._host.read()[differs])
        returned = detached(tracer.run(lambda: self._aside.run(call)))
        if self._host.read()[differs] == before[differs]:
            self._differs = None
            self._acts.append(self._prepare)
            return returned
        at, what = f"at {tracer.found} " if tracer.found else "", differs[0]
        self.finding = f"{at}it changes {what} on the host, where a replay does nothing; move that out of the step"
        return returned


def _talks_to_other_ranks(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.parallel.DistributedDataParallel) or hasattr(module, "set_requires_all_reduce")
