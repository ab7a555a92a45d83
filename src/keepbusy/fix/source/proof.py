"""A candidate source run in place of the program's own, and what it computed: losses and weights, step by step.

No file is touched: in the child process the candidate is compiled where the program's file would be. The losses are the
roots of backward passes.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from keepbusy.instrument import script
from keepbusy.instrument.children import when_imported
from keepbusy.instrument.patches import Function, Patches

ASKED = "KEEPBUSY_CANDIDATE"
"""Names a file for the child: which sources to take for which files, and where to leave what was computed."""


def begin() -> None:
    """In the child, before the program."""
    asked = json.loads(Path(os.environ[ASKED]).read_text(encoding="utf-8"))
    sources: dict[str, str] = asked["sources"]

    def compiled(source: bytes, path: str) -> CodeType:
        return script.COMPILE[0](sources.get(str(Path(path).resolve()), "").encode() or source, path)

    def reading(plain: Function) -> Function:
        def get_code(loader: Any, name: str) -> CodeType | None:
            path = loader.get_filename(name)
            if str(Path(path).resolve()) in sources:
                return compiled(b"", path)
            return plain(loader, name)

        return get_code

    script.COMPILE.append(compiled)
    Patches().replace(SourceFileLoader, "get_code", reading)
    if asked["witness"]:
        when_imported("torch", lambda: _witness(Path(asked["witness"])))


def _witness(path: Path) -> None:
    """Write down each loss and, after each step of an optimizer, a number that all bits of its weights make."""
    import atexit

    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    losses: list[float] = []
    weights: list[int] = []

    def going_back(plain: Function) -> Function:
        def backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            losses.append(float(tensor.detach().double().sum().cpu()))
            return plain(tensor, *args, **kwargs)

        return backward

    Patches().replace(torch.Tensor, "backward", going_back)

    def stepped(optimizer: Any, *_: Any) -> None:
        tensors = [one for group in optimizer.param_groups for one in group["params"]]
        weights.append(sum((at + 1) * _number_of(one) for at, one in enumerate(tensors)))

    register_optimizer_step_post_hook(stepped)
    atexit.register(lambda: path.write_text(json.dumps({"losses": losses, "weights": weights})))


def _number_of(tensor: Any) -> int:
    """Differs if any bit does, or if two change places."""
    import torch

    bits = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).long()
    return int((bits * (torch.arange(len(bits)) % 65521 + 1)).sum())


@dataclass(frozen=True)
class Computed:
    """What a run computed."""

    losses: tuple[float, ...]
    weights: tuple[int, ...]

    @classmethod
    def read(cls, path: Path) -> Computed:
        held = json.loads(path.read_text(encoding="utf-8"))
        return cls(tuple(held["losses"]), tuple(held["weights"]))

    def same(self, other: Computed, tolerance: float) -> str:
        """Why they are not the same; "" if they are."""
        if len(self.losses) != len(other.losses) or len(self.weights) != len(other.weights):
            return f"it went back {len(other.losses)} times in place of {len(self.losses)}"
        if not tolerance:
            pairs = enumerate(zip(self.weights, other.weights, strict=True), 1)
            step = next((step for step, (one, another) in pairs if one != another), 0)
            return f"its weights differ from step {step} on" if step else ""
        both = zip(self.losses, other.losses, strict=True)
        furthest = max((abs(one - another) / max(abs(one), 1e-12) for one, another in both), default=0.0)
        return "" if furthest <= tolerance else f"its losses differ by up to {furthest:.1g} of their size"
