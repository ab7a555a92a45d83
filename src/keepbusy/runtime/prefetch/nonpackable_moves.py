"""What cannot be packed: objects that move themselves, by their own `to`, and tensors of unusual kinds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from keepbusy.runtime.prefetch.batch_tree import BatchTree, moves_itself
from keepbusy.runtime.prefetch.packed_layout import packable


class NonpackableMoves(TorchFunctionMode):  # type: ignore[misc]  # PyTorch is not typed here
    """While objects move themselves on the copy stream, their tensors travel by pinned memory.

    What is made meanwhile lies in memory of the copy stream. `made` is what the loop's stream must be recorded on.
    """

    def __init__(self, device: torch.device, copy_stream: Any, loop_stream: Any) -> None:
        super().__init__()
        self._device, self._copy_stream, self._loop_stream = device, copy_stream, loop_stream
        self.made: list[Tensor] = []

    def move(self, value: Any) -> Any:
        with self:
            return value.to(self._device)

    def add_tensors_of(self, batch: Any, known: Tensor) -> None:
        """To `made`, all in the batch that does not lie in this memory."""
        for leaf in BatchTree(batch).leaves:
            if isinstance(leaf, Tensor):
                self.made += [leaf] if leaf.is_cuda and not _lies_in(leaf, known) else []
            elif moves_itself(leaf):
                self.move(leaf)  # it is there already: it only shows its tensors

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not Tensor.to or args[0].is_cuda:
            made = function(*args, **kwargs)
        elif packable(args[:1]):
            device, dtype, _, layout = torch._C._nn._parse_to(*args[1:], **kwargs)
            layout = torch.preserve_format if layout is None else layout
            made = args[0].pin_memory().to(device, dtype, non_blocking=True, memory_format=layout)
        else:
            with torch.cuda.stream(self._loop_stream):  # unusual kinds cannot be recorded on another stream than theirs
                made = function(*args, **kwargs)
            self._copy_stream.wait_stream(self._loop_stream)
        self.made += [one for one in tree_leaves(made) if isinstance(one, Tensor) and one.is_cuda]
        return made


def _lies_in(tensor: Tensor, memory: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage()._cdata == memory.untyped_storage()._cdata
