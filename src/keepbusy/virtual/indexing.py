"""Operators that read or write rows by their numbers: embeddings, indices, masks, scatters.

Numbers in capitals were fitted to kernels of an H200: those of training steps, and those of plain
shapes in tests/gpu/truth/operator_costs.json.gz. Rates are elements a nanosecond a multiprocessor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from keepbusy.virtual.call import Call
from keepbusy.virtual.operands import Kernel, elements, largest, size, total

_CACHE = 40 << 20
"""Bytes of a table that stay in the device's cache."""
_ROW = 80.0
"""Nanoseconds a row that is found by its number, on each multiprocessor."""
_FAR = 0.72
"""Of the memory bandwidth, where rows come from beyond the cache."""
_ADDED, _PUT = 1.15, 1.75
_SMALL_EMBEDDING = 3_072
_INDICES = ("int64", "int32")
_MASKS = ("bool", "uint8")


def gather(call: Call) -> list[Kernel]:
    """Rows of a table, found by their numbers."""
    written = total(call.outputs or call.inputs[:1])
    rows = max((elements(one) for one in call.inputs if one[1] in _INDICES), default=0)
    beyond = total(call.inputs[:1]) > _CACHE
    streamed = (2 * written / _FAR if beyond else 1.6 * written / call.device.efficiency.streaming) / call.bandwidth
    found = min(rows, _rows_of(call)) * _ROW / call.device.multiprocessors
    return [(f"gather_{call.name}", round(1_500 + max(streamed, found)))]


def _rows_of(call: Call) -> float:
    """No more rows than the result has: `gather` gives a number for every element."""
    result = (call.outputs or call.inputs)[0]
    return elements(result) / max(1, result[0][-1]) if result[0] else 1.0


def embedding_backward(call: Call) -> list[Kernel]:
    """Few indices are added at once; many are sorted first, in two dozen small kernels."""
    grad, efficiency = call.inputs[0], call.device.efficiency
    cleared: Kernel = ("fill", call.streamed(total(call.outputs), efficiency.streaming))
    if elements(call.inputs[-1]) <= _SMALL_EMBEDDING:
        return [cleared, ("embedding_grad", round(5_000 + 22 * elements(call.inputs[-1])))]
    written = min(total(call.outputs), size(grad))
    return [
        cleared,
        *[("embedding_sort", 2_700)] * 26,
        ("embedding_grad_weight", call.streamed(size(grad), efficiency.random, 6_000)),
        ("embedding_scatter", call.streamed(written, efficiency.random, 20_000)),
    ]


def scatter(call: Call) -> list[Kernel]:
    moved = largest(call.inputs[1:] or call.inputs)
    if call.name.startswith("index_add"):
        return [(f"scatter_{call.name}", round(1_500 + call.each(elements(call.inputs[-1]), _ADDED)))]
    return [(f"scatter_{call.name}", call.strided(elements(moved)))]


def index_put(call: Call) -> list[Kernel]:
    """Adding where indices may repeat means sorting them first; one value under a mask is a fill."""
    values = elements(call.inputs[-1])
    if call.inputs[-1][1] in _MASKS or (values == 1 and any(one[1] in _MASKS for one in call.inputs[1:])):
        return [("masked_fill", call.strided(elements(call.inputs[0])))]
    kernels = [(f"scatter_{call.name}", round(1_500 + call.each(values, _PUT)))]
    found = _places_of_masks(call)
    if not call.asked.get("accumulate", False):
        return [*found, *kernels]
    return [*found, *[("index_arithmetic", 1_500)] * 6, *[("index_sort", 3_000)] * 10, *kernels]


def _places_of_masks(call: Call) -> list[Kernel]:
    """A mask is made a list of places first."""
    masks = [one for one in call.inputs[1:] if one[1] in _MASKS]
    return [kernel for mask in masks for kernel in nonzero(replace(call, inputs=(mask,)))]


def index(call: Call) -> list[Kernel]:
    """By numbers, or by a mask, whose places are numbers too."""
    masks = [one for one in call.inputs[1:] if one[1] in _MASKS]
    if not masks:
        return gather(call)
    rows: Kernel = gather(replace(call, inputs=(*call.inputs, ((_rows_found(call),), "int64", (1,)))))[0]
    return [*_places_of_masks(call), rows]


def _rows_found(call: Call) -> int:
    return call.outputs[0][0][0] if call.outputs and call.outputs[0][0] else 1


def masked_select(call: Call) -> list[Kernel]:
    return [*_places_of_masks(call), ("index_arithmetic", 1_500), *gather(call)]


def one_hot(call: Call) -> list[Kernel]:
    return [("fill", call.streamed(total(call.outputs), call.device.efficiency.streaming)), ("scatter", 3_500)]


def bincount(call: Call) -> list[Kernel]:
    counted = elements(call.inputs[0])
    return [*[("reduce_extremes", 2_000)] * 4, ("bincount", round(4_000 + 0.15 * counted))]


def nonzero(call: Call) -> list[Kernel]:
    """Count, read the count on the host (the caller's part), then write the places."""
    read = call.streamed(size(call.inputs[0]), call.device.efficiency.rows, 1_500)
    return [("nonzero_count", read), ("nonzero_total", 1_100), ("nonzero_init", 700), ("nonzero_write", 1_000 + read)]


_GATHERS = ("embedding", "index_select", "gather", "take", "take_along_dim", "embedding_renorm_")
_SCATTERS = (
    "index_add_", "index_add", "index_copy_", "index_copy", "scatter", "scatter_", "scatter_add", "scatter_add_",
    "scatter_reduce", "masked_scatter_", "masked_scatter", "index_fill_",
)  # fmt: skip

FAMILIES: dict[str, Callable[[Call], list[Kernel]]] = {
    **dict.fromkeys(_GATHERS, gather),
    **dict.fromkeys(_SCATTERS, scatter),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), index_put),
    **dict.fromkeys(("index", "_unsafe_index"), index),
    "embedding_dense_backward": embedding_backward,
    "masked_select": masked_select,
    "bincount": bincount,
    "one_hot": one_hot,
    "nonzero": nonzero,
}
