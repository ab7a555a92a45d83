"""Of PyTorch, what is replaced while a program is recorded, guarded or run on the virtual GPU."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from keepbusy.torch_names import attribute, in_source, look_up, place, reader, takes

# The backward pass, and tensors.

RUN_BACKWARD = [
    place(f"{module}:_engine_run_backward", "backward passes are not recorded")
    for module in ("torch.autograd.graph", "torch.autograd")
]
PICKLE_TENSOR = place("torch:Tensor._reduce_ex_internal", "races with pickled tensors are not found")
CHECK_OF_ARGUMENTS = place("torch:_is_all_true", "`--values none` refuses distributions")

# The profiler and the allocator's history.

_NO_WINDOWS = "`keepbusy run` does not learn how long kernels take on a real GPU"
PROFILER_BEGINS = [
    place(f"torch.autograd.profiler:{name}", "`keepbusy run` does not give way to the program's own profiler")
    for name in ("_prepare_profiler", "_enable_profiler")
]
end_profiler = look_up("torch.autograd.profiler:_disable_profiler", _NO_WINDOWS)
profiler_settings = look_up(
    "torch._C._profiler:_ExperimentalConfig", _NO_WINDOWS, lambda settings: settings(profile_all_threads=True)
)
_NO_MEMORY = "`keepbusy run --memory` has no history of a real GPU's memory"
call_once_ready = look_up("torch.cuda:_lazy_call", _NO_MEMORY, takes(print))
record_memory = look_up("torch.cuda.memory:_record_memory_history", _NO_MEMORY, takes(context=None, max_entries=1))
memory_snapshot = look_up("torch.cuda.memory:_snapshot", _NO_MEMORY, takes())

# Loaders and their workers.

_NO_WAITS = "it is not known how long a program waits for its loader"
_LOADER, _WORKERS = (
    f"torch.utils.data.dataloader:{name}" for name in ("_BaseDataLoaderIter", "_MultiProcessingDataLoaderIter")
)
NEXT_BATCH = place(f"{_LOADER}.__next__", _NO_WAITS)
dataset_of = reader(_LOADER, "_dataset", _NO_WAITS)
workers_of = reader(_LOADER, "_num_workers", _NO_WAITS)
batches_given = reader(_LOADER, "_num_yielded", _NO_WAITS)
PREFETCH_FACTOR = attribute(_WORKERS, "_prefetch_factor", _NO_WAITS)
FETCH = [
    place(f"torch.utils.data._utils.fetch:{kind}.fetch", _NO_WAITS, takes("fetcher", []))
    for kind in ("_MapDatasetFetcher", "_IterableDatasetFetcher")
]
_NO_WORKERS = "loaders' workers cost no time on the virtual GPU"
WORKER_LOOP = place(
    "torch.utils.data._utils.worker:_worker_loop",
    _NO_WORKERS,
    lambda loop: [*signature(loop).parameters][2:4] == ["index_queue", "data_queue"],
)
GIVE_BATCH = place(f"{_WORKERS}._process_data", _NO_WORKERS, takes("loader", "data", 0))
ASK_FOR_BATCH = place(f"{_WORKERS}._try_put_index", _NO_WORKERS, takes("loader"))
batches_asked = reader(_WORKERS, "_send_idx", _NO_WORKERS)
batches_received = reader(_WORKERS, "_rcvd_idx", _NO_WORKERS)
tasks_of = reader(_WORKERS, "_task_info", _NO_WORKERS)
gives_in_order = reader(_WORKERS, "_in_order", _NO_WORKERS)
processes_of = reader(_WORKERS, "_workers", _NO_WORKERS)

# The compiler, TorchScript and parameters without a shape, which know functions by identity.

_IS_COMPILED = "torch.compile compiles what keepbusy puts around PyTorch's functions"
DISABLED, REASON = (
    in_source("torch._dynamo.eval_frame", name, _IS_COMPILED)
    for name in ("_torchdynamo_disable", "_torchdynamo_disable_msg")
)
_Action = look_up("torch._C._dynamo.eval_frame:_FrameAction", _IS_COMPILED, lambda kind: (kind.SKIP, kind.DEFAULT))
_Strategy = look_up("torch._C._dynamo.eval_frame:_FrameExecStrategy", _IS_COMPILED)
_set_strategy = look_up("torch._C._dynamo.eval_frame:set_code_exec_strategy", _IS_COMPILED)
LAZY_METHODS = place(
    "torch.nn.parameter:UninitializedTensorMixin._allowed_methods", "keepbusy.guard refuses lazy modules", iter
)
make_script_table = look_up("torch.jit._builtins:_get_builtin_table", "`keepbusy run --on` fails with TorchScript")
FIND_FOR_SCRIPT = place("torch.jit._builtins:_find_builtin", "`keepbusy run --on` fails with TorchScript")


def never_compile(function: Any, callees: str) -> Callable[..., Any]:
    """`callees`: what becomes of what it calls, `SKIP` or `DEFAULT`."""
    _set_strategy(function.__code__, _Strategy(_Action.SKIP, getattr(_Action, callees)))
    return function
