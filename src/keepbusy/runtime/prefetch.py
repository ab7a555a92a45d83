"""`prefetch`: batches on the device before the loop asks for them, copied beside its compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from keepbusy.runtime.ahead import Ahead, InTurn
from keepbusy.runtime.copies import Copies, Then
from keepbusy.runtime.overlap import Overlap, Report
from keepbusy.runtime.pulls import Place, Pulls

__all__ = ["Prefetch", "Report", "prefetch"]


def prefetch(loader: Any, depth: int = 2, device: Any = None, then: Then | None = None) -> Prefetch:
    """The loader's batches, on the device, each copied while the loop computes on those before it.

        for batch in keepbusy.prefetch(loader, then=normalise):
            loss = step(batch)

    `loader` is any iterable. Its batches may be tensors, dicts, tuples, named tuples and dataclasses of them,
    trees that PyTorch knows, and objects with a `to`; what else stands in them is left as it is.
    `depth` batches are kept ahead, so `depth + 2` are on the device at once. `then` runs on the device,
    on the stream of the copies, and returns the batch that the loop gets. The current stream may read a batch
    as any tensor of its own. Without CUDA this is a plain iterator over the loader, with `then`.
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise ValueError(f"prefetch got depth={depth!r} but needs at least one batch ahead: give depth=1 or more.")
    chosen = None if device is None else torch.device(device)
    if torch.cuda.is_available() and chosen is not None and chosen.type != "cuda":
        raise ValueError(f"prefetch got device={str(device)!r} but copies to CUDA devices: give device='cuda' or none.")
    return Prefetch(loader, depth, chosen, then)


class Prefetch:
    """A loader whose batches are fetched ahead. What it does not have itself it has from the loader."""

    def __init__(self, loader: Any, depth: int, device: torch.device | None, then: Then | None) -> None:
        self._loader, self._depth, self._device, self._then = loader, depth, device, then
        self._overlap = Overlap(depth)
        self._sides: dict[torch.device, Any] = {}
        self._pulls = Pulls(loader)
        self._resume: Place | None = None

    def __iter__(self) -> Iterator[Any]:
        self._pulls, self._resume = Pulls(self._loader, self._resume), None
        if not torch.cuda.is_available():
            return InTurn(self._pulls, self._then)
        device = self._current_device()
        copies = Copies(device, self._side(device), self._depth, self._then)
        return Ahead(self._pulls, copies, self._depth, self._overlap)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":  # asked for while this is not made yet, as by `copy`
            raise AttributeError(name)
        return getattr(self._loader, name)

    def state_dict(self) -> Place:
        """What resumes at the first batch that the loop has not had, whatever was fetched ahead."""
        return self._pulls.place() if self._resume is None else self._resume

    def load_state_dict(self, state: Place) -> None:
        """The next pass begins there: by the loader's own state if it keeps one, else what came before is skipped."""
        if "loader" in state:
            self._loader.load_state_dict(state["loader"])
        self._resume = state

    def report(self) -> Report:
        """How much of the copies was hidden so far, and why the rest was not."""
        return self._overlap.report()

    def _current_device(self) -> torch.device:
        if self._device is None or self._device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return self._device

    def _side(self, device: torch.device) -> Any:
        """One stream for all passes: memory that `then` takes from one stream is of no use to another."""
        if device not in self._sides:
            self._sides[device] = torch.cuda.Stream(device)
        return self._sides[device]
