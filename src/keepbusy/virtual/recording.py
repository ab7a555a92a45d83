"""What a CUDA graph computes: recorded during its capture, computed again at each replay.

While a stream captures, a GPU runs nothing. Here operators compute all the same, since PyTorch must
know what comes of them; but when the capture ends, whatever they wrote into is as it was before, and
their results hold nothing until the first replay. A replay computes the recorded steps into the same memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.seeds import put_state, state_of
from keepbusy.virtual.tensors import map_tensors, to_host

_aten = torch.ops.aten
_WASTE = 2
"""A piece of memory serves again where no more than half of it would lie idle."""


class Arena:
    """Host memory of graphs that share a pool. What dies in a capture serves again in it, as on a GPU."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int, Any]] = []  # size, address and storage
        self._returned: deque[Any] = deque()

    def take(self, size: int) -> Any:
        """A storage of at least so many bytes."""
        while self._returned:
            storage = self._returned.popleft()
            insort(self._free, (storage.nbytes(), storage.data_ptr(), storage))
        place = bisect_left(self._free, (size,))
        if place < len(self._free) and self._free[place][0] <= _WASTE * size:
            return self._free.pop(place)[2]
        return _aten.empty.memory_format([size], dtype=torch.uint8).untyped_storage()

    def give_back(self, storage: Any) -> None:
        """Safe anywhere, also in a finalizer."""
        self._returned.append(storage)


class Recording:
    """One capture: its steps, and what must be undone when it ends."""

    def __init__(self, arena: Arena, generators: Iterable[Any]) -> None:
        self.arena = arena
        self._steps: list[Callable[[], object]] = []
        self._played = 0
        self._fresh: list[tuple[Tensor, Tensor]] = []  # results of the operator at work, and where they are kept
        self._kept: list[Tensor] = []
        self._own: set[int] = set()  # addresses of its memory
        self._before: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}  # what was written into, and what it held
        # by the address of what is behind it: the dispatcher makes a new Python object on its way
        self._states = {one._cdata: (one, state_of(one)) for one in generators}
        self._noted: dict[tuple[int, bytes], Tensor] = {}  # by the state in the capture, the state in this replay

    # during the capture

    def keep(self, tensor: Tensor) -> Tensor:
        """A new result, moved to the graph's own memory."""
        if 0 in tensor.stride():
            tensor = tensor.contiguous()
        storage = self.arena.take(_reach(tensor))
        kept = _over(storage, 0, tensor)
        kept.copy_(tensor)
        self._fresh.append((tensor, kept))
        self._kept.append(kept)
        self._own.add(storage.data_ptr())
        return kept

    def returns(self, kept: Tensor) -> Callable[[], None]:
        """What gives its memory back."""
        return partial(self.arena.give_back, kept.untyped_storage())

    def about_to_write(self, *tensors: Tensor) -> None:
        """Remember what they hold, unless it is of this capture's making."""
        for one in tensors:
            place = (one.data_ptr(), one.shape, one.stride(), one.dtype)
            if place not in self._before and one.untyped_storage().data_ptr() not in self._own:
                self._before[place] = (one.detach(), one.clone())  # an operator may resize its view of them

    def repeat(self, compute: Callable[[], Any], out: Any) -> None:
        """An operator has computed `out`: at each replay, the same again, to where its results were kept."""
        kept = {id(tensor): place for tensor, place in self._fresh}
        targets = [kept.get(id(one)) for one in _flat(out)]
        self._fresh.clear()
        self._steps.append(partial(_again, compute, targets) if any(one is not None for one in targets) else compute)

    def run(self, does: Callable[[], object], *written: Tensor) -> None:
        """Do something now, and at each replay."""
        self.about_to_write(*written)
        does()
        self._steps.append(does)

    def draws_from(self, generator: Any) -> None:
        """A GPU must know before the capture whose random numbers a graph draws."""
        if generator._cdata not in self._states:
            raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")

    def note_state(self, generator: Any, state: Tensor) -> None:
        """The program took a state, and may put it back: a replay has another one there."""
        if generator._cdata in self._states:
            place = (generator._cdata, state.numpy().tobytes())
            self.run(lambda: self._noted.update({place: state_of(generator)}))

    def put_back(self, generator: Any, state: Tensor) -> None:
        place = (generator._cdata, state.numpy().tobytes())
        if place not in self._noted and not torch.equal(state, self._states[generator._cdata][1]):
            raise NotImplementedError(
                "keepbusy's virtual GPU cannot put back, within a capture, a random state from before it."
            )
        self.run(lambda: put_state(generator, self._noted.get(place, state)))

    def end(self) -> None:
        """Nothing has run: memory and random states are as they were, and results hold nothing."""
        with torch.inference_mode(False), torch.no_grad():
            for target, held in reversed(self._before.values()):
                target.copy_(held)
            for one in self._kept:
                one.fill_(float("nan")) if one.is_floating_point() or one.is_complex() else one.zero_()
        for generator, state in self._states.values():
            put_state(generator, state)
        for done in (self._before, self._kept, self._own, self._fresh):
            done.clear()

    # at replay

    def later(self, does: Callable[[], object]) -> Callable[[], None]:
        """For what must wait until the device gets there: plays the steps so far, then does it."""
        so_far = len(self._steps)

        def catch_up() -> None:
            self._play(so_far)
            does()

        return catch_up

    def begin(self) -> None:
        self._played = 0
        for place, (generator, state) in self._states.items():
            self._noted[place, state.numpy().tobytes()] = state_of(generator)

    def finish(self) -> None:
        """Play what has not been played since `begin`."""
        self._play(len(self._steps))

    def _play(self, until: int) -> None:
        steps, self._played = self._steps[self._played : until], until
        with torch.inference_mode(False), torch.no_grad(), _unseen(), _outside_autocast(), _outside_functions():
            for step in steps:
                step()


# the program's own modes see nothing of what happens on the device
_unseen, _outside_autocast, _outside_functions = (
    torch._C._DisableTorchDispatch,
    torch._C._DisableAutocast,
    torch._C.DisableTorchFunction,
)


def lasting(tensor: Tensor) -> Tensor:
    """As `to_host`, but the device may give the tensor's memory to others: only the host's is kept."""
    storage = MACHINE.host_memory(tensor)
    with torch.inference_mode(False):
        if storage is not None:
            tensor = _over(storage, (tensor.data_ptr() - storage.data_ptr()) // tensor.element_size(), tensor)
        return to_host(tensor)  # never resized in place: that would move the memory


def _over(storage: Any, offset: int, like: Tensor) -> Tensor:
    """A plain host tensor: one made in inference mode could not be written to outside."""
    with torch.inference_mode(False):
        made = _aten.empty.memory_format([0], dtype=like.dtype)
        return _aten.set_.source_Storage_storage_offset(made, storage, offset, like.shape, like.stride())


def _reach(tensor: Tensor) -> int:
    """Bytes from its first element to its last."""
    if not tensor.numel():
        return 0
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _again(compute: Callable[[], Any], targets: list[Tensor | None]) -> None:
    for target, found in zip(targets, _flat(compute()), strict=True):
        if target is not None:
            target.copy_(found)


def _flat(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found
