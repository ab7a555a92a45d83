"""Claim: what kernels cost on the virtual H200 is what they took on a real one, within 20% for most operators.

    python benchmarks/virtual_costs.py TRACE_DIRECTORY

The directory holds PyTorch profiler traces of stallbench's cases, `<case>.stalled.rank0.trace.json.gz`.
Their models are known, so the operators of a step are written down here with their shapes, and the
sum of each operator's kernels is held against what the trace shows. Nothing is fitted to a case.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from keepbusy.timeline.model import NONE, FrameKind, LinkKind, Timeline
from keepbusy.traces import read
from keepbusy.virtual.costs.device import Operand
from keepbusy.virtual.costs.device import read as read_device
from keepbusy.virtual.costs.operator_costs import OperatorCosts

Call = tuple[str, tuple[Operand, ...], tuple[Operand, ...], dict[str, Any]]
HALF, FULL, LONG = "bfloat16", "float32", "int64"
LAYERS, VOCABULARY, IMAGES = 8, 4096, 256
MODELS = {  # case: batch, length, width
    "healthy": (64, 512, 768),
    "item_per_parameter": (16, 512, 768),
    "empty_cache": (16, 512, 768),
    "item_every_step": (16, 512, 768),
    "nan_check": (8, 512, 512),
    "reduce_after_backward": (8, 512, 1536),
    "launch_bound": (8, 128, 256),
}
SAME = {"clamp_min": "relu", "_cudnn_attention_forward": "attention", "cudnn_convolution": "convolution"}


def tensor(*shape: int, dtype: str = HALF) -> Operand:
    strides = list(accumulate((1, *reversed(shape[1:])), lambda one, other: one * other))[::-1]
    return shape, dtype, tuple(strides[: len(shape)])


def turned(one: Operand) -> Operand:
    return (one[0][1], one[0][0]), one[1], (one[2][1], one[2][0])


def linear(rows: int, out: int, inner: int) -> Iterator[Call]:
    yield "copy_", (tensor(out, dtype=FULL),), (tensor(out),), {}
    yield "copy_", (tensor(out, inner, dtype=FULL),), (tensor(out, inner),), {}
    weight = turned(tensor(out, inner))
    yield "addmm", (tensor(out), tensor(rows, inner), weight), (tensor(rows, out),), {}


def linear_backward(rows: int, out: int, inner: int) -> Iterator[Call]:
    grad = tensor(rows, out)
    yield "mm", (grad, tensor(out, inner)), (tensor(rows, inner),), {}
    yield "mm", (turned(grad), tensor(rows, inner)), (tensor(out, inner),), {}
    yield "sum", (grad,), (tensor(1, out),), {"dim": [0]}
    yield "copy_", (tensor(out, inner),), (tensor(out, inner, dtype=FULL),), {}
    yield "copy_", (tensor(out),), (tensor(out, dtype=FULL),), {}


def gpt(batch: int, length: int, width: int) -> Iterator[Call]:
    rows, heads = batch * length, width // 64
    stream, half = tensor(rows, width, dtype=FULL), tensor(rows, width)
    split = ((batch, heads, length, 64), HALF, (length * 3 * width, 64, 3 * width, 1))
    yield "embedding", (tensor(VOCABULARY, width, dtype=FULL), tensor(rows, dtype=LONG)), (stream,), {}
    for _ in range(LAYERS):
        yield "native_layer_norm", (stream,), (stream,), {}
        yield "copy_", (stream,), (half,), {}
        yield from linear(rows, 3 * width, width)
        yield "scaled_dot_product_attention", (split, split, split), (split,), {"is_causal": True}
        yield from linear(rows, width, width)
        yield "add", (stream, half), (stream,), {}
        yield "native_layer_norm", (stream,), (stream,), {}
        yield "copy_", (stream,), (half,), {}
        yield from linear(rows, 4 * width, width)
        yield "gelu", (tensor(rows, 4 * width),), (tensor(rows, 4 * width),), {}
        yield from linear(rows, width, 4 * width)
        yield "add", (stream, half), (stream,), {}
    yield from loss(rows, width)
    for _ in range(LAYERS):
        yield from block_backward(rows, width, batch, heads, length)
    tokens = tensor(rows, dtype=LONG)
    yield "embedding_dense_backward", (stream, tokens), (tensor(VOCABULARY, width, dtype=FULL),), {}


def loss(rows: int, width: int) -> Iterator[Call]:
    logits, picked = tensor(rows, VOCABULARY, dtype=FULL), tensor(rows, dtype=LONG)
    yield "copy_", (tensor(rows, width, dtype=FULL),), (tensor(rows, width),), {}
    yield from linear(rows, VOCABULARY, width)
    yield "copy_", (tensor(rows, VOCABULARY),), (logits,), {}
    yield "_log_softmax", (logits,), (logits,), {}
    yield "nll_loss_forward", (logits, picked), (tensor(1, dtype=FULL),), {}
    yield "nll_loss_backward", (tensor(1, dtype=FULL), logits, picked), (logits,), {}
    yield "_log_softmax_backward_data", (logits, logits), (logits,), {}
    yield "copy_", (logits,), (tensor(rows, VOCABULARY),), {}
    yield from linear_backward(rows, VOCABULARY, width)
    yield "copy_", (tensor(rows, width),), (tensor(rows, width, dtype=FULL),), {}


def block_backward(rows: int, width: int, batch: int, heads: int, length: int) -> Iterator[Call]:
    stream, half = tensor(rows, width, dtype=FULL), tensor(rows, width)
    wide, small = tensor(rows, 4 * width), tensor(width, dtype=FULL)
    mixed = ((batch, heads, length, 64), HALF, (length * width, 64, width, 1))
    three = tensor(3, batch, heads, length, 64)
    apart = (
        (batch, length, 3, heads, 64),
        HALF,
        (heads * length * 64, 64, batch * heads * length * 64, length * 64, 1),
    )
    yield "copy_", (stream,), (half,), {}
    yield from linear_backward(rows, width, 4 * width)
    yield "gelu_backward", (wide, wide), (wide,), {}
    yield from linear_backward(rows, 4 * width, width)
    for last in (False, True):
        yield "copy_", (half,), (stream,), {}
        yield "native_layer_norm_backward", (stream, stream), (stream, small, small), {}
        yield "add_", (stream, stream), (), {}
        if not last:
            yield "copy_", (stream,), (half,), {}
            yield from linear_backward(rows, width, width)
            attention = (mixed, mixed, mixed, mixed, mixed)
            yield "scaled_dot_product_attention_backward", attention, (mixed,) * 3, {"is_causal": True}
            yield "cat", (mixed,) * 3, (three,), {}
            yield "copy_", (apart,), (tensor(batch, length, 3, heads, 64),), {}
            yield from linear_backward(rows, 3 * width, width)


def images() -> Iterator[Call]:
    """stallbench's small classifier: channels last, bfloat16."""

    def picture(channels: int, edge: int, dtype: str = HALF) -> Operand:
        return (IMAGES, channels, edge, edge), dtype, (channels * edge * edge, 1, edge * channels, channels)

    layers = ((3, 128, 7, 224, 56), (128, 128, 3, 56, 56), (128, 256, 3, 56, 28), (256, 512, 3, 28, 14))
    for index, (channels, out, window, edge, less) in enumerate(layers):
        filters = ((out, channels, window, window), HALF, (channels * window * window, 1, window * channels, channels))
        here, there = picture(channels, edge), picture(out, less)
        yield "convolution", (here, filters), (there,), {"stride": [1, 1], "groups": 1}
        yield "bias", (there, ((1, out, 1, 1), HALF, (out, 1, 1, 1))), (there,), {}
        yield "relu", (there,), (there,), {}
        wanted = (filters,) if not index else (here, filters)
        yield "convolution_backward", (there, here, filters), wanted, {"stride": [1, 1], "groups": 1}
        yield "sum", (there,), (tensor(out),), {"dim": [0, 2, 3]}
        yield "threshold_backward", (there, there), (there,), {}
        if index < 3:
            yield "native_batch_norm", (there,), (there,), {}
            yield "native_batch_norm_backward", (there, there), (there,), {}


def predicted(costs: OperatorCosts, calls: Iterator[Call]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for name, inputs, outputs, arguments in calls:
        kernels = costs.kernels(name, inputs, outputs, arguments)
        # in a trace, what clears a result is an operator of its own
        sums[_class(name)] += sum(work for kernel, work in kernels if kernel != "fill")
    return sums


def measured(timeline: Timeline, step: str) -> dict[str, float]:
    """The median step: cut where `step`, an operator of its own once a step, begins."""
    spans, frames, links = timeline.spans, timeline.frames, timeline.links
    launches = links.take(np.flatnonzero(links.kind == LinkKind.LAUNCH))
    order = np.argsort(launches.target, kind="stable")
    sums: list[dict[str, float]] = []
    for launch, command in zip(launches.source[order].tolist(), launches.target[order].tolist(), strict=True):
        frame = int(spans.frame[launch])
        while frame != NONE and frames.kind[frame] != FrameKind.OPERATOR:
            frame = int(frames.parent[frame])
        name = timeline.names[frames.name[frame]].removeprefix("aten::") if frame != NONE else ""
        if name == step:
            sums.append(defaultdict(float))
        if sums and "Memcpy HtoD" not in timeline.names[spans.name[command]]:
            sums[-1][_class(name, timeline)] += float(spans.end[command] - spans.start[command])
    names = {name for one in sums for name in one}
    return {name: median(one.get(name, 0.0) for one in sums) for name in names}


def _class(name: str, timeline: Timeline | None = None) -> str:
    """Operators that are counted together: casts to half, casts back, and the names of CUDA's own variants."""
    if timeline is not None and name in ("gather", "index_select"):
        return "embedding"
    if name.startswith(("_cudnn_attention", "scaled_dot_product_attention")):
        return "attention_backward" if name.endswith("backward") else "attention"
    return {"addmm": "linear", "mm": "linear_backward", "add": "add"}.get(name, SAME.get(name, name))


def main(directory: str) -> None:
    costs, ratios = OperatorCosts(read_device("h200")), []
    cases = {case: gpt(*shape) for case, shape in MODELS.items()} | {"pageable_copy": images()}
    for case, calls in cases.items():
        path = Path(directory) / f"{case}.stalled.rank0.trace.json.gz"
        if not path.exists():
            continue
        truth = measured(read([path]), "_log_softmax")
        truth.pop("add_" if case == "launch_bound" else "", None)  # there the optimizer adds one by one
        ours = predicted(costs, calls)
        if "bias" in ours:
            truth["bias"] = truth.pop("add_")
        print(f"\n{case:32s} predicted   measured  microseconds a step")
        for name in sorted(set(ours) & set(truth), key=lambda one: -truth[one]):
            ratios.append(ours[name] / truth[name])
            print(f"  {name:30s} {ours[name] / 1e3:9.0f}  {truth[name] / 1e3:9.0f}   x {ratios[-1]:.2f}")
        both = [name for name in ours if name in truth]
        whole = sum(ours[name] for name in both) / sum(truth[name] for name in both)
        print(f"  {'all of these':30s} {'':20s}   x {whole:.2f}")
    off = sorted(abs(np.log(ratio)) for ratio in ratios)
    within = sum(one < np.log(1.2) for one in off) / len(off)
    print(f"\n{len(off)} sums: median off by {np.expm1(off[len(off) // 2]):.0%}, {within:.0%} within 20%")


if __name__ == "__main__":
    main(*sys.argv[1:])
