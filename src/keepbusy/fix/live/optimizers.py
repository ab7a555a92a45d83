"""Optimizers whose step is one launch for all parameters. It rounds differently in the last bit, so it is asked for.

The first steps are made both ways from one state: as the program would have stepped, on copies of its weights and of
the optimizer's state, and fused. Where they differ by more than rounding the copies' values count from then on.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from typing import Any

import torch

from keepbusy.fix.live.switch import CHECKED, FixSwitch, ours
from keepbusy.instrument.patches import Function, Patches

_KINDS = ("Adam", "AdamW", "SGD", "Adagrad")
_CHOICES = ("fused", "foreach", "differentiable")
_ROUNDING, _SMALLEST = 1e-5, 1e-7
"""Of a weight; and of those that are nearly nothing."""


class FusedOptimizers:
    """`fused=True` where the program chose no implementation and all parameters are floats of one device."""

    def __init__(self) -> None:
        self.switch = FixSwitch(
            "fused", "optimizers that step in one launch", tolerance="a step's weights differ by rounding, 1e-6 of them"
        )

    def patch(self, patches: Patches) -> None:
        for name in _KINDS:
            kind = getattr(torch.optim, name)
            if "fused" in inspect.signature(kind.__init__).parameters:
                patches.replace(kind, "__init__", self._making)

    def _making(self, plain: Function) -> Function:
        def init(optimizer: Any, params: Any, *args: Any, **options: Any) -> None:
            if not self.switch.on or any(options.get(one) is not None for one in _CHOICES):
                plain(optimizer, params, *args, **options)
                return
            held = list(params)
            is_fused = _may_be_fused(held)
            plain(optimizer, held, *args, **({**options, "fused": True} if is_fused else options))
            if is_fused:
                self.switch.count()
                optimizer.register_step_pre_hook(self._before)

        return init

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A closure would be called twice, and a scaler's gradients are unscaled within the step."""
        if self.switch.checked >= CHECKED or len(args) > 1 or kwargs or hasattr(optimizer, "grad_scale"):
            return
        size = sum(one.nbytes for one in _tensors(optimizer))
        if torch.cuda.mem_get_info()[0] < 4 * size:
            return
        self.switch.checked += 1
        with ours():
            twin = _unfused(optimizer)
            type(optimizer).step.__wrapped__(twin)  # whoever counts steps is not to count this one

        def after(*_: Any) -> None:
            hook.remove()
            self._compare(optimizer, twin)

        hook: Any = optimizer.register_step_post_hook(after)

    def _compare(self, optimizer: Any, twin: Any) -> None:
        pairs = list(zip(_tensors(optimizer), _tensors(twin), strict=True))
        if all(_is_near(one, other) for one, other in pairs):
            return
        self.switch.stop("a step came out different")
        with torch.no_grad():
            for one, other in pairs:
                one.copy_(other)
                optimizer.state[one] = twin.state[other]
        for group in optimizer.param_groups:
            group["fused"] = None


def _unfused(optimizer: Any) -> Any:
    """An optimizer of copies, in the same state."""
    twin, copies = copy.copy(optimizer), dict[Any, Any]()
    for one in _tensors(optimizer):
        copies[one] = one.detach().clone()
        copies[one].grad = None if one.grad is None else one.grad.clone()
    groups = optimizer.param_groups
    twin.param_groups = [{**one, "params": [copies[part] for part in one["params"]], "fused": None} for one in groups]
    twin.state = defaultdict(dict)
    for one, state in optimizer.state.items():
        cloned = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        twin.state[copies[one]] = cloned | ({"step": cloned["step"].cpu()} if "step" in cloned else {})
    return twin


def _tensors(optimizer: Any) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    rounding = max(_ROUNDING, 4 * torch.finfo(one.dtype).eps)
    return torch.allclose(one, other, rtol=rounding, atol=_SMALLEST, equal_nan=True)


def _may_be_fused(params: list[Any]) -> bool:
    tensors: list[Any] = []
    for one in params:
        group = one["params"] if isinstance(one, dict) else one[1] if isinstance(one, tuple) else one
        if isinstance(group, torch.Tensor):
            tensors.append(group)
        elif isinstance(group, list | tuple):
            tensors += group
        else:
            return False  # what can be run through once only is the optimizer's
    return all(isinstance(one, torch.Tensor) and one.is_cuda and one.is_floating_point() for one in tensors)
