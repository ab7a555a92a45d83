"""Batches of a loader that are on the GPU before the loop asks for them: `keepbusy.prefetch`, and nobody sees it.

The loop is given the batch that its loader made, on the host, as ever. A copy of it went ahead, and it is what the
program's own `.to(device)` gives where it is certain that nothing has changed the batch in between (`first_moves`).
Which parts of a batch go where is seen in the turns before. What else could tell the difference:
- a loader that is asked earlier: only such as have workers of their own, whose order of samples is known when a pass
  begins, and whose data set shares no memory with the program;
- the program changes the batch once it has moved it: by then nothing is copied from it any more;
- batches that are kept: each part gets memory of its own, as if it had been copied alone;
- memory: there must be room for many more such batches, on the GPU and between processes.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _InfiniteConstantSampler

from keepbusy.fix.live.batch_copies import DeferredCopies, may_be_sent, numbered
from keepbusy.fix.live.switch import FixSwitch, Place, ours, place_of
from keepbusy.fix.loaders.more_workers import room_in_shared_memory
from keepbusy.fix.loaders.reach import Reach, Unshared
from keepbusy.instrument.patches import Function, Patches
from keepbusy.runtime.prefetch import prefetch

_SAMPLERS = {
    *(SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler),
    _InfiniteConstantSampler,
}
"""What they draw they draw when a pass begins."""
_SEEN = 2
"""Turns that moved the same parts to the same device: then these are sent ahead."""
_ROOM = 16
"""Batches that there must be room for."""
_DIFFERENT = "a batch came out different"


class FetchedBatches:
    """What a loader gave before the loop has had it: batches, or the error in the place of one."""

    def __init__(self, own: Iterator[Any]) -> None:
        self._own = own
        self._fetched: deque[tuple[Any, Exception | None]] = deque()

    def ahead(self, chosen: tuple[int, ...]) -> Iterator[list[Tensor]]:
        """The chosen parts of each: of those that are here, and then of those to come."""
        yield from [_parts(batch, chosen) for batch, _ in self._fetched]
        while True:
            try:
                batch, error = next(self._own), None
            except StopIteration:
                return
            except Exception as raised:
                batch, error = None, raised
            self._fetched.append((batch, error))
            yield _parts(batch, chosen)

    def take(self) -> Any:
        if not self._fetched:
            return next(self._own)
        batch, error = self._fetched.popleft()
        if error is not None:
            raise error
        return batch


def _parts(batch: Any, chosen: tuple[int, ...]) -> list[Tensor]:
    leaves = tree_leaves(batch)
    return [leaves[place] for place in chosen if place < len(leaves) and isinstance(leaves[place], Tensor)]


@dataclass
class SeenTurns:
    """Of a line that takes batches: which parts its turns move, and where to."""

    parts: dict[int, torch.device] = field(default_factory=dict)
    times: int = 0  # in a row
    size: int = 0  # of a batch, in bytes

    def add(self, parts: dict[int, torch.device], size: int) -> None:
        self.times = self.times + 1 if parts and parts == self.parts else 0
        self.parts, self.size = parts, size

    def device(self) -> torch.device | None:
        """Where its parts may be sent ahead, if they all go there and there is room."""
        if self.times < _SEEN or len(set(self.parts.values())) > 1:
            return None
        device = next(iter(self.parts.values()))
        room = min(torch.cuda.mem_get_info(device)[0], room_in_shared_memory())
        return device if room > _ROOM * self.size else None


class HandedPart(NamedTuple):
    """A tensor of the batch that the loop has."""

    tensor: weakref.ref[Tensor]
    version: int
    moves: frozenset[Place]
    asked: Callable[[torch.device], None]
    sent: Tensor | None
    copied: Any  # an event: once it has passed nothing is copied from the tensor

    def fitting(self, device: torch.device) -> Tensor | None:
        """What was sent there, if the program has not changed the tensor since."""
        known, sent = self.tensor(), self.sent
        return sent if sent is not None and sent.device == device and self.version == _version(known) else None


class LoopBatches:
    """What a loop goes through in place of its loader's iterator."""

    def __init__(self, fix: BatchesAhead, loader: DataLoader[Any], own: Any) -> None:
        self._fix, self.loader, self._own = fix, loader, own
        self._batches = FetchedBatches(own)
        self._ahead: Any = None
        self._chosen: tuple[int, ...] = ()
        self._turn: tuple[SeenTurns, dict[int, torch.device], int] | None = None
        self._handed: list[int] = []

    def __iter__(self) -> LoopBatches:
        return self

    def __len__(self) -> int:
        return len(self._own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __del__(self) -> None:
        self._forget()

    def __next__(self) -> Any:
        place = place_of(sys._getframe(1))
        self._forget()
        moves = self._fix.moves_after(place, self)
        if moves and (self._fix.may() or (self._ahead is not None and not self._fix.is_over())):
            sent, copied = self._sent(self._fix.seen[place])
        else:
            self._ahead, sent, copied = None, [], None
        batch = self._batches.take()
        if moves:
            self._hand(batch, moves, self._fix.seen[place], dict(zip(self._chosen, sent, strict=False)), copied)
        return batch

    def _forget(self) -> None:
        """The turn before has had its batch."""
        for one in self._handed:
            self._fix.handed.pop(one, None)
        self._handed.clear()
        if self._turn is not None:
            seen, parts, size = self._turn
            seen.add(parts, size)
            self._turn = None

    def _sent(self, seen: SeenTurns) -> tuple[list[Tensor], Any]:
        """The parts of the batch that comes now, and the event after their copies."""
        with ours(), suppress(StopIteration):
            device = seen.device() if self._ahead is None else None
            if device is not None:
                self._chosen = tuple(sorted(seen.parts))
                self._ahead = iter(prefetch(self._batches.ahead(self._chosen), device=device, then=_with_event))
            if self._ahead is not None:
                try:
                    return next(self._ahead)
                except RuntimeError as error:  # the loader's own come with its batches
                    self._fix.switch.stop(f"batches could not be sent ahead: {type(error).__name__}")
        self._ahead = None
        return [], None

    def _hand(self, batch: Any, moves: frozenset[Place], seen: SeenTurns, sent: dict[int, Tensor], copied: Any) -> None:
        parts = dict[int, torch.device]()
        tensors = {at: one for at, one in enumerate(tree_leaves(batch)) if type(one) is Tensor and not one.is_cuda}
        for at, one in tensors.items():
            asked = partial(parts.__setitem__, at)
            part = HandedPart(weakref.ref(one), _version(one), moves, asked, sent.get(at), copied)
            self._fix.handed[id(one)] = part
        self._handed += map(id, tensors.values())
        self._turn = seen, parts, sum(one.nbytes for one in tensors.values())


def _with_event(sent: list[Tensor]) -> tuple[list[Tensor], Any]:
    return sent, torch.cuda.current_stream().record_event()


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


class BatchesAhead:
    """`for batch in loader:`, where the turn begins with moving the batch to the device."""

    def __init__(self, moves: dict[str, dict[int, frozenset[Place]]], copies: DeferredCopies) -> None:
        """`moves`: of each file, and of its lines that take a batch, those at which that is moved as it came."""
        self.switch = FixSwitch("batches", "parts of batches that were on the GPU before the loop asked for them")
        self._moves, self._copies = moves, copies
        self._shown: dict[Place, weakref.ref[Any] | None] = {}
        self.handed: dict[int, HandedPart] = {}
        self.seen: defaultdict[Place, SeenTurns] = defaultdict(SeenTurns)

    def take(self, iterated: Any, line: int) -> Any:
        """What is gone through at this line of the program."""
        known = isinstance(iterated, DataLoader | LoopBatches)
        self._shown[sys._getframe(1).f_code.co_filename, line] = weakref.ref(iterated) if known else None
        return iterated

    def moves_after(self, taking: Place, batches: LoopBatches) -> frozenset[Place]:
        """Where the batch that is taken there is moved as it came; nowhere if it came through other hands."""
        shown = self._shown.get(taking)
        if shown is None or not any(shown() is one for one in (batches, batches.loader)):
            return frozenset()
        return self._moves.get(taking[0], {}).get(taking[1], frozenset())

    def may(self) -> bool:
        return self.switch.on and not self._copies.own_streams

    def is_over(self) -> bool:
        """For good. While it is off to be compared batches come as early, or turns without it would have its stock."""
        return bool(self.switch.off_because) or self._copies.own_streams

    def patch(self, patches: Patches) -> None:
        patches.replace(DataLoader, "__iter__", self._iterating)
        self._copies.ahead, self._copies.handed = self._moved, self.handed

    def _iterating(self, plain: Function) -> Function:
        def iterate(loader: DataLoader[Any]) -> Any:
            own = plain(loader)
            return (
                LoopBatches(self, loader, own) if not self.switch.off_because and _may_be_asked_early(loader) else own
            )

        return iterate

    def _moved(
        self, tensor: Tensor, device: torch.device | None, dtype: torch.dtype | None, waits: bool
    ) -> Tensor | None:
        """What the program's own move gives, if it is there."""
        if device is None:  # what stays on the host goes by another name from here on
            self.handed.clear()
        part = self.handed.pop(id(tensor), None)
        same: Any = part and part.tensor()
        frame = sys._getframe(3)
        if part is None or device is None or dtype is not None or same is not tensor:
            return None
        if place_of(frame) not in part.moves:
            return None
        device = numbered(device)
        part.asked(device)
        sent = part.fitting(device)
        if sent is None or not self.may() or not may_be_sent(tensor):
            return None
        if waits and tensor.is_pinned():  # which may be changed from here on
            with ours():
                part.copied.synchronize()
        self.switch.count(frame)
        return self.switch.checked_against(sent.clone(), lambda: tensor.to(device), _DIFFERENT)


def _may_be_asked_early(loader: DataLoader[Any]) -> bool:
    """Whether its batches are the same when they are asked for some turns before the loop does."""
    if not (
        type(loader) is DataLoader
        and loader.num_workers
        and not loader.persistent_workers
        and not loader.timeout
        and type(loader.sampler) in _SAMPLERS
        and getattr(loader.sampler, "generator", None) is None
        and type(loader.batch_sampler) in (BatchSampler, type(None))
    ):
        return False
    try:
        return not any(one.is_shared() for one in Reach(loader.dataset, loader.collate_fn).tensors())
    except Unshared:
        return False
