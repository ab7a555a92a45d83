"""Whose a frame is and what it does in a program, told once, by the producer, from the names that PyTorch gives.

These names are the profiler's, and a virtual run writes the same ones. They become the columns `owner` and `role` of
`Frames`, so that nobody who explains a timeline has to know them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from enum import IntEnum, IntFlag

import numpy as np

from keepbusy.timeline.model import Frames


class Owner(IntEnum):
    """Whose code a frame is. Of operators and annotations nobody can tell."""

    UNKNOWN = 0
    USER = 1
    LIBRARY = 2
    TORCH = 3
    TOOL = 4


class Role(IntFlag):
    """What a frame does; several may hold."""

    NONE = 0
    OPTIMIZER = 2
    LOADER = 4  # the next batch is taken
    LOADER_WORKERS = 8  # from a loader whose workers are processes
    MODULE = 16
    BACKWARD = 32  # a node of autograd's graph
    READS = 64  # an operator that reads values of the device, or their number
    READS_SCALAR = 128  # of these, one that reads a single value
    MAKES = 256  # an operator that draws or fills
    SHAPES = 512  # an operator that changes values or their form one by one, as it goes with what was drawn
    MOVES = 1024  # an operator that may copy between host and device
    MESSAGE = 2048  # a send to one other rank, or its receive
    INTERNAL = 4096  # an annotation that PyTorch makes for itself: no place of the user's
    GRADIENTS = 8192  # gradients are done: what travels within it is theirs
    SCALES = 16384  # an operator that divides or multiplies: of gradients, for their mean over the ranks
    OBJECTS = 32768  # Python objects travel to other ranks, pickled
    SHARDS = 65536  # FSDP's own: parameters are gathered, gradients scattered
    RECEIVES = 131072  # of messages, the one that comes
    PIECE = 262144  # a micro-batch's way through a stage, as torch.distributed.pipelining calls it
    LAYER = 524288  # an operator that multiplies matrices: what comes next needs it
    TABLE = 1048576  # an operator on rows of a table, or on its sparse gradient
    THROUGH_HOST = 2097152  # a message to other ranks, from memory of the host


STEP_MARKS = ("keepbusy.step#", "ProfilerStep#", "Optimizer.step#")
"""What marks steps, the surest first."""
OWN_STEP, PROFILER_STEP = STEP_MARKS[:2]
DDP_FORWARD, EVENT_WAIT = "DistributedDataParallel.forward", "cudaEventSynchronize"

_SCALARS = ("item", "_local_scalar_dense", "is_nonzero")
_BEGINNINGS = (
    (("Optimizer.",), Role.OPTIMIZER),
    (("enumerate(DataLoader)",), Role.LOADER),
    (("enumerate(DataLoader)#_MultiProcessing",), Role.LOADER_WORKERS),
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
)
_OPERATORS = (
    (_SCALARS, Role.READS | Role.READS_SCALAR),
    (("nonzero", "equal", "unique2", "_unique2"), Role.READS),
    (("_to_copy", "copy_"), Role.MOVES),
    (("div_", "div", "mul_", "mul"), Role.SCALES),
    (("embedding", "embedding_bag", "_embedding_bag", "coalesce", "_coalesce", "sparse_mask"), Role.TABLE),
)
_MAKES = re.compile(
    r"(randn?|randint|randperm|rand_like|randn_like|normal_?|uniform_|bernoulli_?|random_|exponential_"
    r"|arange|linspace|zeros|ones|full|eye|tril|triu|zero_|fill_)$"
)
_SHAPES = re.compile(
    r"(mul|add|sub|div|neg|clamp|pow|sqrt|rsqrt|exp|log|sin|cos|abs|sigmoid|tanh|where|lt|gt|le|ge|eq|ne"
    r"|lerp|to|_to_copy|copy_|float|half|contiguous|clone|pin_memory|_pin_memory|empty|empty_like|empty_strided"
    r"|resize_|expand|repeat|stack|cat|unsqueeze|view|reshape)_?$"
)
_LAYER = re.compile(r"\w*(mm|matmul|linear|einsum|convolution|attention\w*|lstm\w*|gru\w*|rnn\w*)$")
_ATEN = "aten::"
_OBJECTS = re.compile(r"torch/distributed/.*: (all_gather_object|gather_object|(broadcast|scatter)_object_list)$")

_PIECE = re.compile(r"(Forward|Backward) \d+$")

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


def described(frames: Frames, names: Sequence[str]) -> Frames:
    """With `owner` and `role` as the names tell them."""
    owner, role = np.array([(_owner(name), _role(name)) for name in names], np.int64).reshape(-1, 2).T
    return frames.change(owner=owner[frames.name], role=role[frames.name])


def source_line(name: str) -> tuple[str, int, str] | None:
    """File, line and function of a frame called as Kineto calls Python's: `train.py(41): main`."""
    found = _LINE.match(name)
    return (found["file"], int(found["line"]), found["function"]) if found else None


def owner_of_file(file: str) -> Owner:
    """By where it lies, as Kineto shows it: below site-packages from the package on."""
    top = file.split("/", 1)[0].removesuffix(".py")
    if top in (_TORCH, _TOOL):
        return Owner.TORCH if top == _TORCH else Owner.TOOL
    foreign = _INSTALLED_PATH.search(file) or _LIBRARIES.fullmatch(top) or top in sys.stdlib_module_names
    return Owner.LIBRARY if foreign else Owner.USER


def _owner(name: str) -> Owner:
    line = source_line(name) if "): " in name else None
    return owner_of_file(line[0]) if line else Owner.UNKNOWN


def _role(name: str) -> int:
    role = 0
    if name.startswith(_ATEN):
        operator = name.removeprefix(_ATEN)
        for operators, one in _OPERATORS:
            role |= one if operator in operators else 0
        role |= Role.MAKES if _MAKES.match(operator) else 0
        role |= Role.LAYER if _LAYER.match(operator) else 0
        role |= Role.SHAPES if _SHAPES.match(operator) else 0
    else:
        for beginnings, one in _BEGINNINGS:
            role |= one if name.startswith(beginnings) else 0
        role |= Role.OBJECTS if _OBJECTS.match(name) else 0
        role |= Role.PIECE if _PIECE.match(name) else 0
    return int(role)
