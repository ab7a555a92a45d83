"""What an operator launches on CUDA, and how long each kernel runs: by its law, found in operators.toml.

Laws go by what an operator is, and by how PyTorch's CUDA code launches it, which is not how its CPU code does.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from keepbusy.virtual.costs import laws
from keepbusy.virtual.costs.device import Array, Call, Device, Kernel, NoLaw, Operand


class Law(NamedTuple):
    """How the operators of a family are costed: a row of operators.toml, which says what is what."""

    kernels: Callable[[Call], list[Kernel]]
    names: str = ""
    needs: Sequence[int] = (0,)
    asks: Sequence[str] = ()

    @property
    def depends_on_precision(self) -> bool:
        """Whether PyTorch's precision of float32 products is for these operators."""
        return self.kernels is laws.matrix_product


_TABLE = tuple(
    Law(getattr(laws, name), **about)
    for name, about in tomllib.loads(Path(__file__).with_name("operators.toml").read_text(encoding="utf-8")).items()
)
LAWS: Mapping[str, Law] = {name: law for law in _TABLE for name in law.names.split()}
_LISTS = Law(laws.multi_tensor, needs=(), asks=("lists",))
"""The law of all `_foreach_…` and `_fused_…` operators that are not listed. `lists`: how many lists of tensors were
flattened into the inputs."""
_ELEMENTWISE = Law(laws.elementwise, needs=())


def law_of(name: str) -> Law:
    """The law of an operator, named without its namespace and overload."""
    return LAWS.get(name) or (_LISTS if name.startswith(("_foreach_", "_fused_")) else _ELEMENTWISE)


class OperatorCosts:
    """The costs on one device. They are kept by name and tensors, so a training loop pays for them once."""

    def __init__(
        self, device: Device, allows_tf32: Callable[[], bool] = lambda: False, notes: list[str] | None = None
    ) -> None:
        """`allows_tf32`: whether float32 products may use tensor cores now. `notes`: where to note a law that fails,
        so that the program goes on; without it, as in tests, the failure is raised.
        """
        self.device, self.notes = device, notes
        self.allows_tf32 = allows_tf32
        self.by_call: dict[Any, Any] = {}
        """What the caller knows of calls, by what it knows a call by, which is quicker to make."""
        self._known: dict[tuple[Any, ...], tuple[Kernel, ...]] = {}

    def kernels(
        self,
        name: str,
        inputs: tuple[Operand, ...],
        outputs: tuple[Operand, ...] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> tuple[Kernel, ...]:
        """Name and work of each kernel. `name` without its namespace and overload; tensors in the schema's order."""
        law = law_of(name)
        asked = (
            tuple((wanted, _plain(arguments[wanted])) for wanted in law.asks if wanted in arguments)
            if arguments
            else ()
        )
        tf32 = law.depends_on_precision and self.allows_tf32()
        key = (name, inputs, outputs, asked, tf32)
        if key not in self._known:
            given, made = (tuple(Array(*operand) for operand in side) for side in (inputs, outputs))
            call = Call(self.device, name, given, made, dict(asked), tf32)
            self._known[key] = tuple(self._found(law, call))
        return self._known[key]

    def _found(self, law: Law, call: Call) -> list[Kernel]:
        if not (call.inputs or call.outputs):
            return []
        dimensions = [len(shape) for shape, _, _ in call.inputs[: len(law.needs)]]
        if len(dimensions) < len(law.needs) or any(has < n for has, n in zip(dimensions, law.needs, strict=True)):
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


def _plain(value: Any) -> Any:
    """As part of a key: of a tensor its length."""
    if hasattr(value, "shape"):
        return value.shape[0]
    return tuple(value) if isinstance(value, list) else value
