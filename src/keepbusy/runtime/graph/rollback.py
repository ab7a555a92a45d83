"""The host's side of a training state, as a capture might leave it half done. The device's side no capture touches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.optimizer import Optimizer

from keepbusy.runtime.graph import host_state
from keepbusy.runtime.graph.participants import Participants


def rollback_to_now(participants: Participants) -> list[Callable[[], None]]:
    """What brings random numbers, optimizers and scalers back to where they are now."""
    return [
        host_state.restore_random_numbers(),
        *map(_of_optimizer, participants.optimizers),
        *map(_of_scaler, participants.scalers),
    ]


def _of_optimizer(optimizer: Optimizer) -> Callable[[], None]:
    groups = [dict(group) for group in optimizer.param_groups]
    states = [
        # tensors of the host are written to in a capture, those of the device are not
        (
            parameter,
            state,
            {
                label: value.clone() if isinstance(value, torch.Tensor) and not value.is_cuda else value
                for label, value in state.items()
            },
        )
        for parameter, state in optimizer.state.items()
    ]
    known, names = {id(parameter) for parameter, _, _ in states}, set(vars(optimizer))

    def restore() -> None:
        for group, before in zip(optimizer.param_groups, groups, strict=False):
            group.update(before)
        for parameter in [one for one in optimizer.state if id(one) not in known]:
            del optimizer.state[parameter]
        for _, state, before in states:
            state.clear()
            state.update(before)
        for name in set(vars(optimizer)) - names:  # GradScaler hangs its tensors here while the optimizer steps
            delattr(optimizer, name)

    return restore


def _of_scaler(scaler: torch.amp.GradScaler) -> Callable[[], None]:
    stages = {optimizer: dict(stage) for optimizer, stage in scaler._per_optimizer_states.items()}
    found = [(stage["found_inf_per_device"], dict(stage["found_inf_per_device"])) for stage in stages.values()]

    def restore() -> None:
        scaler._per_optimizer_states.clear()
        scaler._per_optimizer_states.update(stages)
        for now, before in found:
            now.clear()
            now.update(before)

    return restore
