"""ZeRO's first stage: whole parameters and gradients on every rank, and of the optimizer's states a part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

BUCKET = 64 << 20
"""Bytes of parameters that are gathered at once: as large as need be for a link to be at its best, and no larger."""


class ShardedStates:
    """While the optimizer steps it sees a slice of each parameter, which lies where the parameter does; then the
    slices of all ranks are gathered. Before and after it holds the parameters themselves, so that clipping, a
    `GradScaler` and schedulers see what they know. Its states are DTensors, as those of FSDP2."""

    def __init__(self, optimizer: torch.optim.Optimizer, mesh: Any) -> None:
        self._optimizer, self._mesh = optimizer, mesh
        self._ranks, self._rank = mesh.size(), mesh.get_local_rank()
        self._slices: dict[int, torch.nn.Parameter] = {}
        for whole in self._parameters():
            self._slices[id(whole)] = torch.nn.Parameter(self._slice(whole.detach()), requires_grad=True)
            if whole in optimizer.state:
                held = optimizer.state[whole]
                held |= {key: self._slice(one) for key, one in held.items() if _is_like(one, whole)}
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (one for group in self._optimizer.param_groups for one in group["params"])

    def _slice(self, whole: Tensor) -> DTensor:
        """This rank's rows, in the memory of the whole."""
        if whole.dim() == 0:
            return DTensor.from_local(whole, self._mesh, run_check=False)
        rows = -(-whole.shape[0] // self._ranks)
        first = min(self._rank * rows, whole.shape[0])
        local = whole[first : first + rows]
        return DTensor.from_local(
            local, self._mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def _before(self, *_arguments: Any) -> None:
        self._wholes = [list(group["params"]) for group in self._optimizer.param_groups]
        for group, wholes in zip(self._optimizer.param_groups, self._wholes, strict=True):
            group["params"] = [self._slices[id(one)] for one in wholes]
            for whole, part in zip(wholes, group["params"], strict=True):
                part.grad = None if whole.grad is None else self._slice(whole.grad)
                _move_state(self._optimizer, whole, part)

    def _after(self, *_arguments: Any) -> None:
        for group, wholes in zip(self._optimizer.param_groups, self._wholes, strict=True):
            for whole, part in zip(wholes, group["params"], strict=True):
                part.grad = None
                _move_state(self._optimizer, part, whole)
            group["params"] = wholes
        for bucket in self._buckets():
            self._gather(bucket)

    def _buckets(self) -> Iterator[list[Tensor]]:
        held: list[Tensor] = []
        for whole in sorted((one for one in self._parameters() if one.dim()), key=lambda one: str(one.dtype)):
            if held and (held[0].dtype != whole.dtype or sum(one.nbytes for one in held) + whole.nbytes > BUCKET):
                yield held
                held = []
            held.append(whole.detach())
        if held:
            yield held

    def _gather(self, wholes: list[Tensor]) -> None:
        """Each rank's rows go to all, padded where they do not divide."""
        sizes = [-(-one.shape[0] // self._ranks) * (one.numel() // one.shape[0]) for one in wholes]
        mine = wholes[0].new_empty(sum(sizes))
        rows = [self._slices_of(one).reshape(-1) for one in wholes]
        torch._foreach_copy_([part[: len(row)] for part, row in zip(mine.split(sizes), rows, strict=True)], rows)
        gathered = mine.new_empty(self._ranks * len(mine))
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since PyTorch 2.13
        gather(gathered, mine, group=self._mesh.get_group())
        parts = gathered.view(self._ranks, -1).split(sizes, dim=1)
        torch._foreach_copy_(
            [one.view(-1) for one in wholes],
            [part.reshape(-1)[: one.numel()] for part, one in zip(parts, wholes, strict=True)],
        )

    def _slices_of(self, whole: Tensor) -> Tensor:
        return self._slice(whole).to_local()


def _is_like(value: Any, whole: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == whole.shape and value.dim() > 0


def _move_state(optimizer: torch.optim.Optimizer, source: Tensor, target: Tensor) -> None:
    if source in optimizer.state:
        optimizer.state[target] = optimizer.state.pop(source)
