"""Of PyTorch's distributed half: process groups, DistributedDataParallel, FSDP and device meshes."""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import Work
from torch.nn.parallel import DistributedDataParallel

from keepbusy.torch_names import attribute, in_source, look_up, place, reader, register

__all__ = ["Work"]

# Process groups, which the virtual GPU has of its own.

_NO_GROUPS = "torch.distributed does not run on virtual GPUs"
register("torch._C._distributed_c10d:Work", _NO_GROUPS, lambda kind: (kind.wait, kind.get_future))
GROUPS = look_up(
    "torch.distributed.distributed_c10d:_world", _NO_GROUPS, lambda world: (world.pg_group_ranks, world.pg_names)
)
broadcast_all = look_up("torch.distributed:_broadcast_coalesced", "keepbusy.spread does not run")
LOG_OF_DDP = place("torch._C._distributed_c10d:Logger.set_runtime_stats_and_log", "DDP reads timers that are not there")

# DistributedDataParallel and FSDP: when they send gradients, and whether weights stay gathered.

_DDP = "torch.nn.parallel:DistributedDataParallel"
_NO_DEFERRING = "keepbusy.accumulate does not know when gradients are sent"
_ACTIVE = attribute(_DDP, "_active_ddp_module", _NO_DEFERRING)
_delays_sending = reader(_DDP, "_static_graph_delay_allreduce_enqueued", _NO_DEFERRING)
_FSDP = "torch.distributed.fsdp._fully_shard"
FSDP_STATE, _FSDP_GROUP = f"{_FSDP}._fsdp_state", f"{_FSDP}._fsdp_param_group"
_group_of = in_source(FSDP_STATE, "_fsdp_param_group", _NO_DEFERRING)
_groups_of = "_fsdp_param_groups"
"""Which several versions lack."""
in_source(f"{_FSDP}._fully_shard", "_get_fsdp_state", _NO_DEFERRING)
in_source(_FSDP_GROUP, "post_forward_mesh_info", _NO_DEFERRING)
FSDP_STEPS = [
    *(
        (f"{FSDP_STATE}:FSDPState", in_source(FSDP_STATE, name, "FSDP costs no time on virtual GPUs"))
        for name in ("_pre_forward", "_post_forward", "_pre_backward", "_root_post_backward_final_callback")
    ),
    (f"{_FSDP_GROUP}:FSDPParamGroup", in_source(_FSDP_GROUP, "post_backward", "FSDP costs no time on virtual GPUs")),
]
"""What FSDP does in Python around each module, by class and method."""


def active_ddp_module() -> Any:
    """The one whose forward pass is under way."""
    return getattr(DistributedDataParallel, _ACTIVE, None)


def has_yet_to_send(module: Any) -> bool:
    """DDP of a static graph learns it from its very first backward pass, which has to send; it may do so twice."""
    return getattr(module, "static_graph", False) and not _delays_sending(module)


def stays_gathered(module: Any) -> bool:
    """Whether FSDP's weights stay whole from forward to backward anyway."""
    state = module._get_fsdp_state()
    groups = getattr(state, _groups_of, None) or [getattr(state, _group_of)]
    return all(group is not None and group.post_forward_mesh_info is None for group in groups)


# Tensors of several ranks.

LOCAL_PART = in_source("torch.distributed.tensor._api", "_local_tensor", "parts of distributed tensors are not read")
FLATTEN_MESH = attribute(
    "torch.distributed.device_mesh:DeviceMesh", "_flatten", "keepbusy.spread takes two sums for a norm"
)
COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of their operators."""
register("torch:ops._c10d_functional.all_reduce", "keepbusy.spread counts no collectives")
REDISTRIBUTION = "torch.distributed.tensor._redistribute"
"""Who warns that gradients are slow to gather."""
in_source(REDISTRIBUTION, "logger", "keepbusy.spread shows a warning once a step")
