"""The kernels of operators: a law a family, with figures from figures.toml. operators.toml names each law's operators.

A product is cut into tiles, which the multiprocessors compute in waves; the last wave may be nearly empty. A long inner
dimension is split if that fills the waves. Other kernels take the time of the bytes that they move or of the elements
that they access.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from keepbusy.virtual.costs import figures
from keepbusy.virtual.costs.device import SHORTEST, Array, Call, Device, Kernel, NoLaw, largest, lasts, total

PRODUCTS, ATTENTION = figures("products"), figures("attention")
CONVOLUTIONS, RECURRENT = figures("convolutions"), figures("recurrent")
_TILES = tuple((rows, columns, share) for rows, columns, share in PRODUCTS.tiles)
_SIMT_TILES = (*_TILES, *((rows, columns, share) for rows, columns, share in PRODUCTS.small_tiles))
_TENSOR_CORES = ("float16", "bfloat16", "tfloat32", "float8", "int8", "float64")
_CONVOLUTION_CORES = ("float16", "bfloat16", "tfloat32", "float8", "int8")
ELEMENTWISE, RANDOM, DROPOUT = figures("elementwise"), figures("random"), figures("dropout")
FILL, CONCATENATE = figures("fill"), figures("concatenate")
REDUCTIONS, SOFTMAX, NLL_LOSS = figures("reductions"), figures("softmax"), figures("nll_loss")
SORT, TOPK, UNIQUE, SCAN = figures("sort"), figures("topk"), figures("unique"), figures("scan")
LAYER_NORM, PASSES = figures("layer_norm"), figures("passes")
INDEXING, EMBEDDING_BACKWARD = figures("indexing"), figures("embedding_backward")
BINCOUNT, NONZERO = figures("bincount"), figures("nonzero")
POOLS, RESIZING, LISTS = figures("pools"), figures("resizing"), figures("lists")

_INDICES, _MASKS = ("int64", "int32"), ("bool", "uint8")

# Bytes: elementwise operators, copies, fills, random numbers


def elementwise(call: Call) -> list[Kernel]:
    """The usual case, also for operators without a law: one kernel that moves all bytes once."""
    operands = (*call.inputs, *call.outputs)
    largest_array, efficiency = largest(operands), call.device.efficiency
    large = [array for array in operands if array.elements * 16 > largest_array.elements]
    name, share = f"elementwise_{call.name}", _elementwise_share(call, large)
    start = SHORTEST if share > efficiency.mixed else ELEMENTWISE.converting_start
    plain = call.streamed(call.moved(), share, start)
    broadcasts = any(1 < array.elements < largest_array.elements for array in call.inputs)  # apart from scalars
    if largest_array.dense and not broadcasts and all(array.lies_as(largest_array) for array in large):
        return [(name, plain)]
    count = largest_array.elements
    if any(_transposes(array, largest_array) for array in large):
        return [(name, max(plain, lasts(SHORTEST, call.each(count, ELEMENTWISE.transposing))))]
    # wide elements take as long as narrow ones until bytes are the limit
    return [(name, max(plain, call.strided(count * (1.0 if largest_array.item_size <= 4 else ELEMENTWISE.wide))))]


def _elementwise_share(call: Call, large: list[Array]) -> float:
    efficiency = call.device.efficiency
    if len({array.dtype for array in large if array.dtype not in _MASKS}) > 1:
        to_half = call.name == "copy" and call.outputs[0].dtype in ("float16", "bfloat16")
        return efficiency.streaming if to_half else efficiency.mixed
    # with wider types memory is the limit
    heavy = call.name in ELEMENTWISE.heavy and bool(large) and large[0].item_size <= 2
    return efficiency.heavy if heavy else efficiency.streaming


def _transposes(array: Array, other: Array) -> bool:
    """Whether neighbours in the memory of one tensor are apart in the other."""
    adjacent, other_adjacent = (
        {dim for dim, length in enumerate(tensor.shape) if length > 1 and tensor.strides[dim] == 1}
        for tensor in (array, other)
    )
    spread = any(length > 1 and stride == 0 for length, stride in zip(array.shape, array.strides, strict=True))
    apart = bool(adjacent) and bool(other_adjacent) and not adjacent & other_adjacent
    return array.shape == other.shape and not spread and apart


def copy(call: Call) -> list[Kernel]:
    """A copy to `self`, which is only written, whether it is given as an input or as the output."""
    target = call.result
    return elementwise(replace(call, name="copy", inputs=call.inputs[-1:], outputs=(target,)))


def nothing(_call: Call) -> list[Kernel]:
    """A view, or memory that is not filled."""
    return []


def fill(call: Call) -> list[Kernel]:
    target = largest((*call.inputs, *call.outputs))
    return [("fill", call.streamed(target.size, call.device.efficiency.streaming, FILL.start))]


def clear(call: Call) -> Kernel:
    """The kernel that zeroes results before values are added to them."""
    return "fill", call.streamed(total(call.outputs), call.device.efficiency.streaming)


def draw(call: Call) -> list[Kernel]:
    target = largest((*call.outputs, *call.inputs))
    rate = RANDOM.normal if "norm" in call.name or call.name.startswith("randn") else RANDOM.other
    streaming = call.streaming(target.size, call.device.efficiency.streaming)
    return [(f"random_{call.name}", lasts(RANDOM.start, streaming, call.each(target.elements, rate)))]


def dropout(call: Call) -> list[Kernel]:
    drawing = 0.0 if call.name.endswith("backward") else call.each(call.inputs[0].elements, RANDOM.other)
    streaming = call.streaming(call.moved(), call.device.efficiency.rows)
    return [("fused_dropout", lasts(DROPOUT.start, streaming, drawing))]


def concatenate(call: Call) -> list[Kernel]:
    efficiency, moved = call.device.efficiency, 2 * total(call.inputs)
    if all(array.contiguous for array in call.inputs):
        return [("concatenate", call.streamed(moved, efficiency.streaming))]
    scattered = call.strided(round(CONCATENATE.apart * sum(array.elements for array in call.inputs)))
    return [("concatenate", max(call.streamed(moved, efficiency.mixed), scattered))]


def move(call: Call) -> list[Kernel]:
    """Elements moved one by one."""
    return [(f"move_{call.name}", call.strided(largest((*call.outputs, *call.inputs)).elements))]


# Reductions, softmaxes, losses, sorts and scans


def reduce(call: Call) -> list[Kernel]:
    """A reduction of all elements, of rows, or of columns, which is fast only with many columns."""
    source, name, law = call.inputs[0], f"reduce_{call.name}", REDUCTIONS
    count, results = source.elements, max(1, sum(array.elements for array in call.outputs))
    cleared: Kernel = ("Memset (Device)", law.clearing)
    columns = _columns(call, source)
    if columns:
        share = columns_share(call.device, max(columns, sum(array.elements for array in call.outputs)))
        summed = (name, call.streamed(total(call.inputs) + total(call.outputs), share, law.columns_start))
        return [cleared, summed] if count > law.large else [summed]
    if results > 1 or (call.arguments.get("dim") is not None and len(source.shape) > 1):
        rate = law.rate.get(call.name, law.rate["usual"]) / (1 if count / results >= law.narrow else 2)
        streaming = call.streaming(source.size, call.device.efficiency.rows)
        return [(name, lasts(law.start, streaming, call.each(count, rate)))]
    if count <= law.one_block:
        return [(name, lasts(law.start, count * law.one_block_each))]
    return [cleared, (name, call.streamed(source.size, law.several_share, law.several_start))]


def _columns(call: Call, source: Array) -> int:
    """How many neighbours in memory belong to different sums; 0 if neighbours are summed."""
    dims, shape = call.arguments.get("dim"), source.shape
    if dims is None or not shape:
        return 0
    dim_list = (dims,) if isinstance(dims, int) else tuple(dims)
    summed = {dim % len(shape) for dim in dim_list if isinstance(dim, int)} or set(range(len(shape)))
    inner = min(range(len(shape)), key=lambda dim: (source.strides[dim] if shape[dim] > 1 else 1 << 60, -dim))
    return 0 if inner in summed else shape[inner]


def columns_share(device: Device, columns: int) -> float:
    """The share of the memory bandwidth that a sum over rows reaches: few columns leave most of the device idle."""
    return device.efficiency.columns * min(1.0, max(REDUCTIONS.columns_worst, columns / REDUCTIONS.columns_many))


def softmax(call: Call) -> list[Kernel]:
    """Rows that fit into registers are read once, longer ones several times."""
    backward, source, efficiency = call.name.endswith("backward_data"), call.inputs[0], call.device.efficiency
    width = source.shape[-1] if source.shape else 1
    name, moved = call.name.strip("_"), call.moved()
    if width > SOFTMAX.cache:
        share = SOFTMAX.beyond_backward if backward else SOFTMAX.beyond
        element_limit = call.each(source.elements, SOFTMAX.beyond_rate)
        return [(name, lasts(SOFTMAX.start, call.streaming(moved, share), element_limit))]
    share = efficiency.streaming if backward or width <= SOFTMAX.registers else efficiency.softmax
    return [(name, call.streamed(moved, share, SOFTMAX.start))]


def nll_loss(call: Call) -> list[Kernel]:
    rows = call.inputs[min(1, len(call.inputs) - 1)].elements
    return [("nll_loss_forward", lasts(NLL_LOSS.start, NLL_LOSS.row * rows))]


def nll_loss_backward(call: Call) -> list[Kernel]:
    rows = call.inputs[min(len(call.inputs) - 1, 2 if len(call.inputs) > 2 else 1)].elements
    return [clear(call), ("nll_loss_backward", lasts(NLL_LOSS.start_backward, NLL_LOSS.row_backward * rows))]


def sort(call: Call) -> list[Kernel]:
    """A pass takes a few bits of the keys, so wider types need more passes."""
    source = call.inputs[0]
    if source.elements <= SORT.small:
        return [("sort_small", SORT.small_start)]
    once = lasts(SORT.pass_start, call.each(source.elements, SORT.rate))
    passes = 2 * source.item_size
    return [("sort_histogram", SORT.histogram), ("sort_scan", SORT.scan), *[("sort_pass", once)] * passes]


def topk(call: Call) -> list[Kernel]:
    """The smallest chosen element is found a few bits at a time, row by row."""
    source = call.inputs[0]
    selecting = lasts(TOPK.start + source.rows * TOPK.row, call.each(source.size, TOPK.rate))
    return [("topk_gather", selecting), ("topk_sort", TOPK.sorting)]


def unique(call: Call) -> list[Kernel]:
    return [*[("unique_part", UNIQUE.part)] * 3, *sort(call)]


def scan(call: Call) -> list[Kernel]:
    scanned = lasts(SCAN.start, call.each(call.inputs[0].elements, SCAN.rate))
    return [("scan_init", SCAN.init), ("scan", scanned)]


# Normalisations: a pass for the statistics, a pass for the result, and their gradients


def layer_norm(call: Call) -> list[Kernel]:
    source, law = call.inputs[0], LAYER_NORM
    moved = source.size + call.result.size
    streaming = call.streaming(moved, call.device.efficiency.norm)
    rows = source.rows * law.row
    return [("layer_norm", lasts(law.start, streaming, rows, call.each(source.elements, law.rate)))]


def layer_norm_backward(call: Call) -> list[Kernel]:
    source, law, efficiency = call.inputs[0], LAYER_NORM, call.device.efficiency
    moved, rows = source.size + call.inputs[1].size, source.rows
    streaming = call.streaming(1.5 * moved, efficiency.streaming)
    kernels = [("layer_norm_grad_input", lasts(law.grad_input_start, streaming, rows * law.grad_input_row))]
    if len(call.outputs) > 1:
        wider = max(1.0, source.shape[-1] / law.wide if source.shape else 1.0)
        summed = rows * wider * (law.grad_weight_row if rows < law.long else law.grad_weight_row_long)
        streaming = call.streaming(moved, efficiency.streaming)
        kernels.append(("layer_norm_grad_weight", lasts(law.grad_weight_start, streaming, summed)))
    return kernels


def group_norm(call: Call) -> list[Kernel]:
    return _passes(call, call.name.removeprefix("native_"))


def batch_norm(call: Call) -> list[Kernel]:
    """The passes depend on the type, and on whether channels come last in memory."""
    image = call.inputs[0]
    by_rows = image.channels_last or len(image.shape) == 2
    kind = "last" if by_rows else "cudnn" if image.item_size >= 4 else "first"
    return _passes(call, f"batch_norm_{kind}{'_backward' if call.name.endswith('backward') else ''}")


def _passes(call: Call, name: str) -> list[Kernel]:
    """The kernels of figures.toml's [passes]."""
    image = call.inputs[0]
    channels = image.shape[1] if len(image.shape) > 1 else 1
    kernels: list[Kernel] = []
    for kernel in getattr(PASSES, name):
        if "bytes" in kernel:
            share = getattr(call.device.efficiency, kernel["share"])
            spent = call.streamed(kernel["bytes"] * image.size, share, kernel["start"])
        elif "apart" in kernel:
            spent = call.strided(image.elements * kernel["apart"])
        elif "channel" in kernel:
            waves = max(1.0, channels / call.device.multiprocessors)
            spent = lasts(kernel["start"], waves * (image.elements / max(1, channels) * kernel["channel"]))
        else:
            spent = kernel["start"]
        kernels.append((kernel["kernel"], spent))
    return kernels


# Indexing: embeddings, indices, masks, scatters


def gather(call: Call) -> list[Kernel]:
    """Rows of a table, looked up by index."""
    written = total(call.outputs or call.inputs[:1])
    if total(call.inputs[:1]) > INDEXING.cache:
        streaming = 2 * written / INDEXING.beyond / call.device.memory.bandwidth
    else:
        streaming = INDEXING.cached * written / call.device.efficiency.streaming / call.device.memory.bandwidth
    index_count = max((array.elements for array in call.inputs if array.dtype in _INDICES), default=0)
    # no more rows than the result has: `gather` has an index for every element
    rows = min(index_count, call.result.rows)
    row_lookup = rows * INDEXING.row / call.device.multiprocessors
    return [(f"gather_{call.name}", lasts(INDEXING.start, streaming, row_lookup))]


def index(call: Call) -> list[Kernel]:
    """Indexing by numbers, or by a mask, which is turned into numbers first."""
    if not any(array.dtype in _MASKS for array in call.inputs[1:]):
        return gather(call)
    chosen = call.outputs[0].shape[0] if call.outputs and call.outputs[0].shape else 1
    rows = gather(replace(call, inputs=(*call.inputs, Array((chosen,), "int64", (1,)))))
    return [*_places_of_masks(call), *rows]


def masked_select(call: Call) -> list[Kernel]:
    return [*_places_of_masks(call), ("index_arithmetic", INDEXING.arithmetic), *gather(call)]


def _places_of_masks(call: Call) -> list[Kernel]:
    """The kernels that turn masks into lists of places."""
    masks = [array for array in call.inputs[1:] if array.dtype in _MASKS]
    return [kernel for mask in masks for kernel in nonzero(replace(call, inputs=(mask,)))]


def nonzero(call: Call) -> list[Kernel]:
    """Count, read the count on the host (which the caller adds), then write the places."""
    read = call.streamed(call.inputs[0].size, call.device.efficiency.rows, NONZERO.start)
    counted: list[Kernel] = [("nonzero_count", read), ("nonzero_total", NONZERO.total), ("nonzero_init", NONZERO.init)]
    return [*counted, ("nonzero_write", NONZERO.write + read)]


def scatter(call: Call) -> list[Kernel]:
    return [(f"scatter_{call.name}", call.strided(largest(call.inputs[1:] or call.inputs).elements))]


def index_add(call: Call) -> list[Kernel]:
    added = call.each(call.inputs[-1].elements, INDEXING.added)
    return [(f"scatter_{call.name}", lasts(INDEXING.start, added))]


def index_put(call: Call) -> list[Kernel]:
    """Accumulating sorts the indices first, since they may repeat. A single value under a mask is a fill."""
    values = call.inputs[-1].elements
    if call.inputs[-1].dtype in _MASKS or (values == 1 and any(array.dtype in _MASKS for array in call.inputs[1:])):
        return [("masked_fill", call.strided(call.inputs[0].elements))]
    kernels = [(f"scatter_{call.name}", lasts(INDEXING.start, call.each(values, INDEXING.put)))]
    if call.arguments.get("accumulate", False):
        arithmetic: list[Kernel] = [("index_arithmetic", INDEXING.arithmetic)] * 6
        kernels = [*arithmetic, *[("index_sort", INDEXING.sorting)] * 10, *kernels]
    return [*_places_of_masks(call), *kernels]


def embedding_backward(call: Call) -> list[Kernel]:
    """Few indices are added directly; many are sorted first."""
    grad, law, share = call.inputs[0], EMBEDDING_BACKWARD, call.device.efficiency.random
    count = call.inputs[-1].elements
    if count <= law.small:
        return [clear(call), ("embedding_grad", lasts(law.small_start, law.small_each * count))]
    return [
        clear(call),
        *[("embedding_sort", law.sort)] * law.sort_kernels,
        ("embedding_grad_weight", call.streamed(grad.size, share, law.weight_start)),
        ("embedding_scatter", call.streamed(min(total(call.outputs), grad.size), share, law.scatter_start)),
    ]


def one_hot(call: Call) -> list[Kernel]:
    return [clear(call), ("scatter", INDEXING.scatter)]


def bincount(call: Call) -> list[Kernel]:
    counted = lasts(BINCOUNT.start, BINCOUNT.each * call.inputs[0].elements)
    return [*[("reduce_extremes", BINCOUNT.extremes)] * 4, ("bincount", counted)]


# Images: pooling and resizing


def average(call: Call) -> list[Kernel]:
    window, image = call.arguments.get("kernel_size", ()), call.inputs[0]
    taps = prod(window) if len(window) > 1 else (window[0] ** 2 if window else 9)
    backward = "_backward" if call.name.endswith("backward") else ""
    rate = getattr(POOLS, f"average{backward}{'_last' if image.channels_last else ''}")
    return [(f"pool_{call.name}", lasts(SHORTEST, call.each(image.elements * taps, rate)))]


def maxima_backward(call: Call) -> list[Kernel]:
    image = largest((*call.inputs, *call.outputs))
    rate = POOLS.maxima_last if image.channels_last else POOLS.maxima
    return [("fill", POOLS.clearing), ("pool_backward", lasts(SHORTEST, call.each(image.elements, rate)))]


def nearest(call: Call) -> list[Kernel]:
    image = largest((*call.inputs, *call.outputs))
    times = RESIZING.nearest_last if image.channels_last and not call.name.endswith("backward") else 1.0
    return [(f"resize_{call.name}", call.strided(image.elements * times))]


def bilinear(call: Call) -> list[Kernel]:
    image = call.result
    if image.channels_last:
        return [(f"resize_{call.name}", call.strided(RESIZING.bilinear_last * image.elements))]
    planes = prod(image.shape[:2])
    resized = lasts(SHORTEST, planes * (RESIZING.plane + RESIZING.pixel * prod(image.shape[2:])))
    return [("resize_planes", resized)]


# Lists of tensors, as in foreach and fused optimizers: the tensors share launches, as many as a launch's tables hold


def multi_tensor(call: Call) -> list[Kernel]:
    lists = max(1, int(call.arguments.get("lists", 1)))
    first = call.inputs[: max(1, len(call.inputs) // lists)]
    fused, new = call.name.startswith("_fused_"), bool(call.outputs) and not call.name.endswith("_")
    # fused Adam writes the parameters and both averages, the others one list
    written = total(call.outputs) if new else total(first) * (max(1, min(lists, 4) - 1) if fused else 1)
    depth = lists + 1 if new else lists
    launches = _launches(first, LISTS.tensors[min(depth, len(LISTS.tensors)) - 1])
    element_time = (total(call.inputs) + written) / max(1, sum(launches))
    element_time /= call.device.memory.bandwidth * call.device.efficiency.foreach
    alone_time = LISTS.alone_fused if fused else LISTS.alone[min(depth, len(LISTS.alone)) - 1]
    longest = alone_time * min(LISTS.chunk, max((tensor.elements for tensor in first), default=0))
    start = LISTS.start_fused if fused else LISTS.start
    return [(f"multi_tensor{call.name.rstrip('_')}", lasts(start, part * element_time, longest)) for part in launches]


def _launches(tensors: tuple[Array, ...], limit: int) -> list[int]:
    """Elements of each launch, which takes at most `limit` tensors and a number of blocks."""
    launches, blocks, tensors_begun, count = [], 0, 0, 0
    for tensor in tensors:
        remaining = tensor.elements
        tensors_begun += 1
        while remaining > 0:
            part = min(remaining, LISTS.chunk)
            remaining -= part
            count += part
            blocks += 1
            if blocks == LISTS.blocks or (tensors_begun == limit and remaining == 0):
                launches.append(count)
                blocks, count, tensors_begun = 0, 0, int(remaining > 0)
    return [*launches, count] if count or not launches else launches


# Matrices


def matrix_product(call: Call) -> list[Kernel]:
    matrices = [array for array in call.inputs if len(array.shape) >= 1]
    if len(matrices) < 2:
        return [("gemm", PRODUCTS.start)]
    is_last = call.name.startswith(("add", "badd", "_addmm")) and len(matrices) > 2  # what is added stands first
    left, right = matrices[-2:] if is_last else matrices[:2]
    if call.name in ("addr", "outer") or len(left.shape) == 1 or len(right.shape) == 1:
        return [_vector_product(call, left, right, *call.outputs)]
    is_folded = call.name in ("linear", "matmul") and len(right.shape) == 2
    rows = prod(left.shape[:-1]) if is_folded else left.shape[-2]
    columns = right.shape[-2] if call.name == "linear" else right.shape[-1]
    if min(rows, columns) == 1:
        return [_vector_product(call, left, right)]
    batch = 1 if is_folded else prod(left.shape[:-2]) if len(left.shape) > 2 else prod(right.shape[:-2])
    dtype = call.dtype()
    return [(f"gemm_{dtype}", product(call.device, rows, columns, left.shape[-1], dtype, left.item_size, batch))]


def _vector_product(call: Call, *operands: Array) -> Kernel:
    return "gemv", call.streamed(total(operands), PRODUCTS.vector_share, PRODUCTS.vector_start)


def product(
    device: Device, rows: int, columns: int, inner: int, dtype: str, width: int, batch: int = 1, moved: int = 0
) -> int:
    """`width`: bytes of an element; `moved`: bytes in all, if fewer than those of the matrices."""
    if not rows * columns * inner * batch:
        return int(PRODUCTS.start)
    cores = dtype in _TENSOR_CORES
    rate = device.rate(dtype) * (device.efficiency.matrix if cores else device.efficiency.simt)
    tiles, fill = (_TILES, PRODUCTS.fill) if cores else (_SIMT_TILES, PRODUCTS.fill_simt)
    spent = float("inf")
    for split in PRODUCTS.splits:
        if split > 1 and inner // split < PRODUCTS.least_split:
            continue
        written = 8.0 * batch * rows * columns / device.memory.bandwidth
        for high, wide, share in tiles:
            count = batch * -(-rows // high) * -(-columns // wide) * split
            waves = -(-count // device.multiprocessors)
            reached = rate * share / device.multiprocessors
            tiled = waves * 2.0 * high * wide * (-(-inner // split) + fill) / reached
            spent = min(spent, tiled if split == 1 else tiled + PRODUCTS.summing + written)
    if spent > PRODUCTS.long and cores:  # limited by power
        operations = 2.0 * batch * rows * columns * inner
        beyond = (spent - PRODUCTS.long) / spent * operations
        spent = PRODUCTS.long + beyond / (device.rate(dtype) * device.efficiency.sustained)
    moved = moved or batch * (rows * inner + inner * columns + rows * columns) * width
    return lasts(PRODUCTS.start, spent, moved / (device.memory.bandwidth * device.efficiency.streaming))


# Attention: one kernel forward, three backward


def attend(call: Call) -> list[Kernel]:
    return _attention(call, call.inputs[0], call.inputs[1])


def attend_backward(call: Call) -> list[Kernel]:
    """The inputs begin with the gradient of the result, or with the query."""
    query = call.inputs[0]
    same = [array for array in call.inputs if len(array.shape) == 4 and array.shape[-1] == query.shape[-1]]
    if not same:
        raise NoLaw("no heads of four dimensions")
    keys = same[2] if len(same) > 3 else same[min(1, len(same) - 1)]
    moved = prod(query.shape) * (2 if call.dtype() in _TENSOR_CORES else 4)
    dot, convert = ATTENTION.dot, ATTENTION.convert
    return [
        ("flash_attention_dot", call.streamed(2 * moved, dot["share"], dot["start"])),
        *_attention(call, query, keys, backward=True),
        ("flash_attention_convert", call.streamed(3 * moved, convert["share"], convert["start"])),
    ]


def attend_whole(call: Call) -> list[Kernel]:
    """Attention with its projections: queries, keys and values at once, and the result."""
    if len(call.inputs[0].shape) != 3:
        raise NoLaw("not a batch of sequences")
    (batch, length, width), dtype = call.inputs[0].shape, call.dtype()
    heads = int(call.arguments.get("num_head", 1))
    query = Array((batch * heads, length, width // max(1, heads)), call.inputs[0].dtype, (1, 1, 1))
    item = call.inputs[0].item_size
    into = product(call.device, batch * length, 3 * width, width, dtype, item)
    out = product(call.device, batch * length, width, width, dtype, item)
    return [(f"gemm_{dtype}", into), *_attention(call, query, query), (f"gemm_{dtype}", out)]


def _attention(call: Call, query: Array, key: Array, backward: bool = False) -> list[Kernel]:
    *batch_and_heads, queries, width = query.shape
    device, heads, keys = call.device, prod(batch_and_heads), key.shape[-2]
    causal = bool(call.arguments.get("is_causal", False))
    if call.dtype() in _TENSOR_CORES:  # a block for a tile of queries reads all keys; backward the other way round
        tile, law = ATTENTION.tile, ATTENTION.backward if backward else ATTENTION.forward
        tiled, others = (keys, queries) if backward else (queries, keys)
        padded = -(-others // tile) * tile
        passed = (padded + tile) / 2 if causal else padded
        slower = ATTENTION.rate / device.rate("bfloat16") * device.multiprocessors / ATTENTION.multiprocessors
        waves = -(-heads * -(-tiled // tile) // device.multiprocessors)
        spent = float(waves * (law["begin"] + passed * law["each"] * max(1.0, width / 64) ** law["wider"]) * slower)
    else:  # arithmetic, over tiles of 64
        length, depth = (-(-count // 64) * 64 for count in (queries, keys))
        operations = 4.0 * heads * length * depth * width * (0.5 if causal else 1.0)
        operations *= ATTENTION.plain_backward if backward else 1.0
        share = ATTENTION.plain_share if width <= 64 or backward else ATTENTION.plain_share_wide
        spent = float(operations / (device.rate("float32") * share))
    return [(f"flash_attention_{'backward' if backward else 'forward'}", lasts(ATTENTION.start, spent))]


# Convolutions: implicit products over channels last, and the kernels that cuDNN adds


def convolve(call: Call) -> list[Kernel]:
    source, filters = call.inputs[0], call.inputs[1]
    result = call.result
    kernels = _convolution(call, source, filters, result, "forward")
    if len(call.inputs) > 2:
        kernels.append(("elementwise_bias", call.strided(result.elements)))
    return kernels


def convolve_backward(call: Call) -> list[Kernel]:
    """The gradients that are needed, recognised by their shapes."""
    grad, source, filters = call.inputs[:3]
    kernels: list[Kernel] = []
    for result in call.outputs:
        if result.shape == source.shape:
            kernels += _convolution(call, source, filters, grad, "input")
        elif result.shape == filters.shape:
            kernels += _convolution(call, source, filters, grad, "weight")
        elif len(result.shape) == 1:
            share = columns_share(call.device, result.shape[0])
            kernels.append(("reduce_sum", call.streamed(grad.size, share, CONVOLUTIONS.bias_start)))
    return kernels


def _convolution(call: Call, source: Array, filters: Array, result: Array, direction: str) -> list[Kernel]:
    """`direction`: "forward", or "input" or "weight" for a gradient. A transposed convolution swaps the first two."""
    groups, dtype = int(call.arguments.get("groups", 1)), call.dtype(convolution=True)
    if call.arguments.get("transposed", False):
        source, result = result, source
        direction = {"forward": "input", "input": "forward"}.get(direction, direction)
    channels, taps = filters.shape[1], prod(filters.shape[2:])
    if groups > 1 and channels == 1:
        return [_depthwise(call, source, result, taps, direction)]
    cores = dtype in _CONVOLUTION_CORES
    if cores and channels < CONVOLUTIONS.channels:
        return [*_transposed(call, source, result), *_padded(call, source, channels), _shallow(result, taps, direction)]
    # with one tap at every pixel a plain product does, in any layout
    is_plain = taps == 1 and all(stride == 1 for stride in call.arguments.get("stride", ())) and len(source.shape) > 2
    transposes = _transposed(call, source, result, filters) if cores and not is_plain else []
    return [*transposes, _implicit_product(call, source, filters, result, direction, groups)]


def _implicit_product(call: Call, source: Array, filters: Array, result: Array, direction: str, groups: int) -> Kernel:
    """A product of matrices whose bytes are those of the images."""
    if not result.shape:
        raise NoLaw("a result without dimensions")
    dtype, width = call.dtype(convolution=True), source.item_size
    positions = result.shape[0] * prod(result.shape[2:])
    channels, taps, out = filters.shape[1], prod(filters.shape[2:]), filters.shape[0] // groups
    rows, columns, inner = positions, out, channels * taps
    if direction == "input":
        columns, inner = channels, out * taps
    elif direction == "weight":
        rows, columns, inner = out, channels * taps, positions
    moved = (source.elements + result.elements + filters.elements) * width
    spent = product(call.device, rows, columns, inner, dtype, width, groups, moved)
    if direction == "weight":
        law = CONVOLUTIONS.weight_tfloat32 if dtype == "tfloat32" else CONVOLUTIONS.weight
        spent = round(spent * law["times"]) + law["adding"]
    return f"conv_{direction}_{dtype}", spent + (CONVOLUTIONS.gathering if taps > 1 else 0)


def _transposed(call: Call, source: Array, result: Array, filters: Array | None = None) -> list[Kernel]:
    """The transposes around a convolution by tensor cores, which need channels last."""
    if len(source.shape) != 4 or source.shape[1] == 1:
        return []
    law, of_filters = CONVOLUTIONS.transposing, CONVOLUTIONS.transposing_filters
    kernels: list[Kernel] = []
    for array in (source, result):
        if not array.channels_last:
            limits = call.streaming(2 * array.size, law["share"]), call.each(array.elements, law["rate"])
            kernels.append(("nchw_to_nhwc", lasts(law["start"], *limits)))
    if kernels and filters is not None:
        duration = lasts(of_filters["start"], call.each(filters.elements, of_filters["rate"]))
        kernels.append(("nchw_to_nhwc", duration))
    return kernels


def _padded(call: Call, source: Array, channels: int) -> list[Kernel]:
    """Padding of channels: images have three, and tensor cores need eight."""
    if channels == 1:
        return []
    if len(source.shape) < 2 or not source.shape[1]:
        raise NoLaw("no channels")
    law, padded_size = CONVOLUTIONS.padding, source.size / source.shape[1] * CONVOLUTIONS.channels
    return [
        ("fill", call.streamed(padded_size, call.device.efficiency.streaming, law["clearing"])),
        ("conv_pad_channels", call.streamed(law["times"] * padded_size, law["share"], law["start"])),
    ]


def _shallow(result: Array, taps: int, direction: str) -> Kernel:
    """A convolution with so few channels that the number of results sets its time."""
    count, law, weight = result.elements, CONVOLUTIONS.shallow, CONVOLUTIONS.shallow_weight
    if direction == "weight":
        return f"conv_{direction}", lasts(weight["start"], count * weight["each"])
    element_time = law["each"] + law["tap"] * taps * CONVOLUTIONS.channels
    return f"conv_{direction}", lasts(PRODUCTS.start, count * element_time)


def _depthwise(call: Call, source: Array, result: Array, taps: int, direction: str) -> Kernel:
    """A convolution of each channel by itself."""
    law = CONVOLUTIONS.depthwise_last if source.channels_last else CONVOLUTIONS.depthwise
    start, tap = law[direction]
    element_time = start + tap * taps
    slower = CONVOLUTIONS.multiprocessors / call.device.multiprocessors
    streaming = call.streaming(total((source, result)), call.device.efficiency.streaming)
    return f"conv_depthwise_{direction}", lasts(SHORTEST, result.elements * element_time * slower, streaming)


# Recurrent layers of cuDNN: products over the whole input at once, then step by step


def recur(call: Call) -> list[Kernel]:
    source, backward = call.inputs[0], call.name.endswith("_backward")
    weights = [array for array in call.inputs[1:] if len(array.shape) == 2]
    packed = int(call.arguments.get("batch_sizes", 0))
    steps = packed or source.shape[0]
    if not steps and len(source.shape) != 3:
        raise NoLaw("no steps")
    batch = source.shape[1] if len(source.shape) == 3 else -(-source.shape[0] // steps)
    dtype, width = call.dtype(convolution=True), source.item_size
    thin, products_per_step = (RECURRENT.thin_backward, 2) if backward else (RECURRENT.thin, 1)
    kernels: list[Kernel] = []
    for layer in range(max(1, len(weights) // 2)):
        of_input, of_state = weights[2 * layer : 2 * layer + 2] if len(weights) >= 2 else (source, source)
        input_product = product(call.device, steps * batch, of_input.shape[0], of_input.shape[1], dtype, width)
        state_product = product(call.device, batch, of_state.shape[0], of_state.shape[1], dtype, width) - PRODUCTS.start
        step = PRODUCTS.start + RECURRENT.gates + round(state_product * thin)
        kernels += [("rnn_input_gemm", input_product)] * products_per_step
        kernels += [("rnn_step", step)] * (steps * products_per_step)
    return kernels
