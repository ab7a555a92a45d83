"""Tensors moved between the devices of one process: what `torch.nn.DataParallel` is made of.

PyTorch has this in C++, for CUDA builds only. Copies are asked not to block, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _reorder_tensors_as, _take_tensors, _unflatten_dense_tensors

from keepbusy.virtual.cuda_streams import StreamContext

_HOST = -1


def scatter(
    tensor: Tensor, devices: Sequence[int], sizes: Sequence[int] | None, dim: int, streams: Any
) -> list[Tensor]:
    """A part for each device, on the stream given for it; there may be fewer parts than devices."""
    parts = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(list(sizes), dim)
    streams = streams or [None] * len(devices)
    return [_moved(part, device, stream) for part, device, stream in zip(parts, devices, streams, strict=False)]


def _moved(part: Tensor, device: int, stream: Any) -> Tensor:
    with nullcontext() if stream is None else StreamContext(stream):
        return part.to(torch.device("cuda", device), non_blocking=True)


def scatter_out(tensor: Tensor, out: list[Tensor], dim: int, streams: Any) -> list[Tensor]:
    parts = tensor.split([one.size(dim) for one in out], dim)
    for target, part in zip(out, parts, strict=True):
        target.copy_(part, non_blocking=True)
    return out


def gather(tensors: Sequence[Tensor], dim: int, destination: int | None) -> Tensor:
    """One after the other along `dim`, on a device or, for -1, on the host."""
    shape = list(tensors[0].shape)
    shape[dim] = sum(one.size(dim) for one in tensors)
    where = torch.device("cpu") if destination == _HOST else torch.device("cuda", destination)
    return gather_out(tensors, torch.empty(shape, dtype=tensors[0].dtype, device=where), dim)


def gather_out(tensors: Sequence[Tensor], out: Tensor, dim: int) -> Tensor:
    for part, tensor in zip(out.split([one.size(dim) for one in tensors], dim), tensors, strict=True):
        part.copy_(tensor, non_blocking=out.is_cuda)
    return out


def broadcast(tensor: Tensor, devices: Sequence[int]) -> list[Tensor]:
    return [tensor.to(torch.device("cuda", device), non_blocking=True) for device in devices]


def broadcast_out(tensor: Tensor, out: list[Tensor]) -> list[Tensor]:
    for one in out:
        one.copy_(tensor, non_blocking=True)
    return out


def broadcast_coalesced(tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int) -> list[list[Tensor]]:
    """Of each device all tensors, sent in a few large buffers; the first device has them already."""
    return [list(tensors), *(_sent(tensors, device, buffer_size) for device in devices[1:])]


def _sent(tensors: Sequence[Tensor], device: int, buffer_size: int) -> list[Tensor]:
    found: list[Tensor] = []
    for group in _take_tensors(tensors, buffer_size):
        (buffer,) = broadcast(_flatten_dense_tensors(group), [device])
        found += [one.data for one in _unflatten_dense_tensors(buffer, group)]
    return list(_reorder_tensors_as(found, tensors))


ANSWERS: dict[str, Callable[..., Any]] = {
    "_scatter": scatter,
    "_scatter_out": scatter_out,
    "_gather": gather,
    "_gather_out": gather_out,
    "_broadcast": broadcast,
    "_broadcast_out": broadcast_out,
    "_broadcast_coalesced": broadcast_coalesced,
}
