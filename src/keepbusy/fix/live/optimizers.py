"""Optimizers whose step is one launch for all parameters. It rounds differently in the last bit, so it is asked for."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from keepbusy.fix.live.switch import FixSwitch
from keepbusy.instrument.patches import Function, Patches

_KINDS = ("Adam", "AdamW", "SGD", "Adagrad")
_CHOICES = ("fused", "foreach", "differentiable")


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
            if _may_be_fused(held):
                self.switch.count()
                options["fused"] = True
            plain(optimizer, held, *args, **options)

        return init


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
