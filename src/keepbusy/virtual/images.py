"""Operators over images that are no convolutions: pools, and changes of size.

Rates, elements a nanosecond a multiprocessor, were fitted to kernels of an H200 at plain shapes:
tests/gpu/truth/operator_costs.json.gz.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from keepbusy.virtual.call import LEAST, Call
from keepbusy.virtual.operands import Kernel, channels_last, elements, largest

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


FAMILIES: dict[str, Callable[[Call], list[Kernel]]] = {
    **dict.fromkeys(("avg_pool2d", "avg_pool2d_backward", "avg_pool3d", "avg_pool3d_backward"), average),
    "max_pool2d_with_indices_backward": maxima_backward,
    **dict.fromkeys(("upsample_nearest2d", "upsample_nearest2d_backward", "_upsample_nearest_exact2d"), nearest),
    **dict.fromkeys(("upsample_bilinear2d", "upsample_bilinear2d_backward", "grid_sampler_2d"), bilinear),
    **dict.fromkeys(("flip", "roll", "repeat", "tril", "tril_", "triu", "triu_", "where", "col2im", "im2col"), strided),
}
