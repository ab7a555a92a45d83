"""`torch._foreach_copy_`: one kernel where it can be one, else a copy for each tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from keepbusy.virtual.kernels import Kernel

_aten = torch.ops.aten


class CopyLists(Kernel):
    """A kernel copies lists that lie alike on one device; all others PyTorch copies tensor by tensor."""

    __slots__ = ()

    def __call__(self, targets: list[Tensor], sources: list[Tensor], non_blocking: bool = False) -> None:
        if _alike(targets, sources):
            super().__call__(targets, sources, non_blocking)
            return
        for target, source in zip(targets, sources, strict=True):
            _aten.copy_.default(target, source, non_blocking)


def _alike(targets: list[Tensor], sources: list[Tensor]) -> bool:
    one_device = len({one.device for one in (*targets, *sources)}) == 1
    types = len({one.dtype for one in targets}), len({one.dtype for one in sources})
    pairs = zip(targets, sources, strict=True)
    return one_device and types == (1, 1) and all((a.shape, a.stride()) == (b.shape, b.stride()) for a, b in pairs)
