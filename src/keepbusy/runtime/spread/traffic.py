"""What travels between ranks, counted, and what the layout says must."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from keepbusy.runtime.spread.layout import RankLayout

KINDS = {"allreduce": "all-reduce", "allgather": "all-gather", "reduce_scatter": "reduce-scatter"}
KINDS |= {"all_reduce": "all-reduce", "all_gather": "all-gather", "broadcast": "broadcast"}


class Traffic(TorchDispatchMode):  # type: ignore[misc]  # PyTorch is not typed here
    """Counts collectives, and the bytes of each one's whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.number: Counter[str] = Counter()
        self.size: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        if function.namespace in ("c10d", "_c10d_functional"):
            kind = next((kind for key, kind in KINDS.items() if key in function.__name__), None)
            if kind:
                self.number[kind] += 1
                self.size[kind] += max(_bytes(args[0]), _bytes(args[1]))
        return function(*args, **(kwargs or {}))

    def __str__(self) -> str:
        return ", ".join(f"{self.number[one]} {one}s of {self.size[one] / 1e6:.4g} MB" for one in sorted(self.number))


def _bytes(value: Any) -> int:
    return sum(one.nbytes for one in tree_leaves(value) if isinstance(one, Tensor))


class Theory:
    """What a forward and a backward pass must move, by the layout: at least these bytes, and this often.

    DDP reduces each gradient once. FSDP2 gathers each group of parameters once, and at stage 3 once more in the
    backward pass, but for the outermost, which stays; it scatters each group's gradients once. Tensor
    parallelism has collectives of its own, and each batch norm one more in either pass. Where modules run twice, as
    those that are computed again in the backward pass, there may be more.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: RankLayout,
        of_layers: dict[str, int],
        norms: int,
        unused: list[str],
        repeats: bool,
    ) -> None:
        self.number: dict[str, int] = {}
        self.size: Counter[str] = Counter()
        self._layout = layout
        self._idle = {id(one) for name, one in model.named_parameters() if name in unused}
        if layout.wraps:
            self.size["all-reduce"] = sum(one.nbytes for one in model.parameters() if one.requires_grad)
        elif layout.data > 1:
            self._sharded(model)
        for kind, number in of_layers.items():
            if layout.data == 1 or kind in self.number:  # what FSDP2 reduces among replicas is not counted
                self.number[kind] = self.number.get(kind, 0) + number
        self._norms, self._repeats = norms, repeats

    def _sharded(self, model: nn.Module) -> None:
        groups = list(_groups(model))
        trained = [[one for one in held if one.requires_grad and id(one) not in self._idle] for _, held in groups]
        if not self._layout.shard:
            self.size["all-reduce"] = sum(self._padded(held) for held in trained)
            return
        again = self._layout.shard == 3
        self.number["all-gather"] = sum(1 + (again and module is not model) for module, _ in groups)
        self.number["reduce-scatter"] = sum(map(bool, trained))
        for (module, held), learning in zip(groups, trained, strict=True):
            self.size["all-gather"] += self._padded(held) * (1 + (again and module is not model))
            self.size["reduce-scatter"] += self._padded(learning)

    def _padded(self, parameters: Iterable[Any]) -> int:
        """With the rows that make the parts of all ranks as large as the largest."""
        total = 0
        for one in parameters:
            local = one.to_local()
            whole = list(one.shape)
            if self._layout.tensor > 1 and (cut := one.placements[-1]).is_shard():
                whole[cut.dim] //= self._layout.tensor
            parts = self._layout.data if self._layout.shard else 1
            rows = -(-whole[0] // parts) * parts
            total += local.element_size() * rows * prod(whole[1:])
        return total

    def differs(self, counted: Traffic) -> str | None:
        """A sentence, if other things moved than must."""
        for kind, number in self.number.items():
            own = self._norms if kind in ("all-gather", "all-reduce") else 0
            more = counted.number[kind] > number + 2 * own and not self._repeats
            if counted.number[kind] < number or more:
                return f"{counted.number[kind]} {kind}s were counted, and this layout has {number}"
        for kind, size in self.size.items():
            if counted.size[kind] < size:
                return f"{kind}s moved {counted.size[kind]:,} bytes, and this layout has {size:,}"
        return None


def _groups(model: nn.Module) -> Iterable[tuple[nn.Module, list[Any]]]:
    """What FSDP2 gathers as one: a wrapped module, and the parameters in it that no inner one holds."""
    taken: set[int] = set()
    for module in reversed(list(model.modules())):
        if hasattr(module, "set_requires_gradient_sync"):
            held = [one for one in module.parameters() if id(one) not in taken]
            taken |= {id(one) for one in held}
            if held:
                yield module, held
