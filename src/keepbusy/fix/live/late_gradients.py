"""Gradients of DistributedDataParallel that travel between ranks once a step, with those of the last micro-batch.

What the ranks add up is the same, in another order, so it is asked for by name. The source shows which turn is the last
(`loop_turns`); in the first steps it is seen that this holds, and that all ranks see the same. Ranks must do the same
from then on, so this is not switched off and on to compare times. Whoever looks at gradients meanwhile gets what all
ranks together have, and that ends it; so does an optimizer that steps in a turn that was not to be the last.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from keepbusy.fix.live.switch import FixSwitch, is_ours, ours
from keepbusy.instrument.patches import Function, Patches

_WATCHED = 12
"""Turns in which the program is watched; then the ranks compare what they saw."""
_STEPPED = 2
"""Of these, that an optimizer stepped in."""


class MarkedTurn(NamedTuple):
    """The turn of a loop over micro-batches that is under way."""

    frame: int
    code: CodeType
    lines: range
    is_last: bool


class SeenGradient(property):
    """In place of PyTorch's own, which its compiler asks for its name, and whose it is."""

    __objclass__, __name__ = torch._C._TensorBase, "grad"


class LateGradients:
    """`loss.backward()` of a model wrapped by DistributedDataParallel, several times before the optimizer steps."""

    def __init__(self) -> None:
        self.switch = FixSwitch(
            "gradients",
            "backward passes whose gradients were sent with those of the last micro-batch",
            tolerance="gradients are added in another order, and differ by rounding: 1e-6 of them",
        )
        self._turn: MarkedTurn | None = None
        self._watched: weakref.WeakKeyDictionary[Any, list[bool]] = weakref.WeakKeyDictionary()
        self._stepped: list[bool] = []
        self._held: weakref.WeakSet[Any] = weakref.WeakSet()
        """Models whose gradients are this rank's own."""

    def patch(self, patches: Patches) -> None:
        patches.replace(DistributedDataParallel, "forward", self._forward)
        hook = register_optimizer_step_pre_hook(lambda optimizer, *_: self._step(optimizer))
        patches.later(hook.remove)
        plain: Any = torch.Tensor.grad

        def grad(tensor: torch.Tensor) -> Any:
            if self._held and not is_ours() and sys._getframe(1).f_code.co_name != "zero_grad":
                self._look_at(tensor)
            with ours():  # under a mode of PyTorch's this is called once more, by its name
                return plain.__get__(tensor)

        torch.Tensor.grad = SeenGradient(grad, plain.__set__, plain.__delete__)
        patches.later(lambda: setattr(torch.Tensor, "grad", plain))

    def mark(self, condition: Callable[[], object], first: int, last: int) -> None:
        """A turn begins."""
        frame, is_last = sys._getframe(1), True
        with suppress(Exception):  # the program will come to it
            is_last = bool(condition())
        self._turn = MarkedTurn(id(frame), frame.f_code, range(first, last + 1), is_last)

    def _forward(self, plain: Function) -> Function:
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            turn = self._turn
            if turn is None or not self.switch.on or not _is_plain(model) or not _is_within(turn, sys._getframe(1)):
                return plain(model, *args, **kwargs)
            if not self._is_known(model, turn.is_last) or turn.is_last or not self.switch.on:
                self._held.discard(model)  # its backward pass takes along what the others left
                return plain(model, *args, **kwargs)
            self._held.add(model)
            self.switch.count(sys._getframe(1))
            model.require_backward_grad_sync = False
            try:
                return plain(model, *args, **kwargs)
            finally:  # and buffers are the first rank's before each pass, as ever
                model.require_backward_grad_sync = model.require_forward_param_sync = True

        return forward

    def _is_known(self, model: Any, is_last: bool) -> bool:
        """Whether the ranks have agreed. They do the same in these turns, or DDP's own collectives would not meet."""
        seen = self._watched.setdefault(model, [])
        if len(seen) == _WATCHED:
            return True
        seen.append(is_last)
        if len(seen) == _WATCHED:
            fits = len(self._stepped) >= _STEPPED and all(self._stepped)
            told = [fits, *seen, *(not one for one in seen)]
            with ours():
                least = torch.tensor(told, dtype=torch.int32, device=model.device)
                dist.all_reduce(least, dist.ReduceOp.MIN, group=model.process_group)
                agreed = least.tolist() == [1, *told[1:]]
            if not agreed:
                self.switch.stop("optimizers step in other turns than the source says, or not in the same on all ranks")
        return False

    def _step(self, optimizer: Any) -> None:
        if self._turn is not None:
            self._stepped.append(self._turn.is_last)
        mine = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for model in [one for one in self._held if any(id(part) in mine for part in one.parameters())]:
            self._join(model, "an optimizer stepped before the last micro-batch")

    def _look_at(self, tensor: torch.Tensor) -> None:
        for model in [one for one in self._held if any(part is tensor for part in one.parameters())]:
            self._join(model, "the program looks at gradients between micro-batches")

    def _join(self, model: Any, why: str) -> None:
        """What DDP would have left: the mean over all ranks."""
        self._held.discard(model)
        self.switch.stop(why)
        with ours(), torch.no_grad():
            for one in _gradients(model):
                dist.all_reduce(one, group=model.process_group)
                one.div_(dist.get_world_size(model.process_group))


def _gradients(model: Any) -> Iterator[torch.Tensor]:
    return (one.grad for one in model.parameters() if one.requires_grad and one.grad is not None)


def _is_within(turn: MarkedTurn, frame: FrameType | None) -> bool:
    """Whether the loop is still at it."""
    while frame is not None:
        if id(frame) == turn.frame and frame.f_code is turn.code:
            return frame.f_lineno in turn.lines
        frame = frame.f_back
    return False


def _is_plain(model: Any) -> bool:
    """Whether its gradients are added up and nothing else is done to them, and the program has not said when."""
    return (
        type(model) is DistributedDataParallel
        and torch.is_grad_enabled()
        and model.require_backward_grad_sync
        and not (model.find_unused_parameters or model.static_graph or model._comm_hooks or model.mixed_precision)
        and not (model._delay_all_reduce_params or model._join_config.enable)
        and all(one.dtype.is_floating_point for one in model.parameters())
    )
