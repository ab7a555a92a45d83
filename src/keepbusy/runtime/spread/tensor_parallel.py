"""Tensor parallelism: which layers are cut is derived from the module tree, tried on an example, and then done.

What is cut is a region: a part of the model that every GPU of a group computes a share of, layers cut by columns, then
one cut by rows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.hooks import RemovableHandle

from keepbusy.runtime.module_parts import own_weights
from keepbusy.runtime.spread.layout import RankLayout, gather, own_part
from keepbusy.runtime.spread.module_tree import blocks_of, keep_order, reordered, tied_parameters

TOLERANCE = 1e-2
"""Of the norm: what a region may differ from the whole one. Sums in another order differ by 1e-6, with TF32 and
bfloat16 by some 1e-3, and what is wrong by 0.1 and more."""
_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name since PyTorch 2.13
Exchange: TypeAlias = Callable[[Tensor, Any], Tensor]
_HEADS = re.compile(r"heads?$")
"""Attributes that count the heads of an attention: num_heads, n_head, num_key_value_heads."""

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
        self._names = {module: name for name, module in model.named_modules()}
        whole = [one for one, name in self._names.items() if any(fnmatchcase(name, pattern) for pattern in asked)]
        self._kept = {*tied_parameters(model), *(id(own) for module in whole for own in module.parameters())}
        self._call_order = {module: place for place, module in enumerate(calls)}
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
        claimed = {column for region in self.regions for column in (*region.columns, region.row)}
        look = f"{module} {_ways(module)} {[path for path, one in module.named_modules() if one in claimed]}"
        if look not in self._decided:
            choices = regions_of(name, module, claimed, self._kept, self._layout.tensor, self._call_order)
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
            region.divide(1)
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
            modules = {module for block in blocks.values() for module in block.modules()}
            regions = [region for region in self.regions if region.module in modules]
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
        on_pieces = 2 * sum(bool(region.gathers) for region in self.regions)
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
            for path, module in block.named_modules()
            if module not in self._region_of and any(own.dim() > 1 for own in own_weights(module))
        ]
        named = f": {', '.join(readers[:3])}" if readers else ""
        return f"; plan='sequence' gives a piece of each sequence to what is not cut{named}"

    def _role(self, module: nn.Module) -> str:
        return self._region_of[module].role(module) if module in self._region_of else "whole"

    @cached_property
    def _region_of(self) -> dict[nn.Module, Region]:
        return {column: region for region in self.regions for column in (*region.columns, region.row, *region.inside)}

    @cached_property
    def _on_pieces(self) -> set[nn.Module]:
        return {module for blocks in self.stretches for block in blocks.values() for module in block.modules()}

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
                if region.gathers == "module" and any(region.module in {*block.modules()} for block in blocks.values()):
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
    return [name[column] for column in region.columns], name[region.row], numbers, inside, region.segments


def _like(known: _Known, name: str, module: nn.Module) -> Region:
    columns, row, numbers, inside, segments = known
    at = module.get_submodule
    values = {(at(path), key): getattr(at(path), key) for path, key in numbers}
    return Region(
        name, module, [at(column) for column in columns], at(row), values, {at(one) for one in inside}, segments
    )


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
    weights = [
        torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output).to(output.dtype)
        for output in outputs
    ]
    trained = [weight for weight in parameters if weight.requires_grad]
    found = iter(torch.autograd.grad(outputs, [*inputs, *trained], weights, allow_unused=True))
    gradients = [next(found) if input_.requires_grad else None for input_ in [*inputs, *parameters]]
    return [output.detach() for output in outputs], gradients


def _distance(one: Any, other: Any, floor: float = 1e-12) -> float:
    """Of the norm; what is nearly zero, as the gradient of a bias that a softmax cancels, is held against the rest."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    if one.shape != other.shape:
        return float("inf")
    return float((one - other).norm()) / max(float(other.norm()), floor, 1e-30)


@dataclass
class Region:
    """Between its columns and its row a rank holds its own share of the features. `numbers` are attributes of modules
    that say how wide it is or how many heads it has: they are divided."""

    name: str
    module: nn.Module
    columns: list[nn.Module]
    row: nn.Module
    numbers: dict[tuple[nn.Module, str], int]
    inside: set[nn.Module] = field(default_factory=set)
    """Modules between columns and row that have parameters of their own, whose gradients are sums over the group."""
    segments: tuple[int, ...] = ()
    """Of one column that makes several things, as queries, keys and values: the rows of each, all of which are cut."""
    gathers: str = ""
    """Where sequences are cut: what brings them together at its entrance, the `module` or its `columns`."""

    def role(self, module: nn.Module) -> str:
        if module in self.columns:
            return "column"
        return "row" if module is self.row else "inside" if module in self.inside else "whole"

    def order(self, module: nn.Module, parts: int) -> Tensor | None:
        """How the rows of a packed column must lie, so that each rank's share is one piece; None of any other."""
        if not self.segments or module not in self.columns:
            return None
        rows = torch.arange(sum(self.segments)).split(self.segments)
        return torch.cat([one.chunk(parts)[rank] for rank in range(parts) for one in rows])

    def divide(self, parts: int) -> None:
        """Heads and widths become those of one part; of one part alone, what they were."""
        for (module, name), value in self.numbers.items():
            setattr(module, name, value // parts)


def cut_of(role: str, name: str) -> int | None:
    """The dimension along which a parameter of a Linear is cut."""
    if role == "column":
        return 0
    return 1 if role == "row" and name == "weight" else None


def is_summed(role: str, name: str, on_pieces: bool) -> bool:
    """Whether each rank's gradient of a parameter is a part: of its features, or of its piece of the sequences."""
    return cut_of(role, name) is None and (role == "inside" or on_pieces)


def regions_of(
    name: str, module: nn.Module, claimed: set[nn.Module], kept: set[int], parts: int, order: Mapping[nn.Module, int]
) -> Iterator[Region]:
    """What may be cut in a module, by the shapes of its Linear layers, most likely first; a trial tells if it is right.

    All but the last make features of one input, which the last brings together again: queries, keys, values and the
    projection; gate, up and down. Or they follow each other in pairs. One layer may hold several of the features.
    `order`: which module was called how early; in which order they were made says less.
    """
    layers = [one for one in module.modules() if type(one) is nn.Linear and one not in claimed]
    layers = [layer for layer in layers if not any(id(own) in kept for own in layer.parameters())]
    layers.sort(key=lambda one: order.get(one, -1))
    for columns, row in _choices(layers):
        for segments in _segments(columns, row):
            if not any(rows % parts for rows in (*segments, *(column.out_features for column in columns))):
                for numbers in _numbers(module, columns, row, segments, parts):
                    yield Region(name, module, columns, row, numbers, segments=segments)


def _choices(layers: list[Any]) -> Iterator[tuple[list[Any], Any]]:
    """Columns, and the row after them: all layers but the last, and the last; then each two that follow one another."""
    if len(layers) > 1:
        yield layers[:-1], layers[-1]
    if len(layers) > 2:
        yield from (([first], second) for first, second in itertools.pairwise(layers))


def _segments(columns: list[Any], row: Any) -> Iterator[tuple[int, ...]]:
    """How the columns' rows may be meant: as one thing each; or of a single one, as so many things of the row's width,
    as one of it and two narrower ones (keys and values of fewer heads), or head by head."""
    width, narrow = columns[0].out_features, row.in_features
    if len({column.in_features for column in columns}) > 1 or width < narrow:
        return
    if width > narrow and len(columns) == 1:
        if width % narrow == 0:
            yield (narrow,) * (width // narrow)
        if (width - narrow) % 2 == 0 and width != 3 * narrow:
            yield narrow, (width - narrow) // 2, (width - narrow) // 2
    if width == narrow or len(columns) == 1:
        yield ()


def _numbers(
    module: nn.Module, columns: list[Any], row: Any, segments: tuple[int, ...], parts: int
) -> list[dict[tuple[nn.Module, str], int]]:
    whole = {
        (one, key): value
        for one in module.modules()
        if one not in columns and one is not row
        for key, value in vars(one).items()
        if type(value) is int
    }
    heads = {place: value for place, value in whole.items() if _HEADS.search(place[1])}
    if any(value % parts for value in heads.values()):
        return []
    widths = {row.in_features, *segments, *(column.out_features for column in columns)}
    wide = heads | {place: value for place, value in whole.items() if value in widths}
    return [one for one, _ in itertools.groupby([heads, wide, {}])]


class Cut:
    """A module of a tensor-parallel model: while it runs, its parameters are this rank's own plain tensors.

    So nothing but storage is a DTensor: optimizers, clipping and checkpoints see them, and the forward pass never
    mixes them with plain tensors nor pays for their dispatch.
    """

    def __init__(
        self, module: nn.Module, region: Region | None, group: Any, seeds: Seeds, on_pieces: bool = False
    ) -> None:
        self._module, self._region, self._group, self._seeds = module, region, group, seeds
        self._role = region.role(module) if region else "whole"
        self._on_pieces = on_pieces
        self._bias: Tensor | None = None
        self.trial: dict[str, Tensor] = {}

    def attach(self, caller: nn.Module) -> list[RemovableHandle]:
        """The caller is the module itself, or what reads its parameters without calling it."""
        after = caller.register_forward_hook(self._after, always_call=True)
        return [caller.register_forward_pre_hook(self._before), after]

    def _before(self, _caller: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        module = self._module
        for name, parameter in module._parameters.items():
            if parameter is not None:
                own = self.trial.get(name, parameter) if self.trial else own_part(parameter)
                summed = is_summed(self._role, name, self._on_pieces)
                module.__dict__[name] = _Exchange.apply(own, self._group, *COPIED) if summed else own
        if self._role == "row":
            self._bias, module.__dict__["bias"] = module.bias, None
            self._seeds.leave()
        gathers = self._region.gathers if self._region else ""
        if self._role == "column" and gathers != "module":
            return (self._seeds.copied(arguments[0], self._group, GATHERED if gathers else COPIED), *arguments[1:])
        return None

    def _after(self, _caller: nn.Module, _arguments: Any, output: Any) -> Any:
        for name in self._module._parameters:
            self._module.__dict__.pop(name, None)
        if output is None:  # it failed
            return None
        if self._role == "row":
            pieces = self._region is not None and self._region.gathers
            output = _Exchange.apply(output, self._group, *(SCATTERED if pieces else SUMMED))
            bias, self._bias = self._bias, None
            return output if bias is None else output + bias.to(output.dtype)
        if self._role == "column":
            self._seeds.enter()
        return None


class Seeds:
    """What all regions of a model share: the copy of an input that several columns read, and random numbers.

    Outside of regions all ranks of a group hold the same activations and must drop the same ones; inside, each holds
    others. The key of the generator is changed there and its offset kept, so that checkpointed activations repeat.
    """

    def __init__(self, rank: int, device: torch.device, random: bool) -> None:
        self._rank, self._device, self._random = rank, device, random
        self._inside: Any = None
        self._key_inside = -1
        self._stays = False
        self._copy: tuple[Tensor, Tensor] | None = None

    def copied(self, whole: Tensor, group: Any, how: tuple[Exchange, Exchange]) -> Tensor:
        """One sum of gradients for all that read the same input, in the type in which autocast will have them read."""
        if self._copy is None or self._copy[0] is not whole or self._copy[1].requires_grad != torch.is_grad_enabled():
            self._copy = whole, _Exchange.apply(_as_read(whole), group, *how)
        return self._copy[1]

    def enter(self, stays: bool = False) -> None:
        """`stays`: throughout a stretch, whose regions begin and end within."""
        self._stays = stays or self._stays
        if not self._random or self._inside is not None:
            return
        if self._device.type == "cuda":
            generator = torch.cuda.default_generators[self._device.index]
            outside, offset = generator.initial_seed(), generator.get_offset()
            if outside == self._key_inside:  # what is computed again began inside
                return
            self._inside, self._key_inside = outside, outside ^ (self._rank + 1) << 20
            generator.manual_seed(self._key_inside)
            generator.set_offset(offset)
        else:
            seed = int(torch.randint(1 << 30, ()))
            self._inside = torch.get_rng_state()
            torch.manual_seed(seed + self._rank)

    def leave(self, stays: bool | None = None) -> None:
        self._copy, self._stays = None, self._stays if stays is None else stays
        if self._inside is None or self._stays:
            return
        if self._device.type == "cuda":
            generator = torch.cuda.default_generators[self._device.index]
            offset = generator.get_offset()
            generator.manual_seed(self._inside)
            generator.set_offset(offset)
        else:
            torch.set_rng_state(self._inside)
        self._inside = None


def _as_read(whole: Tensor) -> Tensor:
    """In the type in which autocast has layers read it: half as much is sent, and they share what they keep."""
    kind = whole.device.type
    low = torch.is_autocast_enabled(kind) and whole.dtype == torch.float32
    return whole.to(torch.get_autocast_dtype(kind)) if low else whole


class BlockStretch:
    """Blocks that follow each other, between which each rank of a group holds its piece of every sequence: what is not
    cut by features computes a piece then, and holds one. Regions gather what they read, and scatter what they sum."""

    def __init__(self, name: str, blocks: list[nn.Module], group: Any, seeds: Seeds) -> None:
        self._name, self._group, self._ranks = name, group, dist.get_world_size(group)
        blocks[0].register_forward_pre_hook(self._cut)
        blocks[-1].register_forward_hook(self._join)
        for one in blocks:  # each by itself, as one that is computed again begins where it began, and may be cut short
            one.register_forward_pre_hook(lambda *_: seeds.enter(stays=True))
            one.register_forward_hook(lambda *_: seeds.leave(stays=False), always_call=True)

    def _cut(self, _module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        whole = arguments[0]
        if whole.dim() != 3 or whole.shape[1] % self._ranks:
            raise ValueError(
                f"{self._name} got an input of shape {tuple(whole.shape)}, whose second dimension, its sequence, "
                f"cannot be cut in {self._ranks}; pad the batches to a multiple of it, or leave plan='sequence' out"
            )
        return (_Exchange.apply(whole, self._group, *CUT), *arguments[1:])

    def _join(self, _module: nn.Module, _arguments: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (_Exchange.apply(output[0], self._group, *JOINED), *output[1:])
        return _Exchange.apply(output, self._group, *JOINED)

    def gather_at(self, module: nn.Module, width: int) -> None:
        """What a module reads whose region is cut: the first of its arguments that is a piece."""

        def gathered(_module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
            given = [*arguments, *options.values()]
            is_piece = [isinstance(value, Tensor) and value.dim() == 3 and value.shape[2] == width for value in given]
            place = is_piece.index(True)
            given[place] = _Exchange.apply(_as_read(given[place]), self._group, *GATHERED)
            return tuple(given[: len(arguments)]), dict(zip(options, given[len(arguments) :], strict=True))

        module.register_forward_pre_hook(gathered, with_kwargs=True)


class _Exchange(torch.autograd.Function):  # type: ignore[misc]  # PyTorch is not typed here
    """What is done between ranks on the way there, and to gradients on the way back."""

    @staticmethod
    def forward(context: Any, value: Tensor, group: Any, there: Exchange, back: Exchange) -> Tensor:
        context.group, context.back = group, back
        return there(value, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        return context.back(gradient, context.group), None, None, None


def _same(value: Tensor, _group: Any) -> Tensor:
    return value.view_as(value)


def _sum(part: Tensor, group: Any) -> Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _piece(whole: Tensor, group: Any) -> Tensor:
    """This rank's, of every sequence."""
    return whole.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


def _pieces(piece: Tensor, group: Any) -> Tensor:
    """All ranks', as whole sequences."""
    pieces = piece.new_empty(dist.get_world_size(group), *piece.shape)
    gather(pieces.view(-1), piece.reshape(-1), group=group)
    return pieces.movedim(0, 1).flatten(1, 2)


def _piece_of_sum(part: Tensor, group: Any) -> Tensor:
    pieces = part.unflatten(1, (dist.get_world_size(group), -1)).movedim(1, 0).contiguous()
    own = torch.empty_like(pieces[0])
    _scatter(own.view(-1), pieces.view(-1), group=group)
    return own


COPIED = _same, _sum
"""The same on all ranks of a group, each of which does something else with it: gradients are summed."""
SUMMED = _sum, _same
"""The sum of what each rank of a group has; the gradient is that of the sum."""
CUT, JOINED = (_piece, _pieces), (_pieces, _piece)
"""Sequences, outside of whose pieces all ranks do the same."""
GATHERED, SCATTERED = (_pieces, _piece_of_sum), (_piece_of_sum, _pieces)
"""Copied and summed, where each rank has but a piece of the sequences before and after."""
