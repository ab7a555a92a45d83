"""Tensors joined where the batch is made: in the loader's workers, in shared memory that stays and is pinned once.

Of five hundred tensors that a worker sends one by one, each comes by a file of its own, is pinned alone, and is taken
from and put into its batch in Python. Joined they are one tensor on all that way, until they are cut out on the device.
And what is large is not copied again to pinned memory, from pages that the training process has never touched before.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from keepbusy.runtime.prefetch.batch_tree import has_to
from keepbusy.runtime.prefetch.joined_batch import JoinedBatch
from keepbusy.runtime.prefetch.packed_layout import DIRECT_COPY_BYTES, layout_of, packable, pieces
from keepbusy.runtime.prefetch.shared_buffers import WorkerBuffers

FEWEST = 8
"""Of fewer tensors, if they are small, nothing is gained."""


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
        self._collate, self._buffers = collate, WorkerBuffers()

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        nodes, structure = tree_flatten(batch, is_leaf=has_to)
        places = packable(nodes)
        layout = layout_of([nodes[place] for place in places], together=True)
        if len(places) < FEWEST and layout.packed < DIRECT_COPY_BYTES:
            return batch
        places = [places[index] for index in layout.order]
        others = sorted(set(range(len(nodes))).difference(places))
        try:
            numbered = tree_unflatten(range(len(nodes)), structure)
            form = pickle.dumps((numbered, (*places, *others), layout))
        except Exception:  # a kind of tree that takes nothing but tensors
            return batch
        joined = self._buffers.take(layout.packed)
        torch._foreach_copy_(pieces(joined, layout), [nodes[place] for place in places])
        return JoinedBatch(form, joined, [nodes[place] for place in others])
