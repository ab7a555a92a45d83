"""Operators that gather many elements into few: sums, softmaxes, losses, sorts and scans.

Numbers in capitals were fitted to kernels of an H200: those of training steps, and those of plain
shapes in tests/gpu/truth/operator_costs.json.gz. Rates are elements a nanosecond a multiprocessor.
"""

from __future__ import annotations

from collections.abc import Callable

from keepbusy.virtual.call import Call
from keepbusy.virtual.convolutions import columns_share
from keepbusy.virtual.operands import Kernel, Operand, elements, item_size, size, total

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


FAMILIES: dict[str, Callable[[Call], list[Kernel]]] = {
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
