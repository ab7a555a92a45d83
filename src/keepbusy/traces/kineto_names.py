"""All names that Kineto writes into a trace, and those of CUDA's and HIP's functions.

From Kineto's sources: output_json.cpp writes the rows and copies the facts of a collective from
`record_param_comms` to its kernel; CuptiActivity.h names the arguments of kernels, copies, syncs and events;
RoctracerActivity_inl.h those of AMD, whose runtime rows name streams by address. The arguments of collectives come from
saveNcclMeta of PyTorch's profiler. Names of steps, operators and Python lines, which virtual runs write too, stand in
`timeline.frame_roles`.
"""

from __future__ import annotations

import re
from enum import IntEnum

from keepbusy.timeline.model import Direction


class Category(IntEnum):
    """Kineto's `cat`, of the complete events (`ph: X`) that say something about who waits for whom."""

    KERNEL = 0  # kernel
    COPY = 1  # gpu_memcpy
    FILL = 2  # gpu_memset
    RUNTIME = 3  # cuda_runtime
    DRIVER = 4  # cuda_driver
    OPERATOR = 5  # cpu_op
    PYTHON = 6  # python_function
    ANNOTATION = 7  # user_annotation
    OVERHEAD = 8  # overhead
    SYNC = 9  # cuda_sync, of traces with enable_cuda_sync_events
    RECORD = 10  # cuda_event, in the same traces: an event recorded on a stream, if Kineto is new enough
    LINE = 11  # not Kineto's: a line of the program, from keepbusy's own window


CATEGORIES = {
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.COPY,
    "gpu_memset": Category.FILL,
    "cuda_runtime": Category.RUNTIME,  # AMD's calls too
    "xpu_runtime": Category.RUNTIME,
    "mtia_runtime": Category.RUNTIME,
    "privateuse1_runtime": Category.RUNTIME,
    "cuda_driver": Category.DRIVER,
    "xpu_driver": Category.DRIVER,
    "privateuse1_driver": Category.DRIVER,
    "cpu_op": Category.OPERATOR,
    "python_function": Category.PYTHON,
    "user_annotation": Category.ANNOTATION,
    "overhead": Category.OVERHEAD,
    "cuda_sync": Category.SYNC,
    "cuda_event": Category.RECORD,
    # PyTorch 1.8 to 1.12
    "Kernel": Category.KERNEL,
    "Memcpy": Category.COPY,
    "Memset": Category.FILL,
    "Runtime": Category.RUNTIME,
    "Operator": Category.OPERATOR,
}
OLD_OPERATOR = "Operator"
"""The category in which PyTorch 1.8 to 1.12 wrote annotations as well, whose names have a `#`."""

ARGUMENTS = {
    "size": "bytes",
    "sequence": "Sequence number",
    "awaited_stream": "wait_on_stream",
    "awaited_record": "wait_on_cuda_event_record_corr_id",
    "collective": "Collective name",
    "elements_in": "In msg nelems",
    "elements_out": "Out msg nelems",
    "group": "Process Group Name",
    "group_size": "Group size",
    "ranks": "Process Group Ranks",
    "from_rank": "Src Rank",
    "to_rank": "Dst Rank",
}
"""keepbusy's names of an event's arguments, and Kineto's."""
MEMORY = "[memory]"
"""The name of an instant at which memory was allocated or freed. Only recorded with `profile_memory=True`."""
MEMORY_ARGUMENTS = {
    "kind": "Device Type",
    "device": "Device Id",
    "block": "Addr",
    "size": "Bytes",
    "allocated": "Total Allocated",
    "reserved": "Total Reserved",
}
"""keepbusy's names of its arguments, and Kineto's."""
CUDA_MEMORY = 1
"""The kind of device whose memory is shown."""

NAMES_OF_CALLS = {
    "launch": "cudaLaunchKernel",
    "graph_launch": "cudaGraphLaunch",
    "copy_to_gpu": "cudaMemcpyAsync",
    "copy_to_host": "cudaMemcpyAsync",
    "copy_on_gpu": "cudaMemcpyAsync",
    "copy": "cudaMemcpyAsync",
    "set_memory": "cudaMemsetAsync",
    "stream_sync": "cudaStreamSynchronize",
    "event_sync": "cudaEventSynchronize",
    "context_sync": "cudaDeviceSynchronize",
    "allocate": "cudaMalloc",
    "free": "cudaFree",
    "allocate_host": "cudaHostAlloc",
    "free_host": "cudaFreeHost",
    "register_host": "cudaHostRegister",
    "unregister_host": "cudaHostUnregister",
    "map_memory": "cuMemMap",
    "unmap_memory": "cuMemUnmap",
}
"""Kineto's names for the calls in keepbusy's log."""
SYNC_CALL = re.compile(
    r"^(cuda|hip)(Stream|Device|Event)Synchronize|^cu(Stream|Ctx|Event)Synchronize|^(cuda|hip)Memcpy(2D|3D)?$"
)
DEVICE_SYNC = re.compile(r"DeviceSynchronize|CtxSynchronize|Free$")
EVENT_SYNC = re.compile(r"EventSynchronize$")
STREAM_WAIT = re.compile(r"^(cuda|hip)StreamWaitEvent|^cuStreamWaitEvent")
ALLOCATION = re.compile(
    r"^(cuda|hip)(Malloc|Free|HostAlloc|HostRegister|HostUnregister|HostMalloc)"
    r"|^cuMem(Create|Map|Unmap|Release|SetAccess|AddressReserve|AddressFree|Alloc|Free)"
)
ALLOCATION_SYNC = re.compile(r"^(cuda|hip)Free$|^(cuda|hip)(FreeHost|HostUnregister)$|^cuMem(Unmap|Free)")
"""Allocations that wait for the device."""

DIRECTIONS = (
    ("HtoD", Direction.HOST_TO_DEVICE),
    ("DtoH", Direction.DEVICE_TO_HOST),
    ("DtoD", Direction.DEVICE_TO_DEVICE),
    ("PtoP", Direction.DEVICE_TO_DEVICE),
    ("HtoH", Direction.HOST_TO_HOST),
)
"""Parts of a copy's name, as in `Memcpy HtoD (Pageable -> Device)`."""
PINNED, PAGEABLE = "Pinned", "Pageable"

NCCL_KERNEL = "nccl"
"""The beginning of the names of NCCL's and RCCL's kernels."""
ELEMENT_SIZES = {"float": 4, "double": 8, "half": 2, "long": 8, "int": 4, "short": 2, "byte": 1, "char": 1, "bool": 1}
"""Bytes of the types whose names have no number of bits."""
QUEUE_FULL = "Command Buffer Full"
"""An event that is no overhead: a launch waits because the queue of its stream is full."""
RANK, WORLD_SIZE = "rank", "world_size"
"""Keys in `distributedInfo`."""
CAPABILITY = "computeMajor"
"""A key in each of `deviceProperties`."""
