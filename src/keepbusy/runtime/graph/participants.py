"""Where gradients lie: a replay writes to the memory of its capture, whatever `.grad` points to by then."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

# Who takes part in a step: the modules it calls, the optimizers it steps, the tensors that gather gradients.
#
# The step is a function, and nothing says what it trains. Hooks tell the modules and optimizers; for the rest the
# garbage collector is asked what there is.

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


class Held(NamedTuple):
    """One tensor's gradient before the step and after it."""

    leaf: Tensor
    entry: Tensor | None
    exit: Tensor | None
    needed: bool  # the step reads or extends what it finds, and looks for it in the memory of `entry`


class Gradients:
    """All gradients that there are as a step begins: to be brought back, or compared with those that it leaves."""

    def __init__(self) -> None:
        self._entries = [(leaf, leaf.grad, _version(leaf.grad)) for leaf in leaves()]
        self._applied: set[int] = set()
        self._stepped: set[int] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Meanwhile it is noted which gradients optimizers apply."""
        hook = register_optimizer_step_pre_hook(self._note)
        try:
            yield
        finally:
            hook.remove()

    def _note(self, optimizer: Optimizer, *_arguments: Any) -> None:
        for group in optimizer.param_groups:
            self._stepped |= {id(one) for one in group["params"]}
            self._applied |= {id(one.grad) for one in group["params"]}

    def restore(self) -> None:
        for leaf, entry, _ in self._entries:
            leaf.grad = entry

    def held(self) -> list[Held]:
        """Of the tensors whose gradients the step changed, and of those that it trained."""
        return [
            Held(leaf, entry, leaf.grad, self._needed(leaf, entry, version))
            for leaf, entry, version in self._entries
            if leaf.grad is not entry or _version(entry) != version or id(leaf) in self._stepped
        ]

    def _needed(self, leaf: Tensor, entry: Tensor | None, version: int) -> bool:
        kept_or_written = leaf.grad is entry or _version(entry) != version
        return entry is not None and (kept_or_written or id(entry) in self._applied)


def enter(held: list[Held]) -> None:
    """Before a replay: gradients that it needs stand where it looks for them."""
    for leaf, entry, _, needed in held:
        found = leaf.grad
        if needed and found is not entry and entry is not None and found is not None:
            entry.copy_(found)


def leave(held: list[Held]) -> None:
    """After a replay: everybody finds the gradients where it has put them."""
    for leaf, _, left, _ in held:
        if leaf.grad is not left:
            leaf.grad = left


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else gradient._version
