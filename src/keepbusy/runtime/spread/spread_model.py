"""`spread`: distributes a model and its optimizer over all ranks of torchrun; the training loop stays as it is.

model, optimizer = keepbusy.spread(model, optimizer)                     # DDP
model, optimizer = keepbusy.spread(model, optimizer, shard=3)            # FSDP2
model, optimizer, loader = keepbusy.spread(model, optimizer, loader, shard=2, tensor=2, example=batch)

Also here: ZeRO's first stage, and checkpoints that any layout writes and any other reads.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from keepbusy.runtime.spread.equality import Example, FirstStep
from keepbusy.runtime.spread.layout import (
    RankLayout,
    check_arguments,
    gather,
    lay_out,
    own_part,
    ranks_here,
    share,
    synchronise,
)
from keepbusy.runtime.spread.module_tree import TrainedNames, blocks_of, with_states
from keepbusy.runtime.spread.tensor_parallel import TensorPlan
from keepbusy.torch_names.distributed import broadcast_all
from keepbusy.torch_names.pytorch import COMPILED, GRADIENT_HOOKS, foreach_copy

LARGE = 4 << 20
"""Bytes from which a parameter is gathered by itself, in place; smaller ones are copied together and back."""
_ELEMENTWISE = {optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam}
_ELEMENTWISE |= {optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD}
"""Optimizers that can step on slices of parameters. Others compute norms or factors, so they get DTensors."""


def spread(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    loader: Iterable[Any] | None = None,
    *,
    shard: int = 0,
    tensor: int | None = None,
    plan: str | Mapping[str, str] = "auto",
    example: Any = None,
) -> Any:
    """The model and the optimizer, trained by all ranks that torchrun started; a single rank returns them unchanged.

    `shard`: 0 copies the model to each rank (DDP), 1 shards the optimizer's states, 2 also gradients, 3 also
    parameters. `tensor`: so many GPUs share each layer. `loader`: is returned third, with a share of each batch;
    without it each rank provides its own batches, and ranks of a tensor group the same ones. `example`: arguments of
    the model (a tensor, a tuple of arguments or a dict of options). One step on it is compared with one process before
    the training, and tensor parallelism tries its plan on it; the whole model must fit on a GPU for that. `plan`:
    patterns of module names that are not cut, as in `{"*.attention": "whole"}`; or "sequence", then each rank of a
    tensor group holds a piece of every sequence between the layers that are cut, including norms and dropouts.
    """
    if layout_override := os.environ.get("KEEPBUSY_LAYOUT"):  # the layout that `keepbusy plan` tries
        shard, tensor = map(int, layout_override.split(","))
    check_arguments(shard, tensor, plan)
    _check_model(model)
    if tensor is not None and tensor > 1 and example is None:
        raise ValueError("spread needs example= with tensor=: a batch on which it finds out which layers can be cut")
    parts = 1
    if ranks_here() > 1:
        layout = lay_out(shard, tensor)
        model, parts = _spread_over(layout, model, optimizer, plan, example), layout.data
        loader = loader if loader is None else share(loader, layout)
    if path := os.environ.get("KEEPBUSY_LAYOUT_FOUND"):  # `keepbusy plan` needs it to compare by batches
        Path(path).write_text(json.dumps({"data": parts, "shared": loader is not None}), encoding="utf-8")
    return (model, optimizer) if loader is None else (model, optimizer, loader)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"spread got a {type(model).__name__} for its model; give it a torch.nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel) or hasattr(module, "set_requires_gradient_sync"):
            raise ValueError(f"{name or 'the model'} is wrapped already, by {type(module).__name__}; spread wraps it")
        if hasattr(module, COMPILED):
            raise ValueError("spread got a compiled model; spread it first, and compile what comes back")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} has no values (it is on the meta device); load or initialise the model first")


class Replicas(DistributedDataParallel):  # type: ignore[misc]  # PyTorch is not typed here
    """DDP with the attributes and the state names of its model."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return self.module.state_dict(*arguments, **options)

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        return self.module.load_state_dict(*arguments, **options)


def _spread_over(layout: RankLayout, model: nn.Module, optimizer: Any, plan: Any, example: Any) -> nn.Module:
    """All steps: values on devices, the example on the whole model, cuts, shards, optimizer, comparison."""
    if not layout.wraps:
        _check_hooks(model)
    trained = TrainedNames(model, optimizer)
    placed = layout.wraps or layout.tensor > 1 or example is not None
    if placed:
        model.to(layout.device)  # by its own methods: an RNN lays its weights out again
        _place(model, layout.device)
    proof = None if example is None else Example(model, example, layout.device)
    if layout.data > 1:
        synchronise(model, layout.device, layout.data_group)
    cut = None
    if layout.tensor > 1 and proof is not None:
        cut = TensorPlan(model, layout, proof.calls, plan)
        cut.apply()
    outer, blocks = _wrap(layout, model, proof, placed)
    trained.repoint(model)
    weights = list(model.parameters())
    kept_share = sum(own_part(weight).numel() for weight in weights) / max(1, sum(weight.numel() for weight in weights))
    report = f"{layout}, {kept_share:.0%} of the parameters on each of {dist.get_world_size()} ranks{blocks}"
    report += f", {cut}" if cut else ""
    if proof is not None:
        report += f"\nkeepbusy: {proof.prove(outer, model, layout, cut.uncut if cut else '')}"
    if optimizer is not None:
        FirstStep(model, optimizer, layout)
        if layout.wraps and layout.shard == 1:
            ShardedStates(optimizer, layout.mesh["data"])
    seed = torch.randint(1 << 60, (1,)).to(layout.device)
    dist.broadcast(seed, 0)
    torch.manual_seed(int(seed) + layout.data_rank)  # ranks of one tensor group drop the same activations
    if dist.get_rank() == 0:
        sys.stderr.write(f"keepbusy: {report}\n")
    return outer


def _check_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if any(getattr(parameter, hooks, None) for hooks in GRADIENT_HOOKS):
            raise ValueError(
                f"{name} has a hook on its gradient, which sharding would leave behind with the old parameter; "
                "register it on a parameter of the model that spread returns"
            )


def _place(module: nn.Module, device: torch.device) -> None:
    """Move tensors to this rank's device, with the values of the first rank, since ranks may have used other seeds.
    Sharded tensors have their values already."""
    unsharded = [weight for weight in [*module.parameters(), *module.buffers()] if not isinstance(weight, DTensor)]
    for tensor in unsharded:
        tensor.data = tensor.data.to(device)
    if unsharded:
        broadcast_all(dist.group.WORLD, [tensor.detach() for tensor in unsharded], 256 << 20, 0)


def _wrap(layout: RankLayout, model: nn.Module, proof: Example | None, placed: bool) -> tuple[nn.Module, str]:
    """DDP around the model, or FSDP2 in it, and a phrase about its blocks. A block that is not called would not be
    gathered, so it counts as none. A model that is not placed yet is placed block by block, so it need not fit on the
    device."""
    called = None
    if proof is not None:
        called = set(proof.calls)
        proof.calls.clear()
    if layout.wraps:
        places = [layout.device.index] if layout.device.type == "cuda" else None
        finds = proof is not None and bool(proof.unused)
        return Replicas(model, device_ids=places, gradient_as_bucket_view=True, find_unused_parameters=finds), ""
    if layout.data == 1:
        return model, ""
    blocks = [block for block in blocks_of(model).values() if called is None or block in called]
    # for replicas the mesh has two dimensions, the second with one rank
    mesh = layout.mesh["data"] if layout.shard else layout.mesh["data", "alone"]
    kinds = sorted({type(block).__name__ for block in blocks})
    for module in (*blocks, model):
        if not placed:
            _place(module, layout.device)
        reshards = layout.shard == 3 and module is not model
        fully_shard(module, mesh=mesh, reshard_after_forward=reshards)
    return model, f", in {len(blocks)} blocks ({', '.join(kinds)})" if blocks else ", as one block"


class ShardedStates:
    """ZeRO's first stage: each rank has all parameters and gradients, and a part of the optimizer's states.

    During its step the optimizer has this rank's rows of each parameter, in the parameter's memory; then the rows of
    all ranks are gathered. Otherwise it has the parameters themselves, as clipping, a `GradScaler` and schedulers
    expect. It saves DTensors, like FSDP2.
    """

    def __init__(self, optimizer: optim.Optimizer, mesh: Any) -> None:
        self._optimizer, self._mesh = optimizer, mesh
        self._ranks, self._rank = mesh.size(), mesh.get_local_rank()
        self._takes_rows = type(optimizer) in _ELEMENTWISE
        wholes = self._parameters()
        self._parts = {id(whole): nn.Parameter(self._part(whole.detach())) for whole in wholes}
        for whole in wholes:
            if whole in optimizer.state:
                states = optimizer.state[whole]
                optimizer.state[whole] = {name: self._loaded(value, whole) for name, value in states.items()}
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.register_state_dict_post_hook(lambda own, saved: with_states(own, saved, self._saved))
        optimizer.register_load_state_dict_pre_hook(lambda own, saved: with_states(own, saved, self._loaded))

    def _parameters(self) -> list[nn.Parameter]:
        return [weight for group in self._optimizer.param_groups for weight in group["params"]]

    def _rows(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor, as a view; the last ranks may have fewer, or none."""
        if not whole.dim():
            return whole
        rows = -(-whole.shape[0] // self._ranks)
        return whole[min(self._rank * rows, whole.shape[0]) :][:rows]

    def _part(self, whole: Tensor) -> Tensor:
        rows = self._rows(whole)
        return rows if self._takes_rows else self._sharded(rows, whole)

    def _sharded(self, rows: Tensor, whole: Tensor) -> DTensor:
        placements = [Shard(0) if whole.dim() else Replicate()]
        geometry = {"shape": whole.shape, "stride": whole.stride()}
        return DTensor.from_local(rows, self._mesh, placements, run_check=False, **geometry)

    def _before(self, *_arguments: Any) -> None:
        self._wholes = [group["params"] for group in self._optimizer.param_groups]
        for group, wholes in zip(self._optimizer.param_groups, self._wholes, strict=True):
            group["params"] = [self._parts[id(whole)] for whole in wholes]
            for whole, part in zip(wholes, group["params"], strict=True):
                part.grad = None if whole.grad is None else self._part(whole.grad)
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
        """Gather all rows on all ranks; large parameters are sent while small ones are copied together."""
        waits, small = [], defaultdict(list)
        for whole in (weight.detach() for weight in self._parameters() if weight.dim()):
            if whole.nbytes >= LARGE and whole.shape[0] % self._ranks == 0 and whole.is_contiguous():
                waits.append(gather(whole, self._rows(whole), group=self._mesh.get_group(), async_op=True))
            else:
                small[whole.dtype].append(whole)
        for wholes in small.values():
            self._gather_together(wholes)
        for wait in waits:
            wait.wait()

    def _gather_together(self, wholes: list[Tensor]) -> None:
        """Gather small parameters of one type as one tensor, padded if rows do not divide."""
        sizes = [-(-whole.shape[0] // self._ranks) * (whole.numel() // whole.shape[0]) for whole in wholes]
        own = wholes[0].new_empty(sum(sizes))
        rows = [self._rows(whole).reshape(-1) for whole in wholes]
        foreach_copy([part[: len(row)] for part, row in zip(own.split(sizes), rows, strict=True)], rows)
        gathered = own.new_empty(self._ranks * len(own))
        gather(gathered, own, group=self._mesh.get_group())
        parts = gathered.view(self._ranks, -1).split(sizes, dim=1)
        rows = [part.reshape(-1)[: whole.numel()].view_as(whole) for part, whole in zip(parts, wholes, strict=True)]
        foreach_copy(wholes, rows)

    def _saved(self, value: Any, whole: Tensor) -> Any:
        """Rows as a DTensor."""
        is_rows = isinstance(value, Tensor) and value.dim() > 0 and value.shape == self._rows(whole).shape
        return self._sharded(value, whole) if is_rows and not isinstance(value, DTensor) else value

    def _loaded(self, value: Any, whole: Tensor) -> Any:
        """This rank's rows of a whole tensor, or of a DTensor."""
        if not isinstance(value, Tensor) or value.shape != whole.shape or not value.dim():
            return value
        rows = value.to_local() if isinstance(value, DTensor) else self._rows(value).clone()
        return rows if self._takes_rows else self._sharded(rows, whole)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """The state to save: parameters, buffers and the optimizer's states, by their names in the original model.

        keepbusy.save_later(state_of(model, optimizer), "step1000")

    All ranks must call it. Sharded tensors stay sharded, and each rank writes its part.
    """
    own = _inner(model)
    state = {"model": state_dict.get_model_state_dict(own)}
    if optimizer is not None:
        state["optimizer"] = state_dict.get_optimizer_state_dict(own, optimizer)
    return state


def resume(model: nn.Module, optimizer: torch.optim.Optimizer | None, path: str | os.PathLike[str]) -> None:
    """Resume from a checkpoint of `state_of`, a file or a folder, written by any layout."""
    path, own = Path(path), _inner(model)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path} to resume from")
    whole = path.is_file()
    if whole:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    else:
        state = state_of(model, optimizer)
        checkpoint.load(state, checkpoint_id=path)
    options = state_dict.StateDictOptions(full_state_dict=whole)
    state_dict.set_model_state_dict(own, state["model"], options=options)
    if optimizer is not None:
        state_dict.set_optimizer_state_dict(own, optimizer, state["optimizer"], options=options)


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
