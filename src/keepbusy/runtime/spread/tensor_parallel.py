"""Tensor parallelism: which layers are cut is derived from the module tree, tried on an example, and then done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_flatten, tree_map

from keepbusy.runtime.spread.blocks import blocks_of, tied_parameters
from keepbusy.runtime.spread.layout import RankLayout
from keepbusy.runtime.spread.parameters import keep_order, reordered
from keepbusy.runtime.spread.region import BlockStretch, Cut, Region, Seeds, cut_of, is_summed, regions_of

TOLERANCE = 1e-2
"""Of the norm: what a region may differ from the whole one. Sums in another order differ by 1e-6, with TF32 and
bfloat16 by some 1e-3, and what is wrong by 0.1 and more."""

_Known = tuple[list[str], str, list[tuple[str, str]], list[str], tuple[int, ...]]
Calls = Mapping[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]
"""What each module was called with when the example ran."""


class TensorPlan:
    """The regions of a model that are cut, each tried against the whole module on what the example brought it."""

    def __init__(self, model: nn.Module, layout: RankLayout, calls: Calls, asked: Iterable[str]) -> None:
        """`asked`: patterns of names of modules that stay whole."""
        self.regions: list[Region] = []
        self.stretches: list[dict[str, nn.Module]] = []
        """Blocks that hold pieces of the sequences between their regions, by name."""
        self._model, self._layout, self._calls = model, layout, calls
        self._names = {one: name for name, one in model.named_modules()}
        whole = [one for one, name in self._names.items() if any(fnmatchcase(name, pattern) for pattern in asked)]
        self._kept = {*tied_parameters(model), *(id(own) for one in whole for own in one.parameters())}
        self._turns = {one: turn for turn, one in enumerate(calls)}
        self._decided: dict[str, _Known | None] = {}
        for module, name in reversed(self._names.items()):  # inner ones come first, and one may hold several
            while region := self._next_region(name, module):
                self.regions.append(region)
        self.regions.reverse()
        if not self.regions:
            raise ValueError(
                f"spread found no layers to cut in {layout.tensor}: in no module do Linear layers follow each other by "
                "columns and rows, with widths and heads that it divides; leave tensor= out"
            )

    def __str__(self) -> str:
        stretches = f", sequences cut in {len(self.stretches)} stretches" if self.stretches else ""
        return f"{len(self.regions)} regions cut{stretches}"

    def _caller(self, module: nn.Module) -> nn.Module:
        """The innermost module around it that was called."""
        name = self._names[module]
        while module not in self._calls and name:
            name = name.rpartition(".")[0]
            module = self._model.get_submodule(name)
        return module

    def _next_region(self, name: str, module: nn.Module) -> Region | None:
        """What can be cut in a module besides the regions there are. Modules that look alike are tried once."""
        if module not in self._calls or not list(module.children()):
            return None
        claimed = {one for region in self.regions for one in (*region.columns, region.row)}
        look = f"{module} {_ways(module)} {[path for path, one in module.named_modules() if one in claimed]}"
        if look not in self._decided:
            choices = regions_of(name, module, claimed, self._kept, self._layout.tensor, self._turns)
            right = next((one for one in choices if self._is_right(one)), None)
            self._decided[look] = _described(right, module) if right else None
        known = self._decided[look]
        return _like(known, name, module) if known else None

    def _is_right(self, region: Region) -> bool:
        """The same on all ranks, or it would not be a plan."""
        try:
            right = self._differs(region) <= TOLERANCE
        except Exception:  # code that knows how wide the whole is
            right = False
        vote = torch.tensor(float(right), device=self._layout.device)
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=self._layout.tensor_group)
        return bool(vote)

    def _differs(self, region: Region) -> float:
        """How far outputs and gradients are from those of the whole module, of their norms."""
        arguments, options = self._calls[region.module]
        layout = self._layout
        whole = dict(region.module.named_parameters())
        outputs, expected = _run(region.module, arguments, options, list(whole.values()))
        seeds = Seeds(layout.tensor_rank, layout.device, random=False)
        owners = {name: region.module.get_submodule(name.rpartition(".")[0]) for name in whole}
        cuts = {one: Cut(one, region, layout.tensor_group, seeds) for one in owners.values()}
        parts = {}
        for name, parameter in whole.items():
            part = _part(parameter, region, owners[name], name, layout)
            parts[name] = cuts[owners[name]].trial[name.rpartition(".")[2]] = part.detach().requires_grad_(True)
        handles = [handle for one, cut in cuts.items() for handle in cut.attach(self._caller(one))]
        region.divide(layout.tensor)
        try:
            found, gradients = _run(region.module, arguments, options, list(parts.values()))
        finally:
            region.undivide()
            for handle in handles:
                handle.remove()
        worst = max(_distance(one, other) for one, other in zip(found, outputs, strict=True))
        self._floor = 1e-2 * max(float(one.norm()) for one in expected if one is not None)
        inputs = len(gradients) - len(parts)
        for got, right in zip(gradients[:inputs], expected[:inputs], strict=True):
            worst = max(worst, _distance(got, right, self._floor))
        for name, got, right in zip(parts, gradients[inputs:], expected[inputs:], strict=True):
            worst = max(worst, self._parameter_differs(region, owners[name], name, got, right))
        return worst

    def _parameter_differs(self, region: Region, owner: nn.Module, name: str, got: Any, right: Any) -> float:
        if right is None or got is None:
            return 0.0 if right is got else float("inf")
        if cut_of(region.role(owner), name.rpartition(".")[2]) is not None:
            return _distance(got, _part(right, region, owner, name, self._layout), self._floor)
        alone, summed = _distance(got, right, self._floor), got.clone()
        dist.all_reduce(summed, group=self._layout.tensor_group)
        if owner is not region.row and alone > TOLERANCE >= _distance(summed, right, self._floor):
            region.inside.add(owner)
            return 0.0
        return alone

    def cut_sequences(self) -> None:
        """Blocks that follow each other hold pieces of the sequences between their regions."""
        lists: dict[str, dict[str, nn.Module]] = {}
        for name, block in blocks_of(self._model).items():
            lists.setdefault(name.rpartition(".")[0], {})[name] = block
        for blocks in lists.values():
            modules = {one for block in blocks.values() for one in block.modules()}
            regions = [one for one in self.regions if one.module in modules]
            if regions and all(block in self._calls for block in blocks.values()):
                self.stretches.append(blocks)
                for region in regions:
                    region.gathers = "columns" if region.name in blocks else "module"
        if not self.stretches:
            raise ValueError("spread found no blocks that follow each other and are cut; leave plan='sequence' out")

    @property
    def collectives(self) -> dict[str, int]:
        """Of a step: each region's output and the gradient of its input, each a gather and a scatter where there are
        pieces of sequences; those at a stretch's ends; and those of parameters that compute a part."""
        on_pieces = 2 * sum(bool(one.gathers) for one in self.regions)
        sums = sum(
            is_summed(self._role(module), name, module in self._on_pieces)
            for module in self._model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        )
        found = {"all-reduce": 2 * len(self.regions) - on_pieces + sums}
        if on_pieces:
            found |= {"all-gather": on_pieces + 2 * len(self.stretches), "reduce-scatter": on_pieces}
        return found

    @property
    def uncut(self) -> str:
        """Where sequences are cut: who reads but its rank's piece, and might have to read all of it."""
        if not self.stretches:
            return ""
        readers = [
            f"{name}.{path}" if path else name
            for blocks in self.stretches
            for name, block in blocks.items()
            for path, one in block.named_modules()
            if one not in self._region_of and any(own.dim() > 1 for own in one.parameters(recurse=False))
        ]
        named = f": {', '.join(readers[:3])}" if readers else ""
        return f"; plan='sequence' gives a piece of each sequence to what is not cut{named}"

    def _role(self, module: nn.Module) -> str:
        return self._region_of[module].role(module) if module in self._region_of else "whole"

    @cached_property
    def _region_of(self) -> dict[nn.Module, Region]:
        return {one: region for region in self.regions for one in (*region.columns, region.row, *region.inside)}

    @cached_property
    def _on_pieces(self) -> set[nn.Module]:
        return {one for blocks in self.stretches for block in blocks.values() for one in block.modules()}

    def apply(self, random: bool) -> None:
        """Every parameter becomes a DTensor, so that optimizers and clipping never meet two kinds."""
        layout = self._layout
        seeds = Seeds(layout.tensor_rank, layout.device, random)
        made: dict[int, nn.Parameter] = {}
        for module in self._model.modules():
            self._share_parameters(module, made)
            if module._parameters:
                own = Cut(module, self._region_of.get(module), layout.tensor_group, seeds, module in self._on_pieces)
                own.attach(self._caller(module))
        for region in self.regions:
            region.divide(layout.tensor)
        for blocks in self.stretches:
            stretch = BlockStretch(next(iter(blocks)), [*blocks.values()], layout.tensor_group, seeds)
            for region in self.regions:
                if region.gathers == "module" and any(region.module in {*one.modules()} for one in blocks.values()):
                    stretch.gather_at(region.module, region.columns[0].in_features)

    def _share_parameters(self, module: nn.Module, made: dict[int, nn.Parameter]) -> None:
        """`made`: what stands for each parameter of before, which may be held twice."""
        region, role = self._region_of.get(module), self._role(module)
        order = region.order(module, self._layout.tensor) if region else None
        if order is not None:
            keep_order(module, order)
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in made:
                cut = cut_of(role, name)
                placement = Replicate() if cut is None else Shard(cut)
                whole = reordered(parameter.detach(), order)
                shared = distribute_tensor(whole, self._layout.mesh["tensor"], [placement], src_data_rank=None)
                made[id(parameter)] = nn.Parameter(shared, requires_grad=parameter.requires_grad)
            module._parameters[name] = made.get(id(parameter))


def _ways(module: nn.Module) -> list[Any]:
    """Words and switches by which modules that look alike may compute something else."""
    return [value for one in module.modules() for value in vars(one).values() if isinstance(value, str | bool)]


def _described(region: Region, module: nn.Module) -> _Known:
    """By names within the module, so that its siblings need no trial."""
    name = {one: path for path, one in module.named_modules()}
    numbers = [(name[one], key) for one, key in region.numbers]
    inside = [name[one] for one in region.inside]
    return [name[one] for one in region.columns], name[region.row], numbers, inside, region.segments


def _like(known: _Known, name: str, module: nn.Module) -> Region:
    columns, row, numbers, inside, segments = known
    at = module.get_submodule
    values = {(at(path), key): getattr(at(path), key) for path, key in numbers}
    return Region(name, module, [at(one) for one in columns], at(row), values, {at(one) for one in inside}, segments)


def _part(whole: Tensor, region: Region, owner: nn.Module, name: str, layout: RankLayout) -> Tensor:
    """What this rank holds of a parameter."""
    cut = cut_of(region.role(owner), name.rpartition(".")[2])
    if cut is None:
        return whole
    return reordered(whole, region.order(owner, layout.tensor)).chunk(layout.tensor, cut)[layout.tensor_rank]


def _run(module: nn.Module, arguments: Any, options: Any, parameters: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """Outputs, and the gradients of inputs and parameters under a weighting of the outputs that tells them apart."""

    def fresh(value: Any) -> Any:
        return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    arguments, options = tree_map(fresh, (arguments, options))
    inputs = [one for one in tree_flatten((arguments, options))[0] if isinstance(one, Tensor) and one.requires_grad]
    output = module(*arguments, **options)
    outputs = [one for one in tree_flatten(output)[0] if isinstance(one, Tensor) and one.requires_grad]
    weights = [torch.linspace(-1, 1, one.numel(), device=one.device).view_as(one).to(one.dtype) for one in outputs]
    trained = [one for one in parameters if one.requires_grad]
    found = iter(torch.autograd.grad(outputs, [*inputs, *trained], weights, allow_unused=True))
    gradients = [next(found) if one.requires_grad else None for one in [*inputs, *parameters]]
    return [one.detach() for one in outputs], gradients


def _distance(one: Any, other: Any, floor: float = 1e-12) -> float:
    """Of the norm; what is nearly zero, as the gradient of a bias that a softmax cancels, is held against the rest."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    if one.shape != other.shape:
        return float("inf")
    return float((one - other).norm()) / max(float(other.norm()), floor, 1e-30)
