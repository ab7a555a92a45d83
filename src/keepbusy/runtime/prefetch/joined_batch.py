"""A batch whose tensors are one, on its way from a loader's worker."""

from __future__ import annotations

import pickle
import weakref
from functools import lru_cache
from itertools import chain
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data._utils.pin_memory import pin_memory

from keepbusy.runtime.prefetch.packed_layout import Layout, pieces
from keepbusy.runtime.prefetch.shared_buffers import give_back, is_held, joined_in, name_of


class JoinedBatch:
    """A batch on its way from a worker: its tensors in one, and whatever else it holds."""

    joined: Tensor

    def __init__(self, form: bytes, joined: Tensor, others: list[Any]) -> None:
        self.form, self.joined, self.others = form, joined, others

    def __getstate__(self) -> tuple[Any, ...]:
        """As the worker sends it."""
        sent = None if is_held(self.joined) else self.joined
        return self.form, name_of(self.joined), self.joined.nbytes, sent, self.others

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """It has come. The worker may fill its buffer again once the tensor in it is let go, however that happens."""
        self.form, name, size, sent, self.others = state
        joined = joined_in(name, size) if sent is None else sent
        if joined is not None:
            self.joined = joined
            weakref.finalize(joined, give_back, joined.untyped_storage()).atexit = False

    def pin_memory(self) -> JoinedBatch:
        """As a loader does with what it knows; the buffer is pinned already, or once it is copied from."""
        self.others = pin_memory(self.others)
        return self

    def opened(self, joined: Tensor, *others: Any) -> Any:
        """The batch as it was, of the same bytes elsewhere."""
        structure, places, layout = _form_of(self.form)
        nodes: list[Any] = [None] * len(places)
        for place, node in zip(places, chain(pieces(joined, layout), others), strict=True):
            nodes[place] = node
        return (
            dict(zip(structure, nodes, strict=True))
            if isinstance(structure, list)
            else tree_unflatten(nodes, structure)
        )


@lru_cache(maxsize=64)
def _form_of(form: bytes) -> tuple[Any, tuple[int, ...], Layout]:
    """Its tree, or the names of a plain dict; where in it the leaves stand; and their layout.

    Batches of the same kind say it by the same bytes.
    """
    numbered, places, layout = pickle.loads(form)
    plain = numbered.__class__ is dict and set(map(type, numbered.values())) == {int}
    return list(numbered) if plain else tree_flatten(numbered)[1], places, layout
