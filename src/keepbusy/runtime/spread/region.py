"""A part of the model that every GPU of a group computes a share of: layers cut by columns, then one cut by rows."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from keepbusy.runtime.spread.layout import gather, own_part

_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name since PyTorch 2.13
Exchange: TypeAlias = Callable[[Tensor, Any], Tensor]
HEADS = re.compile(r"heads?$")
"""Attributes that count the heads of an attention: num_heads, n_head, num_key_value_heads."""


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
        for (module, name), value in self.numbers.items():
            setattr(module, name, value // parts)

    def undivide(self) -> None:
        for (module, name), value in self.numbers.items():
            setattr(module, name, value)


def cut_of(role: str, name: str) -> int | None:
    """The dimension along which a parameter of a Linear is cut."""
    if role == "column":
        return 0
    return 1 if role == "row" and name == "weight" else None


def is_summed(role: str, name: str, on_pieces: bool) -> bool:
    """Whether each rank's gradient of a parameter is a part: of its features, or of its piece of the sequences."""
    return cut_of(role, name) is None and (role == "inside" or on_pieces)


def regions_of(
    name: str, module: nn.Module, claimed: set[nn.Module], kept: set[int], parts: int, turns: Mapping[nn.Module, int]
) -> Iterator[Region]:
    """What may be cut in a module, by the shapes of its Linear layers, most likely first; a trial tells if it is right.

    All but the last make features of one input, which the last brings together again: queries, keys, values and the
    projection; gate, up and down. Or they follow each other in pairs. One layer may hold several of the features.
    `turns`: which module was called how early; in which order they were made says less.
    """
    layers = [one for one in module.modules() if type(one) is nn.Linear and one not in claimed]
    layers = [one for one in layers if not any(id(own) in kept for own in one.parameters())]
    layers.sort(key=lambda one: turns.get(one, -1))
    for columns, row in _choices(layers):
        for segments in _segments(columns, row):
            if not any(rows % parts for rows in (*segments, *(one.out_features for one in columns))):
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
    if len({one.in_features for one in columns}) > 1 or width < narrow:
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
    heads = {place: value for place, value in whole.items() if HEADS.search(place[1])}
    if any(value % parts for value in heads.values()):
        return []
    widths = {row.in_features, *segments, *(one.out_features for one in columns)}
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
            place = next(number for number, one in enumerate(given) if _is_piece(one, width))
            given[place] = _Exchange.apply(_as_read(given[place]), self._group, *GATHERED)
            return tuple(given[: len(arguments)]), dict(zip(options, given[len(arguments) :], strict=True))

        module.register_forward_pre_hook(gathered, with_kwargs=True)


def _is_piece(value: Any, width: int) -> bool:
    return isinstance(value, Tensor) and value.dim() == 3 and value.shape[2] == width


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
