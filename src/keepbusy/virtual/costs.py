"""What an operator launches on CUDA, and how long each kernel runs.

Costs come from what an operator is (`products.py`: arithmetic, `traffic.py`: bytes, and their like), and from how
PyTorch's CUDA code launches it, which is not how its CPU code does. They are kept by name, shapes,
types and strides, so a training loop pays for them once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from keepbusy.virtual import convolutions, families, images, indexing, norms, reductions, traffic
from keepbusy.virtual.call import Call
from keepbusy.virtual.device import Device
from keepbusy.virtual.lists import multi_tensor
from keepbusy.virtual.operands import Kernel, Operand

__all__ = ["ASKS", "Costs", "Kernel", "Operand"]

_Key: TypeAlias = tuple[str, tuple[Operand, ...], tuple[Operand, ...], tuple[Any, ...], bool]

ASKS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(families.ATTENTION, ("is_causal",)),
    **dict.fromkeys(families.ATTENTION_BACKWARD, ("is_causal",)),
    **dict.fromkeys(convolutions.CONVOLUTIONS, ("stride", "transposed", "groups")),
    **dict.fromkeys(convolutions.CONVOLUTIONS_BACKWARD, ("stride", "transposed", "groups")),
    **dict.fromkeys((*families.RECURRENT, *families.RECURRENT_BACKWARD), ("batch_sizes",)),
    "_native_multi_head_attention": ("num_head",),
    **dict.fromkeys(("avg_pool2d", "avg_pool2d_backward"), ("kernel_size",)),
    **dict.fromkeys(reductions.REDUCTIONS, ("dim",)),
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
        tf32 = name in families.PRODUCTS and self._allows_tf32()
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
        if call.name in traffic.FREE or not (call.inputs or call.outputs):
            return []
        family = _FAMILIES.get(call.name)
        if family is None and call.name.startswith(("_foreach_", "_fused_")):
            family = multi_tensor
        try:
            return (family or traffic.elementwise)(call)
        except (IndexError, ValueError, TypeError, ZeroDivisionError):
            return traffic.elementwise(call)  # shapes that nobody thought of: a cost must never stop a program


def _plain(value: Any) -> Any:
    """As part of a key: of a tensor its length."""
    if hasattr(value, "shape"):
        return value.shape[0]
    return tuple(value) if isinstance(value, list) else value


_FAMILIES: dict[str, Callable[[Call], list[Kernel]]] = {
    **dict.fromkeys(families.PRODUCTS, families.matrix_product),
    **dict.fromkeys(convolutions.CONVOLUTIONS, convolutions.convolve),
    **dict.fromkeys(convolutions.CONVOLUTIONS_BACKWARD, convolutions.convolve_backward),
    **dict.fromkeys(families.ATTENTION, families.attend),
    **dict.fromkeys(families.ATTENTION_BACKWARD, families.attend_backward),
    "_native_multi_head_attention": families.attend_whole,
    **dict.fromkeys(families.RECURRENT, families.recur),
    **dict.fromkeys(families.RECURRENT_BACKWARD, families.recur),
    **traffic.FAMILIES,
    **reductions.FAMILIES,
    **norms.FAMILIES,
    **indexing.FAMILIES,
    **images.FAMILIES,
}
