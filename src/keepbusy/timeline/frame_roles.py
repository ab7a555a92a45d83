"""Whose code a frame is, and what a frame or span does, derived once, by the producer, from the names of PyTorch and
CUDA.

These names are the profiler's, and a virtual run writes the same ones. They become the columns `owner` of `Frames` and
`role` of `Frames` and `Spans`, so that no other room has to know them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum, IntFlag, auto
from typing import TypeVar

import numpy as np

from keepbusy.timeline.model import Frames, Ints, Mask, Spans

_Named = TypeVar("_Named", Frames, Spans)


class Owner(IntEnum):
    """Whose code a frame is. UNKNOWN for operators and annotations."""

    UNKNOWN = 0
    USER = 1
    LIBRARY = 2
    TORCH = 3
    TOOL = 4


class Role(IntFlag):
    """What a frame or a span does. It can have several roles."""

    NONE = 0
    OPTIMIZER = auto()
    LOADER = auto()  # the next batch is taken
    LOADER_WORKERS = auto()  # from a loader whose workers are processes
    MODULE = auto()
    BACKWARD = auto()  # a node of autograd's graph
    READS = auto()  # an operator that reads values of the device, or their number
    READS_SCALAR = auto()  # of these, one that reads a single value
    MAKES = auto()  # an operator that draws or fills
    SHAPES = auto()  # an operator that changes values or their form one by one, as it goes with what was drawn
    MOVES = auto()  # an operator that may copy between host and device
    MESSAGE = auto()  # a send to one other rank, or its receive
    INTERNAL = auto()  # an annotation that PyTorch makes for itself: no place of the user's
    GRADIENTS = auto()  # gradients are ready: collectives within it send them
    SCALES = auto()  # an operator that divides or multiplies, such as gradients for their mean over the ranks
    OBJECTS = auto()  # Python objects are sent to other ranks, pickled
    SHARDS = auto()  # FSDP's own: parameters are gathered, gradients scattered
    RECEIVES = auto()  # the receive of a message
    PIECE = auto()  # a micro-batch passes a stage, as torch.distributed.pipelining calls it
    LAYER = auto()  # an operator that multiplies matrices: what comes next needs it
    TABLE = auto()  # an operator on rows of a table, or on its sparse gradient
    THROUGH_HOST = auto()  # a message to other ranks, from memory of the host
    CHOOSES = auto()  # an operator that selects by a mask: only the GPU knows how many elements that is
    REPEATS = auto()  # one that repeats elements, each as often as a tensor says
    COUNTS = auto()  # one whose result has as many elements as there are different values
    SYNCHRONIZES = auto()  # a call that only waits for the device
    AWAITS_EVENT = auto()  # one of these that waits for an event
    STEP = auto()  # an annotation around a whole step, which has the step's number in its name
    DDP_FORWARD = auto()  # the forward pass of a module that DistributedDataParallel holds
    BROADCASTS = auto()
    PAIRED = auto()  # NCCL's kernel that sends and receives. All-to-all uses it, too
    ASKS_MEMORY = auto()  # memory is requested from the driver
    GIVES_BACK = auto()  # memory is returned to the driver
    WRITES = auto()  # PyTorch's own Python that saves tensors to a file
    SCALER = auto()  # that of a GradScaler
    UPDATES = auto()  # that of PyTorch's own optimizers that can update all parameters at once
    PICKS = auto()  # an operator that reads or writes rows of a tensor by their indices
    VALIDATES = auto()  # PyTorch's own Python that checks a distribution's arguments
    PRINTS = auto()  # PyTorch's own Python that writes a tensor as text
    PROVES = auto()  # keepbusy's own Python that compares a graph with the step that it was captured from
    WRAPS = auto()  # PyTorch's own Python around an operator: its caller is the operator's caller


STEP_MARKS = ("keepbusy.step#", "ProfilerStep#", "Optimizer.step#")
"""Beginnings of names that mark steps, the most reliable first."""
OWN_STEP, PROFILER_STEP = STEP_MARKS[:2]
LOADER_WITH_WORKERS = "enumerate(DataLoader)#_MultiProcessing"
"""PyTorch's annotation around taking a batch from worker processes."""

_SCALARS = ("item", "_local_scalar_dense", "is_nonzero")
_BEGINNINGS = (
    (("Optimizer.",), Role.OPTIMIZER),
    (("enumerate(DataLoader)",), Role.LOADER),
    ((LOADER_WITH_WORKERS,), Role.LOADER_WORKERS),
    (("nn.Module",), Role.MODULE),
    (("autograd::",), Role.BACKWARD | Role.INTERNAL),
    (("backward",), Role.BACKWARD),  # a whole pass, as a virtual run calls it
    (("FSDP::post_backward", "FSDP::root_post_backward"), Role.GRADIENTS),
    (("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",), Role.GRADIENTS),
    (("FSDP::",), Role.SHARDS),
    (("nccl:send", "nccl:recv"), Role.MESSAGE),
    (("nccl:recv",), Role.RECEIVES),
    (("gloo:",), Role.THROUGH_HOST | Role.INTERNAL),
    (("nccl:", "DistributedDataParallel."), Role.INTERNAL),
    (("DistributedDataParallel.forward",), Role.DDP_FORWARD),
    (STEP_MARKS[:2], Role.STEP),
    (("cudaEventSynchronize",), Role.AWAITS_EVENT),
)
_CONTAINED = (
    (re.compile(r"Synchronize"), Role.SYNCHRONIZES),
    (re.compile(r"^(site-packages/)?torch/serialization\.py"), Role.WRITES),
    (re.compile(r"^(site-packages/)?torch/\S*/grad_scaler\.py"), Role.SCALER),
    (re.compile(r"^(site-packages/)?torch/optim/(?!lbfgs|sparse_adam|_muon)"), Role.UPDATES),
    (re.compile(r"^(site-packages/)?torch/distributions/distribution\.py"), Role.VALIDATES),
    (re.compile(r"^(site-packages/)?torch/_tensor_str\.py"), Role.PRINTS),
    (
        re.compile(
            r"^(site-packages/)?torch/(functional|_tensor|_jit_internal|nn/functional|cuda/(__init__|streams))\.py"
        ),
        Role.WRAPS,
    ),
    (re.compile(r"^(site-packages/)?keepbusy/runtime/graph/replay_check\.py"), Role.PROVES),
    (re.compile(r"broadcast"), Role.BROADCASTS),
    (re.compile(r"SendRecv"), Role.PAIRED),
    (re.compile(r"^(cuda|hip)Malloc(?!Host)|^cuMem(Create|Alloc)"), Role.ASKS_MEMORY),
    (re.compile(r"^(cuda|hip)(Free|HostUnregister)|^cuMem(Free|AddressFree|Unmap|Release)"), Role.GIVES_BACK),
    (
        re.compile(
            r"^torch/distributed/.*: (all_gather_object|gather_object|(broadcast|scatter)_object_list"
            r"|_object_to_tensor|_tensor_to_object)$"
        ),
        Role.OBJECTS,
    ),
    (re.compile(r"^(Forward|Backward) \d+$"), Role.PIECE),
)
"""Parts of the names of frames and calls other than operators."""
_PURPOSES = Role.WRITES | Role.SCALER | Role.VALIDATES | Role.PRINTS
_OPERATORS = (
    (_SCALARS, Role.READS | Role.READS_SCALAR),
    (("nonzero", "equal", "unique2", "_unique2"), Role.READS),
    (("_to_copy", "copy_"), Role.MOVES),
    (("div_", "div", "mul_", "mul"), Role.SCALES),
    (("embedding", "embedding_bag", "_embedding_bag", "coalesce", "_coalesce", "sparse_mask"), Role.TABLE),
)
_OPERATORS_LIKE = (
    # of most that choose or count, only the GPU knows the size of the result
    (re.compile(r"(?<!is_)nonzero|index|masked_select|where"), Role.CHOOSES),
    (re.compile(r"^(getitem|setitem|gather|take|index(_select|_copy_?|_put_?)?|_index_put_impl_)$"), Role.PICKS),
    (re.compile(r"repeat_interleave"), Role.REPEATS),
    (re.compile(r"unique|bincount|one_hot"), Role.COUNTS),
    (
        re.compile(
            r"^(randn?|randint|randperm|rand_like|randn_like|normal_?|uniform_|bernoulli_?|random_|exponential_"
            r"|arange|linspace|zeros|ones|full|eye|tril|triu|zero_|fill_)$"
        ),
        Role.MAKES,
    ),
    (re.compile(r"^\w*(mm|matmul|linear|einsum|convolution|attention\w*|lstm\w*|gru\w*|rnn\w*)$"), Role.LAYER),
    (
        re.compile(
            r"^(mul|add|sub|div|neg|clamp|pow|sqrt|rsqrt|exp|log|sin|cos|abs|sigmoid|tanh|where|lt|gt|le|ge|eq|ne"
            r"|lerp|to|_to_copy|copy_|float|half|contiguous|clone|pin_memory|_pin_memory|empty|empty_like|empty_strided"
            r"|resize_|expand|repeat|stack|cat|unsqueeze|view|reshape)_?$"
        ),
        Role.SHAPES,
    ),
)
_ATEN = "aten::"

_LINE = re.compile(r"^(?P<file>.+)\((?P<line>\d{1,9})\): (?P<function>.+)$")
INSTALLED = "site-packages/"
"""The prefix of a file's name if its producer knows that it was installed. Otherwise the name has to show it."""
_INSTALLED_PATH = re.compile(r"(^|/)(site-packages|dist-packages)/|^<|(^|/)lib/python\d")
_TORCH = "torch"
_TOOL = "keepbusy"
_LIBRARIES = re.compile(
    r"torchvision|torchaudio|torchdata|torchmetrics|triton|numpy|transformers|accelerate|datasets|tokenizers|peft"
    r"|diffusers|lightning|pytorch_lightning|lightning_fabric|deepspeed|megatron|composer|timm|fairscale|apex|xformers"
    r"|flash_attn|einops|PIL|cv2|tqdm|wandb|sklearn|scipy|pandas|ignite|torchtnt|torch_geometric"
)


def described(table: _Named, names: Sequence[str]) -> _Named:
    """Adds the column `role`, and for frames `owner`, derived from the names."""
    used = np.zeros(len(names), bool)
    used[table.name] = True
    columns = {"role": _for_each_name(_role, names, used)[table.name]}
    if isinstance(table, Frames):
        columns["owner"] = _for_each_name(_owner, names, used)[table.name]
    return table.change(**columns)


def _for_each_name(classify: Callable[[str], int], names: Sequence[str], used: Mask) -> Ints:
    return np.array([classify(name) if flag else 0 for name, flag in zip(names, used.tolist(), strict=True)], np.int64)


_ADDRESS = re.compile(r" object at 0x[0-9a-f]+|_\d+$")
"""The part of a frame's name that differs from call to call: an object's address, a module's number."""


def called_alike(names: Sequence[str]) -> Ints:
    """For each name a number, shared by the names that one call can have at different times."""
    canonical: dict[str, int] = {}
    return np.array([canonical.setdefault(_ADDRESS.sub("", name), len(canonical)) for name in names], np.int64)


def source_line(name: str) -> tuple[str, int, str] | None:
    """File, line and function of a Python frame, from its name in Kineto's format: `train.py(41): main`."""
    match = _LINE.match(name)
    return (match["file"], int(match["line"]), match["function"]) if match else None


def owner_of_file(file: str) -> Owner:
    """Whose file it is, by its path. Kineto's paths below site-packages begin with the package."""
    top = file.split("/", 1)[0].removesuffix(".py")
    if top == _TORCH:
        return Owner.TORCH
    if top == _TOOL or file.rpartition("/")[2] == _TOOL:  # the script that pip writes
        return Owner.TOOL
    foreign = _INSTALLED_PATH.search(file) or _LIBRARIES.fullmatch(top) or top in sys.stdlib_module_names
    return Owner.LIBRARY if foreign else Owner.USER


def _owner(name: str) -> Owner:
    line = source_line(name) if "): " in name else None
    return owner_of_file(line[0]) if line else Owner.UNKNOWN


def _role(name: str) -> int:
    role = 0
    if name.startswith(_ATEN):
        operator = name.removeprefix(_ATEN)
        for operators, own_role in _OPERATORS:
            role |= own_role if operator in operators else 0
        for pattern, own_role in _OPERATORS_LIKE:
            role |= own_role if pattern.search(operator) else 0
    else:
        for beginnings, own_role in _BEGINNINGS:
            role |= own_role if name.startswith(beginnings) else 0
        for pattern, own_role in _CONTAINED:
            role |= own_role if pattern.search(name) else 0
    return int(role)


def tells_purpose(file: str) -> bool:
    """Whether this file of PyTorch's shows what the calls within it are for: saving a checkpoint, printing a tensor."""
    return any(role & _PURPOSES and pattern.search(file) for pattern, role in _CONTAINED)
