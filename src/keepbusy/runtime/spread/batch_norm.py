"""Batch norms whose statistics are those of the whole batch, as one GPU would take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.nn import functional as differentiable


class HostBatchNorm(nn.modules.batchnorm._BatchNorm):  # type: ignore[misc]  # PyTorch is not typed here
    """What `SyncBatchNorm` is on a GPU, on the host."""

    process_group: Any

    def _check_input_dim(self, x: Tensor) -> None:
        """Any number of dimensions will do."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(x)
        dims = [place for place in range(x.dim()) if place != 1]
        count = x.numel() // x.shape[1]
        sums = torch.stack([x.sum(dims), x.square().sum(dims), x.new_full((x.shape[1],), count)])
        total, squares, counts = differentiable.all_reduce(sums, group=self.process_group)
        mean = total / counts
        variance = squares / counts - mean.square()
        if self.training and self.running_mean is not None:
            self._keep(mean.detach(), (variance * counts / (counts - 1)).detach())
        shape = [1, -1, *[1] * (x.dim() - 2)]
        normed = (x - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        return normed * self.weight.view(shape) + self.bias.view(shape) if self.affine else normed

    def _keep(self, mean: Tensor, variance: Tensor) -> None:
        self.num_batches_tracked.add_(1)
        share = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance, share)


def synchronise(model: nn.Module, device: torch.device, group: Any) -> int:
    """How many batch norms of the model take their statistics over the ranks of the group from now on."""
    kind = nn.SyncBatchNorm if device.type == "cuda" else HostBatchNorm
    norms = [one for one in model.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
    for one in norms:
        one.__class__, one.process_group = kind, group
    return len(norms)
