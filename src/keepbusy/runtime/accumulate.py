"""`accumulate`: several micro-batches for each optimizer step, and gradients that are sent once.

    for micro in keepbusy.accumulate(model, loader, count=4):
        loss = criterion(model(micro.batch))
        (loss * micro.scale).backward()
        if micro.last:
            optimizer.step()
            optimizer.zero_grad()

The caller divides the loss: `scale` is one over the number of micro-batches of the group, also if the last group is
short. Wrappers still average over ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from keepbusy.torch_names.distributed import active_ddp_module, has_yet_to_send, stays_gathered

T = TypeVar("T")


class Micro(NamedTuple, Generic[T]):
    """A micro-batch, and its place in the group that makes one optimizer step."""

    batch: T
    scale: float
    last: bool


def accumulate(
    model: torch.nn.Module, batches: Iterable[T], *, count: int, keep_sharded: bool = False
) -> Iterator[Micro[T]]:
    """The batches in groups of `count`; the model's gradients are sent between ranks with the last of each group.

    The model is a plain module, or is or holds DDP, FSDP2 or HSDP. It is verified that gradients waited and were then
    sent; else `NotDeferred` gives the reason. `keep_sharded` is for HSDP: gradients are scattered at every micro-batch,
    which keeps them small, and only the reduction between replicas waits.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"accumulate got a {type(model).__name__} for its model; give it the torch.nn.Module in it")
    if count < 1:
        raise ValueError(f"accumulate got count={count}; a group has at least one micro-batch")
    return _deferred(Deferral(model, keep_sharded), batches, count)


def _deferred(deferral: Deferral, batches: Iterable[T], count: int) -> Iterator[Micro[T]]:
    try:
        groups = _of_known_length(batches, count, len(batches))  # type: ignore[arg-type]
    except TypeError:
        groups = _of_unknown_length(batches, count)
    with deferral:
        for micro in groups:
            deferral.begin(micro.last)
            yield micro
            deferral.end()


def _of_known_length(batches: Iterable[T], count: int, total: int) -> Iterator[Micro[T]]:
    index, last = -1, True
    for index, batch in enumerate(batches):
        place = index % count
        size = min(count, total - index + place) if index < total else count
        last = place == size - 1
        yield Micro(batch, 1 / size, last)
    if not last:
        raise RuntimeError(
            f"accumulate counted on len(batches) = {total} and got {index + 1}, so the gradients of the last "
            f"{index % count + 1} were not sent; give it an iterable without a length, or with the right one"
        )


def _of_unknown_length(batches: Iterable[T], count: int) -> Iterator[Micro[T]]:
    """Fetches one batch ahead, to know which is the last. Whether its group is short is known too late for `scale`."""
    ahead, nothing = iter(batches), object()
    next_batch, count_so_far = next(ahead, nothing), 0
    while next_batch is not nothing:
        batch, next_batch = next_batch, next(ahead, nothing)
        last = count_so_far % count == count - 1 or next_batch is nothing
        yield Micro(batch, 1 / count, last)  # type: ignore[arg-type]
        count_so_far += 1


class NotDeferred(RuntimeError):  # noqa: N818 -- it names what was found
    """Gradients were sent too early, or not at all."""


class Deferral:
    """Defers gradient collectives to the last micro-batch of a group, and verifies that.

    Each kind of wrapper is checked where it decides: DDP in its forward pass, FSDP2 where it returns a reduced
    gradient. An optimizer is checked before it steps, so that no wrong gradient is applied.
    """

    def __init__(self, model: torch.nn.Module, keep_sharded: bool) -> None:
        self._model = model
        self._parts: list[_NoSyncWrapper | _ShardedModules] = [_NoSyncWrapper(wrapper) for wrapper in _wrappers(model)]
        if shards := [module for module in model.modules() if hasattr(module, "set_requires_all_reduce")]:
            self._parts.append(_ShardedModules(shards, keep_sharded))
        elif keep_sharded:
            raise ValueError("accumulate got keep_sharded=True for a model without HSDP; leave it out")
        self._last, self._proven = True, False

    def __enter__(self) -> Self:
        self._exits = ExitStack()
        hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            self._model.register_forward_pre_hook(self._before_forward),
        ]
        for hook in hooks:
            self._exits.callback(hook.remove)
        for part in self._parts:
            self._exits.enter_context(part)
        self._trained = {id(weight) for weight in self._model.parameters() if weight.requires_grad}
        return self

    def __exit__(self, *_error: object) -> None:
        self._exits.close()

    def begin(self, last: bool) -> None:
        self._last, self._proven = last, False
        for part in self._parts:
            part.begin(last)

    def end(self) -> None:
        if self._last and not self._proven:
            self._prove()

    def _prove(self) -> None:
        for part in self._parts:
            part.prove()
        self._proven = True

    def _before_forward(self, model: torch.nn.Module, _arguments: Any) -> None:
        outer = active_ddp_module()
        if outer is not None and outer is not model and not any(part.module is outer for part in self._parts):
            raise NotDeferred(
                "accumulate was given a module inside DistributedDataParallel, which sends gradients at every "
                "micro-batch; give it the DistributedDataParallel itself"
            )

    def _before_step(self, optimizer: Optimizer, *_arguments: Any) -> None:
        stepped = [weight for group in optimizer.param_groups for weight in group["params"]]
        if not any(id(weight) in self._trained for weight in stepped):  # another model's, with gradients of its own
            waiting = any(weight.grad is not None for weight in self._model.parameters())
            if waiting and self._last and all(weight.grad is None for weight in stepped):
                raise NotDeferred(
                    f"{type(optimizer).__name__} steps {len(stepped)} parameters, none of which has a gradient or "
                    "belongs to the model; it was made before the model was wrapped: make it afterwards"
                )
        elif not self._last:
            raise NotDeferred(
                "optimizer.step() came at a micro-batch that is not the last of its group, with gradients that have "
                "not been sent; step under `if micro.last:`"
            )
        elif not self._proven:
            self._prove()


class _NoSyncWrapper:
    """DDP, and other wrappers with `no_sync`, which decide in the forward pass whether the backward pass sends."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._stack = ExitStack()
        self._sends, self._called = True, False

    def __enter__(self) -> Self:
        self._hook = self.module.register_forward_hook(self._after_forward)
        return self

    def __exit__(self, *_error: object) -> None:
        self._hook.remove()
        self._stack.close()

    def begin(self, last: bool) -> None:
        self._sends, self._called = last or has_yet_to_send(self.module), False
        self._stack.close()
        if not self._sends:
            self._stack.enter_context(self.module.no_sync())

    def _after_forward(self, module: Any, *_arguments: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._called = True
        if getattr(module, "require_backward_grad_sync", self._sends) != self._sends:
            raise NotDeferred(
                f"gradients would {'stay' if self._sends else 'travel'} at this micro-batch, because "
                "require_backward_grad_sync or no_sync() was changed inside the loop; leave both to accumulate"
            )

    def prove(self) -> None:
        if not self._called:
            raise NotDeferred(
                f"{type(self.module).__name__} was not called at the last micro-batch of the group, so its gradients "
                "were not sent; call it, and not its `.module`, inside the loop and at every micro-batch"
            )


class _ShardedModules:
    """FSDP2 and HSDP: flags on each module, and a hook for each reduced gradient.

    `set_is_last_backward(False)` is not called: FSDP2 would prefetch in the order of an earlier forward pass, and
    gather weights that are not needed.
    """

    module = None

    def __init__(self, modules: list[Any], keep_sharded: bool) -> None:
        self._modules, self._keep_sharded = modules, keep_sharded
        self._last, self._reduced = True, 0
        placements = [placement for weight in self._parameters() for placement in getattr(weight, "placements", ())]
        if keep_sharded and not any(placement.is_replicate() for placement in placements):
            raise ValueError("accumulate got keep_sharded=True for a model on one mesh dimension; it is for HSDP")

    def __enter__(self) -> Self:
        for module in self._modules:
            module.reshard()  # parameters still gathered, after an evaluation, are not those that are trained
        self._hooks = [weight.register_post_accumulate_grad_hook(self._count) for weight in self._parameters()]
        return self

    def __exit__(self, *_error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self.begin(last=True)

    def begin(self, last: bool) -> None:
        self._last, self._reduced = last, 0
        for module in self._modules:
            if self._keep_sharded:
                module.set_requires_all_reduce(last, recurse=False)
            else:
                module.set_requires_gradient_sync(last, recurse=False)
            if stays_gathered(module):
                module.set_reshard_after_backward(last, recurse=False)

    def _count(self, _parameter: torch.Tensor) -> None:
        self._reduced += 1
        if not self._last:
            raise NotDeferred(
                "gradients were sent at a micro-batch that is not the last of its group, because "
                "set_requires_gradient_sync was called inside the loop; leave it to accumulate"
            )

    def prove(self) -> None:
        if not self._reduced:
            raise NotDeferred(
                "no gradient was reduced at the last micro-batch of the group; call the model and its backward pass "
                "inside the loop and at every micro-batch"
            )

    def _parameters(self) -> Iterable[torch.Tensor]:
        return {weight for module in self._modules for weight in module.parameters() if weight.requires_grad}


def _wrappers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The outermost modules that can defer their gradients."""
    if hasattr(module, "no_sync"):
        yield module
    else:
        for child in module.children():
            yield from _wrappers(child)
