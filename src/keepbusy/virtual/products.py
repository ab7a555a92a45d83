"""How long matrix products, convolutions and attention take: tiles on multiprocessors.

A product is cut into tiles, and the multiprocessors take one each, wave after wave; the last wave
may be nearly empty. A long inner dimension is split where that fills the waves. Numbers in capitals
were fitted to 75 products of five models on an H200 (mean error 4.5%): they belong to no case.
"""

from __future__ import annotations

from keepbusy.virtual.device import Device
from keepbusy.virtual.operands import Kernel

_TILES = {
    (256, 128): 1.0,
    (128, 256): 1.0,
    (192, 192): 1.0,
    (128, 128): 0.95,
    (128, 64): 0.8,
    (64, 128): 0.8,
    (64, 64): 0.6,
}
"""Tiles, and which share of the best rate their inner loop reaches."""
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_LEAST_SPLIT = 256
PROLOGUE = 160
"""Filling and draining a tile's pipeline takes as long as this much of the inner dimension."""
START = 2_500
SUMMING = 3_500
LONG = 500_000
"""A product that runs longer than this meets the limit of power."""
_TENSOR_CORES = ("float16", "bfloat16", "tfloat32", "float8", "int8", "float64")
_SHALLOW_FORWARD, _SHALLOW_BACKWARD = 0.10, 0.225
"""Of the matrix rate: convolutions over an image's three channels, padded to eight."""
CHANNELS = 8
_HALF_LENGTH = 350
"""Attention over so many keys reaches half of its best rate."""
_FORWARD_START, _BACKWARD_START = 4_500, 7_000
_FORWARD, _BACKWARD = 0.455, 0.385
"""Of the matrix rate, with heads of 64; wider heads do better."""


def product(
    device: Device, rows: int, columns: int, inner: int, dtype: str, size: int, batch: int = 1, moved: int = 0
) -> int:
    """`size`: bytes of an element; `moved`: bytes in all, where they are fewer than those of the matrices."""
    if not rows * columns * inner * batch:
        return START
    best = min(_tiled(device, rows, columns, inner, dtype, tile, split, batch) for tile in _TILES for split in _SPLITS)
    moved = moved or batch * (rows * inner + inner * columns + rows * columns) * size
    streamed = moved / (device.memory.bandwidth * device.efficiency.streaming)
    return round(START + max(_powered(device, best, 2.0 * batch * rows * columns * inner, dtype), streamed))


def _tiled(
    device: Device, rows: int, columns: int, inner: int, dtype: str, tile: tuple[int, int], split: int, batch: int
) -> float:
    if split > 1 and inner // split < _LEAST_SPLIT:
        return float("inf")
    tiles = batch * -(-rows // tile[0]) * -(-columns // tile[1]) * split
    waves = -(-tiles // device.multiprocessors)
    rate = best_rate(device, dtype) * _TILES[tile] / device.multiprocessors
    spent = waves * 2.0 * tile[0] * tile[1] * (-(-inner // split) + PROLOGUE) / rate
    return spent if split == 1 else spent + SUMMING + 8.0 * batch * rows * columns / device.memory.bandwidth


def best_rate(device: Device, dtype: str) -> float:
    share = device.efficiency.matrix if dtype in _TENSOR_CORES else device.efficiency.simt
    return device.rate(dtype) * share


def _powered(device: Device, spent: float, operations: float, dtype: str) -> float:
    if spent <= LONG or dtype not in _TENSOR_CORES:
        return spent
    return LONG + (spent - LONG) / spent * operations / (device.rate(dtype) * device.efficiency.sustained)


def convolution(
    device: Device,
    out_rows: int,
    out_channels: int,
    in_channels: int,
    window: int,
    groups: int,
    dtype: str,
    size: int,
    turn: str = "forward",
) -> list[Kernel]:
    """As an implicit product. `out_rows`: positions of the output, over the batch; `window`: taps of the filter."""
    channels = in_channels // groups
    if groups > 1 and channels == 1:
        moved = out_rows * (in_channels + out_channels) * size
        return [(f"conv_depthwise_{turn}", round(START + moved / (device.memory.bandwidth * 0.3)))]
    if channels < CHANNELS and dtype in _TENSOR_CORES:
        return _shallow(device, out_rows * out_channels * window * groups, dtype, turn)
    rows, columns, inner = out_rows, out_channels // groups, channels * window
    moved = (out_rows * (in_channels + out_channels) + in_channels // groups * out_channels * window) * size
    if turn == "input":
        columns, inner = channels, columns * window
    elif turn == "weight":
        rows, columns, inner = columns, inner, rows
    return [(f"conv_{turn}_{dtype}", product(device, rows, columns, inner, dtype, size, groups, moved))]


def _shallow(device: Device, taps: int, dtype: str, turn: str) -> list[Kernel]:
    """The few channels of an image are padded to eight first, and still feed the tensor cores badly."""
    operations = 2.0 * taps * CHANNELS
    share = _SHALLOW_FORWARD if turn == "forward" else _SHALLOW_BACKWARD
    spent = operations / (device.rate(dtype) * share)
    return [(f"conv_{turn}_{dtype}", round(START + spent))]


def attention(
    device: Device, heads: int, queries: int, keys: int, width: int, causal: bool, dtype: str, backward: bool = False
) -> list[Kernel]:
    """Recognised whole: one kernel forward, three backward. `heads`: over the batch."""
    operations = 4.0 * heads * queries * keys * width * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
    share = (_BACKWARD if backward else _FORWARD) * min(2.0, max(width, 32) / 64) ** 0.5 * keys / (keys + _HALF_LENGTH)
    tensor = dtype in _TENSOR_CORES
    rate = device.rate(dtype) * (share if tensor else min(share, 0.5))
    spent = round((_BACKWARD_START if backward else _FORWARD_START) + operations / rate)
    if not backward:
        return [("flash_attention_forward", spent)]
    moved = heads * queries * width * (2 if tensor else 4)
    bandwidth = device.memory.bandwidth
    return [
        ("flash_attention_dot", round(1_000 + 2 * moved / (bandwidth * 0.38))),
        ("flash_attention_backward", spent),
        ("flash_attention_convert", round(1_000 + 3 * moved / (bandwidth * 0.67))),
    ]
