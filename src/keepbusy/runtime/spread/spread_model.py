"""`spread`: a model and its optimizer over all ranks of torchrun, and a training loop that stays as it is.

model, optimizer = keepbusy.spread(model, optimizer)                     # DDP
model, optimizer = keepbusy.spread(model, optimizer, shard=3)            # FSDP2
model, optimizer, loader = keepbusy.spread(model, optimizer, loader, shard=2, tensor=2, example=batch)
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from keepbusy.runtime.spread.batch_share import share, synchronise
from keepbusy.runtime.spread.blocks import blocks_of, dropouts_of, without_dropout
from keepbusy.runtime.spread.equality import Example, FirstStep
from keepbusy.runtime.spread.layout import (
    RankLayout,
    check_arguments,
    lay_out,
    own_part,
    planned,
    ranks_here,
    tell_planner,
)
from keepbusy.runtime.spread.parameters import TrainedNames
from keepbusy.runtime.spread.sharded_states import ShardedStates
from keepbusy.runtime.spread.tensor_parallel import TensorPlan
from keepbusy.runtime.spread.traffic import Theory


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
    shard, tensor = planned(shard, tensor)
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
        told = f"{layout}, {self._local_share():.0%} of the parameters on each of {dist.get_world_size()} ranks{blocks}"
        told += f", {cut}" if cut else ""
        if proof is not None:
            told += f"\nkeepbusy: {self._proven(proof, cut, norms)}"
        if optimizer is not None:
            FirstStep(model, optimizer, layout)
            if layout.wraps and layout.shard == 1:
                ShardedStates(optimizer, layout.mesh["data"])
        self._seed()
        if dist.get_rank() == 0:
            sys.stderr.write(f"keepbusy: {told}\n")

    def _place(self, module: nn.Module) -> None:
        """On this rank's device, with the values of the first rank: layers that were made with other seeds would be
        trained as a mixture. What is sharded already has its values."""
        held = [one for one in [*module.parameters(), *module.buffers()] if not isinstance(one, DTensor)]
        with torch.no_grad():
            for one in held:
                one.data = one.data.to(self._layout.device)
        if held:
            dist._broadcast_coalesced(dist.group.WORLD, [one.detach() for one in held], 256 << 20, 0)

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
        kinds = sorted({type(one).__name__ for one in blocks.values()})
        for module in (*blocks.values(), model):
            if not placed:
                self._place(module)
            again = layout.shard == 3 and module is not model
            fully_shard(module, mesh=layout.sharding_mesh, reshard_after_forward=again)
        return f", in {len(blocks)} blocks ({', '.join(kinds)})" if blocks else ", as one block"

    def _proven(self, proof: Example, cut: TensorPlan | None, norms: int) -> str:
        collectives, uncut = (cut.collectives, cut.uncut) if cut else ({}, "")
        theory = Theory(self._inner, self._layout, collectives, norms, proof.unused, proof.repeats)
        return proof.prove(self.model, self._inner, self._layout, theory, uncut)

    def _local_share(self) -> float:
        parameters = list(self._inner.parameters())
        return sum(own_part(one).numel() for one in parameters) / max(1, sum(one.numel() for one in parameters))

    def _seed(self) -> None:
        """Ranks with other parts of a batch drop other activations; those of one tensor group drop the same."""
        seed = torch.randint(1 << 60, (1,)).to(self._layout.device)
        dist.broadcast(seed, 0)
        torch.manual_seed(int(seed) + self._layout.data_rank)
