"""How long matrix products and attention take: tiles on multiprocessors.

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
_SIMT_TILES = {**_TILES, (64, 32): 0.5, (32, 32): 0.45}
"""Tiles, and which share of the best rate their inner loop reaches; without tensor cores smaller ones are worth it."""
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_LEAST_SPLIT = 256
PROLOGUE, _SIMT_PROLOGUE = 160, 16
"""Filling and draining a tile's pipeline takes as long as this much of the inner dimension."""
START = 2_500
SUMMING = 3_500
LONG = 500_000
"""A product that runs longer than this meets the limit of power."""
_TENSOR_CORES = ("float16", "bfloat16", "tfloat32", "float8", "int8", "float64")
_ATTENTION_TILE, _ATTENTION_START = 128, 3_500
_TILE_FORWARD, _TILE_BACKWARD = (1_000.0, 10.2, 0.45), (2_300.0, 26.5, 0.5)
"""Of a tile of queries: nanoseconds to begin, for each key with heads of 64, and the power at which wider heads take
longer; of an H200, whose rate and multiprocessors follow."""
_ATTENTION_RATE, _ATTENTION_BLOCKS = 989_000.0, 132


def product(
    device: Device, rows: int, columns: int, inner: int, dtype: str, size: int, batch: int = 1, moved: int = 0
) -> int:
    """`size`: bytes of an element; `moved`: bytes in all, where they are fewer than those of the matrices."""
    if not rows * columns * inner * batch:
        return START
    tiles = _TILES if dtype in _TENSOR_CORES else _SIMT_TILES
    best = min(_tiled(device, rows, columns, inner, dtype, tile, split, batch) for tile in tiles for split in _SPLITS)
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
    rate = best_rate(device, dtype) * _SIMT_TILES[tile] / device.multiprocessors
    prologue = PROLOGUE if dtype in _TENSOR_CORES else _SIMT_PROLOGUE
    spent = waves * 2.0 * tile[0] * tile[1] * (-(-inner // split) + prologue) / rate
    return spent if split == 1 else spent + SUMMING + 8.0 * batch * rows * columns / device.memory.bandwidth


def best_rate(device: Device, dtype: str) -> float:
    share = device.efficiency.matrix if dtype in _TENSOR_CORES else device.efficiency.simt
    return device.rate(dtype) * share


def _powered(device: Device, spent: float, operations: float, dtype: str) -> float:
    if spent <= LONG or dtype not in _TENSOR_CORES:
        return spent
    return LONG + (spent - LONG) / spent * operations / (device.rate(dtype) * device.efficiency.sustained)


def attention(
    device: Device, heads: int, queries: int, keys: int, width: int, causal: bool, dtype: str, backward: bool = False
) -> list[Kernel]:
    """Recognised whole: one kernel forward, three backward. `heads`: over the batch."""
    tensor = dtype in _TENSOR_CORES
    whole = _tiled_attention if tensor else _plain_attention
    spent = round(whole(device, heads, queries, keys, width, causal, backward))
    if not backward:
        return [("flash_attention_forward", spent)]
    moved = heads * queries * width * (2 if tensor else 4)
    bandwidth = device.memory.bandwidth
    return [
        ("flash_attention_dot", round(1_000 + 2 * moved / (bandwidth * 0.38))),
        ("flash_attention_backward", spent),
        ("flash_attention_convert", round(1_000 + 3 * moved / (bandwidth * 0.67))),
    ]


def _tiled_attention(
    device: Device, heads: int, queries: int, keys: int, width: int, causal: bool, backward: bool
) -> float:
    """A block for each tile of queries, past all of its keys; backward the other way round."""
    mine, others = (keys, queries) if backward else (queries, keys)
    tile = _ATTENTION_TILE
    padded = -(-others // tile) * tile
    passed = (padded + tile) / 2 if causal else padded
    begin, each, wider = _TILE_BACKWARD if backward else _TILE_FORWARD
    slower = _ATTENTION_RATE / device.rate("bfloat16") * device.multiprocessors / _ATTENTION_BLOCKS
    waves = -(-heads * -(-mine // tile) // device.multiprocessors)
    return _ATTENTION_START + waves * (begin + passed * each * max(1.0, width / 64) ** wider) * slower


def _plain_attention(
    device: Device, heads: int, queries: int, keys: int, width: int, causal: bool, backward: bool
) -> float:
    """Without tensor cores: arithmetic, over tiles of 64."""
    length, depth = (-(-one // 64) * 64 for one in (queries, keys))
    operations = 4.0 * heads * length * depth * width * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
    share = 0.45 if width <= 64 or backward else 0.62
    return _ATTENTION_START + operations / (device.rate("float32") * share)
