"""A candidate source run in place of the program's own, and what it computed: losses and weights, step by step.

No file is touched: in the child process the candidate is compiled where the program's file would be. The losses are the
roots of backward passes; of a program that only infers, what its models return is compared.
"""

from __future__ import annotations

import atexit
import inspect
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from zlib import crc32

from keepbusy.fix.source.in_memory import StandIns
from keepbusy.fix.source.rewritten_run import follow_graphs
from keepbusy.program.patches import Function, Patches, when_imported

if TYPE_CHECKING:
    from torch import Tensor

CANDIDATE = "KEEPBUSY_CANDIDATE"
"""Names a file for the child: which sources to take for which files, and where to leave what was computed."""
Peek: TypeAlias = "Callable[[Callable[[Tensor], Any], Tensor], Any]"
"""Calls a function with a tensor as the host sees it, in no time of the program's."""


def begin(peek: Peek, rank: Callable[[], int]) -> None:
    """Called in the child before the program, which then draws the same random numbers as in the other runs.

    It is called in processes that the program spawns, too: each says at its end which rank it was.
    """
    candidate = json.loads(Path(os.environ[CANDIDATE]).read_text(encoding="utf-8"))
    StandIns(candidate["sources"], candidate["origins"]).begin()
    patches = Patches()
    random.seed(0)
    when_imported("numpy", lambda: sys.modules["numpy"].random.seed(0))
    witness = _Witness(peek)
    when_imported("torch", witness.begin)
    if candidate.get("capturable"):
        when_imported("torch.optim", lambda: _choose_capturable(patches))
    when_imported("keepbusy.runtime.graph.graphed_step", lambda: _replay_uncompared(patches))
    follow_graphs(Path(candidate["witness"]), rank())
    atexit.register(lambda: witness.leave(Path(candidate["witness"]), rank()))


def _choose_capturable(patches: Patches) -> None:
    """PyTorch's optimizers are made as a graph needs them, where the program chose nothing else."""
    for kind in vars(sys.modules["torch.optim"]).values():
        if isinstance(kind, type) and "capturable" in inspect.signature(kind).parameters:
            patches.replace(kind, "__init__", _made_capturable)


def _made_capturable(plain: Function) -> Function:
    def init(optimizer: Any, *args: Any, **options: Any) -> None:
        is_chosen = options.get("fused") or options.get("differentiable")
        plain(optimizer, *args, **options if is_chosen else {"capturable": True} | options)

    return init


def _replay_uncompared(patches: Patches) -> None:
    """The results of the whole run are compared instead: in a short run the first replays would count for too much."""
    graphed_step = sys.modules["keepbusy.runtime.graph.graphed_step"]
    patches.replace(graphed_step, "is_compared", lambda _: lambda _: False)


@dataclass(frozen=True)
class RunResults:
    """What a run computed."""

    losses: list[float] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    last: list[float] = field(default_factory=list)  # of each weight at the end the sum of its sizes

    @classmethod
    def read(cls, folder: Path) -> RunResults:
        """Those of all ranks."""
        results = cls()
        for path in sorted(folder.glob("rank*.json")):
            for name, values in json.loads(path.read_text(encoding="utf-8")).items():
                getattr(results, name).extend(values)
        return results

    def same(self, other: RunResults, tolerance: float) -> str:
        """Why they are not the same; "" if they are."""
        if not self.losses and not self.outputs:
            return "the program calls no backward() and no module without gradients, so there is nothing to compare"
        if tolerance:
            return self._near(other, tolerance)
        if len(self.losses) != len(other.losses) or len(self.weights) != len(other.weights):
            return f"it called backward() {len(other.losses)} times, the program itself {len(self.losses)} times"
        of_weights, of_outputs = _first(self.weights, other.weights), _first(self.outputs, other.outputs)
        if of_weights:
            return f"its weights differ from step {of_weights} on"
        if of_outputs:
            return f"its outputs differ from number {of_outputs} on"
        return "" if repr(self.last) == repr(other.last) else "its weights differ at the end"

    def _near(self, other: RunResults, tolerance: float) -> str:
        """Losses, and the weights at the end.

        Where steps are replayed as a graph, a loss is seen only while a shape is captured, and nobody can tell to
        which steps these few losses belong. Then the weights alone are compared.
        """
        if len(self.last) != len(other.last):
            return "its optimizers hold more or fewer weights than the program's own"
        for name, apart in self.distances(other).items():
            if not all(distance <= tolerance for distance in apart):
                return f"its {name} differ by up to {100 * apart[0]:.3g}%, and may by {100 * tolerance:.3g}%"
        replayed = len(other.losses) < len(self.losses)
        return "it trained nothing that could be compared" if replayed and not self.last else ""

    def distances(self, other: RunResults) -> dict[str, list[float]]:
        """How far losses and weights are apart, as a share, the furthest first; no losses where some were not seen."""
        losses = [] if len(other.losses) < len(self.losses) else self.losses
        pairs = {"losses": (losses, other.losses), "weights": (self.last, other.last)}
        return {
            name: sorted((abs(a - b) / max(abs(a), 1e-6) for a, b in zip(*pair, strict=False)), reverse=True)
            for name, pair in pairs.items()
        }


def _first(some: list[int], others: list[int]) -> int:
    """Where they begin to differ, from 1 on; 0 if they do not."""
    pairs = enumerate(zip(some, others, strict=False), 1)
    least = min(len(some), len(others))
    return next(
        (number for number, (value, other) in pairs if value != other), 0 if len(some) == len(others) else least + 1
    )


class _Witness:
    """Writes down each loss and, after each step of an optimizer, a number that all bits of its weights make."""

    def __init__(self, peek: Peek) -> None:
        self._peek, self._computed, self._inside = peek, RunResults(), False
        self._optimizers: list[Any] = []

    def begin(self) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        torch.manual_seed(0)
        patches = Patches()
        patches.replace(torch.Tensor, "backward", self._going_back)
        patches.replace(torch.nn.Module, "__call__", self._calling)
        register_optimizer_step_post_hook(self._stepped)

    def leave(self, folder: Path, rank: int) -> None:
        """A process that computed nothing only spawned those that did."""
        for optimizer in self._optimizers:
            self._computed.last.extend(self._peek(_size, parameter) for parameter in _parameters(optimizer))
        if any(vars(self._computed).values()):
            (folder / f"rank{rank}.json").write_text(json.dumps(vars(self._computed)), encoding="utf-8")

    def _going_back(self, plain: Function) -> Function:
        def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._computed.losses.append(self._peek(lambda seen: float(seen.detach().double().sum()), tensor))
            return plain(tensor, *args, **kwargs)

        return backward

    def _calling(self, plain: Function) -> Function:
        """Writes down what the outermost module returns where nothing is learnt."""
        import torch

        from keepbusy.torch_names.pytorch import tree_leaves

        witness = self

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:  # PyTorch's profiler looks for a module of this name
            if witness._inside or torch.is_grad_enabled():
                return plain(self, *args, **kwargs)
            witness._inside = True
            try:
                outputs = plain(self, *args, **kwargs)
            finally:
                witness._inside = False
            witness._computed.outputs.append(witness._number_of(tree_leaves(outputs)))
            return outputs

        return call

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if not any(stepped is optimizer for stepped in self._optimizers):
            self._optimizers.append(optimizer)
        self._computed.weights.append(self._number_of(_parameters(optimizer)))

    def _number_of(self, tensors: Any) -> int:
        """Differs if any bit does, or if two change places."""
        import torch

        dense = (tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided)
        return reduce(lambda number, tensor: int(self._peek(lambda seen: crc32(_bits(seen), number), tensor)), dense, 0)


def _parameters(optimizer: Any) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _size(seen: Tensor) -> float:
    return float(seen.detach().double().abs().sum())


def _bits(seen: Tensor) -> Any:
    import torch

    return seen.detach().contiguous().flatten().view(torch.uint8).numpy()
