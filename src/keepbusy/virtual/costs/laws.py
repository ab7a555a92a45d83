"""How long operators take whose time is the bytes they move or the elements they reach: a law a family.

The figures are those of figures.toml. Which operator follows which law stands in operator_costs.py.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from keepbusy.virtual.costs.device import Device
from keepbusy.virtual.costs.figures import figures
from keepbusy.virtual.costs.operator_call import (
    SHORTEST,
    Call,
    Kernel,
    Operand,
    channels_last,
    contiguous,
    dense,
    elements,
    item_size,
    largest,
    lasts,
    same_layout,
    size,
    total,
)

ELEMENTWISE, RANDOM, DROPOUT = figures("elementwise"), figures("random"), figures("dropout")
FILL, CONCATENATE = figures("fill"), figures("concatenate")
REDUCTIONS, SOFTMAX, NLL_LOSS = figures("reductions"), figures("softmax"), figures("nll_loss")
SORT, TOPK, UNIQUE, SCAN = figures("sort"), figures("topk"), figures("unique"), figures("scan")
LAYER_NORM, PASSES = figures("layer_norm"), figures("passes")
INDEXING, EMBEDDING_BACKWARD = figures("indexing"), figures("embedding_backward")
BINCOUNT, NONZERO = figures("bincount"), figures("nonzero")
POOLS, RESIZING, LISTS = figures("pools"), figures("resizing"), figures("lists")

_HEAVY = {
    "gelu", "gelu_", "gelu_backward", "pow", "pow_", "erf", "erf_", "erfinv", "erfinv_", "tanh", "tanh_",
    "tanh_backward", "lgamma", "digamma", "mish", "mish_backward", "softplus", "softplus_backward", "atan2", "sin",
    "cos", "exp", "log", "log1p", "expm1",
}  # fmt: skip
"""Elementwise operators whose function takes longer than the bytes."""
_INDICES, _MASKS = ("int64", "int32"), ("bool", "uint8")

# Bytes: elementwise operators, copies, fills, random numbers


def elementwise(call: Call) -> list[Kernel]:
    """The usual case, also for operators that nobody described: one kernel, all bytes once."""
    operands = (*call.inputs, *call.outputs)
    shape, efficiency = largest(operands), call.device.efficiency
    large = [one for one in operands if elements(one) * 16 > elements(shape)]
    name, share = f"elementwise_{call.name}", _elementwise_share(call, large)
    start = SHORTEST if share > efficiency.mixed else ELEMENTWISE.converting_start
    plain = call.streamed(call.moved(), share, start)
    broadcasts = any(1 < elements(one) < elements(shape) for one in call.inputs)  # more than a scalar
    if dense(shape) and not broadcasts and all(same_layout(one, shape) for one in large):
        return [(name, plain)]
    count = elements(shape)
    if any(_transposes(one, shape) for one in large):
        return [(name, max(plain, lasts(SHORTEST, call.each(count, ELEMENTWISE.transposing))))]
    # wide elements are moved as fast as narrow ones until the bytes are the limit
    return [(name, max(plain, call.strided(count * (1.0 if item_size(shape[1]) <= 4 else ELEMENTWISE.wide))))]


def _elementwise_share(call: Call, large: list[Operand]) -> float:
    efficiency = call.device.efficiency
    if len({one[1] for one in large if one[1] not in _MASKS}) > 1:
        to_half = call.name == "copy" and call.outputs[0][1] in ("float16", "bfloat16")
        return efficiency.streaming if to_half else efficiency.mixed
    heavy = call.name in _HEAVY and bool(large) and item_size(large[0][1]) <= 2  # wider types are waited for anyway
    return efficiency.heavy if heavy else efficiency.streaming


def _transposes(one: Operand, other: Operand) -> bool:
    """Whether what lies side by side in one tensor lies apart in the other."""
    mine, its = ({dim for dim, length in enumerate(it[0]) if length > 1 and it[2][dim] == 1} for it in (one, other))
    spread = any(length > 1 and stride == 0 for length, stride in zip(one[0], one[2], strict=True))
    return one[0] == other[0] and not spread and bool(mine) and bool(its) and not mine & its


def copy(call: Call) -> list[Kernel]:
    """To `self`, which is written and not read, whether it is given as an input or as the output."""
    target = (*call.outputs, *call.inputs)[0]
    return elementwise(replace(call, name="copy", inputs=call.inputs[-1:], outputs=(target,)))


def nothing(_call: Call) -> list[Kernel]:
    """A view, or memory that nobody fills."""
    return []


def fill(call: Call) -> list[Kernel]:
    target = largest((*call.inputs, *call.outputs))
    return [("fill", call.streamed(size(target), call.device.efficiency.streaming, FILL.start))]


def clear(call: Call) -> Kernel:
    """The results are zeroed before something is added to them."""
    return "fill", call.streamed(total(call.outputs), call.device.efficiency.streaming)


def draw(call: Call) -> list[Kernel]:
    target = largest((*call.outputs, *call.inputs))
    rate = RANDOM.normal if "norm" in call.name or call.name.startswith("randn") else RANDOM.other
    streaming = call.streaming(size(target), call.device.efficiency.streaming)
    return [(f"random_{call.name}", lasts(RANDOM.start, streaming, call.each(elements(target), rate)))]


def dropout(call: Call) -> list[Kernel]:
    drawn = 0.0 if call.name.endswith("backward") else call.each(elements(call.inputs[0]), RANDOM.other)
    streaming = call.streaming(call.moved(), call.device.efficiency.rows)
    return [("fused_dropout", lasts(DROPOUT.start, streaming, drawn))]


def concatenate(call: Call) -> list[Kernel]:
    efficiency, moved = call.device.efficiency, 2 * total(call.inputs)
    if all(contiguous(one) for one in call.inputs):
        return [("concatenate", call.streamed(moved, efficiency.streaming))]
    apart = call.strided(round(CONCATENATE.apart * sum(map(elements, call.inputs))))
    return [("concatenate", max(call.streamed(moved, efficiency.mixed), apart))]


def move(call: Call) -> list[Kernel]:
    """Elements that are moved one by one."""
    return [(f"move_{call.name}", call.strided(elements(largest((*call.outputs, *call.inputs)))))]


# Many elements into few: sums, softmaxes, losses, sorts and scans


def reduce(call: Call) -> list[Kernel]:
    """Over everything, over rows, or over columns, of which many are needed to be fast."""
    source, name, law = call.inputs[0], f"reduce_{call.name}", REDUCTIONS
    count, results = elements(source), max(1, sum(map(elements, call.outputs)))
    cleared: Kernel = ("Memset (Device)", law.clearing)
    columns = _columns(call, source)
    if columns:
        share = columns_share(call.device, max(columns, sum(map(elements, call.outputs))))
        summed = (name, call.streamed(total(call.inputs) + total(call.outputs), share, law.columns_start))
        return [cleared, summed] if count > law.large else [summed]
    if results > 1 or (call.arguments.get("dim") is not None and len(source[0]) > 1):
        rate = law.rate.get(call.name, law.rate["usual"]) / (1 if count / results >= law.narrow else 2)
        streaming = call.streaming(size(source), call.device.efficiency.rows)
        return [(name, lasts(law.start, streaming, call.each(count, rate)))]
    if count <= law.one_block:
        return [(name, lasts(law.start, count * law.one_block_each))]
    return [cleared, (name, call.streamed(size(source), law.several_share, law.several_start))]


def _columns(call: Call, source: Operand) -> int:
    """How many elements lie side by side that are not summed with each other; 0 if they are."""
    dims = call.arguments.get("dim")
    if dims is None or not source[0]:
        return 0
    listed = (dims,) if isinstance(dims, int) else tuple(dims)
    summed = {dim % len(source[0]) for dim in listed if isinstance(dim, int)} or set(range(len(source[0])))
    inner = min(range(len(source[0])), key=lambda dim: (source[2][dim] if source[0][dim] > 1 else 1 << 60, -dim))
    return 0 if inner in summed else source[0][inner]


def columns_share(device: Device, columns: int) -> float:
    """Of the memory bandwidth, what a sum over rows reaches: few columns leave most of the device idle."""
    return device.efficiency.columns * min(1.0, max(REDUCTIONS.columns_worst, columns / REDUCTIONS.columns_many))


def softmax(call: Call) -> list[Kernel]:
    """Rows that fit into registers are read once, others again and again."""
    backward, source, efficiency = call.name.endswith("backward_data"), call.inputs[0], call.device.efficiency
    width = source[0][-1] if source[0] else 1
    name, moved = call.name.strip("_"), call.moved()
    if width > SOFTMAX.cache:
        share = SOFTMAX.beyond_backward if backward else SOFTMAX.beyond
        least = call.each(elements(source), SOFTMAX.beyond_rate)
        return [(name, lasts(SOFTMAX.start, call.streaming(moved, share), least))]
    share = efficiency.streaming if backward or width <= SOFTMAX.registers else efficiency.softmax
    return [(name, call.streamed(moved, share, SOFTMAX.start))]


def nll_loss(call: Call) -> list[Kernel]:
    rows = elements(call.inputs[min(1, len(call.inputs) - 1)])
    return [("nll_loss_forward", lasts(NLL_LOSS.start, NLL_LOSS.row * rows))]


def nll_loss_backward(call: Call) -> list[Kernel]:
    rows = elements(call.inputs[min(len(call.inputs) - 1, 2 if len(call.inputs) > 2 else 1)])
    return [clear(call), ("nll_loss_backward", lasts(NLL_LOSS.start_backward, NLL_LOSS.row_backward * rows))]


def sort(call: Call) -> list[Kernel]:
    """A few bits of the keys at a time: wider types take more passes."""
    source = call.inputs[0]
    if elements(source) <= SORT.small:
        return [("sort_small", SORT.small_start)]
    once = lasts(SORT.pass_start, call.each(elements(source), SORT.rate))
    passes = 2 * item_size(source[1])
    return [("sort_histogram", SORT.histogram), ("sort_scan", SORT.scan), *[("sort_pass", once)] * passes]


def topk(call: Call) -> list[Kernel]:
    """The least of the chosen is found a few bits at a time, row by row."""
    source = call.inputs[0]
    found = lasts(TOPK.start + rows_of(source) * TOPK.row, call.each(size(source), TOPK.rate))
    return [("topk_gather", found), ("topk_sort", TOPK.sorting)]


def unique(call: Call) -> list[Kernel]:
    return [*[("unique_part", UNIQUE.part)] * 3, *sort(call)]


def scan(call: Call) -> list[Kernel]:
    scanned = lasts(SCAN.start, call.each(elements(call.inputs[0]), SCAN.rate))
    return [("scan_init", SCAN.init), ("scan", scanned)]


def rows_of(one: Operand) -> float:
    return elements(one) / max(1, one[0][-1]) if one[0] else 1.0


# Normalisations: a pass for the statistics, a pass for the result, and what their gradients take


def layer_norm(call: Call) -> list[Kernel]:
    source, law = call.inputs[0], LAYER_NORM
    moved = size(source) + size(call.outputs[0] if call.outputs else source)
    streaming = call.streaming(moved, call.device.efficiency.norm)
    rows = rows_of(source) * law.row
    return [("layer_norm", lasts(law.start, streaming, rows, call.each(elements(source), law.rate)))]


def layer_norm_backward(call: Call) -> list[Kernel]:
    source, law, efficiency = call.inputs[0], LAYER_NORM, call.device.efficiency
    moved, rows = size(source) + size(call.inputs[1]), rows_of(source)
    streaming = call.streaming(1.5 * moved, efficiency.streaming)
    kernels = [("layer_norm_grad_input", lasts(law.grad_input_start, streaming, rows * law.grad_input_row))]
    if len(call.outputs) > 1:
        wider = max(1.0, source[0][-1] / law.wide if source[0] else 1.0)
        summed = rows * wider * (law.grad_weight_row if rows < law.long else law.grad_weight_row_long)
        streaming = call.streaming(moved, efficiency.streaming)
        kernels.append(("layer_norm_grad_weight", lasts(law.grad_weight_start, streaming, summed)))
    return kernels


def group_norm(call: Call) -> list[Kernel]:
    return _passes(call, call.name.removeprefix("native_"))


def batch_norm(call: Call) -> list[Kernel]:
    """By whether channels come last in memory, and by the type."""
    image = call.inputs[0]
    by_rows = channels_last(image) or len(image[0]) == 2
    kind = "last" if by_rows else "cudnn" if item_size(image[1]) >= 4 else "first"
    return _passes(call, f"batch_norm_{kind}{'_backward' if call.name.endswith('backward') else ''}")


def _passes(call: Call, name: str) -> list[Kernel]:
    """The kernels of figures.toml's [passes]."""
    image = call.inputs[0]
    channels = image[0][1] if len(image[0]) > 1 else 1
    kernels: list[Kernel] = []
    for one in getattr(PASSES, name):
        if "bytes" in one:
            share = getattr(call.device.efficiency, one["share"])
            spent = call.streamed(one["bytes"] * size(image), share, one["start"])
        elif "apart" in one:
            spent = call.strided(elements(image) * one["apart"])
        elif "channel" in one:
            waves = max(1.0, channels / call.device.multiprocessors)
            spent = lasts(one["start"], waves * (elements(image) / max(1, channels) * one["channel"]))
        else:
            spent = one["start"]
        kernels.append((one["kernel"], spent))
    return kernels


# What is found by number: embeddings, indices, masks, scatters


def gather(call: Call) -> list[Kernel]:
    """Rows of a table, found by their numbers."""
    written = total(call.outputs or call.inputs[:1])
    if total(call.inputs[:1]) > INDEXING.cache:
        streaming = 2 * written / INDEXING.beyond / call.device.memory.bandwidth
    else:
        streaming = INDEXING.cached * written / call.device.efficiency.streaming / call.device.memory.bandwidth
    numbers = max((elements(one) for one in call.inputs if one[1] in _INDICES), default=0)
    # no more rows than the result has: `gather` gives a number for every element
    rows = min(numbers, rows_of((call.outputs or call.inputs)[0]))
    found = rows * INDEXING.row / call.device.multiprocessors
    return [(f"gather_{call.name}", lasts(INDEXING.start, streaming, found))]


def index(call: Call) -> list[Kernel]:
    """By numbers, or by a mask, whose places are numbers too."""
    if not any(one[1] in _MASKS for one in call.inputs[1:]):
        return gather(call)
    found = call.outputs[0][0][0] if call.outputs and call.outputs[0][0] else 1
    rows = gather(replace(call, inputs=(*call.inputs, ((found,), "int64", (1,)))))
    return [*_places_of_masks(call), *rows]


def masked_select(call: Call) -> list[Kernel]:
    return [*_places_of_masks(call), ("index_arithmetic", INDEXING.arithmetic), *gather(call)]


def _places_of_masks(call: Call) -> list[Kernel]:
    """A mask is made a list of places first."""
    masks = [one for one in call.inputs[1:] if one[1] in _MASKS]
    return [kernel for mask in masks for kernel in nonzero(replace(call, inputs=(mask,)))]


def nonzero(call: Call) -> list[Kernel]:
    """Count, read the count on the host (the caller's part), then write the places."""
    read = call.streamed(size(call.inputs[0]), call.device.efficiency.rows, NONZERO.start)
    counted: list[Kernel] = [("nonzero_count", read), ("nonzero_total", NONZERO.total), ("nonzero_init", NONZERO.init)]
    return [*counted, ("nonzero_write", NONZERO.write + read)]


def scatter(call: Call) -> list[Kernel]:
    return [(f"scatter_{call.name}", call.strided(elements(largest(call.inputs[1:] or call.inputs))))]


def index_add(call: Call) -> list[Kernel]:
    added = call.each(elements(call.inputs[-1]), INDEXING.added)
    return [(f"scatter_{call.name}", lasts(INDEXING.start, added))]


def index_put(call: Call) -> list[Kernel]:
    """Adding where indices may repeat means sorting them first; one value under a mask is a fill."""
    values = elements(call.inputs[-1])
    if call.inputs[-1][1] in _MASKS or (values == 1 and any(one[1] in _MASKS for one in call.inputs[1:])):
        return [("masked_fill", call.strided(elements(call.inputs[0])))]
    kernels = [(f"scatter_{call.name}", lasts(INDEXING.start, call.each(values, INDEXING.put)))]
    if call.arguments.get("accumulate", False):
        arithmetic: list[Kernel] = [("index_arithmetic", INDEXING.arithmetic)] * 6
        kernels = [*arithmetic, *[("index_sort", INDEXING.sorting)] * 10, *kernels]
    return [*_places_of_masks(call), *kernels]


def embedding_backward(call: Call) -> list[Kernel]:
    """Few indices are added at once; many are sorted first."""
    grad, law, share = call.inputs[0], EMBEDDING_BACKWARD, call.device.efficiency.random
    count = elements(call.inputs[-1])
    if count <= law.small:
        return [clear(call), ("embedding_grad", lasts(law.small_start, law.small_each * count))]
    return [
        clear(call),
        *[("embedding_sort", law.sort)] * law.sort_kernels,
        ("embedding_grad_weight", call.streamed(size(grad), share, law.weight_start)),
        ("embedding_scatter", call.streamed(min(total(call.outputs), size(grad)), share, law.scatter_start)),
    ]


def one_hot(call: Call) -> list[Kernel]:
    return [clear(call), ("scatter", INDEXING.scatter)]


def bincount(call: Call) -> list[Kernel]:
    counted = lasts(BINCOUNT.start, BINCOUNT.each * elements(call.inputs[0]))
    return [*[("reduce_extremes", BINCOUNT.extremes)] * 4, ("bincount", counted)]


# Images: pools, and changes of size


def average(call: Call) -> list[Kernel]:
    window, image = call.arguments.get("kernel_size", ()), call.inputs[0]
    taps = prod(window) if len(window) > 1 else (window[0] ** 2 if window else 9)
    backward = "_backward" if call.name.endswith("backward") else ""
    rate = getattr(POOLS, f"average{backward}{'_last' if channels_last(image) else ''}")
    return [(f"pool_{call.name}", lasts(SHORTEST, call.each(elements(image) * taps, rate)))]


def maxima_backward(call: Call) -> list[Kernel]:
    image = largest((*call.inputs, *call.outputs))
    rate = POOLS.maxima_last if channels_last(image) else POOLS.maxima
    return [("fill", POOLS.clearing), ("pool_backward", lasts(SHORTEST, call.each(elements(image), rate)))]


def nearest(call: Call) -> list[Kernel]:
    image = largest((*call.inputs, *call.outputs))
    times = RESIZING.nearest_last if channels_last(image) and not call.name.endswith("backward") else 1.0
    return [(f"resize_{call.name}", call.strided(elements(image) * times))]


def bilinear(call: Call) -> list[Kernel]:
    image = call.outputs[0] if call.outputs else call.inputs[0]
    if channels_last(image):
        return [(f"resize_{call.name}", call.strided(RESIZING.bilinear_last * elements(image)))]
    planes = prod(image[0][:2])
    resized = lasts(SHORTEST, planes * (RESIZING.plane + RESIZING.pixel * prod(image[0][2:])))
    return [("resize_planes", resized)]


def bilinear_backward(call: Call) -> list[Kernel]:
    image = call.outputs[0] if call.outputs else call.inputs[0]
    resized = call.strided(RESIZING.bilinear_backward * elements(image))
    return [("fill", RESIZING.clearing), (f"resize_{call.name}", resized)]


# Lists of tensors: foreach and fused optimizers, blocks of all of them in as few launches as their tables hold


def multi_tensor(call: Call) -> list[Kernel]:
    lists = max(1, int(call.arguments.get("lists", 0)) or _lists(call))
    first = call.inputs[: max(1, len(call.inputs) // lists)]
    fused, new = call.name.startswith("_fused_"), bool(call.outputs) and not call.name.endswith("_")
    # fused Adam writes the parameters and both averages, the others one list
    written = total(call.outputs) if new else total(first) * (max(1, min(lists, 4) - 1) if fused else 1)
    deep = lists + 1 if new else lists
    launches = _launches(first, LISTS.tensors[min(deep, len(LISTS.tensors)) - 1])
    share = (total(call.inputs) + written) / max(1, sum(launches))
    share /= call.device.memory.bandwidth * call.device.efficiency.foreach
    alone = LISTS.alone_fused if fused else LISTS.alone[min(deep, len(LISTS.alone)) - 1]
    longest = alone * min(LISTS.chunk, max(map(elements, first), default=0))
    start = LISTS.start_fused if fused else LISTS.start
    return [(f"multi_tensor{call.name.rstrip('_')}", lasts(start, part * share, longest)) for part in launches]


def _lists(call: Call) -> int:
    """How many lists of equal shapes the inputs may be made of."""
    shapes = [one[0] for one in call.inputs]
    for lists in (5, 4, 3, 2):
        part = len(shapes) // lists
        same = len(shapes) == part * lists and all(shapes[i] == shapes[i % part] for i in range(len(shapes)))
        if part and same and len(set(shapes)) > 1:
            return lists
    return 1


def _launches(tensors: tuple[Operand, ...], limit: int) -> list[int]:
    """Elements of each launch, which takes so many tensors and so many blocks."""
    launches, blocks, begun, count = [], 0, 0, 0
    for tensor in tensors:
        left = elements(tensor)
        begun += 1
        while left > 0:
            part = min(left, LISTS.chunk)
            left -= part
            count += part
            blocks += 1
            if blocks == LISTS.blocks or (begun == limit and left == 0):
                launches.append(count)
                blocks, count, begun = 0, 0, int(left > 0)
    return [*launches, count] if count or not launches else launches
