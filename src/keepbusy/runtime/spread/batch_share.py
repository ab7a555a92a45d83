"""Each rank's share of every batch: a loop goes on reading whole batches; gradients, and statistics of batch norms, are
those of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn import functional as differentiable
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from keepbusy.runtime.spread.layout import RankLayout


class ShareSampler:
    """Of each batch of indices those of one rank; all ranks draw the same order. What does not divide is left out."""

    def __init__(self, batches: BatchSampler, layout: RankLayout) -> None:
        self._batches, self._layout = batches, layout
        self.batch_size, self.drop_last = batches.batch_size, batches.drop_last

    def __iter__(self) -> Iterator[list[Any]]:
        sampler = self._batches.sampler
        if hasattr(sampler, "generator"):
            seed = torch.randint(1 << 62, (1,)).to(self._layout.device)
            dist.broadcast(seed, 0)
            sampler.generator = torch.Generator().manual_seed(int(seed))
        for indices in self._batches:
            size = len(indices) // self._layout.data
            if size:
                yield indices[size * self._layout.data_rank :][:size]

    def __len__(self) -> int:
        return len(self._batches)


class SharedBatches:
    """Any other iterable of batches: all ranks read them, and each keeps its rows."""

    def __init__(self, batches: Iterable[Any], layout: RankLayout) -> None:
        self._batches, self._layout = batches, layout

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield share_of(batch, self._layout)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def share_of(batch: Any, layout: RankLayout) -> Any:
    """This rank's rows of every tensor in it."""

    def rows(one: Any) -> Any:
        if not isinstance(one, Tensor) or not one.dim():
            return one
        size = one.shape[0] // layout.data
        return one[size * layout.data_rank :][:size]

    return tree_map(rows, batch)


def share(loader: Iterable[Any], layout: RankLayout) -> Any:
    """The loader's batches, a share of each, and on ranks that share layers the same; a `DataLoader` loads no more."""
    if isinstance(getattr(loader, "sampler", None), DistributedSampler):
        raise ValueError(
            "the loader has a DistributedSampler, which gives each rank a share already; give spread the loader of one "
            "process, or leave it out"
        )
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or sampler is None:
        return SharedBatches(loader, layout)
    kept = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor")
    options = {name: getattr(loader, name) for name in (*kept, "persistent_workers", "multiprocessing_context")}
    return DataLoader(loader.dataset, batch_sampler=ShareSampler(sampler, layout), **options)


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
