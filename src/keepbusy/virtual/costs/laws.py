"""Operators over lists of tensors, foreach and fused optimizers: blocks of all of them in as few launches as fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from keepbusy.virtual.costs.operands import (
    LEAST,
    Call,
    Kernel,
    Operand,
    alike,
    channels_last,
    contiguous,
    dense,
    elements,
    item_size,
    largest,
    size,
    total,
)
from keepbusy.virtual.costs.products import columns_share

# Operators whose time is the bytes they move: elementwise ones, copies, fills, random numbers.

_LEAST_MIXED = 1_900
"""The shortest that converts types on the way."""
_DRAWN_NORMAL, _DRAWN = 3.3, 4.5
"""Random numbers a nanosecond a multiprocessor."""
_TURNED = 1.15
"""Elements a nanosecond a multiprocessor that lie side by side in one tensor only."""


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
_RANDOM = _names(
    "normal_ normal uniform_ rand randn rand_like randn_like random_ randint randint_like bernoulli_ bernoulli "
    "exponential_ geometric_ cauchy_ log_normal_ randperm multinomial"
)
_FILLS = _names("fill_ zero_ zeros ones full zeros_like ones_like full_like arange linspace eye tril_indices")


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
    if any(_turned(one, shape) for one in large):
        return [(name, max(plain, round(LEAST + call.each(count, _TURNED))))]
    return [(name, max(plain, call.strided(count * _narrow(shape))))]


def _turned(one: Operand, other: Operand) -> bool:
    """Whether what lies side by side in one tensor lies apart in the other: a transposition."""
    mine, its = ({dim for dim, length in enumerate(it[0]) if length > 1 and it[2][dim] == 1} for it in (one, other))
    spread = any(length > 1 and stride == 0 for length, stride in zip(one[0], one[2], strict=True))
    return one[0] == other[0] and not spread and bool(mine) and bool(its) and not mine & its


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
    rate = _DRAWN_NORMAL if "norm" in call.name or call.name.startswith("randn") else _DRAWN
    streamed = size(target) / (call.bandwidth * call.device.efficiency.streaming)
    return [(f"random_{call.name}", round(1_500 + max(streamed, call.each(elements(target), rate))))]


def dropout(call: Call) -> list[Kernel]:
    streamed = call.moved() / (call.bandwidth * call.device.efficiency.rows)
    drawn = 0.0 if call.name.endswith("backward") else call.each(elements(call.inputs[0]), _DRAWN)
    return [("fused_dropout", round(1_200 + max(streamed, drawn)))]


def concatenate(call: Call) -> list[Kernel]:
    """Narrow elements of strided tensors are moved one by one."""
    count, efficiency = sum(map(elements, call.inputs)), call.device.efficiency
    if all(contiguous(one) for one in call.inputs):
        return [("concatenate", call.streamed(2 * total(call.inputs), efficiency.streaming))]
    moved = call.streamed(2 * total(call.inputs), efficiency.mixed)
    return [("concatenate", max(moved, call.strided(round(1.3 * count))))]


TRAFFIC_FAMILIES: dict[str, Callable[[Call], list[Kernel]]] = {
    **dict.fromkeys(("copy_", "_to_copy", "clone", "to", "contiguous"), copy),
    **dict.fromkeys(_FILLS, fill),
    **dict.fromkeys(_RANDOM, draw),
    **dict.fromkeys(("native_dropout", "_fused_dropout", "dropout", "native_dropout_backward"), dropout),
    **dict.fromkeys(("cat", "stack"), concatenate),
}


# Operators that gather many elements into few: sums, softmaxes, losses, sorts and scans.
#
# Numbers in capitals were fitted to kernels of an H200: those of training steps, and those of plain
# shapes in tests/gpu/truth/operator_costs.json.gz. Rates are elements a nanosecond a multiprocessor.

REDUCTIONS = (
    "sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "any", "all", "norm",
    "linalg_vector_norm", "var", "std", "var_mean", "std_mean", "logsumexp", "nansum", "aminmax", "median",
    "count_nonzero",
)  # fmt: skip
_COLUMNS_LEAST = 7_000
"""The shortest sum over rows: two stages, and a wait between them."""
_SUMS, _COMPARES, _PLACES = 15.0, 11.0, 6.6
_RATES = {
    **dict.fromkeys(("amax", "amin", "any", "all"), _COMPARES),
    **dict.fromkeys(("argmax", "argmin", "max", "min", "aminmax", "var", "std", "var_mean", "std_mean"), _PLACES),
}
_NARROW = 512
"""Rows that are shorter take twice as long an element."""
_ONE_BLOCK, _ALONE, _SEVERAL = 100_000, 0.08, 4_500
"""Up to so many elements one block sums up, at so many nanoseconds each; more take several blocks, and meet."""
_IN_REGISTERS, _IN_CACHE = 1024, 16_384
"""Elements of a row of softmax that are read once; and those that are found again when they are read once more."""
_WIDE, _WIDE_BACKWARD, _WIDE_RATE = 0.47, 0.62, 4.1
_SORT_KERNEL, _SORT_RATE, _SORTED_AT_ONCE = 3_500, 1.25, 4_096
_TOPK_START, _TOPK_ROW, _TOPK_BYTES = 18_000, 12.0, 2.0
_SCAN_RATE = 2.4


def reduce(call: Call) -> list[Kernel]:
    """Over everything, over rows, or over columns, of which many are needed to be fast."""
    source, name = call.inputs[0], f"reduce_{call.name}"
    columns = _columns(call, source)
    if columns:
        share = columns_share(call.device, max(columns, sum(map(elements, call.outputs))))
        kernels = [(name, call.streamed(total(call.inputs) + total(call.outputs), share, _COLUMNS_LEAST))]
        return [("Memset (Device)", 800), *kernels] if elements(source) > 1 << 20 else kernels
    count, results = elements(source), max(1, sum(map(elements, call.outputs)))
    if results > 1 or (call.asked.get("dim") is not None and len(source[0]) > 1):
        return [(name, _rows(call, source, count / results))]
    if count <= _ONE_BLOCK:
        return [(name, round(2_000 + count * _ALONE))]
    return [("Memset (Device)", 800), (name, _SEVERAL + round(size(source) / (call.bandwidth * 0.9)))]


def _rows(call: Call, source: Operand, width: float) -> int:
    rate = _RATES.get(call.name, _SUMS) / (1 if width >= _NARROW else 2)
    streamed = size(source) / (call.bandwidth * call.device.efficiency.rows)
    return round(2_000 + max(streamed, call.each(elements(source), rate)))


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
    """Rows that fit into registers are read once, others again and again."""
    backward, source = call.name.endswith("backward_data"), call.inputs[0]
    width = source[0][-1] if source[0] else 1
    efficiency = call.device.efficiency
    share = efficiency.streaming if backward or width <= _IN_REGISTERS else efficiency.softmax
    if width > _IN_CACHE:
        share = _WIDE_BACKWARD if backward else _WIDE
    streamed = call.moved() / (call.bandwidth * share)
    least = call.each(elements(source), _WIDE_RATE) if width > _IN_CACHE else 0.0
    return [(call.name.strip("_"), round(2_500 + max(streamed, least)))]


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


def sort(call: Call) -> list[Kernel]:
    """A few bits of the keys at a time: wider types take more passes."""
    source = call.inputs[0]
    count, passes = elements(source), 2 * item_size(source[1])
    if count <= _SORTED_AT_ONCE:
        return [("sort_small", 18_000)]
    once = round(_SORT_KERNEL + call.each(count, _SORT_RATE))
    return [("sort_histogram", 6_000), ("sort_scan", 4_000), *[("sort_pass", once)] * passes]


def topk(call: Call) -> list[Kernel]:
    """The least of the chosen is found a few bits at a time, row by row."""
    source = call.inputs[0]
    rows = elements(source) / max(1, source[0][-1]) if source[0] else 1
    searched = call.each(size(source), _TOPK_BYTES)
    return [("topk_gather", round(_TOPK_START + rows * _TOPK_ROW + searched)), ("topk_sort", 3_000)]


def unique(call: Call) -> list[Kernel]:
    return [*[("unique_part", 1_500)] * 3, *sort(call)]


def scan(call: Call) -> list[Kernel]:
    return [("scan_init", 1_000), ("scan", round(2_500 + call.each(elements(call.inputs[0]), _SCAN_RATE)))]


REDUCTIONS_FAMILIES: dict[str, Callable[[Call], list[Kernel]]] = {
    **dict.fromkeys(REDUCTIONS, reduce),
    **dict.fromkeys(
        ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "softmax", "log_softmax"),
        softmax,
    ),
    **dict.fromkeys(("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"), nll_loss),
    **dict.fromkeys(("sort", "argsort", "kthvalue"), sort),
    "topk": topk,
    **dict.fromkeys(("_unique2", "unique_dim", "unique_consecutive"), unique),
    **dict.fromkeys(("cumsum", "cumsum_", "cumprod", "cummax", "logcumsumexp"), scan),
}


# Normalisations: a pass for the statistics, a pass for the result, and what their gradients take.
#
# Numbers in capitals were fitted to kernels of an H200 at plain shapes: tests/gpu/truth/operator_costs.json.gz.

_ROW, _ROW_BACKWARD = 1.4, 0.95
"""Nanoseconds a row of layer norm, however short it is."""
_HALF = 3.3
"""Elements a nanosecond a multiprocessor: of half the bytes a normalised element takes no less than this."""
_SUMMED, _SUMMED_LONG, _LONG, _WIDE_NORM = 3.0, 4.3, 8_192, 1_024
"""Nanoseconds a row for the gradients of weights, and where there are more rows than so many; up to which width."""


def layer_norm(call: Call) -> list[Kernel]:
    source = call.inputs[0]
    moved = size(source) + size(call.outputs[0] if call.outputs else source)
    streamed = moved / (call.bandwidth * call.device.efficiency.norm)
    return [("layer_norm", round(2_500 + max(streamed, _norm_rows(call) * _ROW, call.each(elements(source), _HALF))))]


def layer_norm_backward(call: Call) -> list[Kernel]:
    moved, efficiency = size(call.inputs[0]) + size(call.inputs[1]), call.device.efficiency
    streamed = 1.5 * moved / (call.bandwidth * efficiency.streaming)
    kernels = [("layer_norm_grad_input", round(2_000 + max(streamed, _norm_rows(call) * _ROW_BACKWARD)))]
    if len(call.outputs) > 1:
        rows, wide = _norm_rows(call), max(1.0, call.inputs[0][0][-1] / _WIDE_NORM if call.inputs[0][0] else 1.0)
        summed = rows * wide * (_SUMMED if rows < _LONG else _SUMMED_LONG)
        streamed = moved / (call.bandwidth * efficiency.streaming)
        kernels.append(("layer_norm_grad_weight", round(4_000 + max(streamed, summed))))
    return kernels


def _norm_rows(call: Call) -> float:
    shape = call.inputs[0][0]
    return elements(call.inputs[0]) / max(1, shape[-1]) if shape else 1.0


@dataclass(frozen=True)
class Pass:
    """One kernel over an image: how often it moves the bytes, at which share of the bandwidth."""

    name: str
    times: float
    share: str
    least: int = 2_000

    def kernel(self, call: Call) -> Kernel:
        moved = self.times * size(call.inputs[0])
        return self.name, call.streamed(moved, getattr(call.device.efficiency, self.share), self.least)


@dataclass(frozen=True)
class Strided:
    """One kernel over an image whose elements are reached one by one."""

    name: str
    share: float = 1.0

    def kernel(self, call: Call) -> Kernel:
        return self.name, call.strided(elements(call.inputs[0]) * self.share)


@dataclass(frozen=True)
class Fixed:
    """One kernel over a value a channel."""

    name: str
    work: int

    def kernel(self, call: Call) -> Kernel:
        return self.name, self.work


@dataclass(frozen=True)
class Channels:
    """One kernel with a block for each channel, nanoseconds an element: few channels leave most of the device idle."""

    name: str
    each: float

    def kernel(self, call: Call) -> Kernel:
        shape = call.inputs[0][0]
        channels = shape[1] if len(shape) > 1 else 1
        alone = elements(call.inputs[0]) / max(1, channels) * self.each
        return self.name, round(3_000 + call.waves(channels) * alone)


_Passes = tuple[Pass | Strided | Fixed | Channels, ...]
GROUP_NORM: _Passes = (
    Pass("group_norm_moments", 1, "norm", 6_000),
    Fixed("group_norm_parameters", 1_500),
    Strided("group_norm_apply", 0.9),
)
GROUP_NORM_BACKWARD: _Passes = (
    Pass("group_norm_sums", 2, "norm", 4_000), Fixed("group_norm_parameters", 3_400),
    Strided("group_norm_grad_input", 1.2), Fixed("group_norm_grad_weight", 4_000),
)  # fmt: skip
BATCH_NORM: _Passes = (
    Pass("batch_norm_statistics", 1, "statistics", 5_000), Fixed("batch_norm_running", 1_300),
    Pass("batch_norm_transform", 2, "columns"),
)  # fmt: skip
BATCH_NORM_BACKWARD: _Passes = (
    Pass("batch_norm_reduce", 2, "norm", 4_000), Pass("batch_norm_grad_input", 3, "heavy", 3_000),
)  # fmt: skip
BATCH_NORM_FIRST: _Passes = (
    Channels("batch_norm_statistics", 0.5), Fixed("batch_norm_running", 1_300), Strided("batch_norm_transform"),
)  # fmt: skip
"""Channels first, and half precision: PyTorch's own kernels; in full precision cuDNN does it in one."""
BATCH_NORM_FIRST_BACKWARD: _Passes = (Channels("batch_norm_backward", 1.0),)
BATCH_NORM_CUDNN: _Passes = (Channels("batch_norm_cudnn", 0.43),)
BATCH_NORM_CUDNN_BACKWARD: _Passes = (Channels("batch_norm_cudnn_backward", 0.8),)


def _passes(passes: _Passes) -> Callable[[Call], list[Kernel]]:
    return lambda call: [one.kernel(call) for one in passes]


def _batch_norm(last: _Passes, first: _Passes, full: _Passes) -> Callable[[Call], list[Kernel]]:
    """By whether channels come last in memory, and by the type."""

    def kernels(call: Call) -> list[Kernel]:
        image = call.inputs[0]
        by_rows = channels_last(image) or len(image[0]) == 2
        passes = last if by_rows else full if item_size(image[1]) >= 4 else first
        return [one.kernel(call) for one in passes]

    return kernels


batch_norm = _batch_norm(BATCH_NORM, BATCH_NORM_FIRST, BATCH_NORM_CUDNN)
batch_norm_backward = _batch_norm(BATCH_NORM_BACKWARD, BATCH_NORM_FIRST_BACKWARD, BATCH_NORM_CUDNN_BACKWARD)

NORMS_FAMILIES: dict[str, Callable[[Call], list[Kernel]]] = {
    **dict.fromkeys(("native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm"), layer_norm),
    **dict.fromkeys(
        ("native_layer_norm_backward", "_fused_rms_norm_backward", "rms_norm_backward"), layer_norm_backward
    ),
    "native_group_norm": _passes(GROUP_NORM),
    "native_group_norm_backward": _passes(GROUP_NORM_BACKWARD),
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm"), batch_norm
    ),
    **dict.fromkeys(
        ("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward"), batch_norm_backward
    ),
}


# Operators that read or write rows by their numbers: embeddings, indices, masks, scatters.
#
# Numbers in capitals were fitted to kernels of an H200: those of training steps, and those of plain
# shapes in tests/gpu/truth/operator_costs.json.gz. Rates are elements a nanosecond a multiprocessor.

_CACHE = 40 << 20
"""Bytes of a table that stay in the device's cache."""
_INDEX_ROW = 80.0
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
    found = min(rows, _rows_of(call)) * _INDEX_ROW / call.device.multiprocessors
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

INDEXING_FAMILIES: dict[str, Callable[[Call], list[Kernel]]] = {
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


# Operators over images that are no convolutions: pools, and changes of size.
#
# Rates, elements a nanosecond a multiprocessor, were fitted to kernels of an H200 at plain shapes:
# tests/gpu/truth/operator_costs.json.gz.

_POOLED, _POOLED_BACKWARD = {False: 5.4, True: 3.3}, {False: 2.4, True: 2.0}
"""Taps of an average, by whether channels come last."""
_MAXIMA = {False: 0.74, True: 1.3}
_PLANE, _PLANE_PIXEL = 175.0, 0.082
"""Nanoseconds an image's channel, and each of its pixels: all channels are walked by the same threads."""


def average(call: Call) -> list[Kernel]:
    rates = _POOLED_BACKWARD if call.name.endswith("backward") else _POOLED
    window = call.asked.get("kernel_size", ())
    taps = prod(window) if len(window) > 1 else (window[0] ** 2 if window else 9)
    image = call.inputs[0]
    return [(f"pool_{call.name}", round(LEAST + call.each(elements(image) * taps, rates[channels_last(image)])))]


def maxima_backward(call: Call) -> list[Kernel]:
    image = largest((*call.inputs, *call.outputs))
    return [
        ("fill", 1_500),
        ("pool_backward", round(LEAST + call.each(elements(image), _MAXIMA[channels_last(image)]))),
    ]


def nearest(call: Call) -> list[Kernel]:
    image = largest((*call.inputs, *call.outputs))
    times = 2.0 if channels_last(image) and not call.name.endswith("backward") else 1.0
    return [(f"resize_{call.name}", call.strided(elements(image) * times))]


def bilinear(call: Call) -> list[Kernel]:
    image = call.outputs[0] if call.outputs else call.inputs[0]
    if call.name.endswith("backward"):
        return [("fill", 1_500), (f"resize_{call.name}", call.strided(1.4 * elements(image)))]
    if channels_last(image):
        return [(f"resize_{call.name}", call.strided(7.0 * elements(image)))]
    planes = prod(image[0][:2])
    return [("resize_planes", round(LEAST + planes * (_PLANE + _PLANE_PIXEL * prod(image[0][2:]))))]


def strided(call: Call) -> list[Kernel]:
    """Elements that are moved one by one."""
    return [(f"move_{call.name}", call.strided(elements(largest((*call.outputs, *call.inputs)))))]


IMAGES_FAMILIES: dict[str, Callable[[Call], list[Kernel]]] = {
    **dict.fromkeys(("avg_pool2d", "avg_pool2d_backward", "avg_pool3d", "avg_pool3d_backward"), average),
    "max_pool2d_with_indices_backward": maxima_backward,
    **dict.fromkeys(("upsample_nearest2d", "upsample_nearest2d_backward", "_upsample_nearest_exact2d"), nearest),
    **dict.fromkeys(("upsample_bilinear2d", "upsample_bilinear2d_backward", "grid_sampler_2d"), bilinear),
    **dict.fromkeys(("flip", "roll", "repeat", "tril", "tril_", "triu", "triu_", "where", "col2im", "im2col"), strided),
}


CHUNK, BLOCKS = 65_536, 320
"""Elements of a block, and blocks of a launch, of PyTorch's multi-tensor kernels."""
_MOST_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36}
_ALONE_LIST = {1: 0.15, 2: 0.24, 3: 0.27}
"""Nanoseconds that an element takes of a block, by the number of lists: few blocks leave the device idle."""
_ALONE_FUSED = 1.1


def multi_tensor(call: Call) -> list[Kernel]:
    """foreach and fused optimizers: blocks of all tensors in as few launches as their tables hold."""
    lists = max(1, int(call.asked.get("lists", 0)) or _lists(call))
    count = max(1, len(call.inputs) // lists)
    first = call.inputs[:count]
    deep = lists + (1 if call.outputs and not call.name.endswith("_") else 0)
    launches = _launches(first, _MOST_TENSORS.get(deep, 30))
    moved = total(call.inputs) + (total(call.outputs) if deep > lists else total(first) * _written(call, lists))
    share = moved / max(1, sum(launches)) / (call.bandwidth * call.device.efficiency.foreach)
    alone = _ALONE_FUSED if call.name.startswith("_fused_") else _ALONE_LIST.get(deep, 0.3)
    longest = alone * min(CHUNK, max(map(elements, first), default=0))
    least = 3_000 if call.name.startswith("_fused_") else 1_200
    return [(f"multi_tensor{call.name.rstrip('_')}", round(least + max(part * share, longest))) for part in launches]


def _written(call: Call, lists: int) -> int:
    """How many lists are written: fused Adam writes the parameters and both averages."""
    if not call.name.startswith("_fused_"):
        return 1
    return max(1, min(lists, 4) - 1)


def _lists(call: Call) -> int:
    """How many lists of equal shapes the inputs may be made of."""
    shapes = [one[0] for one in call.inputs]
    for lists in (5, 4, 3, 2):
        part = len(shapes) // lists
        same = len(shapes) == part * lists and all(shapes[i] == shapes[i % part] for i in range(len(shapes)))
        if part and same and len(set(shapes)) > 1:
            return lists
    return 1


def _launches(tensors: tuple[Operand, ...], most: int) -> list[int]:
    """Elements of each launch."""
    launches, blocks, held, here = [], 0, 0, 0
    for tensor in tensors:
        left = elements(tensor)
        held += 1
        while left > 0:
            part = min(left, CHUNK)
            left -= part
            here += part
            blocks += 1
            if blocks == BLOCKS or (held == most and left == 0):
                launches.append(here)
                blocks, here, held = 0, 0, int(left > 0)
    return [*launches, here] if here or not launches else launches
