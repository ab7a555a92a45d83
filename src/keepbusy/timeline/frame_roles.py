"""Whose a frame is, and what it or a span does in a program, told once, by the producer, from the names that PyTorch
and CUDA give.

These names are the profiler's, and a virtual run writes the same ones. They become the columns `owner` of `Frames` and
`role` of `Frames` and `Spans`, so that nobody who explains a timeline has to know them.
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
    """Whose code a frame is. Of operators and annotations nobody can tell."""

    UNKNOWN = 0
    USER = 1
    LIBRARY = 2
    TORCH = 3
    TOOL = 4


class Role(IntFlag):
    """What a frame or a span does; several may hold."""

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
    GRADIENTS = auto()  # gradients are done: what travels within it is theirs
    SCALES = auto()  # an operator that divides or multiplies: of gradients, for their mean over the ranks
    OBJECTS = auto()  # Python objects travel to other ranks, pickled
    SHARDS = auto()  # FSDP's own: parameters are gathered, gradients scattered
    RECEIVES = auto()  # of messages, the one that comes
    PIECE = auto()  # a micro-batch's way through a stage, as torch.distributed.pipelining calls it
    LAYER = auto()  # an operator that multiplies matrices: what comes next needs it
    TABLE = auto()  # an operator on rows of a table, or on its sparse gradient
    THROUGH_HOST = auto()  # a message to other ranks, from memory of the host
    CHOOSES = auto()  # an operator that takes out what a mask chooses: how much that is, only the GPU knows
    REPEATS = auto()  # one that repeats elements, each as often as a tensor says
    COUNTS = auto()  # one that makes as much as there are different values
    SYNCHRONIZES = auto()  # a call that does nothing but wait for the device
    AWAITS_EVENT = auto()  # of these, one that waits for an event
    STEP = auto()  # an annotation around a whole step, which has the step's number in its name
    DDP_FORWARD = auto()  # the forward pass of a module that DistributedDataParallel holds
    BROADCASTS = auto()
    PAIRED = auto()  # NCCL's kernel that sends and receives; all-to-all is made of it, too
    ASKS_MEMORY = auto()  # memory of the device is asked for
    GIVES_BACK = auto()  # memory is given back to the driver
    WRITES = auto()  # PyTorch's own Python that makes a file of tensors
    SCALER = auto()  # that of a GradScaler
    UPDATES = auto()  # that of PyTorch's own optimizers that can update all parameters at once
    PICKS = auto()  # an operator that takes rows out of a tensor by their numbers, or puts them there
    VALIDATES = auto()  # PyTorch's own Python that looks whether a distribution's arguments are valid
    PRINTS = auto()  # PyTorch's own Python that writes a tensor as text
    PROVES = auto()  # keepbusy's own Python that compares a graph with the step that it was made of
    WRAPS = auto()  # PyTorch's own Python that an operator is called through: what calls it calls the operator


STEP_MARKS = ("keepbusy.step#", "ProfilerStep#", "Optimizer.step#")
"""What marks steps, the surest first."""
OWN_STEP, PROFILER_STEP = STEP_MARKS[:2]
LOADER_WITH_WORKERS = "enumerate(DataLoader)#_MultiProcessing"
"""How PyTorch annotates that a batch is taken from processes that prepare it."""

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
"""What others than operators hold in their names."""
_PURPOSES = Role.WRITES | Role.SCALER | Role.VALIDATES | Role.PRINTS
_OPERATORS = (
    (_SCALARS, Role.READS | Role.READS_SCALAR),
    (("nonzero", "equal", "unique2", "_unique2"), Role.READS),
    (("_to_copy", "copy_"), Role.MOVES),
    (("div_", "div", "mul_", "mul"), Role.SCALES),
    (("embedding", "embedding_bag", "_embedding_bag", "coalesce", "_coalesce", "sparse_mask"), Role.TABLE),
)
_OPERATORS_LIKE = (
    # most that choose or count do so in such a way that only the GPU knows the size of their result
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
"""Before the name of a file, where its producer knows that it was installed; else its name has to tell."""
_INSTALLED_PATH = re.compile(r"(^|/)(site-packages|dist-packages)/|^<|(^|/)lib/python\d")
_TORCH = "torch"
_TOOL = "keepbusy"
_LIBRARIES = re.compile(
    r"torchvision|torchaudio|torchdata|torchmetrics|triton|numpy|transformers|accelerate|datasets|tokenizers|peft"
    r"|diffusers|lightning|pytorch_lightning|lightning_fabric|deepspeed|megatron|composer|timm|fairscale|apex|xformers"
    r"|flash_attn|einops|PIL|cv2|tqdm|wandb|sklearn|scipy|pandas|ignite|torchtnt|torch_geometric"
)


def described(table: _Named, names: Sequence[str]) -> _Named:
    """With `role`, and of frames `owner`, as the names tell them."""
    used = np.zeros(len(names), bool)
    used[table.name] = True
    columns = {"role": _of_each(_role, names, used)[table.name]}
    if isinstance(table, Frames):
        columns["owner"] = _of_each(_owner, names, used)[table.name]
    return table.change(**columns)


def _of_each(tell: Callable[[str], int], names: Sequence[str], used: Mask) -> Ints:
    return np.array([tell(name) if known else 0 for name, known in zip(names, used.tolist(), strict=True)], np.int64)


_ADDRESS = re.compile(r" object at 0x[0-9a-f]+|_\d+$")
"""What differs in a frame's name from call to call: the address of an object, the number of a module."""


def called_alike(names: Sequence[str]) -> Ints:
    """Of each name a number, which those share that one call may have at different times."""
    canonical: dict[str, int] = {}
    return np.array([canonical.setdefault(_ADDRESS.sub("", name), len(canonical)) for name in names], np.int64)


def source_line(name: str) -> tuple[str, int, str] | None:
    """File, line and function of a frame called as Kineto calls Python's: `train.py(41): main`."""
    found = _LINE.match(name)
    return (found["file"], int(found["line"]), found["function"]) if found else None


def owner_of_file(file: str) -> Owner:
    """By where it lies, as Kineto shows it: below site-packages from the package on."""
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
        for operators, its_role in _OPERATORS:
            role |= its_role if operator in operators else 0
        for pattern, its_role in _OPERATORS_LIKE:
            role |= its_role if pattern.search(operator) else 0
    else:
        for beginnings, its_role in _BEGINNINGS:
            role |= its_role if name.startswith(beginnings) else 0
        for pattern, its_role in _CONTAINED:
            role |= its_role if pattern.search(name) else 0
    return int(role)


def tells_purpose(file: str) -> bool:
    """Whether PyTorch's lines in this file tell what goes on beneath: a checkpoint is written, a tensor printed."""
    return any(role & _PURPOSES and pattern.search(file) for pattern, role in _CONTAINED)
