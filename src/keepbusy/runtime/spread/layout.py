"""Where a rank stands: its device, with whom it shares a batch, and with whom its weights."""

from __future__ import annotations

import atexit
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""Its name since PyTorch 2.13."""


@dataclass(frozen=True)
class RankLayout:
    """`data` parts of a batch times `tensor` parts of a layer; `shard` says what is cut among the former."""

    shard: int
    data: int
    tensor: int
    mesh: Any
    device: torch.device

    @property
    def wraps(self) -> bool:
        """Whether DDP carries the gradients; with tensor parallelism FSDP2 does, whose parameters may be DTensors."""
        return self.data > 1 and self.tensor == 1 and self.shard < 2

    @property
    def data_rank(self) -> int:
        return int(self.mesh.get_local_rank("data"))

    @property
    def tensor_rank(self) -> int:
        return int(self.mesh.get_local_rank("tensor"))

    @property
    def data_group(self) -> Any:
        return self.mesh.get_group("data")

    @property
    def tensor_group(self) -> Any:
        return self.mesh.get_group("tensor")

    @property
    def sharding_mesh(self) -> Any:
        """For `fully_shard`: replicas stand in a first dimension, and then the second has one rank."""
        return self.mesh["data"] if self.shard else self.mesh["data", "alone"]

    def __str__(self) -> str:
        what = ("replicas", "replicas with sharded optimizer states", "shards of gradients and states", "shards")
        parts = [f"{self.data} {what[self.shard]}"] if self.data > 1 else []
        return " x ".join([*parts, *([f"{self.tensor} parts of each layer"] if self.tensor > 1 else [])])


def own_part(value: Any) -> Tensor:
    """Of a DTensor what this rank holds; a plain tensor is held whole."""
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


def planned(shard: int, tensor: int | None) -> tuple[int, int | None]:
    """The layout that `keepbusy plan` tries, or the one asked for."""
    if asked := os.environ.get("KEEPBUSY_LAYOUT"):
        shard, tensor = map(int, asked.split(","))
    return shard, tensor


def tell_planner(data: int, shared: bool) -> None:
    """How many parts batches are cut into, or how many ranks bring their own."""
    if told := os.environ.get("KEEPBUSY_LAYOUT_FOUND"):
        Path(told).write_text(json.dumps({"data": data, "shared": shared}), encoding="utf-8")


def lay_out(shard: int, tensor: int | None) -> RankLayout:
    """The layout of all ranks; they are brought together first where the script has not done so."""
    ranks, tensor = ranks_here(), tensor or 1
    if ranks % tensor:
        raise ValueError(f"spread got tensor={tensor} for {ranks} ranks; it must divide them")
    if shard == 1 and tensor > 1:
        raise ValueError("spread has no shard=1 with tensor=; shard=2 shards the same states and sends less")
    device = _own_device()
    if not dist.is_initialized():
        bound = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **bound)
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    shape = {"data": ranks // tensor, "tensor": tensor}
    if not shard and tensor > 1:
        shape = {"data": ranks // tensor, "alone": 1, "tensor": tensor}
    mesh = init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    if tensor > 1 and ranks > tensor:
        mesh[tuple(shape)[-2:]]._flatten()  # a norm over both takes one sum then, and not two
    return RankLayout(shard, ranks // tensor, tensor, mesh, device)


def _own_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    place, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place >= count:
        raise ValueError(f"local rank {place} has no GPU: this machine has {count}; start at most {count} processes")
    torch.cuda.set_device(place)
    return torch.device("cuda", place)
