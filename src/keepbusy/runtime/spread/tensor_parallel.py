"""Tensor parallelism: the layers to cut are derived from the module tree, and tried on an example first.

Layers are cut in regions. A region is a part of the model of which each GPU of a group computes a share: layers cut by
columns, followed by one cut by rows.
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
"""Allowed difference of a region from the uncut one, as a share of the norm. Sums in another order differ by 1e-6, with
TF32 and bfloat16 by some 1e-3, and wrong results by 0.1 and more."""
_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name since PyTorch 2.13
Exchange: TypeAlias = Callable[[Tensor, Any], Tensor]
_HEADS = re.compile(r"heads?$")
"""Attributes that count the heads of an attention: num_heads, n_head, num_key_value_heads."""

Calls = Mapping[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]
"""The arguments of each module's call on the example."""


class TensorPlan:
    """The regions of a model that are cut, each compared with the uncut module on the example's arguments."""

    def __init__(self, model: nn.Module, layout: RankLayout, calls: Calls, plan: str | Mapping[str, str]) -> None:
        """`plan`: see `spread`."""
        self.regions: list[Region] = []
        self.sequence_blocks: list[list[nn.Module]] = []
        """Consecutive blocks that hold pieces of the sequences between their regions."""
        self._model, self._layout, self._calls = model, layout, calls
        self._names = {module: name for name, module in model.named_modules()}
        patterns = () if isinstance(plan, str) else plan
        whole = [part for part, name in self._names.items() if any(fnmatchcase(name, each) for each in patterns)]
        self._uncut = {*tied_parameters(model), *(id(own) for module in whole for own in module.parameters())}
        self._tried: dict[str, Region | None] = {}
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
        stretches = f", sequences cut in {len(self.sequence_blocks)} stretches" if self.sequence_blocks else ""
        return f"{len(self.regions)} regions cut{stretches}"

    def _next_region(self, module: nn.Module) -> Region | None:
        """A further region in a module. Equal modules are tried once."""
        if module not in self._calls or not list(module.children()):
            return None
        claimed = {layer for region in self.regions for layer in (*region.columns, region.row)}
        # modules that are printed alike may still differ in their strings and flags
        settings = [each for part in module.modules() for each in vars(part).values() if isinstance(each, str | bool)]
        description = f"{module} {settings} {[path for path, part in module.named_modules() if part in claimed]}"
        if description in self._tried:
            alike = self._tried[description]
            return alike and alike.like(module)
        layers = [
            layer
            for layer in module.modules()
            if type(layer) is nn.Linear and layer not in claimed and self._uncut.isdisjoint(map(id, layer.parameters()))
        ]
        order = {called: place for place, called in enumerate(self._calls)}
        layers.sort(key=lambda layer: order.get(layer, -1))  # in the order of their calls
        choices = regions_of(module, layers, self._layout.tensor)
        self._tried[description] = region = next((region for region in choices if self._is_right(region)), None)
        return region

    def _is_right(self, region: Region) -> bool:
        """Whether the region computes the same as the uncut module, on all ranks."""
        try:
            right = all(distance <= TOLERANCE for distance in self._distances(region))
        except Exception:  # code that depends on the full width
            right = False
        vote = torch.tensor(float(right), device=self._layout.device)
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=self._layout.tensor_group)
        return bool(vote)

    def _distances(self, region: Region) -> list[float]:
        """Differences of outputs and gradients from those of the uncut module, as shares of their norms."""
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
            cut_outputs, gradients = _run(module, parts, *self._calls[module])
        finally:
            region.divide(1)
            for hook in hooks:
                hook.remove()
        distances = [_distance(own, target) for own, target in zip(cut_outputs, outputs, strict=True)]
        floor = 1e-2 * max(float(target.norm()) for target in expected.values() if target is not None)
        for name, whole_gradient in expected.items():
            own, target = gradients[name], whole_gradient
            if isinstance(name, str) and own is not None and target is not None:
                target = owners[name].part(name, target)
                if owners[name].role == "whole":  # within the region each rank's gradient is a part of the sum
                    total = own.clone()
                    dist.all_reduce(total, group=layout.tensor_group)
                    if _distance(own, target, floor) > TOLERANCE >= _distance(total, target, floor):
                        region.inside.add(owners[name].module)
                        own = total
            distances.append(_distance(own, target, floor))
        return distances

    def _caller(self, module: nn.Module) -> nn.Module:
        """The innermost module around a module, or itself, that was called."""
        name = self._names[module]
        while module not in self._calls and name:
            name = name.rpartition(".")[0]
            module = self._model.get_submodule(name)
        return module

    def _cut_sequences(self) -> None:
        """Let consecutive blocks hold pieces of the sequences between their regions."""
        lists: dict[str, list[nn.Module]] = {}
        for name, block in blocks_of(self._model).items():
            lists.setdefault(name.rpartition(".")[0], []).append(block)
        for blocks in lists.values():
            modules = {module for block in blocks for module in block.modules()}
            regions = [region for region in self.regions if region.module in modules]
            if regions and all(block in self._calls for block in blocks):
                self.sequence_blocks.append(blocks)
                for region in regions:
                    region.gathers = "columns" if region.module in blocks else "module"
        if not self.sequence_blocks:
            raise ValueError("spread found no blocks that follow each other and are cut; leave plan='sequence' out")

    def apply(self) -> None:
        """Turn every parameter into a DTensor, so that optimizers and clipping have a single kind."""
        layout, seeds = self._layout, Seeds(self._layout, random=bool(dropouts_of(self._model)))
        region_of = {part: region for region in self.regions for part in (*region.columns, region.row, *region.inside)}
        on_pieces = {module for blocks in self.sequence_blocks for block in blocks for module in block.modules()}
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
        for blocks in self.sequence_blocks:
            cut_block_sequences(self._names[blocks[0]], blocks, layout.tensor_group, seeds)

    @property
    def uncut(self) -> str:
        """If sequences are cut: the uncut modules, which read only their rank's piece and may need all of it."""
        if not self.sequence_blocks:
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
    """Outputs, and the gradients of inputs and parameters, with different weights for all elements of the outputs."""

    def fresh(value: Any) -> Any:
        return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    arguments, options = tree_map(fresh, (arguments, options))
    output = functional_call(module, parameters, arguments, options, tie_weights=False)
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    weights = [
        torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output).to(output.dtype)
        for output in outputs
    ]
    tensors_read: list[tuple[int | str, Any]] = [*enumerate(tree_leaves((arguments, options))), *parameters.items()]
    learned = {key: value for key, value in tensors_read if isinstance(value, Tensor) and value.requires_grad}
    gradients = torch.autograd.grad(outputs, [*learned.values()], weights, allow_unused=True)
    return [output.detach() for output in outputs], dict(zip(learned, gradients, strict=True))


def _distance(own: Tensor | None, right: Tensor | None, floor: float = 1e-12) -> float:
    """The difference as a share of the norm, or of `floor` if that is larger (as for a bias that a softmax cancels)."""
    if own is None or right is None:
        return 0.0 if own is right else float("inf")
    if own.shape != right.shape:
        return float("inf")
    return float((own - right).norm()) / max(float(right.norm()), floor, 1e-30)


@dataclass
class Region:
    """Between its columns and its row a rank holds a share of the features. `numbers` are attributes of modules with
    its width or its number of heads, which are divided."""

    module: nn.Module
    columns: list[Any]
    row: Any
    numbers: dict[tuple[nn.Module, str], int]
    segments: tuple[int, ...] = ()
    """The rows of each part of a packed column, such as queries, keys and values; each part is cut."""
    inside: set[nn.Module] = field(default_factory=set)
    """Modules between columns and row that have parameters of their own, whose gradients are sums over the group."""
    gathers: str = ""
    """If sequences are cut: what gathers them at the region's entrance, the `module` or its `columns`."""

    def role(self, module: nn.Module) -> str:
        if module in self.columns:
            return "column"
        return "row" if module is self.row else "inside" if module in self.inside else "whole"

    def order(self, module: nn.Module, parts: int) -> Tensor | None:
        """The order of a packed column's rows in which each rank's share is contiguous; None for other modules."""
        if not self.segments or module not in self.columns:
            return None
        rows = torch.arange(sum(self.segments)).split(self.segments)
        return torch.cat([segment.chunk(parts)[rank] for rank in range(parts) for segment in rows])

    def divide(self, parts: int) -> None:
        """Divide heads and widths by the number of parts; 1 restores them."""
        for (module, name), value in self.numbers.items():
            setattr(module, name, value // parts)

    def like(self, module: nn.Module) -> Region:
        """The same region in an equal module, which needs no trial."""
        paths = {part: path for path, part in self.module.named_modules()}

        def twin(part: nn.Module) -> nn.Module:
            return module.get_submodule(paths[part])

        numbers = {(twin(owner), name): getattr(twin(owner), name) for owner, name in self.numbers}
        columns, inside = [twin(column) for column in self.columns], {twin(part) for part in self.inside}
        return Region(module, columns, twin(self.row), numbers, self.segments, inside)


def regions_of(module: nn.Module, layers: list[Any], parts: int) -> Iterator[Region]:
    """Candidates for a region in a module, by the shapes of its Linear layers, the most likely first.

    Either all layers but the last make features of one input, which the last combines: queries, keys, values and the
    projection; gate, up and down. Or consecutive layers form pairs. A layer may make several features. `layers`: in the
    order of their calls.
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
    """Possible segments of the columns' rows: one for each column. A single column may also have several of the row's
    width, one of that width and two narrower ones (keys and values of fewer heads), or be cut head by head."""
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

    DTensors are only for storage: optimizers, clipping and checkpoints see them, but the forward pass neither mixes
    them with plain tensors nor pays for their dispatch.
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
        """The dimension along which a parameter of a Linear is cut."""
        if self.role == "column":
            return 0
        return 1 if self.role == "row" and name.endswith("weight") else None

    def _is_summed(self, name: str) -> bool:
        """Whether each rank's gradient of a parameter is a part: of its features, or of its piece of the sequences."""
        return self._dimension(name) is None and (self.role == "inside" or self.on_pieces)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter."""
        cut = self._dimension(name)
        if cut is None:
            return whole
        return reordered(whole, self._order).chunk(self._layout.tensor, cut)[self._layout.tensor_rank]

    def share(self, shared: dict[int, nn.Parameter]) -> None:
        """Turn its parameters into DTensors. `shared`: new parameters by id of the old ones, which may be tied."""
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
        """Add hooks to the caller: the module itself, or one that reads its parameters without calling it."""
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
            exchanges = GATHERED if self._gathers else COPIED
            return (self._seeds.copied(arguments[0], self._group, exchanges), *arguments[1:])
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
    """State shared by all regions of a model: the copy of an input that several columns read, and random numbers.

    Outside of regions all ranks of a group have the same activations and must drop the same ones; inside, activations
    differ. There the generator's key is changed but not its offset, so that checkpointed activations are repeated.
    """

    def __init__(self, layout: RankLayout, random: bool) -> None:
        self._rank, self._device, self._random = layout.tensor_rank, layout.device, random
        self._outside: Any = None  # the generator's key or state outside, while inside
        self._key_inside = -1
        self._stays = False
        self._copy: tuple[Tensor, Tensor] | None = None

    def copied(self, whole: Tensor, group: Any, exchanges: tuple[Exchange, Exchange]) -> Tensor:
        """A copy of the input, in the type that autocast uses, so that gradients of all its readers are summed once."""
        if self._copy is None or self._copy[0] is not whole or self._copy[1].requires_grad != torch.is_grad_enabled():
            self._copy = whole, _Exchange.apply(_as_read(whole), group, *exchanges)
        return self._copy[1]

    def enter(self, stays: bool = False) -> None:
        """`stays`: also between the regions of consecutive blocks."""
        self._stays = stays or self._stays
        if not self._random or self._outside is not None:
            return
        if self._device.type == "cuda":
            key = torch.cuda.default_generators[self._device.index].initial_seed()
            if key == self._key_inside:  # recomputed activations begin inside
                return
            self._outside, self._key_inside = key, key ^ (self._rank + 1) << 20
            self._set_key(self._key_inside)
        else:
            seed = int(torch.randint(1 << 30, ()))
            self._outside = torch.get_rng_state()
            torch.manual_seed(seed + self._rank)

    def leave(self, stays: bool | None = None) -> None:
        self._copy, self._stays = None, self._stays if stays is None else stays
        if self._outside is None or self._stays:
            return
        if self._device.type == "cuda":
            self._set_key(self._outside)
        else:
            torch.set_rng_state(self._outside)
        self._outside = None

    def _set_key(self, key: int) -> None:
        generator = torch.cuda.default_generators[self._device.index]
        offset = generator.get_offset()
        generator.manual_seed(key)
        generator.set_offset(offset)


def _as_read(whole: Tensor) -> Tensor:
    """The value in the type that autocast uses for layers, which halves the bytes sent and saved."""
    kind = whole.device.type
    low = torch.is_autocast_enabled(kind) and whole.dtype == torch.float32
    return whole.to(torch.get_autocast_dtype(kind)) if low else whole


def cut_block_sequences(name: str, blocks: list[nn.Module], group: Any, seeds: Seeds) -> None:
    """Let each rank of a group hold its piece of every sequence within consecutive blocks: layers that are not cut by
    features compute only a piece. Regions gather their inputs and scatter their sums."""

    def cut(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        sequences, ranks = arguments[0], dist.get_world_size(group)
        if sequences.dim() != 3 or sequences.shape[1] % ranks:
            raise ValueError(
                f"{name} got an input of shape {tuple(sequences.shape)}, whose second dimension, its sequence, "
                f"cannot be cut in {ranks}; pad the batches to a multiple of it, or leave plan='sequence' out"
            )
        return (_Exchange.apply(sequences, group, *CUT), *arguments[1:])

    def join(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (_Exchange.apply(output[0], group, *JOINED), *output[1:])
        return _Exchange.apply(output, group, *JOINED)

    blocks[0].register_forward_pre_hook(cut)
    blocks[-1].register_forward_hook(join)
    for block in blocks:  # each by itself, since a checkpointed block is recomputed alone, and may stop early
        block.register_forward_pre_hook(lambda *_: seeds.enter(stays=True))
        block.register_forward_hook(lambda *_: seeds.leave(stays=False), always_call=True)


def gather_at(module: nn.Module, width: int, group: Any) -> None:
    """Gather the input of a module whose region is cut: the first argument that is a piece."""

    def gathered(_module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        values = [*arguments, *options.values()]
        is_piece = [isinstance(value, Tensor) and value.dim() == 3 and value.shape[2] == width for value in values]
        place = is_piece.index(True)
        values[place] = _Exchange.apply(_as_read(values[place]), group, *GATHERED)
        return tuple(values[: len(arguments)]), dict(zip(options, values[len(arguments) :], strict=True))

    module.register_forward_pre_hook(gathered, with_kwargs=True)


class _Exchange(torch.autograd.Function):  # type: ignore[misc]  # PyTorch is not typed here
    """An exchange between ranks in the forward pass, and another one for gradients."""

    @staticmethod
    def forward(context: Any, value: Tensor, group: Any, exchange: Exchange, exchange_gradient: Exchange) -> Tensor:
        context.group, context.exchange_gradient = group, exchange_gradient
        return exchange(value, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        return context.exchange_gradient(gradient, context.group), None, None, None


def _same(value: Tensor, _group: Any) -> Tensor:
    return value.view_as(value)


def _sum(part: Tensor, group: Any) -> Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _piece(whole: Tensor, group: Any) -> Tensor:
    """This rank's piece of every sequence."""
    return whole.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


def _pieces(piece: Tensor, group: Any) -> Tensor:
    """All ranks' pieces, as whole sequences."""
    pieces = piece.new_empty(dist.get_world_size(group), *piece.shape)
    gather(pieces.view(-1), piece.reshape(-1), group=group)
    return pieces.movedim(0, 1).flatten(1, 2)


def _piece_of_sum(part: Tensor, group: Any) -> Tensor:
    pieces = part.unflatten(1, (dist.get_world_size(group), -1)).movedim(1, 0).contiguous()
    own = torch.empty_like(pieces[0])
    _scatter(own.view(-1), pieces.view(-1), group=group)
    return own


COPIED = _same, _sum
"""The same value on all ranks of a group, each of which uses it differently: gradients are summed."""
SUMMED = _sum, _same
"""The sum of the values of all ranks of a group; the gradient is that of the sum."""
CUT, JOINED = (_piece, _pieces), (_pieces, _piece)
"""Sequences cut into pieces, and joined again; outside of the pieces all ranks do the same."""
GATHERED, SCATTERED = (_pieces, _piece_of_sum), (_piece_of_sum, _pieces)
"""Like COPIED and SUMMED, if each rank has only a piece of the sequences before and after."""
