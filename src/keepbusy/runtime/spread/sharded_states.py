"""ZeRO's first stage: whole parameters and gradients on every rank, and of the optimizer's states a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor, Shard

from keepbusy.runtime.spread.layout import gather
from keepbusy.runtime.spread.parameters import saved_keys

LARGE = 4 << 20
"""Bytes from which a parameter is gathered by itself, where it lies; smaller ones are copied together and back."""
ELEMENTWISE = {optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam}
ELEMENTWISE |= {optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD}
"""Optimizers that step on a slice as on the whole; any other takes norms and factors, for which it gets DTensors."""


class ShardedStates:
    """While the optimizer steps it sees this rank's rows of each parameter, which lie where the parameter does; then
    the rows of all ranks are gathered. Before and after it holds the parameters themselves, so that clipping, a
    `GradScaler` and schedulers see what they know. What it saves are DTensors, as those of FSDP2."""

    def __init__(self, optimizer: optim.Optimizer, mesh: Any) -> None:
        self._optimizer, self._mesh = optimizer, mesh
        self._ranks, self._rank = mesh.size(), mesh.get_local_rank()
        self._seen: Callable[[Tensor], Tensor] = self._rows if type(optimizer) in ELEMENTWISE else self._sharded
        self._parts = {id(one): torch.nn.Parameter(self._seen(one.detach())) for one in self._parameters()}
        for whole in self._parameters():
            if whole in optimizer.state:
                optimizer.state[whole] = self._taken(whole, optimizer.state[whole])
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.register_state_dict_post_hook(self._saved)
        optimizer.register_load_state_dict_pre_hook(self._loaded)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [one for group in self._optimizer.param_groups for one in group["params"]]

    def _rows(self, whole: Tensor) -> Tensor:
        """This rank's rows, in the memory of the whole; the last ranks may have fewer, or none."""
        if not whole.dim():
            return whole
        rows = -(-whole.shape[0] // self._ranks)
        return whole[min(self._rank * rows, whole.shape[0]) :][:rows]

    def _sharded(self, whole: Tensor) -> DTensor:
        return self._as_sharded(self._rows(whole), whole)

    def _as_sharded(self, rows: Tensor, whole: Tensor) -> DTensor:
        if not whole.dim():
            return DTensor.from_local(rows, self._mesh, run_check=False)
        look = {"shape": whole.shape, "stride": whole.stride()}
        return DTensor.from_local(rows, self._mesh, [Shard(0)], run_check=False, **look)

    def _before(self, *_arguments: Any) -> None:
        self._wholes = [group["params"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            wholes, group["params"] = group["params"], [self._parts[id(one)] for one in group["params"]]
            for whole, part in zip(wholes, group["params"], strict=True):
                part.grad = None if whole.grad is None else self._seen(whole.grad)
                self._move_state(whole, part)

    def _after(self, *_arguments: Any) -> None:
        for group, wholes in zip(self._optimizer.param_groups, self._wholes, strict=True):
            for whole, part in zip(wholes, group["params"], strict=True):
                part.grad = None
                self._move_state(part, whole)
            group["params"] = wholes
        self._gather_all()

    def _move_state(self, source: Tensor, target: Tensor) -> None:
        if source in self._optimizer.state:
            self._optimizer.state[target] = self._optimizer.state.pop(source)

    def _gather_all(self) -> None:
        """All ranks get all rows; those of large parameters travel while small ones are copied together."""
        waits, small = [], dict[torch.dtype, list[Tensor]]()
        for whole in (one.detach() for one in self._parameters() if one.dim()):
            if whole.nbytes >= LARGE and whole.shape[0] % self._ranks == 0 and whole.is_contiguous():
                waits.append(gather(whole, self._rows(whole), group=self._mesh.get_group(), async_op=True))
            else:
                small.setdefault(whole.dtype, []).append(whole)
        for wholes in small.values():
            self._gather_together(wholes)
        for one in waits:
            one.wait()

    def _gather_together(self, wholes: list[Tensor]) -> None:
        """Padded where rows do not divide."""
        sizes = [-(-one.shape[0] // self._ranks) * (one.numel() // one.shape[0]) for one in wholes]
        mine = wholes[0].new_empty(sum(sizes))
        rows = [self._rows(one).reshape(-1) for one in wholes]
        torch._foreach_copy_([part[: len(row)] for part, row in zip(mine.split(sizes), rows, strict=True)], rows)
        gathered = mine.new_empty(self._ranks * len(mine))
        gather(gathered, mine, group=self._mesh.get_group())
        parts = gathered.view(self._ranks, -1).split(sizes, dim=1)
        rows = [part.reshape(-1)[: one.numel()].view_as(one) for part, one in zip(parts, wholes, strict=True)]
        torch._foreach_copy_(wholes, rows)

    def _saved(self, _optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
        """States as DTensors."""

        def shown(rows: Any, whole: Tensor) -> Any:
            like = isinstance(rows, Tensor) and rows.dim() > 0 and rows.shape == self._rows(whole).shape
            return self._as_sharded(rows, whole) if like and not isinstance(rows, DTensor) else rows

        wholes = self._parameters()
        states = {
            key: {name: shown(one, wholes[key]) for name, one in held.items()} for key, held in saved["state"].items()
        }
        return saved | {"state": states}

    def _loaded(self, _optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
        wholes = dict(zip(saved_keys(saved), self._parameters(), strict=True))
        return saved | {"state": {key: self._taken(wholes[key], held) for key, held in saved["state"].items()}}

    def _taken(self, whole: Tensor, held: dict[str, Any]) -> dict[str, Any]:
        """Of the states of a whole parameter, or of DTensors, this rank's rows."""

        def own(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.shape != whole.shape or not value.dim():
                return value
            rows = value.to_local() if isinstance(value, DTensor) else self._rows(value).clone()
            return rows if self._seen == self._rows else self._as_sharded(rows, whole)

        return {name: own(one) for name, one in held.items()}
