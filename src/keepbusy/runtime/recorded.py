"""A captured call: its graph, and the memory that goes in and out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keepbusy.runtime.aside import Aside
from keepbusy.runtime.call import Call, Outputs
from keepbusy.runtime.capture import Uncapturable, capture
from keepbusy.runtime.cast import Cast
from keepbusy.runtime.gradients import Gradients, Held, enter, leave
from keepbusy.runtime.inputs import Inputs
from keepbusy.runtime.saved import saved


class Recorded:
    """Replays the step for calls of one kind."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, inputs: Inputs, outputs: Outputs, gradients: list[Held], held: list[Any]
    ) -> None:
        self._graph, self._inputs, self._outputs, self._held = graph, inputs, outputs, held
        self._gradients = gradients

    def replay(self, tensors: list[Tensor]) -> Any:
        self._inputs.fill(tensors)
        return self.replay_filled(tensors)

    def replay_filled(self, tensors: list[Tensor]) -> Any:
        """The inputs are there already."""
        enter(self._gradients)
        self._graph.replay()
        leave(self._gradients)
        self._inputs.hand_back(tensors)
        returned = self._outputs.copies()
        self._inputs.wait()
        return returned


def record(call: Call, aside: Aside, cast: Cast, held: list[Any]) -> Recorded:
    """Capture one call. Nothing of it has happened then; raises Uncapturable with everything as it was."""
    call.check()
    inputs, gradients, restores = Inputs(call.tensors), Gradients(), saved(cast)
    try:
        with gradients.watching():
            graph, returned = capture(lambda: call.run(aside.step, inputs.static), aside.stream)
        outputs = Outputs(returned)
    except Uncapturable:
        gradients.restore()
        for restore in restores:
            restore()
        raise
    inputs.note_writes()
    left = gradients.held()
    gradients.restore()  # nothing has run yet: those that the step will leave behind hold no values
    return Recorded(graph, inputs, outputs, left, held)
