"""`spread`: a model and its optimizer over all ranks of torchrun, and a training loop that stays as it is.

model, optimizer = keepbusy.spread(model, optimizer)                     # DDP
model, optimizer = keepbusy.spread(model, optimizer, shard=3)            # FSDP2
model, optimizer, loader = keepbusy.spread(model, optimizer, loader, shard=2, tensor=2, example=batch)

Also here: ZeRO's first stage, and checkpoints that any layout writes and any other reads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from keepbusy.runtime.spread.equality import Example, FirstStep, Theory
from keepbusy.runtime.spread.layout import (
    RankLayout,
    check_arguments,
    gather,
    lay_out,
    own_part,
    ranks_here,
    share,
    synchronise,
    tell_planner,
)
from keepbusy.runtime.spread.module_tree import TrainedNames, blocks_of, dropouts_of, saved_keys, without_dropout
from keepbusy.runtime.spread.tensor_parallel import TensorPlan

LARGE = 4 << 20
"""Bytes from which a parameter is gathered by itself, where it lies; smaller ones are copied together and back."""
_ELEMENTWISE = {optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam}
_ELEMENTWISE |= {optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD}
"""Optimizers that step on a slice as on the whole; any other takes norms and factors, for which it gets DTensors."""


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
    """The model and the optimizer, trained by all ranks that torchrun started; alone they come back as they are.

    `shard`: 0 copies the model to each rank (DDP), 1 shards the optimizer's states, 2 also gradients, 3 also
    parameters. `tensor`: so many GPUs share each layer. `loader`: comes back third, with a share of each batch; without
    it each rank brings its own batches, and ranks of one tensor group the same. `example`: what the model is called
    with (a tensor, a tuple of arguments or a dict of options). One step on it is compared with one process before
    anything is trained, and tensor parallelism tries its plan on it; the whole model must fit on a GPU for that.
    `plan`: patterns of module names that are not to be cut, as in `{"*.attention": "whole"}`; or "sequence", and each
    rank of a tensor group holds a piece of every sequence between the layers that are cut, norms and dropouts as well.
    """
    if asked := os.environ.get("KEEPBUSY_LAYOUT"):  # the layout that `keepbusy plan` tries
        shard, tensor = map(int, asked.split(","))
    check_arguments(shard, tensor, plan)
    _check_model(model)
    if tensor is not None and tensor > 1 and example is None:
        raise ValueError("spread needs example= with tensor=: a batch on which it finds out which layers can be cut")
    parts = 1
    if ranks_here() > 1:
        layout = lay_out(shard, tensor)
        model, parts = _Spreading(model, optimizer, layout, plan, example).model, layout.data
        loader = loader if loader is None else share(loader, layout)
    tell_planner(parts, loader is not None)
    return (model, optimizer) if loader is None else (model, optimizer, loader)


def _check_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"{name} has a hook on its gradient, which sharding would leave behind with the old parameter; "
                "register it on a parameter of the model that spread returns"
            )


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"spread got a {type(model).__name__} for its model; give it a torch.nn.Module")
    for name, one in model.named_modules():
        if isinstance(one, DistributedDataParallel) or hasattr(one, "set_requires_gradient_sync"):
            raise ValueError(f"{name or 'the model'} is wrapped already, by {type(one).__name__}; spread wraps it")
        if hasattr(one, "_orig_mod"):
            raise ValueError("spread got a compiled model; spread it first, and compile what comes back")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} has no values (it is on the meta device); load or initialise the model first")


class Replicas(DistributedDataParallel):  # type: ignore[misc]  # PyTorch is not typed here
    """DDP that shows the model in it: attributes, and the names in its state."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return self.module.state_dict(*arguments, **options)

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        return self.module.load_state_dict(*arguments, **options)


class _Spreading:
    """The steps in their order: values on devices, the whole model's example, cuts, shards, optimizer, proof."""

    def __init__(self, model: nn.Module, optimizer: Any, layout: RankLayout, plan: Any, example: Any) -> None:
        self.model, self._inner, self._layout = model, model, layout
        if not layout.wraps:
            _check_hooks(model)
        trained = TrainedNames(model, optimizer)
        whole = layout.wraps or layout.tensor > 1 or example is not None
        if whole:
            model.to(layout.device)  # by its own ways: an RNN lays its weights out anew
            self._place(model)
        proof = None if example is None else Example(model, example, layout.device)
        norms = synchronise(model, layout.device, layout.data_group) if layout.data > 1 else 0
        cut = self._cut(proof, plan)
        blocks = self._wrap(proof, whole)
        trained.repoint(self._inner)
        weights = list(model.parameters())
        share_held = sum(own_part(weight).numel() for weight in weights) / max(
            1, sum(weight.numel() for weight in weights)
        )
        done = f"{layout}, {share_held:.0%} of the parameters on each of {dist.get_world_size()} ranks{blocks}"
        done += f", {cut}" if cut else ""
        if proof is not None:
            collectives, uncut = (cut.collectives, cut.uncut) if cut else ({}, "")
            theory = Theory(model, layout, collectives, norms, proof.unused, proof.repeats)
            done += f"\nkeepbusy: {proof.prove(self.model, model, layout, theory, uncut)}"
        if optimizer is not None:
            FirstStep(model, optimizer, layout)
            if layout.wraps and layout.shard == 1:
                ShardedStates(optimizer, layout.mesh["data"])
        self._seed()
        if dist.get_rank() == 0:
            sys.stderr.write(f"keepbusy: {done}\n")

    def _place(self, module: nn.Module) -> None:
        """On this rank's device, with the values of the first rank: layers that were made with other seeds would be
        trained as a mixture. What is sharded already has its values."""
        held = [weight for weight in [*module.parameters(), *module.buffers()] if not isinstance(weight, DTensor)]
        with torch.no_grad():
            for one in held:
                one.data = one.data.to(self._layout.device)
        if held:
            dist._broadcast_coalesced(dist.group.WORLD, [tensor.detach() for tensor in held], 256 << 20, 0)

    def _cut(self, proof: Example | None, plan: Any) -> TensorPlan | None:
        """What tensor parallelism cuts."""
        if self._layout.tensor == 1 or proof is None:
            return None
        random = bool(dropouts_of(self._inner))
        with without_dropout(self._inner):
            found = TensorPlan(self._inner, self._layout, proof.calls, {} if isinstance(plan, str) else plan)
        if plan == "sequence":
            found.cut_sequences()
        found.apply(random)
        return found

    def _wrap(self, proof: Example | None, placed: bool) -> str:
        """What is not called is not gathered, so that a block whose parameters are read by others is none. What is not
        placed yet is a block at a time: the whole model need not fit."""
        layout, model = self._layout, self._inner
        called, unused = (proof.forget_calls(), proof.unused) if proof is not None else (None, [])
        if layout.wraps:
            places = [layout.device.index] if layout.device.type == "cuda" else None
            self.model = Replicas(
                model, device_ids=places, gradient_as_bucket_view=True, find_unused_parameters=bool(unused)
            )
            return ""
        if layout.data == 1:
            return ""
        blocks = {name: one for name, one in blocks_of(model).items() if called is None or one in called}
        kinds = sorted({type(block).__name__ for block in blocks.values()})
        for module in (*blocks.values(), model):
            if not placed:
                self._place(module)
            again = layout.shard == 3 and module is not model
            fully_shard(module, mesh=layout.sharding_mesh, reshard_after_forward=again)
        return f", in {len(blocks)} blocks ({', '.join(kinds)})" if blocks else ", as one block"

    def _seed(self) -> None:
        """Ranks with other parts of a batch drop other activations; those of one tensor group drop the same."""
        seed = torch.randint(1 << 60, (1,)).to(self._layout.device)
        dist.broadcast(seed, 0)
        torch.manual_seed(int(seed) + self._layout.data_rank)


class ShardedStates:
    """ZeRO's first stage: whole parameters and gradients on every rank, and of the optimizer's states a part.

    While the optimizer steps it sees this rank's rows of each parameter, which lie where the parameter does; then
    the rows of all ranks are gathered. Before and after it holds the parameters themselves, so that clipping, a
    `GradScaler` and schedulers see what they know. What it saves are DTensors, as those of FSDP2.
    """

    def __init__(self, optimizer: optim.Optimizer, mesh: Any) -> None:
        self._optimizer, self._mesh = optimizer, mesh
        self._ranks, self._rank = mesh.size(), mesh.get_local_rank()
        self._seen: Callable[[Tensor], Tensor] = self._rows if type(optimizer) in _ELEMENTWISE else self._sharded
        self._parts = {id(one): torch.nn.Parameter(self._seen(one.detach())) for one in self._parameters()}
        for whole in self._parameters():
            if whole in optimizer.state:
                optimizer.state[whole] = self._taken(whole, optimizer.state[whole])
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.register_state_dict_post_hook(self._saved)
        optimizer.register_load_state_dict_pre_hook(self._loaded)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [weight for group in self._optimizer.param_groups for weight in group["params"]]

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
            wholes, group["params"] = group["params"], [self._parts[id(weight)] for weight in group["params"]]
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
        sizes = [-(-whole.shape[0] // self._ranks) * (whole.numel() // whole.shape[0]) for whole in wholes]
        own = wholes[0].new_empty(sum(sizes))
        rows = [self._rows(whole).reshape(-1) for whole in wholes]
        torch._foreach_copy_([part[: len(row)] for part, row in zip(own.split(sizes), rows, strict=True)], rows)
        gathered = own.new_empty(self._ranks * len(own))
        gather(gathered, own, group=self._mesh.get_group())
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
            key: {name: shown(tensor, wholes[key]) for name, tensor in held.items()}
            for key, held in saved["state"].items()
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

        return {name: own(tensor) for name, tensor in held.items()}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """What to save: parameters, buffers and the optimizer's states by the names they have in the model itself.

        keepbusy.save_later(state_of(model, optimizer), "step1000")

    All ranks call it. What is sharded stays so, and each rank writes its part.
    """
    own = _inner(model)
    state = {"model": state_dict.get_model_state_dict(own)}
    if optimizer is not None:
        state["optimizer"] = state_dict.get_optimizer_state_dict(own, optimizer)
    return state


def resume(model: nn.Module, optimizer: torch.optim.Optimizer | None, path: str | os.PathLike[str]) -> None:
    """Go on from a checkpoint of `state_of`, whatever the layout that wrote it: a file, or a folder of parts."""
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
