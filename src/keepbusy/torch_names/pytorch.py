"""Of PyTorch, what the runtime uses: trees of values, tensors and storages, modules, optimizers, CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec

from keepbusy.torch_names import attribute, cuda_only, in_source, look_up, reader, register, takes

__all__ = ["TorchDispatchMode", "TreeSpec"]

# Trees of values: what a step or a loader gives, taken apart.

_NO_TREES = "keepbusy.graph, prefetch and readback take no nested values"
tree_flatten = look_up("torch.utils._pytree:tree_flatten", _NO_TREES, lambda flatten: flatten({"a": [1]})[0] == [1])
tree_unflatten = look_up("torch.utils._pytree:tree_unflatten", _NO_TREES, takes([1], "structure"))
tree_leaves = look_up("torch.utils._pytree:tree_leaves", _NO_TREES, lambda leaves: leaves({"a": [1, (2,)]}) == [1, 2])
tree_map = look_up("torch.utils._pytree:tree_map", _NO_TREES, lambda each: each(str, [1, (2,)]) == ["1", ("2",)])
register_pytree_node = look_up("torch.utils._pytree:register_pytree_node", _NO_TREES, takes("class", "to", "from"))
SUPPORTED_NODES = look_up(
    "torch.utils._pytree:SUPPORTED_NODES", "keepbusy.prefetch does not join batches", lambda nodes: list in nodes
)
register("torch.utils._pytree:TreeSpec", _NO_TREES)

# Tensors, their memory, and how operators are watched.

_NO_CHECKS = "keepbusy.graph does not notice that a step is not the one that it captured"
foreach_copy = look_up("torch:_foreach_copy_", "keepbusy.graph and prefetch copy nothing into their buffers")
TensorGuards = look_up("torch._C._dynamo.guards:TensorGuards", _NO_CHECKS, lambda kind: kind.check)
same_addresses = cuda_only("torch._C:_tensors_data_ptrs_at_indices_equal", "keepbusy.graph asks each tensor alone")
storage_users = cuda_only("torch._C:_storage_Use_Count", "keepbusy.graph copies each result that a step returns")
register("torch:Tensor._version", _NO_CHECKS)  # read where it is needed, at each replay
register("torch:UntypedStorage._cdata", _NO_CHECKS)
register(
    "torch.utils._python_dispatch:TorchDispatchMode", "keepbusy.graph and spread do not see a step's operators",
    lambda mode: mode.__torch_dispatch__,
)  # fmt: skip
is_wrapper_of_tensors = look_up(
    "torch.utils._python_dispatch:is_traceable_wrapper_subclass", "keepbusy.save_later takes plain tensors only"
)
parse_to = look_up(
    "torch._C._nn:_parse_to", "batches that move themselves are not prefetched", lambda parse: len(parse("cpu")) == 4
)
pin_memory = look_up("torch.utils.data._utils.pin_memory:pin_memory", "keepbusy.prefetch pins no batches", takes([]))
new_shared_storage = look_up("torch:UntypedStorage._new_shared", "loaders' workers do not join tensors", takes(16))
HELD_ITERATOR = attribute("torch.utils.data:DataLoader", "_iterator", "loaders' workers do not join tensors")

_NO_BUFFER = "keepbusy.graph captures no module whose backward pass comes after the call"
flatten_tensors = look_up("torch._utils:_flatten_dense_tensors", _NO_BUFFER, takes([]))
unflatten_tensors = look_up("torch._utils:_unflatten_dense_tensors", _NO_BUFFER, takes("buffer", []))

# CUDA graphs and streams.

_NO_RETREAT = "a program whose capture fails does not go on uncaptured"
cuda_only("torch._C:_cuda_endAllocateToPool", _NO_RETREAT)
cuda_only("torch._C:_cuda_releasePool", _NO_RETREAT)
cuda_only("torch._C:_cuda_getCurrentStream", "keepbusy.readback does not run")
spin = look_up("torch.cuda:_sleep", "`keepbusy doctor` measures no links between GPUs", takes(1))
_STREAMS: dict[tuple[int, int, int], Any] = {}


def abandon_pool(device: int, pool: Any) -> None:
    """The memory pool of a capture that was invalid: PyTorch stopped before it told the allocator."""
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)


def current_stream(device: torch.device) -> Any:
    """The same object for the same stream: PyTorch makes a new one at each call, which takes as long as a launch."""
    key = torch._C._cuda_getCurrentStream(device.index)
    stream = _STREAMS.get(key)
    if stream is None:
        stream = _STREAMS[key] = torch.cuda.current_stream(device)
    return stream


# Modules, optimizers and what scales gradients.

_MODULE, _SCALER = "torch.nn:Module", "torch.amp:GradScaler"
_NO_STATE = "keepbusy.graph does not see what a step changes in its modules"
PARTS = tuple(attribute(_MODULE, name, _NO_STATE) for name in ("_modules", "_parameters", "_buffers"))
FORWARD_HOOKS = attribute(_MODULE, "_forward_pre_hooks", _NO_STATE)
HOOKS = (
    *(attribute(_MODULE, name, _NO_STATE) for name in ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")),
    FORWARD_HOOKS,
)
HOOKS_OF_ALL = "_global_"
"""How the dicts of hooks that hold for all modules begin, in `torch.nn.modules.module`."""
register(
    "torch.nn.modules.module",
    _NO_STATE,
    lambda module: sum(name.startswith(HOOKS_OF_ALL) for name in vars(module)) >= len(HOOKS),
)
CALLED_AS = attribute(_MODULE, "_call_impl", "keepbusy.spread names the wrong line where gradients differ")
COMPILED = in_source("torch._dynamo.eval_frame", "_orig_mod", "keepbusy.spread fails with compiled models")
BatchNorm = look_up("torch.nn.modules.batchnorm:_BatchNorm", "keepbusy.spread does not synchronize batch norms")
checks_arguments = reader(
    "torch.distributions:Distribution", "_validate_args", "keepbusy.graph captures no step that uses distributions"
)
GRADIENT_HOOKS = tuple(
    attribute("torch:Tensor", name, "keepbusy.spread leaves hooks of gradients behind")
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
)
states_by_optimizer = reader(_SCALER, "_per_optimizer_states", "keepbusy.graph takes no GradScaler")
SCALER_PARTS = tuple(
    attribute(_SCALER, name, "keepbusy.graph takes no GradScaler") for name in ("_scale", "_growth_tracker")
)
STEPS_BY_ITSELF = attribute(_SCALER, "_step_supports_amp_scaling", "keepbusy.graph waits for a GradScaler in each step")
FIRST_FUSED_STEP = attribute(
    "torch.optim:SGD", "_need_device_dtype_check_for_fused", "keepbusy.graph takes no SGD whose learning rate moves"
)
WARNED_OF_CAPTURE = attribute(
    "torch.optim:Adam", "_warned_capturable_if_run_uncaptured", "PyTorch warns of steps that keepbusy.graph makes"
)
LAST_RATES = attribute(
    "torch.optim.lr_scheduler:LRScheduler", "_last_lr", "keepbusy.graph holds back schedules that a step reads"
)
