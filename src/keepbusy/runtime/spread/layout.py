"""A rank's place in the layout: its device, its groups for data and weights, and its share of each batch.

A loop still reads whole batches; gradients, and statistics of batch norms, are those of whole batches.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn import functional as differentiable
from torch.distributed.tensor import DTensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from keepbusy.torch_names.distributed import FLATTEN_MESH
from keepbusy.torch_names.pytorch import BatchNorm, tree_map

gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""The second name is that before PyTorch 2.13."""


@dataclass
class RankLayout:
    """`data` parts of a batch times `tensor` parts of a layer; `shard` says what is cut among the ranks of `data`."""

    shard: int
    data: int
    tensor: int
    mesh: Any
    device: torch.device

    def __post_init__(self) -> None:
        self.data_rank, self.tensor_rank = map(self.mesh.get_local_rank, ("data", "tensor"))
        self.data_group, self.tensor_group = map(self.mesh.get_group, ("data", "tensor"))

    @property
    def wraps(self) -> bool:
        """Whether DDP sends the gradients; with tensor parallelism FSDP2 does, whose parameters may be DTensors."""
        return self.data > 1 and self.tensor == 1 and self.shard < 2

    def __str__(self) -> str:
        names = ("replicas", "replicas with sharded optimizer states", "shards of gradients and states", "shards")
        parts = [f"{self.data} {names[self.shard]}"] if self.data > 1 else []
        return " x ".join([*parts, *([f"{self.tensor} parts of each layer"] if self.tensor > 1 else [])])


def own_part(value: Any) -> Tensor:
    """This rank's part of a DTensor; a plain tensor is held whole."""
    return value.to_local() if isinstance(value, DTensor) else value


def ranks_here() -> int:
    """How many processes train together; 1 without torchrun."""
    if dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def check_arguments(shard: int, tensor: int | None, plan: Any) -> None:
    if shard not in (0, 1, 2, 3):
        raise ValueError(f"spread got shard={shard!r}; it is 0 (DDP), 1, 2 or 3 (the stages of ZeRO)")
    if tensor is not None and (not isinstance(tensor, int) or tensor < 1):
        raise ValueError(f"spread got tensor={tensor!r}; it is the number of GPUs that share each layer, or None")
    if plan not in ("auto", "sequence") and (isinstance(plan, str) or {*plan.values()} - {"whole"}):
        raise ValueError(
            f'spread got plan={plan!r}; it is "auto", "sequence", or names what is not cut: {{"*.attention": "whole"}}'
        )


def lay_out(shard: int, tensor: int | None) -> RankLayout:
    """The layout of all ranks. The process group is initialised first, if the script has not done so."""
    ranks, tensor = ranks_here(), tensor or 1
    if ranks % tensor:
        raise ValueError(f"spread got tensor={tensor} for {ranks} ranks; it must divide them")
    if shard == 1 and tensor > 1:
        raise ValueError("spread has no shard=1 with tensor=; shard=2 shards the same states and sends less")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= count:
            raise ValueError(
                f"local rank {local_rank} has no GPU: this machine has {count}; start at most {count} processes"
            )
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    if not dist.is_initialized():
        options = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **options)
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    shape = {"data": ranks // tensor, "tensor": tensor}
    if not shard and tensor > 1:
        shape = {"data": ranks // tensor, "alone": 1, "tensor": tensor}
    mesh = init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    if tensor > 1 and ranks > tensor:
        getattr(mesh[tuple(shape)[-2:]], FLATTEN_MESH)()  # so that a norm over both takes a single sum
    return RankLayout(shard, ranks // tensor, tensor, mesh, device)


class ShareSampler:
    """This rank's part of each batch of indices, drawn in the same order on all ranks. A remainder is left out."""

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
    """This rank's rows of every tensor in a batch."""

    def rows(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        size = value.shape[0] // layout.data
        return value[size * layout.data_rank :][:size]

    return tree_map(rows, batch)


def share(loader: Iterable[Any], layout: RankLayout) -> Any:
    """This rank's share of the loader's batches, the same on ranks that share layers; a `DataLoader` loads no more."""
    if isinstance(getattr(loader, "sampler", None), DistributedSampler):
        raise ValueError(
            "the loader has a DistributedSampler, which gives each rank a share already; give spread the loader of one "
            "process, or leave it out"
        )
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or sampler is None:
        return SharedBatches(loader, layout)
    option_names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor")
    options = {name: getattr(loader, name) for name in (*option_names, "persistent_workers", "multiprocessing_context")}
    return DataLoader(loader.dataset, batch_sampler=ShareSampler(sampler, layout), **options)


class HostBatchNorm(BatchNorm):  # type: ignore[misc]  # PyTorch is not typed here
    """`SyncBatchNorm` for the host."""

    process_group: Any

    def _check_input_dim(self, x: Tensor) -> None:
        """Allow any number of dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(x)
        dims = [place for place in range(x.dim()) if place != 1]
        count = x.numel() // x.shape[1]
        sums = torch.stack([x.sum(dims), x.square().sum(dims), x.new_full((x.shape[1],), count)])
        total, squares, counts = differentiable.all_reduce(sums, group=self.process_group)
        mean = total / counts
        variance = squares / counts - mean.square()
        if self.running_mean is not None:
            self.num_batches_tracked.add_(1)
            share = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
            self.running_mean.lerp_(mean.detach(), share)
            self.running_var.lerp_((variance * counts / (counts - 1)).detach(), share)
        shape = [1, -1, *[1] * (x.dim() - 2)]
        normed = (x - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        return normed * self.weight.view(shape) + self.bias.view(shape) if self.affine else normed


def synchronise(model: nn.Module, device: torch.device, group: Any) -> None:
    """Let the model's batch norms take their statistics over the ranks of the group."""
    kind = nn.SyncBatchNorm if device.type == "cuda" else HostBatchNorm
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.__class__, module.process_group = kind, group
