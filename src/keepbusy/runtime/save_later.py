"""`save_later`: a checkpoint that is brought home and written while the training goes on."""

from __future__ import annotations

import atexit
import io
import os
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage

from keepbusy.runtime.readback import HostReadback, TensorReadback, refuse_capture
from keepbusy.timeline.files import replacing, replacing_folder
from keepbusy.torch_names.pytorch import is_wrapper_of_tensors


def save_later(state: Any, path: str | os.PathLike[str]) -> Saving:
    """Write a checkpoint without stopping the training: `keepbusy.save_later({"model": model.state_dict()}, path)`.

    The file holds what `torch.save(state, path)` would write now, with its tensors on the host. What the next step
    changes does not get into it: on the device a copy is made first, at the speed of its memory, and travels home
    beside the compute. Where the device has no room for it, the next work of the current stream waits until the rest
    has been copied; the host does not. A thread then writes it under another name and renames it once it is whole, so
    `path` never holds half a checkpoint. A state with sharded tensors (FSDP2, tensor parallelism) becomes a folder that
    `torch.distributed.checkpoint.load` reads; all ranks must call then, with the same path.

    One checkpoint is written at a time: a call waits for the one before, and raises its error if it failed. The program
    does not end before the last one is written.
    """
    refuse_capture("save_later()", "call it between replays")
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}; make it first.")
    for before in _LATEST:
        before.wait()
    _LATEST[:] = [Saving(Snapshot(state), path)]
    return _LATEST[0]


_StorageKey = tuple[torch.device, int, int]
_Rebuild = Callable[[], Tensor]


class Snapshot:
    """A state as it is at one moment: its tensors on their way home, everything else pickled.

    It holds what `torch.save` would write now. Nothing that happens afterwards changes it, and nobody waited.
    """

    def __init__(self, state: Any) -> None:
        self.sharded = False
        self._storages = _Storages()
        structure = _StructureWriter(self._take)
        structure.dump(state)
        self._structure, self._rebuilds = structure.file.getvalue(), structure.rebuilds
        self._storages.set_aside()

    def home(self) -> Any:
        """The state on the host. It is the thread that writes it which waits here."""
        self._storages.bring_home()
        return _StructureReader(self._structure, self._rebuilds).load()

    def _take(self, tensor: Tensor) -> _Rebuild:
        """Note what the tensor holds; what is returned makes one like it, once all are home."""
        if is_wrapper_of_tensors(tensor):
            return self._take_wrapper(tensor)
        is_plain = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type in ("cpu", "cuda")
        if not is_plain or tensor.is_conj() or tensor.is_neg():  # its storage does not hold its values as they are
            host = tensor.detach() if tensor.is_meta else tensor.detach().cpu()
            return lambda: host
        key, storages, rewrap = self._storages.add(tensor), self._storages, _rewrap_as(tensor)
        dtype, look = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())
        return lambda: rewrap(torch.empty(0, dtype=dtype, device="cpu").set_(storages.on_host[key], *look))

    def _take_wrapper(self, tensor: Any) -> _Rebuild:
        """A tensor made of others, such as a rank's part of a sharded one."""
        self.sharded |= hasattr(tensor, "placements")
        kind, look = type(tensor), (tensor.shape, tensor.stride())
        names, context = tensor.__tensor_flatten__()
        parts = {name: self._take_part(getattr(tensor, name)) for name in names}
        return lambda: kind.__tensor_unflatten__({name: part() for name, part in parts.items()}, context, *look)

    def _take_part(self, part: Any) -> Callable[[], Any]:
        return self._take(part) if isinstance(part, Tensor) else lambda: part


class _Storages:
    """What the tensors lie in: tensors that share memory still do so in the end."""

    def __init__(self) -> None:
        self._tensors: dict[_StorageKey, Tensor] = {}
        self.on_host: dict[_StorageKey, UntypedStorage] = {}

    def add(self, tensor: Tensor) -> _StorageKey:
        storage = tensor.untyped_storage()
        key = tensor.device, storage.data_ptr(), storage.nbytes()
        if key not in self._tensors:
            self._tensors[key] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        return key

    def set_aside(self) -> None:
        self._sent = []
        for device in dict.fromkeys(device for device, *_ in self._tensors):
            ones = {key: whole for key, whole in self._tensors.items() if key[0] == device}
            kind = TensorReadback if device.type == "cuda" else HostReadback
            self._sent.append((list(ones), kind(list(ones.values()))))
        self._tensors.clear()

    def bring_home(self) -> None:
        for _, parcel in self._sent:
            parcel.send()
        for keys, parcel in self._sent:
            for place, key in enumerate(keys):
                self.on_host[key] = parcel.open(place).untyped_storage()


class _StructureWriter(pickle.Pickler):
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


class _StructureReader(pickle.Unpickler):
    """The structure with its tensors in place."""

    def __init__(self, structure: bytes, rebuilds: list[_Rebuild]) -> None:
        super().__init__(io.BytesIO(structure))
        self._rebuilds = rebuilds
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, number: int) -> Tensor:
        if number not in self._tensors:
            self._tensors[number] = self._rebuilds[number]()
        return self._tensors[number]


def _rewrap_as(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """What makes a parameter, or another kind of tensor, of a bare one again."""
    kind, learns = type(tensor), tensor.requires_grad
    if isinstance(tensor, torch.nn.Parameter):
        return lambda bare: torch.nn.Parameter(bare, learns)
    return lambda bare: bare.as_subclass(kind).requires_grad_(learns)


class Saving:
    """A checkpoint on its way to its file."""

    def __init__(self, snapshot: Snapshot, path: Path) -> None:
        self.path = path
        self._failure: BaseException | None = None
        self._reported = False
        self._group = _host_group() if snapshot.sharded else None
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name=f"keepbusy: {path.name}")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it is written, or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Come back once it is written, with its path; raises what kept it from being written."""
        self._thread.join()
        if self._failure is not None and not self._reported:
            self._reported = True
            raise RuntimeError(self._sentence()) from self._failure
        return self.path

    def _write(self, snapshot: Snapshot) -> None:
        try:
            state = snapshot.home()
            if self._group is not None:
                _write_shards(state, self.path, self._group)
            else:
                with replacing(self.path) as file:
                    torch.save(state, file)
        except BaseException as failure:
            self._failure = failure

    def _sentence(self) -> str:
        return f"the checkpoint {self.path} was not written ({self._failure}); what was there before is unchanged."

    def report(self) -> None:
        """At the end of the program, what nobody has asked for."""
        if self._failure is not None and not self._reported:
            sys.stderr.write(f"keepbusy: {self._sentence()}\n")


_LATEST: list[Saving] = []


@atexit.register
def _report_failures() -> None:
    for saving in _LATEST:
        saving.report()


def _write_shards(state: Any, path: Path, group: Any) -> None:
    """Each rank its part, in a folder of the first one, which takes its place once all have written theirs."""
    from torch.distributed import checkpoint

    part: list[Path | OSError] = [path]
    with ExitStack() as until_written:
        until_written.callback(dist.barrier, group)  # also where it failed: the others wait there
        if dist.get_rank() == 0:
            try:
                part = [until_written.enter_context(replacing_folder(path))]
            except OSError as error:
                part = [error]
        dist.broadcast_object_list(part, src=0, group=group)
        if isinstance(part[0], OSError):
            raise part[0]
        checkpoint.save(state, checkpoint_id=part[0], process_group=group)


_HOST_GROUPS: dict[Any, Any] = {}


def _host_group() -> Any:
    """Of the present world a group on the hosts that only the writing threads use."""
    world = dist.group.WORLD
    if world not in _HOST_GROUPS:
        _HOST_GROUPS.clear()
        _HOST_GROUPS[world] = dist.new_group(backend="gloo")
    return _HOST_GROUPS[world]
