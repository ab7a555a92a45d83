"""Operators whose time is the bytes they move: elementwise ones, copies, fills, random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from keepbusy.virtual.call import LEAST, Call
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


FAMILIES: dict[str, Callable[[Call], list[Kernel]]] = {
    **dict.fromkeys(("copy_", "_to_copy", "clone", "to", "contiguous"), copy),
    **dict.fromkeys(_FILLS, fill),
    **dict.fromkeys(_RANDOM, draw),
    **dict.fromkeys(("native_dropout", "_fused_dropout", "dropout", "native_dropout_backward"), dropout),
    **dict.fromkeys(("cat", "stack"), concatenate),
}
