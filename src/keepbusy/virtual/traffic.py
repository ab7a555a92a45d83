"""Operators whose time is the bytes they move, and those that are many small kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from keepbusy.virtual import norms
from keepbusy.virtual.families import LEAST, Call, columns_share
from keepbusy.virtual.operands import (
    Kernel,
    Operand,
    alike,
    contiguous,
    dense,
    elements,
    item_size,
    largest,
    size,
    total,
)

_LEAST_MIXED = 1_900
"""The shortest that converts types on the way."""
_COLUMNS_LEAST = 7_000
"""The shortest sum over rows: two stages, and a wait between them."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FREE = _names(
    "empty empty_strided empty_like new_empty resize_ set_ view as_strided _reshape_alias reshape t transpose permute "
    "expand select slice narrow unsqueeze squeeze detach alias unbind split chunk unfold diagonal view_as_real "
    "view_as_complex _unsafe_view record_stream is_set_to real imag movedim swapaxes split_with_sizes"
)
_HEAVY = _names(
    "gelu gelu_ gelu_backward pow pow_ erf erf_ erfinv erfinv_ tanh tanh_ tanh_backward lgamma digamma "
    "mish mish_backward softplus softplus_backward atan2 sin cos exp log log1p expm1"
)
REDUCTIONS = _names(
    "sum mean amax amin max min argmax argmin prod any all norm linalg_vector_norm var std var_mean std_mean logsumexp "
    "nansum aminmax median count_nonzero"
)
_RANDOM = _names(
    "normal_ normal uniform_ rand randn rand_like randn_like random_ randint randint_like bernoulli_ bernoulli "
    "exponential_ geometric_ cauchy_ log_normal_ randperm multinomial"
)
_FILLS = _names("fill_ zero_ zeros ones full zeros_like ones_like full_like arange linspace eye tril_indices")
_GATHERS = _names(
    "embedding index_select gather take take_along_dim roll flip tril triu repeat "
    "masked_fill masked_fill_ where embedding_renorm_ grid_sampler_2d upsample_nearest2d upsample_bilinear2d"
)
_SCATTERS = _names(
    "index_add_ index_add index_copy_ index_copy scatter scatter_ scatter_add scatter_add_ scatter_reduce "
    "masked_scatter_ masked_scatter index_fill_ col2im im2col"
)
_SORT_PASSES, _SORTED_AT_ONCE = 4, 4_096
_SMALL_EMBEDDING = 3_072


def copy(call: Call) -> list[Kernel]:
    """To `self`, which is written and not read, whether it is given as an input or as the output."""
    target = (*call.outputs, *call.inputs)[0]
    return elementwise(replace(call, name="copy", inputs=call.inputs[-1:], outputs=(target,)))


def elementwise(call: Call) -> list[Kernel]:
    """The usual case, also for operators that nobody described: one kernel, all bytes once."""
    operands = (*call.inputs, *call.outputs)
    shape = largest(operands)
    large = [one for one in operands if elements(one) * 16 > elements(shape)]
    name = f"elementwise_{call.name}"
    moved, efficiency = call.moved(), call.device.efficiency
    share = _elementwise_share(call, large)
    plain = call.streamed(moved, share, LEAST if share > efficiency.mixed else _LEAST_MIXED)
    if all(alike(one, shape) for one in large) and dense(shape) and not _broadcast(call, shape):
        return [(name, plain)]
    count = elements(shape)
    strided = LEAST + count / (call.device.multiprocessors * 4.0 * efficiency.strided) * _narrow(shape)
    return [(name, max(plain, round(strided)))]


def _elementwise_share(call: Call, large: list[Operand]) -> float:
    efficiency = call.device.efficiency
    if len({one[1] for one in large if one[1] not in ("bool", "uint8")}) > 1:
        to_half = call.name == "copy" and call.outputs[0][1] in ("float16", "bfloat16")
        return efficiency.streaming if to_half else efficiency.mixed
    heavy = call.name in _HEAVY and bool(large) and item_size(large[0][1]) <= 2  # wider types are waited for anyway
    return efficiency.heavy if heavy else efficiency.streaming


def _broadcast(call: Call, shape: Operand) -> bool:
    """Whether a small operand, more than a scalar, is spread over the large one."""
    return any(1 < elements(one) < elements(shape) for one in call.inputs)


def _narrow(shape: Operand) -> float:
    """Wide elements are moved as fast as narrow ones until the bytes are the limit."""
    return 1.0 if item_size(shape[1]) <= 4 else 1.5


def fill(call: Call) -> list[Kernel]:
    target = largest((*call.inputs, *call.outputs))
    return [("fill", call.streamed(size(target), call.device.efficiency.streaming, 700))]


def draw(call: Call) -> list[Kernel]:
    target = largest((*call.outputs, *call.inputs))
    return [(f"random_{call.name}", call.streamed(size(target), call.device.efficiency.random, 1_500))]


def dropout(call: Call) -> list[Kernel]:
    return [("fused_dropout", call.streamed(call.moved(), call.device.efficiency.mixed, 1_500))]


def reduce(call: Call) -> list[Kernel]:
    """Over the last dimension, or everything, it streams; over the others it needs many columns to be fast."""
    source = call.inputs[0]
    columns = _columns(call, source)
    if columns:
        share, least = columns_share(call.device, columns), _COLUMNS_LEAST
    else:
        share, least = call.device.efficiency.rows, 2_000
    kernels = [(f"reduce_{call.name}", call.streamed(total(call.inputs) + total(call.outputs), share, least))]
    whole = elements(source) > 1 << 20 and sum(map(elements, call.outputs)) <= 1 << 16
    return [("Memset (Device)", 800), *kernels] if whole else kernels


def _columns(call: Call, source: Operand) -> int:
    """How many elements lie side by side that are not summed with each other; 0 if they are."""
    dims = call.asked.get("dim")
    if dims is None or not source[0]:
        return 0
    listed = (dims,) if isinstance(dims, int) else tuple(dims)
    summed = {dim % len(source[0]) for dim in listed if isinstance(dim, int)} or set(range(len(source[0])))
    inner = min(range(len(source[0])), key=lambda dim: (source[2][dim] if source[0][dim] > 1 else 1 << 60, -dim))
    return 0 if inner in summed else source[0][inner]


def softmax(call: Call) -> list[Kernel]:
    backward = call.name.endswith("backward_data")
    share = call.device.efficiency.streaming if backward else call.device.efficiency.softmax
    return [(call.name.strip("_"), call.streamed(call.moved(), share, 2_500))]


def nll_loss(call: Call) -> list[Kernel]:
    """One block walks over all rows."""
    rows = elements(call.inputs[min(1, len(call.inputs) - 1)])
    if not call.name.endswith("backward"):
        return [("nll_loss_forward", round(9_000 + 0.85 * rows))]
    rows = elements(call.inputs[2]) if len(call.inputs) > 2 else rows
    return [
        ("fill", call.streamed(total(call.outputs), call.device.efficiency.streaming)),
        ("nll_loss_backward", round(5_000 + 0.95 * rows)),
    ]


def embedding_backward(call: Call) -> list[Kernel]:
    """Few indices are added at once; many are sorted first, in two dozen small kernels."""
    grad = call.inputs[0]
    cleared: Kernel = ("fill", call.streamed(total(call.outputs), call.device.efficiency.streaming))
    if elements(call.inputs[-1]) <= _SMALL_EMBEDDING:
        return [cleared, ("embedding_grad", round(5_000 + 22 * elements(call.inputs[-1])))]
    return [
        cleared,
        *[("embedding_sort", 2_700)] * 26,
        ("embedding_grad_weight", call.streamed(size(grad), call.device.efficiency.random, 6_000)),
        ("embedding_scatter", call.streamed(total(call.outputs), call.device.efficiency.random, 20_000)),
    ]


def scatter(call: Call) -> list[Kernel]:
    moved = largest(call.inputs[1:] or call.inputs)
    return [(f"scatter_{call.name}", call.strided(elements(moved)))]


def index_put(call: Call) -> list[Kernel]:
    """Adding where indices may repeat means sorting them first."""
    kernels = [(f"scatter_{call.name}", call.strided(elements(call.inputs[-1])))]
    found = _places_of_masks(call)
    if not call.asked.get("accumulate", False):
        return [*found, *kernels]
    return [*found, *[("index_arithmetic", 1_500)] * 4, *[("index_sort", 3_000)] * 8, *kernels]


def _places_of_masks(call: Call) -> list[Kernel]:
    """A mask is made a list of places first."""
    masks = [one for one in call.inputs[1:] if one[1] in ("bool", "uint8")]
    return [kernel for mask in masks for kernel in nonzero(replace(call, inputs=(mask,)))]


def index(call: Call) -> list[Kernel]:
    return [*_places_of_masks(call), *gather(call)]


def gather(call: Call) -> list[Kernel]:
    written = call.outputs or call.inputs[:1]
    return [(f"gather_{call.name}", call.streamed(1.6 * total(written), call.device.efficiency.streaming, 1_500))]


def concatenate(call: Call) -> list[Kernel]:
    """Narrow elements of strided tensors are moved one by one."""
    count = sum(map(elements, call.inputs))
    moved = call.streamed(2 * total(call.inputs), call.device.efficiency.mixed)
    if all(contiguous(one) for one in call.inputs):
        return [("concatenate", moved)]
    return [("concatenate", max(moved, call.strided(round(1.3 * count))))]


def nonzero(call: Call) -> list[Kernel]:
    """Count, read the count on the host (the caller's part), then write the places."""
    read = call.streamed(size(call.inputs[0]), call.device.efficiency.rows, 1_500)
    return [("nonzero_count", read), ("nonzero_total", 1_100), ("nonzero_init", 700), ("nonzero_write", 1_000 + read)]


def sort(call: Call) -> list[Kernel]:
    source = call.inputs[0]
    if elements(source) <= _SORTED_AT_ONCE:
        return [("sort_small", 12_000)]
    once = call.streamed(4 * total(call.inputs[:1]) + 16 * elements(source), call.device.efficiency.mixed, 2_500)
    return [("sort_histogram", 3_500), ("sort_scan", 1_200), *[("sort_pass", once)] * _SORT_PASSES]


def scan(call: Call) -> list[Kernel]:
    return [("scan", call.streamed(2 * call.moved(), call.device.efficiency.mixed, 2_500))]


FAMILIES: dict[str, Callable[[Call], list[Kernel]]] = {
    **dict.fromkeys(("copy_", "_to_copy", "clone", "to", "contiguous"), copy),
    **dict.fromkeys(_FILLS, fill),
    **dict.fromkeys(_RANDOM, draw),
    **dict.fromkeys(("native_dropout", "_fused_dropout", "dropout", "native_dropout_backward"), dropout),
    **dict.fromkeys(REDUCTIONS, reduce),
    **dict.fromkeys(
        ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "softmax", "log_softmax"),
        softmax,
    ),
    **norms.FAMILIES,
    **dict.fromkeys(("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"), nll_loss),
    "embedding_dense_backward": embedding_backward,
    **dict.fromkeys(_SCATTERS, scatter),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), index_put),
    **dict.fromkeys(_GATHERS, gather),
    **dict.fromkeys(("index", "_unsafe_index"), index),
    **dict.fromkeys(("cat", "stack"), concatenate),
    "nonzero": nonzero,
    **dict.fromkeys(("sort", "argsort", "topk", "_unique2", "unique_dim", "unique_consecutive", "kthvalue"), sort),
    **dict.fromkeys(("cumsum", "cumsum_", "cumprod", "cummax", "logcumsumexp"), scan),
}
