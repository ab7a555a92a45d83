"""Of PyTorch's dispatcher and autograd, what the virtual GPU is built on: operators, keys, capsules, devices."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import torch.utils._device
from torch._C import Generator as HostGenerator
from torch._ops import OpOverload

from keepbusy.torch_names import later, look_up, place, reader, register, takes

__all__ = ["HostGenerator", "OpOverload"]
_NO_VIRTUAL = "`keepbusy run --on` has no virtual GPU"

# Operators: their kernels, and what is known of them.

_OVERLOAD = "torch._ops:OpOverload"
register(_OVERLOAD, _NO_VIRTUAL, lambda kind: kind.redispatch)
register("torch._C:Generator", _NO_VIRTUAL)
schema_of = reader(_OVERLOAD, "_schema", _NO_VIRTUAL)
builtin_of = reader(_OVERLOAD, "_op", _NO_VIRTUAL)
packet_of = reader(_OVERLOAD, "_overloadpacket", _NO_VIRTUAL)
variant_of = reader(_OVERLOAD, "_overloadname", _NO_VIRTUAL)
handle_of = reader(_OVERLOAD, "_handle", _NO_VIRTUAL)
all_operators = look_up("torch._C:_dispatch_get_all_op_names", _NO_VIRTUAL)
operators_with_key = look_up(
    "torch._C:_dispatch_get_registrations_for_dispatch_key", _NO_VIRTUAL, lambda named: "aten::tril" in named("CPU")
)
has_kernel = look_up(
    "torch._C:_dispatch_has_computed_kernel_for_dispatch_key", _NO_VIRTUAL, lambda has: has("aten::add.Tensor", "CPU")
)
dump_of_operator = look_up("torch._C:_dispatch_dump", "the virtual GPU's self-test fails on builds with CUDA")
DispatchKey = look_up("torch._C:DispatchKey", _NO_VIRTUAL, lambda key: (key.CPU, key.SparseCPU))
DispatchKeySet = look_up("torch._C:DispatchKeySet", _NO_VIRTUAL, lambda kind: kind(torch._C.DispatchKey.CPU))
attention_choice = look_up("torch:_fused_sdp_choice", "attention has no kernel on the virtual GPU")
conjugate_view = look_up("torch:_conj", "complex numbers are copied from the virtual GPU without their sign")
negative_view = look_up("torch:_neg_view", "complex numbers are copied from the virtual GPU without their sign")

# Tensors over given memory, and the modes that a replay turns off.

to_capsule = look_up("torch._C:_to_dlpack", _NO_VIRTUAL)
from_capsule = look_up("torch._C:_from_dlpack", _NO_VIRTUAL)
storage_size = look_up("torch._C:StorageBase.nbytes", _NO_VIRTUAL)
_NO_REPLAY = "CUDA graphs do not replay on the virtual GPU"
without_dispatch_modes = look_up("torch._C:_DisableTorchDispatch", _NO_REPLAY)
without_autocast = look_up("torch._C:_DisableAutocast", _NO_REPLAY)
without_function_modes = look_up("torch._C:DisableTorchFunction", _NO_REPLAY)
_TRACKER, _NO_TRACKER = "torch.utils._cuda_debug:_CUDAGraphInputLivenessTracker", "captures do not check their inputs"
_POOLS = ("capture_pool", "capture_pools")
"""What the check takes: one pool, or a list since PyTorch 2.15."""
_SINCE = (2, 13)
input_liveness = later(_TRACKER, _NO_TRACKER, since=_SINCE)
register(f"{_TRACKER}.check_alive", _NO_TRACKER, lambda check: [*signature(check).parameters][1] in _POOLS, _SINCE)


def check_inputs_alive(tracker: Any, pool: Any) -> None:
    """Raise where an input of a graph has died; `tracker`: from `input_liveness`."""
    takes_many = _POOLS[1] in signature(tracker.check_alive).parameters
    tracker.check_alive([pool] if takes_many else pool)


# Autograd: which operation goes backward now.

_NO_STREAMS = "backward passes run on one stream of the virtual GPU"
next_sequence_number = look_up("torch._C._autograd:_get_sequence_nr", _NO_STREAMS, lambda number: number() >= 0)
current_node = look_up("torch._C:_current_autograd_node", _NO_STREAMS, lambda node: node() is None)
register("torch.autograd.graph:Node._sequence_nr", _NO_STREAMS)  # called where it is needed, for each operator
ENGINE = look_up("torch.autograd:Variable._execution_engine", "DDP does not wait for collectives of the virtual GPU",
                 lambda engine: engine.queue_callback)  # fmt: skip

# The device that Python is told of.

precision_of = look_up(
    "torch._C:_get_fp32_precision_getter", "the virtual GPU does not know TF32", lambda get: get("cuda", "matmul")
)
accelerator = later("torch._C:_get_accelerator", _NO_VIRTUAL)
build_settings = look_up("torch._C:_show_config", _NO_VIRTUAL, lambda show: "Build settings" in show())
SUPPORTED_ACTIVITIES = place("torch._C._autograd:_supported_activities", "the profiler warns on the virtual GPU")
_NO_DEFAULT = "torch.set_default_tensor_type takes no type of the virtual GPU"
device_constructors = look_up(
    "torch.utils._device:_device_constructors", _NO_DEFAULT, lambda made: torch.ones in made()
)
DEVICE_OF_MODE = place("torch.utils._device:CURRENT_DEVICE", _NO_DEFAULT, lambda device: device is None)
TENSOR_TYPES = look_up("torch:_tensor_classes", _NO_DEFAULT, lambda kinds: torch.FloatTensor in kinds)
SET_DEFAULT_TYPE = place("torch._C:_set_default_tensor_type", _NO_DEFAULT)
DEFAULT_DEVICE = place("torch._C:_get_default_device", _NO_DEFAULT)
HAS_BEGUN = place(
    "torch.cuda:_initialized", "checkpointing loses the virtual GPU's random numbers", lambda has: has in (True, False)
)
_NO_PARALLEL = "torch.nn.DataParallel does not run on virtual GPUs"
reorder_tensors = look_up("torch._utils:_reorder_tensors_as", _NO_PARALLEL, takes([], []))
groups_of_tensors = look_up("torch._utils:_take_tensors", _NO_PARALLEL, takes([], 1))
