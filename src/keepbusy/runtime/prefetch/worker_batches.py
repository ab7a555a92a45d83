"""Batches from a loader's workers: their tensors joined where they are made, in shared memory that is pinned once.

Of five hundred tensors that a worker sends one by one, each comes by a file of its own, is pinned alone, and is taken
from and put into its batch in Python. Joined they are one tensor on all that way, until they are cut out on the device.
And what is large is not copied again to pinned memory, from pages that the training process has never touched before.

A buffer's first byte tells whose it is. The worker that made it sets it and fills the rest; the training process clears
it when the batch within is let go, which is after the device has read it. Where a batch is kept its worker takes
another buffer. The second byte says that the training process holds the buffer: then its name is sent in its place,
and no file is passed between processes, which takes a fifth of a millisecond.
"""

from __future__ import annotations

import copy
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from keepbusy.runtime.prefetch.batch_layout import (
    ALIGNMENT,
    DIRECT_COPY_BYTES,
    BatchLayouts,
    BatchTree,
    Layout,
    ToDevice,
    pieces,
    put_together,
    taken_apart,
)

BUFFERS = 8
"""Of a worker: what it has under way, what the loop has, and what is on its way to the device."""
_WORTH_JOINING = 8
"""Of fewer tensors, if they are small, nothing is gained."""
_HELD, _NAME = 1, slice(16, 32)
_BY_NAME: dict[bytes, torch.UntypedStorage] = {}
"""The buffers that this process holds."""
_FOR_ALL_DEVICES = 1
"""cudaHostRegisterPortable."""


def with_packing_workers(loader: Any) -> Any:
    """The loader, or one just like it whose workers join tensors.

    The user's own stays as it is: what it gives to others is what its `collate_fn` makes.
    """
    if type(loader) is not DataLoader or not loader.num_workers or loader._iterator is not None:
        return loader
    packing = copy.copy(loader)
    packing.collate_fn = PackingCollate(loader.collate_fn)
    return packing


class PackingCollate:
    """A `collate_fn` whose batches are packed, where they hold many tensors or large ones."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate, self._buffers, self._layouts = collate, WorkerBuffers(), BatchLayouts(together=True)
        self._kind: Any = None
        self._form = b""

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        nodes, structure = taken_apart(batch)
        places, others, layout = self._layouts.of(nodes)
        if len(places) < _WORTH_JOINING and layout.packed < DIRECT_COPY_BYTES:
            return batch
        places = [places[index] for index in layout.order]
        kind = structure, places, others, layout
        try:
            if self._kind != kind:
                numbered = put_together(list(range(len(nodes))), structure)
                self._form = pickle.dumps((numbered, (*places, *others), layout))
                self._kind = kind
        except Exception:  # a kind of tree that takes nothing but tensors
            return batch
        joined = self._buffers.take(layout.packed)
        torch._foreach_copy_(pieces(joined, layout), [nodes[place] for place in places])
        return JoinedBatch(self._form, joined, [nodes[place] for place in others])


class WorkerBuffers:
    """Those that this worker made."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """Memory for so many bytes, which nobody reads until it is sent."""
        free = [place for place, buffer in enumerate(self.made) if not buffer[0]]
        fitting = next((place for place in free if len(self.made[place]) >= ALIGNMENT + size), None)
        if fitting is not None:
            buffer = self.made[fitting]
        else:
            buffer = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(ALIGNMENT + size))
            buffer[_NAME] = torch.tensor(list(os.urandom(_NAME.stop - _NAME.start)), dtype=torch.uint8)
            if free:  # batches have grown
                self.made[free[0]] = buffer
            elif len(self.made) < BUFFERS:
                self.made.append(buffer)
        buffer[0] = 1
        return buffer[ALIGNMENT : ALIGNMENT + size]


class JoinedBatch:
    """A batch on its way from a worker: its tensors in one, and whatever else it holds."""

    joined: Tensor

    def __init__(self, form: bytes, joined: Tensor, others: list[Any]) -> None:
        self.form, self.joined, self.others = form, joined, others

    def __getstate__(self) -> tuple[Any, ...]:
        """As the worker sends it: by the name of its buffer, where the training process knows that."""
        sent = None if self.joined.untyped_storage()[_HELD] else self.joined
        return self.form, _name_of(self.joined), self.joined.nbytes, sent, self.others

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """It has come. The worker may fill its buffer again once the tensor in it is let go, however that happens."""
        self.form, name, size, joined, self.others = state
        if joined is None:
            if name not in _BY_NAME:  # let go, as after the pass that the batch was for
                return
            joined = torch.empty(0, dtype=torch.uint8).set_(_BY_NAME[name], ALIGNMENT, (size,))
        self.joined = joined
        weakref.finalize(joined, joined.untyped_storage().__setitem__, 0, 0).atexit = False

    def pin_memory(self) -> JoinedBatch:
        """As a loader does with what it knows; the buffer is pinned already, or once it is copied from."""
        self.others = pin_memory(self.others)
        return self


class JoinedTree(BatchTree):
    """Its leaves, and the batch as it was before it was joined, of the same bytes elsewhere."""

    def __init__(self, batch: JoinedBatch) -> None:
        super().__init__([batch.joined, *batch.others])
        self._form = batch.form

    def close(self, leaves: Iterator[Any], to_device: ToDevice) -> Any:
        joined, *others = super().close(leaves, to_device)
        structure, places, layout = _form_of(self._form)
        nodes: list[Any] = [None] * len(places)
        for place, node in zip(places, chain(pieces(joined, layout), others), strict=True):
            nodes[place] = node
        return put_together(nodes, structure)


@lru_cache(maxsize=64)
def _form_of(form: bytes) -> tuple[Any, tuple[int, ...], Layout]:
    """Its structure, where in it the leaves stand, and their layout.

    Batches of the same kind say it by the same bytes.
    """
    numbered, places, layout = pickle.loads(form)
    return taken_apart(numbered, int)[1], places, layout


class ReceivedBuffers:
    """Those that batches came in. Held, so that one that comes again is the same memory, which is pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: list[bytes] = []
        self._registered: list[int] = []

    def hold(self, joined: Tensor) -> None:
        """The buffer that it stands in, and pin it if it is large, unless that is done."""
        storage = joined.untyped_storage()
        if not storage[_HELD]:
            name = _name_of(joined)
            self._names.append(name)
            _BY_NAME[name] = storage
            if joined.nbytes >= DIRECT_COPY_BYTES:
                self._register(storage.data_ptr(), storage.nbytes())
            storage[_HELD] = 1

    def close(self, copy_stream: Any) -> None:
        """Let them go once nothing is copied from them any more."""
        if self._registered:
            copy_stream.synchronize()
        for place in self._registered:
            torch.cuda.cudart().cudaHostUnregister(place)
        for name in self._names:
            _BY_NAME.pop(name)[_HELD] = 0
        self._registered.clear()
        self._names.clear()

    def _register(self, place: int, size: int) -> None:
        cudart: Any = torch.cuda.cudart()
        if cudart is None:  # a build without CUDA
            return
        if int(cudart.cudaHostRegister(place, size, _FOR_ALL_DEVICES)) == 0:
            self._registered.append(place)
            return
        with suppress(RuntimeError):  # the next kernel would be blamed for it
            torch.zeros(1, device=self._device)


def _name_of(joined: Tensor) -> bytes:
    """Of its buffer."""
    return bytes(torch.empty(0, dtype=torch.uint8).set_(joined.untyped_storage())[_NAME].tolist())
