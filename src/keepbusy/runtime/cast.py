"""Who takes part in a step: the modules it calls, the optimizers it steps, the tensors that gather gradients.

The step is a function, and nothing says what it trains. Hooks tell the modules and optimizers; for the rest the
garbage collector is asked what there is.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

T = TypeVar("T")


class Cast:
    """Modules and optimizers met so far, in the order in which they were."""

    def __init__(self) -> None:
        self._modules: dict[torch.nn.Module, None] = {}
        self._optimizers: dict[Optimizer, None] = {}

    @property
    def modules(self) -> list[torch.nn.Module]:
        return [*self._modules]

    @property
    def optimizers(self) -> list[Optimizer]:
        return [*self._optimizers]

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Whoever comes on the stage meanwhile is noted."""
        hooks = [
            register_module_forward_pre_hook(lambda module, _arguments: self._modules.setdefault(module)),
            register_optimizer_step_pre_hook(lambda optimizer, *_arguments: self._optimizers.setdefault(optimizer)),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def alive(kind: type[T]) -> list[T]:
    """Every object of a kind that lives in this process. Types are asked, not objects: a proxy would wake up."""
    if gc.get_freeze_count():  # frozen ones are not listed
        gc.unfreeze()
        found: list[Any] = gc.get_objects()
        gc.freeze()
    else:
        found = gc.get_objects()
    return [one for one in found if issubclass(type(one), kind)]


def leaves() -> list[torch.Tensor]:
    """Every tensor that may gather a gradient."""
    return [one for one in alive(torch.Tensor) if one.requires_grad and one.is_leaf]


def schedulers() -> list[LRScheduler]:
    return alive(LRScheduler)


def scalers() -> list[torch.amp.GradScaler]:
    return alive(torch.amp.GradScaler)
