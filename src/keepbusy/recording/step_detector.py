"""Where a step ends in a running program that says nothing of steps.

The program's own word (`keepbusy.step()`) counts for more than its optimizers, and these for more than forward passes
(inference) and replays of a captured graph. Whoever counts most and is heard marks the steps; one who falls silent
while another goes on gives way to it: a step that was captured whole shows no optimizer any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from keepbusy.instrument import ENDED
from keepbusy.instrument.loop_tree import PATIENCE
from keepbusy.instrument.patches import Function, Patches, left_alone

# Several optimizers make one step: the round in which each of them has stepped.

GOES_ON, ENDS, BEGINS = 0, 1, 2
"""A round goes on; it ends, and with it a step; or rounds begin anew here, and what lies before was no step."""


class Rounds:
    """Whoever steps is told by number, which may be that of any object.

    Who has not been heard of while another one stepped `PATIENCE` times is no part of its round, as an optimizer of
    averages that steps after every tenth batch: a step ends without it. Should only that one go on, it has the rounds.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._stepped: dict[int, int] = {}  # since the last round ended
        self._of_gone = 0  # what those stepped that are no more: a program may make another one for each step
        self._rare: set[int] = set()
        self._only: int | None = None
        self._fresh = True

    def ended(self, who: int) -> int:
        """Whether a round ends as this one has stepped: GOES_ON, ENDS or BEGINS."""
        if who == self._only and not self._stepped:  # most programs have a single one
            return ENDS
        verdict = self._among(who)
        self._only = next(iter(self._known)) if len(self._known) == 1 else None
        return verdict

    def _among(self, who: int) -> int:
        self._stepped[who] = self._stepped.get(who, 0) + 1
        if who not in self._rare:
            self._known.add(who)
            if self._known <= self._stepped.keys():
                return self._next(BEGINS if self._fresh else ENDS)
        if self._stepped[who] + self._of_gone > PATIENCE:
            self._rare |= self._known - self._stepped.keys()
            self._known = {one for one in self._stepped if one == who or one not in self._rare}
            self._rare -= self._known
            return self._next(BEGINS)
        return GOES_ON

    def forget(self, who: int) -> None:
        """It is no more: the next one may well have its number."""
        self._known.discard(who)
        self._rare.discard(who)
        self._of_gone += self._stepped.pop(who, 0)
        self._only = None

    def _next(self, verdict: int) -> int:
        self._stepped.clear()
        self._of_gone = 0
        self._fresh = False
        return verdict


# Forward passes: the calls of modules that stand in no other module's call.
#
# PyTorch's own global hook would make every module slower that the program has. A wrapper around `__call__` is cheaper,
# and it stays around the outermost modules only, once they are known.

PASSES_TO_LEARN = 64
"""After so many forward passes it is known which kinds of modules stand outermost."""


class ForwardPasses:
    """Calls `passed(module)` after each of them."""

    def __init__(self, passed: Callable[[Any], object]) -> None:
        self._passed = passed
        self._inside = False
        self._outermost: set[type] = set()
        self._patches = Patches()

    def begin(self) -> None:
        from torch.nn import Module

        self._left = PASSES_TO_LEARN
        self._wrap(Module)

    def end(self) -> None:
        self._patches.undo()

    def _wrap(self, kind: type) -> None:
        self._patches.replace(kind, "__call__", self._called)

    def _called(self, original: Function) -> Function:
        from torch.compiler import is_compiling

        def called(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or self._inside:  # the compiler sees nothing but the call itself
                return original(module, *args, **kwargs)
            self._inside = True
            try:
                result = original(module, *args, **kwargs)
            finally:
                self._inside = False
            self._ended(module)
            return result

        return called

    def _ended(self, module: Any) -> None:
        if self._left:
            self._learn(type(module))
        self._passed(module)

    def _learn(self, kind: type) -> None:
        self._outermost.add(kind)
        self._left -= 1
        if not self._left:
            self._patches.undo()
            for kind in self._outermost:
                self._wrap(kind)


SILENT_AFTER = 64
"""So often another one is heard before who has fallen silent gives way."""


class StepSource(IntEnum):
    """Who says that a step has ended, from the least to the most credible."""

    NOBODY = 0
    GRAPH = 1
    FORWARD = 2
    OPTIMIZER = 3
    STEP = 4


class StepEnds:
    """Calls `ended(verdict)` in the program's thread, with one of the verdicts of `Rounds`."""

    def __init__(self, ended: Callable[[int], object]) -> None:
        self.source = StepSource.NOBODY
        self.replayed = False
        """Whether a captured graph was."""
        self._ended = ended
        self._rounds = Rounds()
        self._passed_over = 0
        self._optimizer_steps = 0
        self._optimizers: set[int] = set()
        self._patches = Patches()
        self._forward = ForwardPasses(lambda module: self._heard(StepSource.FORWARD, id(module)))

    def begin(self) -> None:
        """Listen to whatever may end a step."""
        import torch
        from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

        for ours in (StepEnds._announced, StepEnds._stepped):
            left_alone(ours)  # not where it is written: that would import PyTorch before the program does
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

    def _heard(self, source: StepSource, who: int) -> None:
        if source is not self.source and not self._turn_to(source):
            return
        self._passed_over = 0
        verdict = self._rounds.ended(who)
        if verdict != GOES_ON:
            self._ended(verdict)

    def _turn_to(self, source: StepSource) -> bool:
        self._passed_over += source < self.source
        if source < self.source and self._passed_over < SILENT_AFTER:
            return False
        self.source, self._rounds = source, Rounds()
        if source >= StepSource.OPTIMIZER:
            self._forward.end()
        return True

    def _announced(self) -> None:
        self._heard(StepSource.STEP, 0)

    def _stepped(self, optimizer: Any, _arguments: Any, _options: Any) -> None:
        self._optimizer_steps += 1
        if id(optimizer) not in self._optimizers:  # one that is made anew for each fit goes with it
            self._optimizers.add(id(optimizer))
            weakref.finalize(optimizer, self._is_gone, id(optimizer)).atexit = False
        self._heard(StepSource.OPTIMIZER, id(optimizer))

    def _is_gone(self, optimizer: int) -> None:
        self._optimizers.discard(optimizer)
        self._rounds.forget(optimizer)

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
            self._heard(StepSource.GRAPH, id(graph))

        return replay

    def _made(self, original: Function) -> Function:
        """Who makes an optimizer is going to train, and its forward passes end no steps."""

        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._forward.end()
            original(optimizer, *args, **kwargs)

        return made
