"""The kernels that run when PyTorch calls an operator of the CUDA device.

A kernel turns its tensors into host tensors over the same memory, lets PyTorch's own CPU kernel compute, turns the
results into device tensors, and gives the clock the kernels that a GPU would have run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepbusy.timeline.model import NONE, Direction
from keepbusy.torch_names import dispatcher
from keepbusy.virtual.clock.order import Command
from keepbusy.virtual.costs.operator_costs import law_of
from keepbusy.virtual.machine import CURRENT, MACHINE, DeviceCall
from keepbusy.virtual.pytorch import NAMES, OPERATORS, cuda_api, randomness
from keepbusy.virtual.pytorch.tensors import (
    CARRIED_SIZE,
    CPU,
    META,
    VALUES,
    computed,
    map_tensors,
    pieces,
    sparse_like,
    tensors_in,
    to_host,
)

_WAITING, _INDEXING = frozenset(OPERATORS["waiting"]), frozenset(OPERATORS["indexing"])
_NUMBERS = (bool, int, float, complex)
_NUMBER_TYPES = ("number", "float", "Optional[number]", "Optional[float]", "List[number]", "List[float]", "Tensor")
_PLAIN = frozenset([*_NUMBERS, str, type(None), torch.dtype, torch.layout, torch.memory_format])
"""Arguments of these types are compared as they are."""
_KNOWN_BY_TYPE: Mapping[bool, frozenset[type]] = {True: frozenset(), False: frozenset(_NUMBERS)}
"""Types whose values do not matter: for arguments on which shapes may depend, and for others."""
_INTEGERS_OR_TRUTHS = frozenset([int, bool])
_RENEWING = ("training", "train", "use_input_stats")
_NO_TENSORS = -2
_NOT_PLAIN: tuple[None, int, list[Any]] = (None, NONE, [])
HOST_KEYS = dispatcher.DispatchKeySet(dispatcher.DispatchKey.CPU)


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


class _Operands:
    """Converts a call's arguments for the host."""

    __slots__ = ("device", "inputs", "kernel", "recorded", "with_host_tensor", "with_sparse_tensor")

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.recorded = MACHINE.recording is not None  # whether the call may be in a captured graph
        self.device = -1
        self.inputs: list[Tensor] = []
        self.with_host_tensor = False  # apart from scalars
        self.with_sparse_tensor = False

    def take(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, list | tuple):
            return [self.take(item) for item in value]
        if type(value) is torch.device and value.type == "cuda":
            self.device = CURRENT.index(value)
            return CPU if VALUES.real else META
        return value

    def _tensor(self, tensor: Tensor) -> Tensor:
        device = tensor.get_device()
        if device < 0:
            self.with_host_tensor = self.with_host_tensor or tensor.dim() > 0
            return tensor.clone() if self.recorded else tensor  # a captured kernel copies the host's numbers
        if self.device not in (-1, device) and not self.kernel.takes_host_tensors:
            raise _on_two_devices(self.kernel.name, f"cuda:{self.device}", f"cuda:{device}")
        self.device = device
        if tensor.layout is torch.sparse_coo:
            if not VALUES.real:
                raise NotImplementedError("Sparse tensors are nothing without their values: run without --values none.")
            if self.recorded:
                raise NotImplementedError("keepbusy's virtual GPU captures no sparse tensors in CUDA graphs.")
            self.with_sparse_tensor = True
            # a copy, since an operator that writes into it may replace its indices and values
            host = sparse_like(tensor, *map(to_host, pieces(tensor))).clone()
            self.inputs += [host._indices(), host._values()]
            return host
        host = MACHINE.lasting(tensor) if self.recorded else to_host(tensor) if VALUES.real else tensor
        self.inputs.append(host)
        return host

    def check(self) -> int:
        """The device of the call. Refuses arguments that a GPU would refuse."""
        if self.with_host_tensor and self.device >= 0 and self.inputs and not self.kernel.takes_host_tensors:
            raise _on_two_devices(self.kernel.name, f"cuda:{self.device}", "cpu")
        if self.inputs and not self.with_sparse_tensor:  # whose indices are whole numbers
            refusing, dtype = _OF_FLOATS_ALONE.get(self.kernel.short.rstrip("_")), self.inputs[0].dtype
            if refusing and dtype in _INTEGERS:
                raise NotImplementedError(f"\"{refusing}\" not implemented for '{_INTEGERS[dtype]}'")
        return CURRENT.index(self.device)


def _on_two_devices(name: str, device: str, other: str) -> RuntimeError:
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {device} and {other}! "
        f"(when checking the arguments of {name})"
    )


def _read_list(values: list[Any], key: list[Any], shapes: bool) -> tuple[int, list[Any]]:
    """The device of a list (`_NO_TENSORS` without one, NONE for a list that is not plain), and the host's list.
    `shapes`: whether shapes may depend on its numbers."""
    if values and isinstance(values[0], Tensor):
        devices = {tensor.get_device() if isinstance(tensor, Tensor) else NONE for tensor in values}
        if len(devices) > 1 or devices == {NONE}:
            return NONE, values
        layouts = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in values]
        key.append(tuple(layouts))
        return devices.pop(), list(map(MACHINE.seen_by_host, values, layouts))
    if shapes and not _INTEGERS_OR_TRUTHS.issuperset(map(type, values)):
        return NONE, values
    key.append(tuple(values) if shapes else len(values))
    return _NO_TENSORS, values


def _returned(schema: Any) -> tuple[tuple[int, str] | None, ...]:
    """The argument that each result aliases, by place and name; None for a new result."""
    written = [(place, argument) for place, argument in enumerate(schema.arguments) if _writes(argument)]
    returned: list[tuple[int, str] | None] = []
    for result in schema.returns:
        alias = result.alias_info.before_set if _writes(result) else None
        same = ((place, argument.name) for place, argument in written if argument.alias_info.before_set == alias)
        returned.append(next(same, None))
    return tuple(returned)


_ONE_NEW, _OTHER_RESULT = -1, -2
"""A call returns one new tensor, or something else that is no argument."""


class _KnownCall(NamedTuple):
    """What is known about calls that differ only in values."""

    call: Callable[..., Any]  # computes on the host
    kernels: Sequence[tuple[str, int]]  # by name and time
    returned: int  # the place of the argument that it returns, or a constant above


class Kernel:
    """An overload on the virtual device. `on_host`: computes it on the host, in place of PyTorch's own kernel."""

    def __init__(
        self, overload: dispatcher.OpOverload, on_host: Callable[..., Any] | None = None, dense: bool = True
    ) -> None:
        self.overload, self.on_host, self.native = overload, on_host, dispatcher.builtin_of(overload)
        schema, packet = dispatcher.schema_of(overload), dispatcher.packet_of(overload)
        short = schema.name.split("::")[1]
        self.name, self.short = schema.name, short
        places = list(enumerate(schema.arguments))
        self.arguments = [argument.name for argument in schema.arguments]
        self.tensors = frozenset(place for place, argument in places if str(argument.type) == "Tensor")
        self.written = frozenset(argument.name for argument in schema.arguments if _writes(argument))
        self.written_at = frozenset(place for place, argument in places if _writes(argument))
        # running means are written, too, though schemas do not say so
        self.renewed_at = frozenset(place for place, argument in places if argument.name.startswith("running_"))
        changed = sorted(self.written_at | self.renewed_at)
        self.writes = tuple((self.arguments[place], place) for place in changed)
        self.picks = short in OPERATORS["picking"]
        self.reads = not (short.endswith("_like") or short.startswith("new_"))  # these read only the shape
        self.returned = _returned(schema)
        self.takes_host_tensors = short in OPERATORS["take_host_tensors"] or short.startswith("_foreach_")
        self.has_generator = "generator" in self.arguments
        self.is_list_operator = short.startswith(("_foreach_", "_fused_"))
        self.law_arguments = law_of(short).asks
        self.named_shapes = {argument.name: str(argument.type) not in _NUMBER_TYPES for argument in schema.arguments}
        self.shapes = tuple(self.named_shapes.values())
        """Whether shapes may depend on each argument; for plain numbers only the type counts."""
        self.is_random = torch.Tag.nondeterministic_seeded in overload.tags and short not in OPERATORS["draw_nothing"]
        has_scalar = dispatcher.variant_of(overload) == "Tensor" and "Scalar" in packet.overloads()
        self.scalar = dispatcher.builtin_of(packet.Scalar) if has_scalar else None  # as `mul.Scalar` for `mul.Tensor`
        self.is_plain = dense and short not in _WAITING | _INDEXING
        self.is_product = law_of(short).depends_on_precision
        self.is_quick_in_float = short in OPERATORS["products"] and "out_dtype" not in self.arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls that differ only in values take a shorter path after the first."""
        host, place = MACHINE.pause_at()
        try:
            if not self.is_plain or MACHINE.recording is not None or not VALUES.real:
                return self._run(place, args, kwargs)
            key, device, host_args = self._read(args, kwargs)
            cached = MACHINE.costs.by_call.get(key)
            if cached is None:
                return self._run(place, args, kwargs, key)
            try:
                out = self.compute(device, host_args, kwargs) if self.is_random else cached.call(*host_args, **kwargs)
            except RuntimeError:  # `_run` may handle it, or raises it again
                return self._run(place, args, kwargs, key)
            stream = MACHINE.stream(device, host)
            if self.is_list_operator:
                MACHINE.clock.spend(MACHINE.device.host.lists(args))
            MACHINE.clock.operator(self.name, place, stream, cached.kernels)
            command = self._use(args, kwargs, stream, place)
            if cached.returned >= 0:
                return args[cached.returned]
            if cached.returned == _ONE_NEW:
                result = MACHINE.place_on(out, device, stream)
                MACHINE.use_tensor(result, True, command)
                return result
            return self._note_new_results(self._on_device(device, out, args, kwargs), command)
        finally:
            host.resume()

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int, list[Any]]:
        """The key, the device and the host's arguments of a call on tensors of one device and plain values. The key
        holds everything on which the kernels and the host's function may depend."""
        key: list[Any] = [self, self.is_product and MACHINE.costs.allows_tf32()]
        device, host_args = -1, list(args)
        for place, argument in enumerate(args):
            kind = type(argument)
            if kind in _PLAIN:
                key.append(kind if kind in _KNOWN_BY_TYPE[self.shapes[place]] else argument)
                continue
            if isinstance(argument, Tensor):
                index = argument.get_device()
                if index < 0:
                    return _NOT_PLAIN
                layout = argument.shape, argument.stride(), argument.dtype
                key.append(layout)
                host_args[place] = MACHINE.seen_by_host(argument, layout)
            elif kind is list:
                index, host_args[place] = _read_list(argument, key, self.shapes[place])
            else:
                return _NOT_PLAIN
            if index != device:
                if index == NONE or (index >= 0 <= device):
                    return _NOT_PLAIN
                device = max(device, index)
        for name, option in kwargs.items():
            if type(option) not in _PLAIN:
                return _NOT_PLAIN
            key += (name, option if self.named_shapes[name] else type(option))
        return _NOT_PLAIN if device < 0 else (tuple(key), device, host_args)

    def _known_call(self, kernels: Any, out: Any, args: tuple[Any, ...]) -> _KnownCall:
        """What to do at the next call with the same key."""
        returned = _OTHER_RESULT
        if len(self.returned) == 1 and isinstance(out, Tensor) and out.layout is torch.strided:
            source = self.returned[0]
            if source is None:
                returned = _ONE_NEW
            elif source[0] < len(args) and args[source[0]].shape == out.shape:
                returned = source[0]
        return _KnownCall(self.on_host or self._chosen(args), kernels, returned)

    def _run(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any = None) -> Any:
        """Run any call. `key`: remember the call under it; None if such calls cannot be remembered."""
        operands = _Operands(self)
        host_args = [operands.take(argument) for argument in args]
        host_kwargs = {name: operands.take(option) for name, option in kwargs.items()} if kwargs else kwargs
        device = operands.check()
        waits = self.waits(host_args)
        if waits:
            cuda_api.announce_sync()
        recording = MACHINE.records(device) if operands.recorded else None
        if recording is not None:
            recording.about_to_write(*self.written_by(host_args, host_kwargs))
        out = self.compute(device, host_args, host_kwargs)
        parts = (out,) if len(self.returned) == 1 else out or ()
        new = [part for source, part in zip(self.returned, parts, strict=True) if source is None]
        pieces_made = [piece for tensor in tensors_in(new) for piece in pieces(tensor)]
        kernels = MACHINE.kernels(self.short, operands.inputs, pieces_made, self.cost_arguments(args, kwargs))
        if key is not None:
            MACHINE.costs.by_call[key] = self._known_call(kernels, out, args)
        if self.is_list_operator:
            MACHINE.clock.spend(MACHINE.device.host.lists(args))
        stream = MACHINE.stream(device)
        MACHINE.clock.operator(self.name, place, stream, kernels)
        command = self._use(args, kwargs, stream, place)
        if waits:
            with DeviceCall(waits):  # the host needs a number: a small copy, and a wait for it
                MACHINE.copy(device, 8, Direction.DEVICE_TO_HOST, pinned=True, non_blocking=False)
        result = self._on_device(device, out, args, kwargs)
        if not VALUES.real and recording is None and self.short in OPERATORS["truths"]:
            self._answer_truth(args, result)
        if recording is not None:
            recording.repeat(partial(self.compute, device, host_args, host_kwargs), out)
        return self._note_new_results(result, command)

    def _use(self, args: Sequence[Any], kwargs: Mapping[str, Any], stream: int, place: int) -> Command:
        """Note the reads and writes of arguments."""
        command, use = MACHINE.clock.order.command(stream, place), MACHINE.use_tensor
        written = self.written_at
        if self.renewed_at:  # a forward pass that trains writes running means
            by_name = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
            if not self.short.endswith("backward") and any(map(by_name.get, _RENEWING)):
                written = written | self.renewed_at
        for index, argument in enumerate(args):
            if isinstance(argument, Tensor):
                if argument.is_cuda and (index in written or self.reads):
                    use(argument, index in written, command, self.picks and index == 0)
            elif isinstance(argument, list | tuple):
                for tensor in argument:
                    if isinstance(tensor, Tensor) and tensor.is_cuda:
                        use(tensor, index in written, command)
        for name, argument in kwargs.items():
            for tensor in tensors_in(argument):
                if tensor.is_cuda:
                    use(tensor, name in self.written, command)
        return command

    def _note_new_results(self, result: Any, command: Command) -> Any:
        """Note the writes of new results; returns the result."""
        results = (result,) if len(self.returned) == 1 else result or ()
        for source, part in zip(self.returned, results, strict=False):
            for tensor in tensors_in(part) if source is None else ():
                if tensor.is_cuda:
                    MACHINE.use_tensor(tensor, True, command)
        return result

    def compute(self, device: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Compute on the host."""
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        if not VALUES.real:
            return self._without_values(args, kwargs)
        if self.is_random:
            return randomness.draw(self._call, device, args, kwargs, self.has_generator)
        return self._call(*args, **kwargs)

    def _without_values(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Results of the right shapes without values. Operators that only write into arguments are not called."""
        returned = self.returned
        if returned and all(returned) and not kwargs.keys() & self.written:
            written = tuple(args[place] if place < len(args) else kwargs[key] for place, key in filter(None, returned))
            return written if len(written) > 1 else written[0]
        if not returned:
            return None
        return computed(self.on_host or self._chosen(tuple(args)), self.short, args, kwargs)

    def _answer_truth(self, args: tuple[Any, ...], result: Any) -> None:
        """Without values: a tensor equals itself and is not infinite, and answers made of known answers are known. Else
        a program that checks whether its loss is finite would end itself."""
        if not isinstance(result, Tensor) or result.dtype is not torch.bool or result.nbytes > CARRIED_SIZE:
            return
        answer = torch.tensor(True)
        if self.short == "eq":
            is_certain = args[0] is args[1]
        elif self.short == "ne":
            is_certain = isinstance(args[1], float) and math.isinf(args[1])
        else:
            is_certain = all(map(VALUES.readable, tensors_in(args)))
            if is_certain:
                answer = self._call(*map_tensors(lambda tensor: to_host(tensor) if tensor.is_cuda else tensor, args))
        if is_certain:
            to_host(result).copy_(answer)
            VALUES.keep(result)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        call = self.on_host or self._chosen(args)
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            text = str(error)
            if "not resizable" in text and self._make_resizable(kwargs):
                return self._call(*args, **kwargs)
            if any(phrase in text for phrase in _WITHOUT_HALF):
                return _in_float(call, self.written_by(args, kwargs), args, kwargs)
            if self.short in _OF_MORE_TYPES:
                out = kwargs.pop("out", None)
                result = _OF_MORE_TYPES[self.short](*args, **kwargs)
                return result if out is None else out.copy_(result)
            MACHINE.raise_for_memory(error, CURRENT.device)
            raise

    def _chosen(self, args: tuple[Any, ...]) -> Any:
        """The function to call. Only the packet accepts a number that the dispatcher has unpacked from a tensor."""
        for place in self.tensors:
            if place < len(args) and isinstance(args[place], _NUMBERS):
                return self.scalar if self.scalar is not None and place == 1 else dispatcher.packet_of(self.overload)
        if self.is_quick_in_float and any(
            isinstance(argument, Tensor) and argument.dtype in _slow_types() for argument in args
        ):
            return lambda *values, **options: _in_float(self.native, self.written_by(values, options), values, options)
        return self.native

    def _make_resizable(self, kwargs: dict[str, Any]) -> bool:
        """Give results that are too small for their shape new memory, which may grow."""
        outs = [out for name, out in kwargs.items() if name in self.written and isinstance(out, Tensor)]
        small = [out for out in outs if out.nbytes > out.untyped_storage().nbytes()]
        for out in small:
            out.set_()
        return bool(small)

    def _on_device(self, device: int, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result for the program: arguments that were written into, or new device tensors."""
        returned = self.returned
        if VALUES.storages and self.written:
            map_tensors(VALUES.forget, self.written_by(args, kwargs))
        if returned == (None,) and isinstance(out, Tensor):
            return _place(out, device)
        if len(returned) == 1:
            return self._result(device, returned[0], out, args, kwargs)
        if not returned:
            return None
        return tuple(
            [self._result(device, source, part, args, kwargs) for source, part in zip(returned, out, strict=True)]
        )

    def _result(
        self, device: int, source: tuple[int, str] | None, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if source is None:
            return map_tensors(lambda tensor: _place(tensor, device), out)
        argument = args[source[0]] if source[0] < len(args) else kwargs[source[1]]
        if isinstance(argument, Tensor):
            if argument.layout is torch.sparse_coo:
                argument.data = _place(out, device)
            elif argument.shape != out.shape:
                adopt(argument, MACHINE.place_on(out, device))
        return argument

    def cost_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Arguments on which the cost of a call depends; those left out have their defaults."""
        if self.is_list_operator:
            return {"lists": sum(isinstance(argument, list | tuple) and len(argument) > 0 for argument in args)}
        if not self.law_arguments:
            return {}
        arguments = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        return {name: arguments[name] for name in self.law_arguments if name in arguments}

    def written_by(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors that a call writes into, also those that the schema does not name."""
        return tensors_in([args[place] if place < len(args) else kwargs.get(name) for name, place in self.writes])

    def waits(self, args: Sequence[Any]) -> str:
        """The operator for which the host waits within this call, if any: for the number of ones in a mask, unless a
        single value is written there, and for the largest label, unless the number of classes is given."""
        if self.short in _WAITING or (self.short == "one_hot" and min(args[1:2], default=-1) < 0):
            return self.name
        if self.short in _INDEXING and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1] or ()
        ):
            one_value = "put" in self.short and isinstance(args[2], Tensor) and args[2].numel() == 1
            return "" if one_value else "aten::nonzero"
        return ""


def _place(out: Tensor, device: int) -> Tensor:
    """A new result as a device tensor."""
    if out.layout is not torch.sparse_coo:
        return MACHINE.place_on(out, device)
    return sparse_like(out, *(MACHINE.place_on(piece, device) for piece in pieces(out)))


def adopt(tensor: Tensor, other: Tensor) -> None:
    """Give a device tensor the memory and the shape of another, as for a resized result."""
    storage = other.untyped_storage()
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
        HOST_KEYS, tensor, storage, other.storage_offset(), list(other.shape), list(other.stride())
    )


# Operators in sixteen bits that the host lacks or computes slowly: computed in thirty-two bits and rounded, as by CUDA.

_WITHOUT_HALF: list[str] = NAMES["without_half"]
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


@cache
def _slow_types() -> frozenset[torch.dtype]:
    """Types of sixteen bits that this processor has no instructions for."""
    is_quick = {
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    }
    return frozenset(dtype for dtype, is_supported in is_quick.items() if not is_supported())


def _in_float(call: Callable[..., Any], written: list[Tensor], args: Any, kwargs: dict[str, Any]) -> Any:
    originals: dict[int, Tensor] = {}  # by id of the wider tensor
    wide: list[Tensor] = []

    def widen(tensor: Any) -> Any:
        if tensor.dtype not in _WIDER:
            return tensor
        wide.append(tensor.to(_WIDER[tensor.dtype]))
        originals[id(wide[-1])] = tensor
        return wide[-1]

    wide_kwargs = {
        name: _WIDER.get(option, option) if name == "dtype" else map_tensors(widen, option)
        for name, option in kwargs.items()
    }
    out = call(*[map_tensors(widen, argument) for argument in args], **wide_kwargs)
    for widened in wide:
        if any(originals[id(widened)] is target for target in written):
            originals[id(widened)].copy_(widened)
    narrower = {torch.complex64: torch.complex32}
    types = (tensor.dtype for tensor in originals.values() if not tensor.is_complex())
    narrower[torch.float32] = next(types, torch.float16)
    return map_tensors(lambda part: originals.get(id(part), part.to(narrower.get(part.dtype, part.dtype))), out)


# Operators on integers and truth values that only CUDA, or only the host, has.

_OF_MORE_TYPES: dict[str, Callable[..., Tensor]] = {
    "histc": lambda tensor, *bins: tensor.double().histc(*bins).to(tensor.dtype),
    "abs": lambda truths: truths.clone(),
    "trace": lambda truths: truths.long().trace(),
    "nansum": lambda tensor, *dims, **options: torch.where(tensor.isnan(), 0, tensor).sum(*dims or (None,), **options),
}
_OF_FLOATS_ALONE = {name: refusing for refusing, names in NAMES["of_floats_alone"].items() for name in names.split()}
"""By operator, the kernel named in CUDA's refusal."""
_INTEGERS = {getattr(torch, name): scalar for name, scalar in NAMES["integers"].items()}


# How the host computes operators that PyTorch has for CUDA alone. All tensors here are host tensors. The functions are
# those of `torch.ops`, since calls of `torch` would be in the timeline. Operators with no kernel for the host, and none
# here, are refused by name: see `operators.py`.

_aten = torch.ops.aten

# `nn.GRUCell` and `nn.LSTMCell`: all after the two products is one kernel, and one in the backward pass.


def _gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hidden: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    if input_bias is not None and hidden_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    (reset_in, update_in, new_in), (reset_h, update_h, new_h) = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    reset, update = (reset_in + reset_h).sigmoid(), (update_in + update_h).sigmoid()
    new = (new_in + reset * new_h).tanh()
    return new + update * (hidden - new), _aten.cat.default([reset, update, new, hidden, new_h], 1)


def _lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cell: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    gates = input_gates + hidden_gates
    if input_bias is not None and hidden_bias is not None:
        gates = gates + input_bias + hidden_bias
    take, forget, new, give = gates.chunk(4, 1)
    take, forget, new, give = take.sigmoid(), forget.sigmoid(), new.tanh(), give.sigmoid()
    after = forget * cell + take * new
    return give * after.tanh(), after, _aten.cat.default([take, forget, new, give], 1)


# The halves of `nn.SyncBatchNorm`, between which ranks exchange their means.


def _over_channels(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 2))


def _all_but_channels(tensor: Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _batch_norm_stats(tensor: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    variance, mean = _aten.var_mean.correction(tensor.float(), _all_but_channels(tensor), correction=0)
    return mean, (variance + epsilon).rsqrt()


def _batch_norm_elemt(
    tensor: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, scale: Tensor, _epsilon: float
) -> Tensor:
    normal = (tensor - _over_channels(mean, tensor)) * _over_channels(scale, tensor)
    normal = normal if weight is None else normal * _over_channels(weight, tensor)
    return (normal if bias is None else normal + _over_channels(bias, tensor)).to(tensor.dtype)


def _batch_norm_gather_stats(tensor: Tensor, means: Tensor, scales: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Statistics over all ranks: `means` and `scales` have a row for each rank."""
    running_mean, running_var, momentum, epsilon, counts = others
    each = counts.to(means.dtype).view(-1, 1) if isinstance(counts, Tensor) else _aten.full_like.default(means, counts)
    total = each.expand_as(means).sum(0)
    mean = (means * each).sum(0) / total
    variance = ((scales.pow(-2) - epsilon + (means - mean).square()) * each).sum(0) / total
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((variance * total / (total - 1)).to(running_var.dtype), momentum)
    return mean, (variance + epsilon).rsqrt()


def _batch_norm_backward_reduce(
    gradient: Tensor, tensor: Tensor, mean: Tensor, scale: Tensor, _weight: Tensor | None, *needs: bool
) -> tuple[Tensor | None, ...]:
    needs_input, needs_weight, needs_bias = needs
    total = gradient.float().sum(_all_but_channels(tensor))
    with_input = (gradient * (tensor - _over_channels(mean, tensor))).float().sum(_all_but_channels(tensor))
    sums = (total, with_input) if needs_input else (None, None)
    return *sums, with_input * scale if needs_weight else None, total if needs_bias else None


def _batch_norm_backward_elemt(
    gradient: Tensor, tensor: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, *sums: Tensor
) -> Tensor:
    total, with_input, counts = sums
    count = counts.sum()
    centred = tensor - _over_channels(mean, tensor)
    slope = _over_channels(with_input / count * scale * scale, tensor)
    factor = scale if weight is None else scale * weight
    inner = gradient - _over_channels(total / count, tensor) - centred * slope
    return (inner * _over_channels(factor, tensor)).to(tensor.dtype)


# Dropout as on the CPU, with the same random numbers, which are scaled before the product.


def _dropout(tensor: Tensor, p: float, train: bool | None, *, generator: Any = None) -> Any:
    if train is False or p in (0, 1):
        return dispatcher.builtin_of(_aten.native_dropout.default)(tensor, p, train)
    noise = _aten.bernoulli_.float(_aten.empty_like.default(tensor), 1 - p, generator=generator).div_(1 - p)
    return tensor * noise, noise != 0


def _dropout_backward(gradient: Tensor, mask: Tensor, scale: float) -> Any:
    if not scale:
        return dispatcher.builtin_of(_aten.native_dropout_backward.default)(gradient, mask, scale)
    return gradient * mask.to(gradient.dtype).div_(1 / scale)


# A softmax of sixteen bits with a result of thirty-two, as in autocast.


def _widening(softmax: Any) -> Callable[..., Tensor]:
    return lambda tensor, dim, half_to_float: softmax(tensor.float() if half_to_float else tensor, dim, False)


def _narrowing(backward: Any) -> Callable[..., Tensor]:
    return lambda gradient, output, dim, dtype: backward(gradient, output, dim, gradient.dtype).to(dtype)


# Products in sixteen bits whose result has thirty-two.


def _wide(product: Any) -> Callable[..., Tensor]:
    """The last argument is the type."""
    return lambda *args, **factors: product(*[tensor.to(args[-1]) for tensor in args[:-1]], **factors)


CELLS: dict[str, Callable[..., Any]] = {"_thnn_fused_gru_cell": _gru_cell, "_thnn_fused_lstm_cell": _lstm_cell}
ON_HOST: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": _batch_norm_stats,
    "batch_norm_elemt": _batch_norm_elemt,
    "batch_norm_gather_stats": _batch_norm_gather_stats,
    "batch_norm_gather_stats_with_counts": _batch_norm_gather_stats,
    "batch_norm_backward_reduce": _batch_norm_backward_reduce,
    "batch_norm_backward_elemt": _batch_norm_backward_elemt,
    "native_dropout": _dropout,
    "native_dropout_backward": _dropout_backward,
    "_softmax": _widening(_aten._softmax.default),
    "_log_softmax": _widening(_aten._log_softmax.default),
    "_softmax_backward_data": _narrowing(_aten._softmax_backward_data.default),
    "_log_softmax_backward_data": _narrowing(_aten._log_softmax_backward_data.default),
    "mm.dtype": _wide(_aten.mm.default),
    "bmm.dtype": _wide(_aten.bmm.default),
    "addmm.dtype": _wide(_aten.addmm.default),
    "baddbmm.dtype": _wide(_aten.baddbmm.default),
}
