"""The kernels that an operator launches on CUDA, and their durations, by its law in operators.toml.

Laws follow PyTorch's CUDA code, which launches an operator in another way than its CPU code.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from keepbusy.virtual.costs import laws
from keepbusy.virtual.costs.device import Array, Call, Device, Kernel, NoLaw, Operand


class Law(NamedTuple):
    """The cost of a family of operators: a table of operators.toml, which describes the fields."""

    kernels: Callable[[Call], list[Kernel]]
    names: str = ""
    needs: Sequence[int] = (0,)
    asks: Sequence[str] = ()

    @property
    def depends_on_precision(self) -> bool:
        """Whether PyTorch's precision of float32 products applies to these operators."""
        return self.kernels is laws.matrix_product


_TABLE = tuple(
    Law(getattr(laws, name), **about)
    for name, about in tomllib.loads(Path(__file__).with_name("operators.toml").read_text(encoding="utf-8")).items()
)
LAWS: Mapping[str, Law] = {name: law for law in _TABLE for name in law.names.split()}
_LISTS = Law(laws.multi_tensor, needs=(), asks=("lists",))
"""The law of `_foreach_…` and `_fused_…` operators that are not listed. `lists`: the number of lists of tensors that
were flattened into the inputs."""
_ELEMENTWISE = Law(laws.elementwise, needs=())


def law_of(name: str) -> Law:
    """The law of an operator, named without its namespace and overload."""
    return LAWS.get(name) or (_LISTS if name.startswith(("_foreach_", "_fused_")) else _ELEMENTWISE)


class OperatorCosts:
    """The costs on one device, cached by name and tensors, so a training loop computes them once."""

    def __init__(
        self, device: Device, allows_tf32: Callable[[], bool] = lambda: False, notes: list[str] | None = None
    ) -> None:
        """`allows_tf32`: whether float32 products may use tensor cores now. `notes`: a failing law is noted there, and
        the program continues; without it, as in tests, the failure is raised.
        """
        self.device, self.notes = device, notes
        self.allows_tf32 = allows_tf32
        self.by_call: dict[Any, Any] = {}
        """The caller's cache of calls, by keys that are quicker to make than those here."""
        self._kernels: dict[tuple[Any, ...], tuple[Kernel, ...]] = {}

    def kernels(
        self,
        name: str,
        inputs: tuple[Operand, ...],
        outputs: tuple[Operand, ...] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> tuple[Kernel, ...]:
        """Name and work of each kernel. `name` without its namespace and overload; tensors in the schema's order."""
        law = law_of(name)
        law_arguments: tuple[tuple[str, Any], ...] = ()
        if arguments:
            law_arguments = tuple((name, _hashable(arguments[name])) for name in law.asks if name in arguments)
        tf32 = law.depends_on_precision and self.allows_tf32()
        key = (name, inputs, outputs, law_arguments, tf32)
        if key not in self._kernels:
            array_inputs, array_outputs = (tuple(Array(*operand) for operand in side) for side in (inputs, outputs))
            call = Call(self.device, name, array_inputs, array_outputs, dict(law_arguments), tf32)
            self._kernels[key] = tuple(self._by_law(law, call))
        return self._kernels[key]

    def _by_law(self, law: Law, call: Call) -> list[Kernel]:
        if not (call.inputs or call.outputs):
            return []
        pairs = zip(call.inputs, law.needs, strict=False)
        if len(call.inputs) < len(law.needs) or any(len(array.shape) < least for array, least in pairs):
            law = _ELEMENTWISE
        try:
            return law.kernels(call)
        except NoLaw:
            pass
        except Exception as error:
            if self.notes is None:
                raise
            shapes = ", ".join(f"{dtype}{list(shape)}" for shape, dtype, _ in call.inputs)
            self.notes.append(
                f"The time of {call.name}({shapes}) on the virtual GPU is that of its bytes alone: "
                f"its law failed with {type(error).__name__} ({error}), which is a bug of keepbusy's."
            )
        return laws.elementwise(call)


def _hashable(value: Any) -> Any:
    """An argument as part of a key; of a tensor, its length."""
    if hasattr(value, "shape"):
        return value.shape[0]
    return tuple(value) if isinstance(value, list) else value
