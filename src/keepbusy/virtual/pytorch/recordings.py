"""What a CUDA graph computes: recorded during its capture, computed again at each replay.

While a stream captures, a GPU runs nothing. Here operators compute all the same, since PyTorch must know the shapes of
their results; but when the capture ends, whatever they wrote into is as it was before, and their results hold nothing
until the first replay. A replay computes the recorded steps into the same memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from keepbusy.virtual.pytorch.tensors import tensors_in
from keepbusy.virtual.random_states import put_state, state_of

_aten = torch.ops.aten
_MAX_SIZE_RATIO = 2
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
        if place < len(self._free) and self._free[place][0] <= _MAX_SIZE_RATIO * size:
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
        self._results: list[tuple[Tensor, Tensor]] = []  # results of the operator at work, and where they are kept
        self._kept: list[Tensor] = []
        self._addresses: set[int] = set()  # addresses of its memory
        self._before: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}  # what was written into, and what it held
        # by the address of what is behind it: the dispatcher makes a new Python object on its way
        self._states = {generator._cdata: (generator, state_of(generator)) for generator in generators}
        # by the state in the capture, the state in this replay
        self._replayed_states: dict[tuple[int, bytes], Tensor] = {}

    # during the capture

    def keep(self, tensor: Tensor) -> Tensor:
        """A new result, moved to the graph's own memory."""
        result = tensor
        if 0 in tensor.stride():
            tensor = tensor.contiguous()
        last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        storage = self.arena.take((last + 1) * tensor.element_size() if tensor.numel() else 0)
        kept = over_storage(storage, 0, tensor)
        kept.copy_(tensor)
        self._results.append((result, kept))
        self._kept.append(kept)
        self._addresses.add(storage.data_ptr())
        return kept

    def about_to_write(self, *tensors: Tensor) -> None:
        """Remember what they hold, unless it is of this capture's making."""
        for tensor in tensors:
            place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if place not in self._before and tensor.untyped_storage().data_ptr() not in self._addresses:
                self._before[place] = (tensor.detach(), tensor.clone())  # an operator may resize its view of them

    def repeat(self, compute: Callable[[], Any], out: Any) -> None:
        """An operator has computed `out`: at each replay, the same again, to where its results were kept."""
        kept = defaultdict[int, deque[Tensor]](deque)  # an operator may give the same result twice
        for tensor, place in self._results:
            kept[id(tensor)].append(place)
        targets = [kept[id(result)].popleft() if kept[id(result)] else None for result in tensors_in(out)]
        self._results.clear()

        def again() -> None:
            for target, found in zip(targets, tensors_in(compute()), strict=True):
                if target is not None:
                    target.copy_(found)

        self._steps.append(again if any(target is not None for target in targets) else compute)

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
            self.run(lambda: self._replayed_states.update({place: state_of(generator)}))

    def put_back(self, generator: Any, state: Tensor) -> None:
        place = (generator._cdata, state.numpy().tobytes())
        if place not in self._replayed_states and not torch.equal(state, self._states[generator._cdata][1]):
            raise NotImplementedError(
                "keepbusy's virtual GPU cannot put back, within a capture, a random state from before it."
            )
        self.run(lambda: put_state(generator, self._replayed_states.get(place, state)))

    def end(self) -> None:
        """Nothing has run: memory and random states are as they were, and results hold nothing."""
        with torch.inference_mode(False), torch.no_grad():
            for target, held in reversed(self._before.values()):
                target.copy_(held)
            for kept in self._kept:
                kept.fill_(float("nan")) if kept.is_floating_point() or kept.is_complex() else kept.zero_()
        for generator, state in self._states.values():
            put_state(generator, state)
        for done in (self._before, self._kept, self._addresses, self._results):
            done.clear()

    # at replay

    def after_steps_so_far(self, does: Callable[[], object]) -> Callable[[], None]:
        """For what must wait until the device gets there: plays the steps so far, then does it."""
        so_far = len(self._steps)

        def catch_up() -> None:
            self.play(so_far)
            does()

        return catch_up

    def begin(self) -> None:
        self._played = 0
        for place, (generator, state) in self._states.items():
            self._replayed_states[place, state.numpy().tobytes()] = state_of(generator)

    def play(self, until: int | None = None) -> None:
        """Play the steps that have not been played since `begin`: all, or those before the step of that number."""
        steps = self._steps[self._played : until]
        self._played += len(steps)
        c = torch._C  # the program's own modes see nothing of what happens on the device
        with (
            torch.inference_mode(False), torch.no_grad(),
            c._DisableTorchDispatch(), c._DisableAutocast(), c.DisableTorchFunction(),
        ):  # fmt: skip
            for step in steps:
                step()


def over_storage(storage: Any, offset: int, like: Tensor) -> Tensor:
    """A plain host tensor: one made in inference mode could not be written to outside."""
    with torch.inference_mode(False):
        made = _aten.empty.memory_format([0], dtype=like.dtype)
        return _aten.set_.source_Storage_storage_offset(made, storage, offset, like.shape, like.stride())
