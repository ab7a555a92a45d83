"""What an operator launches on CUDA, and how long each kernel runs.

Costs come from what an operator is (`products.py`: arithmetic, `traffic.py`: bytes, and their like), and from how
PyTorch's CUDA code launches it, which is not how its CPU code does. They are kept by name, shapes,
types and strides, so a training loop pays for them once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from keepbusy.virtual.costs import laws, products
from keepbusy.virtual.costs.device import Device
from keepbusy.virtual.costs.laws import multi_tensor
from keepbusy.virtual.costs.operands import Call, Kernel, Operand

_Key: TypeAlias = tuple[str, tuple[Operand, ...], tuple[Operand, ...], tuple[Any, ...], bool]

ASKS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(products.ATTENTION, ("is_causal",)),
    **dict.fromkeys(products.ATTENTION_BACKWARD, ("is_causal",)),
    **dict.fromkeys(products.CONVOLUTIONS, ("stride", "transposed", "groups")),
    **dict.fromkeys(products.CONVOLUTIONS_BACKWARD, ("stride", "transposed", "groups")),
    **dict.fromkeys((*products.RECURRENT, *products.RECURRENT_BACKWARD), ("batch_sizes",)),
    "_native_multi_head_attention": ("num_head",),
    **dict.fromkeys(("avg_pool2d", "avg_pool2d_backward"), ("kernel_size",)),
    **dict.fromkeys(laws.REDUCTIONS, ("dim",)),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), ("accumulate",)),
}
"""Operators whose cost depends on more than their tensors, and the arguments to give. `_foreach_…` and `_fused_…`
operators take `lists`: how many lists of tensors were flattened into their inputs."""


class Costs:
    """Of one device."""

    def __init__(self, device: Device, allows_tf32: Callable[[], bool] = lambda: False) -> None:
        """`allows_tf32`: whether float32 products may use tensor cores now."""
        self.device = device
        self._allows_tf32 = allows_tf32
        self._known: dict[_Key, tuple[Kernel, ...]] = {}

    def kernels(
        self,
        name: str,
        inputs: tuple[Operand, ...],
        outputs: tuple[Operand, ...] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> tuple[Kernel, ...]:
        """Name and work of each kernel. `name` without its namespace and overload; tensors in the schema's order."""
        asked = self._asked(name, arguments) if arguments else ()
        tf32 = name in products.PRODUCTS and self._allows_tf32()
        key = (name, inputs, outputs, asked, tf32)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = tuple(self._found(Call(self.device, name, inputs, outputs, dict(asked), tf32)))
        return found

    def _asked(self, name: str, arguments: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        names = ASKS.get(name)
        if names is None:
            names = ("lists",) if name.startswith(("_foreach_", "_fused_")) else ()
        return tuple((one, _plain(arguments[one])) for one in names if one in arguments)

    def _found(self, call: Call) -> list[Kernel]:
        if call.name in laws.FREE or not (call.inputs or call.outputs):
            return []
        family = _FAMILIES.get(call.name)
        if family is None and call.name.startswith(("_foreach_", "_fused_")):
            family = multi_tensor
        try:
            return (family or laws.elementwise)(call)
        except (IndexError, ValueError, TypeError, ZeroDivisionError):
            return laws.elementwise(call)  # shapes that nobody thought of: a cost must never stop a program


def _plain(value: Any) -> Any:
    """As part of a key: of a tensor its length."""
    if hasattr(value, "shape"):
        return value.shape[0]
    return tuple(value) if isinstance(value, list) else value


_FAMILIES: dict[str, Callable[[Call], list[Kernel]]] = {
    **dict.fromkeys(products.PRODUCTS, products.matrix_product),
    **dict.fromkeys(products.CONVOLUTIONS, products.convolve),
    **dict.fromkeys(products.CONVOLUTIONS_BACKWARD, products.convolve_backward),
    **dict.fromkeys(products.ATTENTION, products.attend),
    **dict.fromkeys(products.ATTENTION_BACKWARD, products.attend_backward),
    "_native_multi_head_attention": products.attend_whole,
    **dict.fromkeys(products.RECURRENT, products.recur),
    **dict.fromkeys(products.RECURRENT_BACKWARD, products.recur),
    **laws.TRAFFIC_FAMILIES,
    **laws.REDUCTIONS_FAMILIES,
    **laws.NORMS_FAMILIES,
    **laws.INDEXING_FAMILIES,
    **laws.IMAGES_FAMILIES,
}
