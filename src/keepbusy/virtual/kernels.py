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

from keepbusy.virtual import randomness, sync_debug, syncs
from keepbusy.virtual.current import CURRENT
from keepbusy.virtual.dispatches import LISTED
from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.recording import lasting
from keepbusy.virtual.signature import Signature
from keepbusy.virtual.tensors import CPU, map_tensors, to_host
from keepbusy.virtual.unreal import META, VALUES, computed

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
        if self.on_host and self.signature.short in syncs.INDEX:
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
        waits = syncs.learns(signature.short, host_args)
        if waits:
            sync_debug.about_to_wait()
        recording = MACHINE.records(device)
        if recording is not None:
            recording.about_to_write(*signature.written_by(host_args, host_kwargs))
        out = self.compute(device, host_args, host_kwargs)
        asked = signature.asked(args, kwargs) if signature.asks or signature.many else kwargs
        self._launch(device, place, operands.inputs, _new(signature, out), asked)
        if waits:
            MACHINE.wait_for_result(device, syncs.shown(signature))
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
