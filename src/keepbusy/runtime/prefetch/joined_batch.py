"""A batch whose small tensors are one, on its way from a loader's worker."""

from __future__ import annotations

import pickle
from functools import lru_cache
from itertools import chain
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data._utils.pin_memory import pin_memory

from keepbusy.runtime.prefetch.packed_layout import Layout, pieces


class JoinedBatch:
    """A batch on its way from a worker: its small tensors in one, and whatever else it holds."""

    def __init__(self, form: bytes, joined: Tensor, others: list[Any]) -> None:
        self.form, self.joined, self.others = form, joined, others

    def pin_memory(self) -> JoinedBatch:
        """As the loader does for what it knows."""
        return JoinedBatch(self.form, self.joined.pin_memory(), pin_memory(self.others))

    def opened(self, joined: Tensor, *others: Any) -> Any:
        """The batch as it was, of the same bytes elsewhere."""
        structure, places, layout = _form_of(self.form)
        nodes: list[Any] = [None] * structure.num_leaves
        for place, node in zip(places, chain(pieces(joined, layout), others), strict=True):
            nodes[place] = node
        return tree_unflatten(nodes, structure)


@lru_cache(maxsize=64)
def _form_of(form: bytes) -> tuple[Any, tuple[int, ...], Layout]:
    """Its tree, where in it the leaves stand, and the layout: batches of the same kind say it by the same bytes."""
    numbered, places, layout = pickle.loads(form)
    return tree_flatten(numbered)[1], places, layout
