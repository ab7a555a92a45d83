"""The values of a CUDA graph: operators are recorded during its capture, and computed again at each replay.

During a capture a GPU runs nothing. Here operators compute all the same, since PyTorch must know the shapes of their
results. When the capture ends, memory that they wrote into is restored, and their results hold nothing until the first
replay. A replay computes the recorded steps into the same memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from keepbusy.torch_names.dispatcher import without_autocast, without_dispatch_modes, without_function_modes
from keepbusy.virtual.pytorch.tensors import tensors_in
from keepbusy.virtual.random_states import put_state, state_of

_aten = torch.ops.aten
_MAX_SIZE_RATIO = 2
"""Memory is reused only if at least half of it is needed."""


class Arena:
    """Host memory of graphs that share a pool. Memory freed in a capture is reused in it, as on a GPU."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int, Any]] = []  # size, address and storage
        self._returned: deque[Any] = deque()

    def take(self, size: int) -> Any:
        """A storage of at least `size` bytes."""
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
    """One capture: its steps, and the values to restore when it ends."""

    def __init__(self, arena: Arena, generators: Iterable[Any]) -> None:
        self.arena = arena
        self._steps: list[Callable[[], object]] = []
        self._played = 0
        self._results: list[tuple[Tensor, Tensor]] = []  # results of the current operator, and their copies
        self._kept: list[Tensor] = []
        self._addresses: set[int] = set()  # of the graph's memory
        self._before: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}  # tensors written into, and their old values
        # by the address of the C++ generator, since the dispatcher makes new Python objects for it
        self._states = {generator._cdata: (generator, state_of(generator)) for generator in generators}
        # states in this replay, by those in the capture
        self._replayed_states: dict[tuple[int, bytes], Tensor] = {}

    # during the capture

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy of a new result in the graph's own memory."""
        result = tensor
        if 0 in tensor.stride():
            tensor = tensor.contiguous()
        last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        storage = self.arena.take((last + 1) * tensor.element_size() if tensor.numel() else 0)
        copy = over_storage(storage, 0, tensor)
        copy.copy_(tensor)
        self._results.append((result, copy))
        self._kept.append(copy)
        self._addresses.add(storage.data_ptr())
        return copy

    def about_to_write(self, *tensors: Tensor) -> None:
        """Remember the values of tensors, except those that the capture has made."""
        for tensor in tensors:
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if key not in self._before and tensor.untyped_storage().data_ptr() not in self._addresses:
                self._before[key] = (tensor.detach(), tensor.clone())  # detached: an operator may resize the tensor

    def repeat(self, compute: Callable[[], Any], out: Any) -> None:
        """An operator has computed `out`. At each replay it is computed again, into the copies of its results."""
        copies = defaultdict[int, deque[Tensor]](deque)  # an operator may give the same result twice
        for tensor, place in self._results:
            copies[id(tensor)].append(place)
        targets = [copies[id(result)].popleft() if copies[id(result)] else None for result in tensors_in(out)]
        self._results.clear()

        def recompute() -> None:
            for target, value in zip(targets, tensors_in(compute()), strict=True):
                if target is not None:
                    target.copy_(value)

        self._steps.append(recompute if any(target is not None for target in targets) else compute)

    def run(self, step: Callable[[], object], *written: Tensor) -> None:
        """Run a step now, and at each replay."""
        self.about_to_write(*written)
        step()
        self._steps.append(step)

    def draws_from(self, generator: Any) -> None:
        """Refuse a generator that was not registered before the capture, as a GPU does."""
        if generator._cdata not in self._states:
            raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")

    def note_state(self, generator: Any, state: Tensor) -> None:
        """The program reads a generator's state, and may put it back; at a replay the state is another one."""
        if generator._cdata in self._states:
            key = (generator._cdata, state.numpy().tobytes())
            self.run(lambda: self._replayed_states.update({key: state_of(generator)}))

    def put_back(self, generator: Any, state: Tensor) -> None:
        key = (generator._cdata, state.numpy().tobytes())
        if key not in self._replayed_states and not torch.equal(state, self._states[generator._cdata][1]):
            raise NotImplementedError(
                "keepbusy's virtual GPU cannot put back, within a capture, a random state from before it."
            )
        self.run(lambda: put_state(generator, self._replayed_states.get(key, state)))

    def end(self) -> None:
        """Restore memory and random states, and clear the results."""
        with torch.inference_mode(False), torch.no_grad():
            for target, before in reversed(self._before.values()):
                target.copy_(before)
            for result in self._kept:
                result.fill_(float("nan")) if result.is_floating_point() or result.is_complex() else result.zero_()
        for generator, state in self._states.values():
            put_state(generator, state)
        for cache in (self._before, self._kept, self._addresses, self._results):
            cache.clear()

    # at replay

    def after_steps_so_far(self, action: Callable[[], object]) -> Callable[[], None]:
        """A function that plays the steps recorded so far, and then runs an action of the host's."""
        count = len(self._steps)

        def catch_up() -> None:
            self.play(count)
            action()

        return catch_up

    def begin(self) -> None:
        self._played = 0
        for place, (generator, state) in self._states.items():
            self._replayed_states[place, state.numpy().tobytes()] = state_of(generator)

    def play(self, until: int | None = None) -> None:
        """Play the steps not played since `begin`: all, or those before step `until`."""
        steps = self._steps[self._played : until]
        self._played += len(steps)
        with (  # the program's own modes do not see the device's work
            torch.inference_mode(False), torch.no_grad(),
            without_dispatch_modes(), without_autocast(), without_function_modes(),
        ):  # fmt: skip
            for step in steps:
                step()


def over_storage(storage: Any, offset: int, like: Tensor) -> Tensor:
    """A host tensor over a storage. It is no inference tensor, which could not be written to outside of that mode."""
    with torch.inference_mode(False):
        tensor = _aten.empty.memory_format([0], dtype=like.dtype)
        return _aten.set_.source_Storage_storage_offset(tensor, storage, offset, like.shape, like.stride())
