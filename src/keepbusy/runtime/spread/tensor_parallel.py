"""Tensor parallelism: which layers are cut is derived from the module tree, tried on an example, and then done.

What is cut is a region: a part of the model that every GPU of a group computes a share of, layers cut by columns, then
one cut by rows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from keepbusy.runtime.module_parts import own_weights
from keepbusy.runtime.spread.layout import RankLayout, gather, own_part
from keepbusy.runtime.spread.module_tree import (
    blocks_of,
    dropouts_of,
    keep_order,
    reordered,
    tied_parameters,
    without_dropout,
)
from keepbusy.torch_names.pytorch import tree_leaves, tree_map

TOLERANCE = 1e-2
"""Of the norm: what a region may differ from the whole one. Sums in another order differ by 1e-6, with TF32 and
bfloat16 by some 1e-3, and what is wrong by 0.1 and more."""
_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name since PyTorch 2.13
Exchange: TypeAlias = Callable[[Tensor, Any], Tensor]
_HEADS = re.compile(r"heads?$")
"""Attributes that count the heads of an attention: num_heads, n_head, num_key_value_heads."""

Calls = Mapping[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]
"""What each module was called with when the example ran."""


class TensorPlan:
    """The regions of a model that are cut, each tried against the whole module on what the example brought it."""

    def __init__(self, model: nn.Module, layout: RankLayout, calls: Calls, plan: str | Mapping[str, str]) -> None:
        """`plan`: as `spread` is given it."""
        self.regions: list[Region] = []
        self.stretches: list[list[nn.Module]] = []
        """Blocks that hold pieces of the sequences between their regions."""
        self._model, self._layout, self._calls = model, layout, calls
        self._names = {module: name for name, module in model.named_modules()}
        patterns = () if isinstance(plan, str) else plan
        whole = [part for part, name in self._names.items() if any(fnmatchcase(name, asked) for asked in patterns)]
        self._kept = {*tied_parameters(model), *(id(own) for module in whole for own in module.parameters())}
        self._known: dict[str, Region | None] = {}
        with without_dropout(model):
            for module in reversed(self._names):  # inner ones come first, and one may hold several
                while region := self._next_region(module):
                    self.regions.append(region)
        if not self.regions:
            raise ValueError(
                f"spread found no layers to cut in {layout.tensor}: in no module do Linear layers follow each other by "
                "columns and rows, with widths and heads that it divides; leave tensor= out"
            )
        if plan == "sequence":
            self._cut_sequences()

    def __str__(self) -> str:
        stretches = f", sequences cut in {len(self.stretches)} stretches" if self.stretches else ""
        return f"{len(self.regions)} regions cut{stretches}"

    def _next_region(self, module: nn.Module) -> Region | None:
        """What can be cut in a module besides the regions there are. Modules that look alike are tried once."""
        if module not in self._calls or not list(module.children()):
            return None
        claimed = {layer for region in self.regions for layer in (*region.columns, region.row)}
        # words and switches tell apart what computes something else, though it is printed alike
        ways = [value for part in module.modules() for value in vars(part).values() if isinstance(value, str | bool)]
        look = f"{module} {ways} {[path for path, part in module.named_modules() if part in claimed]}"
        if look in self._known:
            known = self._known[look]
            return known and known.like(module)
        layers = [
            layer
            for layer in module.modules()
            if type(layer) is nn.Linear and layer not in claimed and self._kept.isdisjoint(map(id, layer.parameters()))
        ]
        order = {called: place for place, called in enumerate(self._calls)}
        layers.sort(key=lambda layer: order.get(layer, -1))  # the order in which they were made says less
        choices = regions_of(module, layers, self._layout.tensor)
        self._known[look] = region = next((region for region in choices if self._is_right(region)), None)
        return region

    def _is_right(self, region: Region) -> bool:
        """The same on all ranks, or it would not be a plan."""
        try:
            right = all(distance <= TOLERANCE for distance in self._distances(region))
        except Exception:  # code that knows how wide the whole is
            right = False
        vote = torch.tensor(float(right), device=self._layout.device)
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=self._layout.tensor_group)
        return bool(vote)

    def _distances(self, region: Region) -> list[float]:
        """How far outputs and gradients are from those of the whole module, of their norms."""
        module, layout, seeds = region.module, self._layout, Seeds(self._layout, random=False)
        cuts = {path: Cut(part, region, layout, seeds) for path, part in module.named_modules()}
        whole = dict(module.named_parameters())
        owners = {name: cuts[name.rpartition(".")[0]] for name in whole}
        parts = {
            name: owners[name].part(name, weight.detach()).requires_grad_(weight.requires_grad)
            for name, weight in whole.items()
        }
        outputs, expected = _run(module, whole, *self._calls[module])
        hooks = [hook for cut in dict.fromkeys(owners.values()) for hook in cut.attach(self._caller(cut.module))]
        region.divide(layout.tensor)
        try:
            found, gradients = _run(module, parts, *self._calls[module])
        finally:
            region.divide(1)
            for hook in hooks:
                hook.remove()
        distances = [_distance(own, right) for own, right in zip(found, outputs, strict=True)]
        floor = 1e-2 * max(float(right.norm()) for right in expected.values() if right is not None)
        for name, whole_gradient in expected.items():
            own, right = gradients[name], whole_gradient
            if isinstance(name, str) and own is not None and right is not None:
                right = owners[name].part(name, right)
                if owners[name].role == "whole":  # if it runs within the region each rank computes a part of the sum
                    total = own.clone()
                    dist.all_reduce(total, group=layout.tensor_group)
                    if _distance(own, right, floor) > TOLERANCE >= _distance(total, right, floor):
                        region.inside.add(owners[name].module)
                        own = total
            distances.append(_distance(own, right, floor))
        return distances

    def _caller(self, module: nn.Module) -> nn.Module:
        """The innermost module around it that was called."""
        name = self._names[module]
        while module not in self._calls and name:
            name = name.rpartition(".")[0]
            module = self._model.get_submodule(name)
        return module

    def _cut_sequences(self) -> None:
        """Blocks that follow each other hold pieces of the sequences between their regions."""
        lists: dict[str, list[nn.Module]] = {}
        for name, block in blocks_of(self._model).items():
            lists.setdefault(name.rpartition(".")[0], []).append(block)
        for blocks in lists.values():
            modules = {module for block in blocks for module in block.modules()}
            regions = [region for region in self.regions if region.module in modules]
            if regions and all(block in self._calls for block in blocks):
                self.stretches.append(blocks)
                for region in regions:
                    region.gathers = "columns" if region.module in blocks else "module"
        if not self.stretches:
            raise ValueError("spread found no blocks that follow each other and are cut; leave plan='sequence' out")

    def apply(self) -> None:
        """Every parameter becomes a DTensor, so that optimizers and clipping never meet two kinds."""
        layout, seeds = self._layout, Seeds(self._layout, random=bool(dropouts_of(self._model)))
        region_of = {part: region for region in self.regions for part in (*region.columns, region.row, *region.inside)}
        on_pieces = {module for blocks in self.stretches for block in blocks for module in block.modules()}
        self._cuts = [
            Cut(module, region_of.get(module), layout, seeds, module in on_pieces)
            for module in self._model.modules()
            if module._parameters
        ]
        shared: dict[int, nn.Parameter] = {}
        for cut in self._cuts:
            cut.share(shared)
            cut.attach(self._caller(cut.module))
        for region in self.regions:
            region.divide(layout.tensor)
            if region.gathers == "module":
                gather_at(region.module, region.columns[0].in_features, layout.tensor_group)
        for blocks in self.stretches:
            cut_stretch(self._names[blocks[0]], blocks, layout.tensor_group, seeds)

    @property
    def uncut(self) -> str:
        """Where sequences are cut: who reads but its rank's piece, and might have to read all of it."""
        if not self.stretches:
            return ""
        readers = [
            self._names[cut.module]
            for cut in self._cuts
            if cut.on_pieces and cut.role == "whole" and any(own.dim() > 1 for own in own_weights(cut.module))
        ]
        named = f": {', '.join(readers[:3])}" if readers else ""
        return f"; plan='sequence' gives a piece of each sequence to what is not cut{named}"


def _run(
    module: nn.Module, parameters: dict[str, Tensor], arguments: Any, options: Any
) -> tuple[list[Tensor], dict[int | str, Tensor | None]]:
    """Outputs, and the gradients of inputs and parameters under a weighting of the outputs that tells them apart."""

    def fresh(value: Any) -> Any:
        return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    arguments, options = tree_map(fresh, (arguments, options))
    output = functional_call(module, parameters, arguments, options, tie_weights=False)
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    weights = [
        torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output).to(output.dtype)
        for output in outputs
    ]
    read: list[tuple[int | str, Any]] = [*enumerate(tree_leaves((arguments, options))), *parameters.items()]
    learned = {key: value for key, value in read if isinstance(value, Tensor) and value.requires_grad}
    found = torch.autograd.grad(outputs, [*learned.values()], weights, allow_unused=True)
    return [output.detach() for output in outputs], dict(zip(learned, found, strict=True))


def _distance(own: Tensor | None, right: Tensor | None, floor: float = 1e-12) -> float:
    """Of the norm; what is nearly zero, as the gradient of a bias that a softmax cancels, is held against the rest."""
    if own is None or right is None:
        return 0.0 if own is right else float("inf")
    if own.shape != right.shape:
        return float("inf")
    return float((own - right).norm()) / max(float(right.norm()), floor, 1e-30)


@dataclass
class Region:
    """Between its columns and its row a rank holds its own share of the features. `numbers` are attributes of modules
    that say how wide it is or how many heads it has: they are divided."""

    module: nn.Module
    columns: list[Any]
    row: Any
    numbers: dict[tuple[nn.Module, str], int]
    segments: tuple[int, ...] = ()
    """Of one column that makes several things, as queries, keys and values: the rows of each, all of which are cut."""
    inside: set[nn.Module] = field(default_factory=set)
    """Modules between columns and row that have parameters of their own, whose gradients are sums over the group."""
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
        return torch.cat([segment.chunk(parts)[rank] for rank in range(parts) for segment in rows])

    def divide(self, parts: int) -> None:
        """Heads and widths become those of one part; of one part alone, what they were."""
        for (module, name), value in self.numbers.items():
            setattr(module, name, value // parts)

    def like(self, module: nn.Module) -> Region:
        """The same in another module, which needs no trial."""
        paths = {part: path for path, part in self.module.named_modules()}

        def twin(part: nn.Module) -> nn.Module:
            return module.get_submodule(paths[part])

        numbers = {(twin(owner), name): getattr(twin(owner), name) for owner, name in self.numbers}
        columns, inside = [twin(column) for column in self.columns], {twin(part) for part in self.inside}
        return Region(module, columns, twin(self.row), numbers, self.segments, inside)


def regions_of(module: nn.Module, layers: list[Any], parts: int) -> Iterator[Region]:
    """What may be cut in a module, by the shapes of its Linear layers, most likely first; a trial tells if it is right.

    All but the last make features of one input, which the last brings together again: queries, keys, values and the
    projection; gate, up and down. Or they follow each other in pairs. One layer may hold several of the features.
    `layers`: in the order of their calls.
    """
    choices = [(layers[:-1], layers[-1])] if len(layers) > 1 else []
    if len(layers) > 2:
        choices += [([first], second) for first, second in itertools.pairwise(layers)]
    for columns, row in choices:
        owners = [part for part in module.modules() if part not in columns and part is not row]
        numbers = {(part, name): value for part in owners for name, value in vars(part).items() if type(value) is int}
        heads = {place: value for place, value in numbers.items() if _HEADS.search(place[1])}
        if any(value % parts for value in heads.values()):
            continue
        for segments in _segments(columns, row):
            rows = {*segments, *(column.out_features for column in columns)}
            if not any(count % parts for count in rows):
                wide = {place: value for place, value in numbers.items() if value in rows | {row.in_features}}
                for divided, _ in itertools.groupby([heads, heads | wide, {}]):
                    yield Region(module, columns, row, divided, segments)


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


class Cut:
    """A module of a tensor-parallel model: while it runs, its parameters are this rank's own plain tensors.

    So nothing but storage is a DTensor: optimizers, clipping and checkpoints see them, and the forward pass never
    mixes them with plain tensors nor pays for their dispatch.
    """

    def __init__(
        self, module: nn.Module, region: Region | None, layout: RankLayout, seeds: Seeds, on_pieces: bool = False
    ) -> None:
        self.module, self.on_pieces = module, on_pieces
        self.role = region.role(module) if region else "whole"
        self._gathers = region.gathers if region else ""
        self._order = region.order(module, layout.tensor) if region else None
        self._layout, self._group, self._seeds = layout, layout.tensor_group, seeds
        self._bias: Tensor | None = None

    def _dimension(self, name: str) -> int | None:
        """Along which a parameter of a Linear is cut."""
        if self.role == "column":
            return 0
        return 1 if self.role == "row" and name.endswith("weight") else None

    def _is_summed(self, name: str) -> bool:
        """Whether each rank's gradient of a parameter is a part: of its features, or of its piece of the sequences."""
        return self._dimension(name) is None and (self.role == "inside" or self.on_pieces)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """What this rank holds of a parameter."""
        cut = self._dimension(name)
        if cut is None:
            return whole
        return reordered(whole, self._order).chunk(self._layout.tensor, cut)[self._layout.tensor_rank]

    def share(self, shared: dict[int, nn.Parameter]) -> None:
        """Its parameters become DTensors. `shared`: what stands for each from before, which may be held twice."""
        if self._order is not None:
            keep_order(self.module, self._order)
        for name, parameter in self.module._parameters.items():
            if parameter is not None and id(parameter) not in shared:
                cut = self._dimension(name)
                placement = Replicate() if cut is None else Shard(cut)
                whole, mesh = reordered(parameter.detach(), self._order), self._layout.mesh["tensor"]
                own = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
                shared[id(parameter)] = nn.Parameter(own, requires_grad=parameter.requires_grad)
            self.module._parameters[name] = shared.get(id(parameter))

    def attach(self, caller: nn.Module) -> list[RemovableHandle]:
        """The caller is the module itself, or what reads its parameters without calling it."""
        after = caller.register_forward_hook(self._after, always_call=True)
        return [caller.register_forward_pre_hook(self._before), after]

    def _before(self, _caller: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        module = self.module
        for name, parameter in module._parameters.items():
            if parameter is not None:
                own = own_part(parameter)
                module.__dict__[name] = _Exchange.apply(own, self._group, *COPIED) if self._is_summed(name) else own
        if self.role == "row":
            self._bias, module.__dict__["bias"] = module.bias, None
            self._seeds.leave()
        if self.role == "column" and self._gathers != "module":
            how = GATHERED if self._gathers else COPIED
            return (self._seeds.copied(arguments[0], self._group, how), *arguments[1:])
        return None

    def _after(self, _caller: nn.Module, _arguments: Any, output: Any) -> Any:
        for name in self.module._parameters:
            self.module.__dict__.pop(name, None)
        if output is None:  # it failed
            return None
        if self.role == "row":
            output = _Exchange.apply(output, self._group, *(SCATTERED if self._gathers else SUMMED))
            bias, self._bias = self._bias, None
            return output if bias is None else output + bias.to(output.dtype)
        if self.role == "column":
            self._seeds.enter()
        return None


class Seeds:
    """What all regions of a model share: the copy of an input that several columns read, and random numbers.

    Outside of regions all ranks of a group hold the same activations and must drop the same ones; inside, each holds
    others. The key of the generator is changed there and its offset kept, so that checkpointed activations repeat.
    """

    def __init__(self, layout: RankLayout, random: bool) -> None:
        self._rank, self._device, self._random = layout.tensor_rank, layout.device, random
        self._outside: Any = None  # the generator's key or state there, while inside
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
        if not self._random or self._outside is not None:
            return
        if self._device.type == "cuda":
            key = torch.cuda.default_generators[self._device.index].initial_seed()
            if key == self._key_inside:  # what is computed again began inside
                return
            self._outside, self._key_inside = key, key ^ (self._rank + 1) << 20
            self._turn_key(self._key_inside)
        else:
            seed = int(torch.randint(1 << 30, ()))
            self._outside = torch.get_rng_state()
            torch.manual_seed(seed + self._rank)

    def leave(self, stays: bool | None = None) -> None:
        self._copy, self._stays = None, self._stays if stays is None else stays
        if self._outside is None or self._stays:
            return
        if self._device.type == "cuda":
            self._turn_key(self._outside)
        else:
            torch.set_rng_state(self._outside)
        self._outside = None

    def _turn_key(self, key: int) -> None:
        generator = torch.cuda.default_generators[self._device.index]
        offset = generator.get_offset()
        generator.manual_seed(key)
        generator.set_offset(offset)


def _as_read(whole: Tensor) -> Tensor:
    """In the type in which autocast has layers read it: half as much is sent, and they share what they keep."""
    kind = whole.device.type
    low = torch.is_autocast_enabled(kind) and whole.dtype == torch.float32
    return whole.to(torch.get_autocast_dtype(kind)) if low else whole


def cut_stretch(name: str, blocks: list[nn.Module], group: Any, seeds: Seeds) -> None:
    """Blocks that follow each other, between which each rank of a group holds its piece of every sequence: what is not
    cut by features computes a piece then, and holds one. Regions gather what they read, and scatter what they sum."""

    def cut(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        whole, ranks = arguments[0], dist.get_world_size(group)
        if whole.dim() != 3 or whole.shape[1] % ranks:
            raise ValueError(
                f"{name} got an input of shape {tuple(whole.shape)}, whose second dimension, its sequence, "
                f"cannot be cut in {ranks}; pad the batches to a multiple of it, or leave plan='sequence' out"
            )
        return (_Exchange.apply(whole, group, *CUT), *arguments[1:])

    def join(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (_Exchange.apply(output[0], group, *JOINED), *output[1:])
        return _Exchange.apply(output, group, *JOINED)

    blocks[0].register_forward_pre_hook(cut)
    blocks[-1].register_forward_hook(join)
    for block in blocks:  # each by itself, as one that is computed again begins where it began, and may be cut short
        block.register_forward_pre_hook(lambda *_: seeds.enter(stays=True))
        block.register_forward_hook(lambda *_: seeds.leave(stays=False), always_call=True)


def gather_at(module: nn.Module, width: int, group: Any) -> None:
    """What a module reads whose region is cut: the first of its arguments that is a piece."""

    def gathered(_module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        given = [*arguments, *options.values()]
        is_piece = [isinstance(value, Tensor) and value.dim() == 3 and value.shape[2] == width for value in given]
        place = is_piece.index(True)
        given[place] = _Exchange.apply(_as_read(given[place]), group, *GATHERED)
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
