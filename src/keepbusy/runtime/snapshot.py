"""A state as it is at one moment: its tensors on their way home, everything else pickled."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from keepbusy.runtime.parcel import Arrived, Parcel

_Key = tuple[torch.device, int, int]
_Rebuild = Callable[[], Tensor]


class Snapshot:
    """What `torch.save` would write now. Nothing that happens afterwards changes it, and nobody has waited for it."""

    def __init__(self, state: Any) -> None:
        self.sharded = False
        self._memory = _Memory()
        structure = _Structure(self._take)
        structure.dump(state)
        self._structure, self._rebuilds = structure.file.getvalue(), structure.rebuilds
        self._memory.set_aside()

    def home(self) -> Any:
        """The state on the host. It is the thread that writes it which waits here."""
        self._memory.bring_home()
        return _Filled(self._structure, self._rebuilds).load()

    def _take(self, tensor: Tensor) -> _Rebuild:
        """Note what the tensor holds; what is returned makes one like it, once all are home."""
        if is_traceable_wrapper_subclass(tensor):
            return self._take_wrapper(tensor)
        if not _is_plain(tensor):
            host = tensor.detach() if tensor.is_meta else tensor.detach().cpu()
            return lambda: host
        key, memory, dress = self._memory.note(tensor), self._memory, _dress_of(tensor)
        dtype, look = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())
        return lambda: dress(torch.empty(0, dtype=dtype, device="cpu").set_(memory.homes[key], *look))

    def _take_wrapper(self, tensor: Any) -> _Rebuild:
        """A tensor made of others, such as a rank's part of a sharded one."""
        self.sharded |= hasattr(tensor, "placements")
        kind, look = type(tensor), (tensor.shape, tensor.stride())
        names, context = tensor.__tensor_flatten__()
        parts = {name: self._take_part(getattr(tensor, name)) for name in names}
        return lambda: kind.__tensor_unflatten__({name: part() for name, part in parts.items()}, context, *look)

    def _take_part(self, part: Any) -> Callable[[], Any]:
        return self._take(part) if isinstance(part, Tensor) else lambda: part


class _Memory:
    """What the tensors lie in: tensors that share memory still do so in the end."""

    def __init__(self) -> None:
        self._noted: dict[_Key, Tensor] = {}
        self.homes: dict[_Key, UntypedStorage] = {}

    def note(self, tensor: Tensor) -> _Key:
        storage = tensor.untyped_storage()
        key = tensor.device, storage.data_ptr(), storage.nbytes()
        if key not in self._noted:
            self._noted[key] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        return key

    def set_aside(self) -> None:
        self._sent = []
        for device in dict.fromkeys(device for device, *_ in self._noted):
            ones = {key: whole for key, whole in self._noted.items() if key[0] == device}
            kind = Parcel if device.type == "cuda" else Arrived
            self._sent.append((list(ones), kind(list(ones.values()))))
        self._noted.clear()

    def bring_home(self) -> None:
        for _, parcel in self._sent:
            parcel.send()
        for keys, parcel in self._sent:
            for place, key in enumerate(keys):
                self.homes[key] = parcel.open(place).untyped_storage()


class _Structure(pickle.Pickler):
    """Everything but the tensors, which are taken out, each with what makes it anew."""

    def __init__(self, take: Callable[[Tensor], _Rebuild]) -> None:
        self.file = io.BytesIO()
        self.rebuilds: list[_Rebuild] = []
        self._take = take
        self._known: dict[int, tuple[int, Tensor]] = {}
        super().__init__(self.file, protocol=pickle.HIGHEST_PROTOCOL)

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._known:
            self._known[id(value)] = len(self.rebuilds), value  # kept, so that its id stays its own
            self.rebuilds.append(self._take(value))
        return self._known[id(value)][0]


class _Filled(pickle.Unpickler):
    """The structure with its tensors in place."""

    def __init__(self, structure: bytes, rebuilds: list[_Rebuild]) -> None:
        super().__init__(io.BytesIO(structure))
        self._rebuilds = rebuilds
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, number: int) -> Tensor:
        if number not in self._tensors:
            self._tensors[number] = self._rebuilds[number]()
        return self._tensors[number]


def _is_plain(tensor: Tensor) -> bool:
    """Its values lie in its storage as they are."""
    strided = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type in ("cpu", "cuda")
    return strided and not tensor.is_conj() and not tensor.is_neg()


def _dress_of(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """What makes a parameter, or another kind of tensor, of a bare one again."""
    kind, learns = type(tensor), tensor.requires_grad
    if isinstance(tensor, torch.nn.Parameter):
        return lambda bare: torch.nn.Parameter(bare, learns)
    return lambda bare: bare.as_subclass(kind).requires_grad_(learns)
