"""Where a step ends in a running program that says nothing of steps.

The program's own word (`keepbusy.step()`) counts for more than its optimizers, and these for more than forward passes
(inference) and replays of a captured graph. Whoever counts most and is heard marks the steps; one who falls silent
while another goes on gives way to it: a step that was captured whole shows no optimizer any more.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

from keepbusy.record.forward_passes import ForwardPasses
from keepbusy.record.patches import Function, Patches, left_alone
from keepbusy.record.rounds import GOES_ON, Rounds
from keepbusy.script.steps import ENDED

SILENCE = 64
"""So often another one is heard before who has fallen silent gives way."""


class Source(IntEnum):
    """Who says that a step has ended, from the least to the most credible."""

    NOBODY = 0
    GRAPH = 1
    FORWARD = 2
    OPTIMIZER = 3
    STEP = 4


class StepEnds:
    """Calls `ended(verdict)` in the program's thread, with one of the verdicts of `Rounds`."""

    def __init__(self, ended: Callable[[int], object]) -> None:
        self.source = Source.NOBODY
        self.replayed = False
        """Whether a captured graph was."""
        self._ended = ended
        self._rounds = Rounds()
        self._passed_over = 0
        self._optimizer_steps = 0
        self._patches = Patches()
        self._forward = ForwardPasses(lambda module: self._heard(Source.FORWARD, id(module)))

    def begin(self) -> None:
        """Listen to whatever may end a step."""
        import torch
        from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

        ENDED.append(self._announced)
        self._patches.later(lambda: ENDED.remove(self._announced))
        self._patches.later(register_optimizer_step_post_hook(self._stepped).remove)
        self._patches.replace(torch.amp.GradScaler, "step", self._scaler_step)
        self._patches.replace(torch.cuda.CUDAGraph, "replay", self._replay)
        self._patches.replace(Optimizer, "__init__", self._made)
        self._forward.begin()

    def end(self) -> None:
        """Leave everything as it was."""
        self._patches.undo()
        self._forward.end()

    def _heard(self, source: Source, who: int) -> None:
        if source is not self.source and not self._turn_to(source):
            return
        self._passed_over = 0
        verdict = self._rounds.ended(who)
        if verdict != GOES_ON:
            self._ended(verdict)

    def _turn_to(self, source: Source) -> bool:
        self._passed_over += source < self.source
        if source < self.source and self._passed_over < SILENCE:
            return False
        self.source, self._rounds = source, Rounds()
        if source >= Source.OPTIMIZER:
            self._forward.end()
        return True

    @left_alone
    def _announced(self) -> None:
        self._heard(Source.STEP, 0)

    @left_alone
    def _stepped(self, optimizer: Any, _arguments: Any, _options: Any) -> None:
        self._optimizer_steps += 1
        self._heard(Source.OPTIMIZER, id(optimizer))

    def _scaler_step(self, original: Function) -> Function:
        """A scaler that meets an infinity lets no optimizer step. The program's step has ended all the same."""

        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._optimizer_steps
            result = original(scaler, optimizer, *args, **kwargs)
            if self._optimizer_steps == before:
                self._stepped(optimizer, (), {})
            return result

        return step

    def _replay(self, original: Function) -> Function:
        def replay(graph: Any) -> None:
            original(graph)
            self.replayed = True
            self._heard(Source.GRAPH, id(graph))

        return replay

    def _made(self, original: Function) -> Function:
        """Who makes an optimizer is going to train, and its forward passes end no steps."""

        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._forward.end()
            original(optimizer, *args, **kwargs)

        return made
