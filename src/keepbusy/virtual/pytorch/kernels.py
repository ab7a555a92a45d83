"""What runs when PyTorch calls an operator of the CUDA device.

A kernel sees its tensors as host tensors over the same memory, lets PyTorch's own CPU kernel
compute, shows the results as device tensors again, and tells the clock what a GPU would have run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from keepbusy.virtual.costs.dispatches import LISTED
from keepbusy.virtual.costs.prices import ASKS
from keepbusy.virtual.current_device import CURRENT
from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.pytorch import cuda_api, randomness
from keepbusy.virtual.pytorch.cuda_graphs import lasting
from keepbusy.virtual.pytorch.tensors import CPU, map_tensors, to_host
from keepbusy.virtual.pytorch.values import META, VALUES, computed

# Which operators make the host wait, because only the device knows the shape of what they return.

_LEARN = (
    "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
    "equal", "bincount", "repeat_interleave", "linalg_eig", "_linalg_eigh", "_linalg_svd", "histogram", "histc",
    "linalg_lstsq",
)  # fmt: skip
INDEX = ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
_MASKS = (torch.bool, torch.uint8)


def learns(name: str, args: list[Any]) -> bool:
    """Whether the host waits within this call."""
    return name in _LEARN or (name in INDEX and indexes_with_mask(name, args))


def shown(signature: Signature) -> str:
    """The operator that waits: indexing with a mask looks for the ones first."""
    return "aten::nonzero" if signature.short in INDEX else signature.name


def indexes_with_mask(name: str, args: list[Any]) -> bool:
    """A mask has as many indices as it has ones; only a single value can be written without knowing how many."""
    masked = any(isinstance(one, torch.Tensor) and one.dtype in _MASKS for one in args[1] or ())
    writes_one_value = "put" in name and isinstance(args[2], torch.Tensor) and args[2].numel() == 1
    return masked and not writes_one_value


# What an operator's schema says that a kernel needs to know, read once.

# They take indices, lengths or step counts on the host beside tensors on the device, as CUDA's kernels do.
_TAKE_HOST_TENSORS = frozenset(
    [
        "_use_cudnn_ctc_loss",
        "index",
        "index_put",
        "index_put_",
        "_index_put_impl_",
        "_unsafe_index",
        "_unsafe_index_put",
        "lstm",
        "gru",
        "rnn_tanh",
        "rnn_relu",
        "_fused_adam_",
        "_fused_adamw_",
        "_fused_sgd_",
        "_fused_adagrad_",
        "_pack_padded_sequence",
        "ctc_loss",
        "_ctc_loss",
        "_ctc_loss_backward",
        "embedding_bag",
        "histogramdd",
    ]
)
# They are marked as random, for what they may do on some device; on the host they draw nothing.
_DRAW_NOTHING = frozenset(["scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu"])


class Signature:
    """One overload: where tensors stand, what it writes, and what it returns."""

    __slots__ = (
        "_writes",
        "arguments",
        "asks",
        "has_generator",
        "is_random",
        "many",
        "name",
        "returned",
        "short",
        "takes_host_tensors",
        "tensors",
        "written",
    )  # fmt: skip

    def __init__(self, overload: torch._ops.OpOverload) -> None:
        schema = overload._schema
        name = schema.name.split("::")[1]
        self.name = schema.name
        self.short = name
        self.arguments = [one.name for one in schema.arguments]
        self.tensors = frozenset(at for at, one in enumerate(schema.arguments) if str(one.type) == "Tensor")
        self.written = frozenset(one.name for one in schema.arguments if _writes(one))
        self._writes = tuple((one.name, at) for at, one in enumerate(schema.arguments) if _writes(one, True))
        self.returned = tuple(_returned(schema, one) for one in schema.returns)
        self.takes_host_tensors = name in _TAKE_HOST_TENSORS or name.startswith("_foreach_")
        self.has_generator = "generator" in self.arguments
        self.many = name.startswith(("_foreach_", "_fused_"))
        self.asks = tuple((one, self._at(one)) for one in ASKS.get(name, ()))
        self.is_random = torch.Tag.nondeterministic_seeded in overload.tags and name not in _DRAW_NOTHING

    def _at(self, argument: str) -> int:
        return self.arguments.index(argument) if argument in self.arguments else len(self.arguments)

    def asked(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the cost of a call depends on, beside its tensors; arguments left out have their usual value."""
        if self.many:
            return {"lists": sum(isinstance(one, list | tuple) and len(one) > 0 for one in args)}
        return {
            name: args[at] if at < len(args) else kwargs[name]
            for name, at in self.asks
            if at < len(args) or name in kwargs
        }

    def written_by(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors that a call writes into, also those of which the schema does not tell."""
        found: list[torch.Tensor] = []
        for name, at in self._writes:
            map_tensors(found.append, args[at] if at < len(args) else kwargs.get(name))
        return found


def _writes(argument: Any, silently: bool = False) -> bool:
    """`silently`: running means are also written by operators that do not say so."""
    said = argument.alias_info is not None and argument.alias_info.is_write
    return said or (silently and argument.name.startswith("running_"))


def _returned(schema: Any, result: Any) -> tuple[int, str] | None:
    """Which argument a result is, by place and name; None for one that is new."""
    if not _writes(result):
        return None
    for at, argument in enumerate(schema.arguments):
        if _writes(argument) and argument.alias_info.before_set == result.alias_info.before_set:
            return at, argument.name
    return None


def returns_a_view(overload: torch._ops.OpOverload) -> bool:
    return any(one.alias_info is not None and not one.alias_info.is_write for one in overload._schema.returns)


def overload_named(name: str) -> torch._ops.OpOverload | None:
    """By its full name, `aten::add.Tensor`; None where this version lacks it."""
    base, _, variant = name.removeprefix("aten::").partition(".")
    try:
        return getattr(getattr(torch.ops.aten, base), variant or "default")
    except (AttributeError, RuntimeError):
        return None


HOST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_NUMBERS = (bool, int, float, complex)


class Operands:
    """One call's arguments on their way to the host."""

    __slots__ = ("device", "inputs", "on_host", "recorded", "signature")

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.recorded = MACHINE.recording is not None  # whether a graph may be captured with them
        self.device = -1
        self.inputs: list[Tensor] = []
        self.on_host = False  # whether a host tensor with dimensions was among them

    def take(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, list | tuple):
            return [self.take(one) for one in value]
        if type(value) is torch.device and value.type == "cuda":
            self.device = CURRENT.index(value)
            return CPU if VALUES.real else META
        return value

    def _tensor(self, tensor: Tensor) -> Tensor:
        device = tensor.get_device()
        if device < 0:
            self.on_host = self.on_host or tensor.dim() > 0
            return tensor.clone() if self.recorded else tensor  # a captured kernel takes the host's numbers along
        if device != self.device:
            if self.device >= 0 and not self.signature.takes_host_tensors:
                raise _apart(self.signature.name, f"cuda:{self.device}", f"cuda:{device}")
            self.device = device
        host = lasting(tensor) if self.recorded else to_host(tensor) if VALUES.real else tensor
        self.inputs.append(host)
        return host

    def check(self) -> int:
        """The device of the call; refuses what a GPU would refuse."""
        if self.device < 0:
            return CURRENT.device
        if self.on_host and self.inputs and not self.signature.takes_host_tensors:
            raise _apart(self.signature.name, f"cuda:{self.device}", "cpu")
        if self.on_host and self.signature.short in INDEX:
            MACHINE.needs_pinned(self.device, is_pinned=False)
        return self.device


def _apart(name: str, one: str, other: str) -> RuntimeError:
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {one} and {other}! "
        f"(when checking the arguments of {name})"
    )


class Kernel:
    """One overload on the virtual device."""

    __slots__ = ("overload", "raw", "scalar", "signature")

    def __init__(self, overload: torch._ops.OpOverload) -> None:
        self.overload = overload
        self.raw = overload._op
        self.signature = Signature(overload)
        self.scalar = _scalar_variant(overload)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        host = MACHINE.come()
        try:
            return self._run(MACHINE.here(), args, kwargs)
        finally:
            MACHINE.clock.go(host)

    def _run(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature, operands = self.signature, Operands(self.signature)
        host_args = [operands.take(one) for one in args]
        host_kwargs = {name: operands.take(one) for name, one in kwargs.items()} if kwargs else kwargs
        device = operands.check()
        waits = learns(signature.short, host_args)
        if waits:
            cuda_api.announce_sync()
        recording = MACHINE.records(device)
        if recording is not None:
            recording.about_to_write(*signature.written_by(host_args, host_kwargs))
        out = self.compute(device, host_args, host_kwargs)
        asked = signature.asked(args, kwargs) if signature.asks or signature.many else kwargs
        self._launch(device, place, operands.inputs, _new(signature, out), asked)
        if waits:
            MACHINE.wait_for_result(device, shown(signature))
        result = self._on_device(device, out, args, kwargs)
        if recording is not None:
            recording.repeat(partial(self.compute, device, host_args, host_kwargs), out)
        return result

    def _launch(
        self, device: int, place: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor], asked: Mapping[str, Any]
    ) -> None:
        kernels = MACHINE.kernels(self.signature.short, inputs, outputs, asked)
        if self.signature.many:
            MACHINE.clock.spend(LISTED * len(inputs) * MACHINE.device.host.operator)
        MACHINE.clock.operator(self.signature.name, place, MACHINE.stream(device), kernels)

    def compute(self, device: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """On the host, with PyTorch's own kernel."""
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        if not VALUES.real:
            return self._without_values(args, kwargs)
        if self.signature.is_random:
            return randomness.draw(self._call, device, args, kwargs, self.signature.has_generator)
        return self._call(*args, **kwargs)

    def _without_values(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Results as they would be, with nothing in them; what is only written into needs no call at all."""
        returned = self.signature.returned
        if returned and all(returned) and not kwargs.keys() & self.signature.written:
            written = tuple(args[at] if at < len(args) else kwargs[name] for at, name in filter(None, returned))
            return written if len(written) > 1 else written[0]
        if not returned:
            return None
        return computed(self._chosen(tuple(args)), self.signature.short, args, kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        call = self._chosen(args)
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            if "not resizable" not in str(error) or not _made_resizable(self.signature, kwargs):
                raise
            return self._call(*args, **kwargs)

    def _chosen(self, args: tuple[Any, ...]) -> Any:
        """Where a Python number stands for a tensor, the dispatcher unpacked it, and only the packet takes it back."""
        for at in self.signature.tensors:
            if at < len(args) and isinstance(args[at], _NUMBERS):
                return self.scalar if self.scalar is not None and at == 1 else self.overload._overloadpacket
        return self.raw

    def _on_device(self, device: int, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result as the program sees it: its own tensors where it wrote into them, else new ones of the device."""
        returned = self.signature.returned
        if VALUES.kept and self.signature.written:
            map_tensors(VALUES.forget, self.signature.written_by(args, kwargs))
        if len(returned) == 1:
            return self._one(device, returned[0], out, args, kwargs)
        if not returned:
            return None
        return tuple([self._one(device, one, part, args, kwargs) for one, part in zip(returned, out, strict=True)])

    def _one(
        self, device: int, source: tuple[int, str] | None, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if source is None:
            return map_tensors(lambda one: MACHINE.place_on(one, device), out)
        mine = args[source[0]] if source[0] < len(args) else kwargs[source[1]]
        if isinstance(mine, Tensor) and mine.shape != out.shape:
            adopt(mine, MACHINE.place_on(out, device))
        return mine


def _new(signature: Signature, out: Any) -> list[Tensor]:
    """Of a result the tensors that were not there before."""
    if len(signature.returned) == 1:
        parts = [out] if signature.returned[0] is None else []
    else:
        parts = [part for one, part in zip(signature.returned, out or (), strict=True) if one is None]
    found: list[Tensor] = []
    for part in parts:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, list | tuple):
            found += [one for one in part if isinstance(one, Tensor)]
    return found


def adopt(tensor: Tensor, other: Tensor) -> None:
    """Let a device tensor have the memory and the shape of another, as a resized result does."""
    storage = other.untyped_storage()
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
        HOST_KEYS, tensor, storage, other.storage_offset(), list(other.shape), list(other.stride())
    )


def _made_resizable(signature: Signature, kwargs: dict[str, Any]) -> bool:
    """Results that are too small for what is written into them get memory of their own, which may grow."""
    small = [one for name, one in kwargs.items() if name in signature.written and _too_small(one)]
    for one in small:
        one.set_()
    return bool(small)


def _too_small(result: Any) -> bool:
    """The shape was changed already when the memory could not grow."""
    return isinstance(result, Tensor) and result.nbytes > result.untyped_storage().nbytes()


def _scalar_variant(overload: torch._ops.OpOverload) -> Any:
    """Of `mul.Tensor` the builtin of `mul.Scalar`, if there is one."""
    packet = overload._overloadpacket
    if overload._overloadname == "Tensor" and "Scalar" in packet.overloads():
        return packet.Scalar._op
    return None
