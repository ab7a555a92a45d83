"""Operators over lists of tensors, foreach and fused optimizers: blocks of all of them in as few launches as fit."""

from __future__ import annotations

from keepbusy.virtual.call import Call
from keepbusy.virtual.operands import Kernel, Operand, elements, total

CHUNK, BLOCKS = 65_536, 320
"""Elements of a block, and blocks of a launch, of PyTorch's multi-tensor kernels."""
_MOST_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36}
_ALONE = {1: 0.15, 2: 0.24, 3: 0.27}
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
    alone = _ALONE_FUSED if call.name.startswith("_fused_") else _ALONE.get(deep, 0.3)
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
