"""What cannot be packed: objects that move themselves, by their own `to`, and tensors of unusual kinds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from keepbusy.runtime.prefetch.batch_tree import moves_itself, opened


def plain(leaves: Sequence[Any]) -> list[int]:
    """Which of them are tensors of the host that are nothing but their bytes. In one loop: there may be hundreds."""
    strided = torch.strided
    return [
        place
        for place, leaf in enumerate(leaves)
        if leaf.__class__ is Tensor
        and leaf.is_cpu
        and leaf.layout is strided
        and not leaf.requires_grad
        and not leaf.is_quantized
    ]


class Moving(TorchFunctionMode):  # type: ignore[misc]  # PyTorch is not typed here
    """While objects move themselves on the copy stream: their tensors travel by pinned memory, and all are noted.

    What is made here lies in memory of the copy stream. `made` is what the loop's stream must be recorded on.
    """

    def __init__(self, device: torch.device, side: Any, home: Any) -> None:
        super().__init__()
        self._device, self._side, self._home = device, side, home
        self.made: list[Tensor] = []

    def move(self, value: Any) -> Any:
        with self:
            return value.to(self._device)

    def note(self, batch: Any, known: Iterable[Tensor]) -> None:
        """Everything in the batch that is not known already."""
        ours = set(map(id, known))
        for leaf in opened(batch)[0]:
            if isinstance(leaf, Tensor):
                self.made += [leaf] if leaf.is_cuda and id(leaf) not in ours else []
            elif moves_itself(leaf):
                self.move(leaf)  # it is there already: it only shows its tensors

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = self._call(function, args, kwargs or {})
        self.made += [one for one in tree_leaves(made) if isinstance(one, Tensor) and one.is_cuda]
        return made

    def _call(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function is not Tensor.to or args[0].is_cuda:
            return function(*args, **kwargs)
        if plain(args[:1]):
            device, dtype, _, layout = torch._C._nn._parse_to(*args[1:], **kwargs)
            layout = torch.preserve_format if layout is None else layout
            return args[0].pin_memory().to(device, dtype, non_blocking=True, memory_format=layout)
        with torch.cuda.stream(self._home):  # unusual kinds cannot be recorded on a stream: they stay on the loop's
            made = function(*args, **kwargs)
        self._side.wait_stream(self._home)
        return made
