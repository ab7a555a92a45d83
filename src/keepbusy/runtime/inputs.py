"""The memory that a graph reads its inputs from, and a second one beside it for what comes from the host.

While a replay runs, the next batch travels into the second; it moves over on the device just before its own replay.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Inputs:
    """Copies of the tensors of one call, in which each later call of the kind leaves its own."""

    def __init__(self, tensors: list[Tensor]) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.static = [torch.empty_like(one, device=device) for one in tensors]
        self._from_host = [place for place, one in enumerate(tensors) if not one.is_cuda]
        self._beside = [torch.empty_like(self.static[place]) for place in self._from_host]
        self._copies = torch.cuda.Stream() if self._from_host else None
        self._taken, self._arrived = torch.cuda.Event(), torch.cuda.Event()
        self._alike = _by_type(self.static)
        self.fill(tensors)
        self._versions = [one._version for one in self.static]

    def fill(self, tensors: list[Tensor]) -> None:
        """Enqueue what brings them here. A batch of the host may be changed once `wait` has returned."""
        sources = [*tensors]
        if self._copies is not None:
            self._bring(tensors, self._copies)
            for place, beside in zip(self._from_host, self._beside, strict=True):
                sources[place] = beside
        for places in self._alike:
            torch._foreach_copy_([self.static[one] for one in places], [sources[one] for one in places])
        self._taken.record()

    def _bring(self, tensors: list[Tensor], copies: torch.cuda.Stream) -> None:
        copies.wait_event(self._taken)
        with torch.cuda.stream(copies):
            for place, beside in zip(self._from_host, self._beside, strict=True):
                beside.copy_(tensors[place], non_blocking=True)
            self._arrived.record()
        torch.cuda.current_stream().wait_event(self._arrived)

    def wait(self) -> None:
        """Until the host's tensors have been read. To be called when the replay is enqueued: it loses no time then."""
        if self._copies is not None:
            self._arrived.synchronize()

    def note_writes(self) -> None:
        """After the capture: which arguments the step writes to."""
        self._written = [
            place
            for place, (one, version) in enumerate(zip(self.static, self._versions, strict=True))
            if one._version != version
        ]

    def hand_back(self, tensors: list[Tensor]) -> None:
        """A step that writes to its arguments finds them written."""
        for place in self._written:
            tensors[place].copy_(self.static[place])


def _by_type(tensors: list[Tensor]) -> list[list[int]]:
    """Places of tensors of one type each: hundreds of them are copied with one launch."""
    groups: dict[torch.dtype, list[int]] = {}
    for place, one in enumerate(tensors):
        groups.setdefault(one.dtype, []).append(place)
    return [*groups.values()]
