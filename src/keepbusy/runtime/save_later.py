"""`save_later`: a checkpoint that is copied to the host and written while the training continues."""

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

    The file holds what `torch.save(state, path)` would write now, with its tensors on the host. Later steps do not
    change it: the tensors are copied on the device first, at the speed of its memory, and then to the host beside the
    compute. If the device has no room for the copies, the current stream, but not the host, waits until the rest has
    been copied. A thread then writes the file under another name and renames it when it is complete, so `path` never
    holds half a checkpoint. A state with sharded tensors (FSDP2, tensor parallelism) becomes a folder that
    `torch.distributed.checkpoint.load` reads; then all ranks must call with the same path.

    One checkpoint is written at a time: a call waits for the previous one, and raises its error if it failed. The
    program does not end before the last one is written.
    """
    refuse_capture("save_later()", "call it between replays")
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}; make it first.")
    for earlier in _LATEST:
        earlier.wait()
    _LATEST[:] = [Saving(Snapshot(state), path)]
    return _LATEST[0]


_StorageKey = tuple[torch.device, int, int]
_Rebuild = Callable[[], Tensor]


class Snapshot:
    """A state at one moment: its tensors are being copied to the host, everything else is pickled.

    It holds what `torch.save` would write now, whatever happens afterwards, and taking it waits for nothing.
    """

    def __init__(self, state: Any) -> None:
        self.sharded = False
        self._storages = _Storages()
        structure = _StructureWriter(self._take)
        structure.dump(state)
        self._structure, self._rebuilds = structure.file.getvalue(), structure.rebuilds
        self._storages.start_copies()

    def on_host(self) -> Any:
        """The state on the host; waits for the copies, in the thread that writes the file."""
        self._storages.finish_copies()
        return _StructureReader(self._structure, self._rebuilds).load()

    def _take(self, tensor: Tensor) -> _Rebuild:
        """Take the tensor's values; returns a function that makes such a tensor once all copies are on the host."""
        if is_wrapper_of_tensors(tensor):
            return self._take_wrapper(tensor)
        is_plain = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type in ("cpu", "cuda")
        if not is_plain or tensor.is_conj() or tensor.is_neg():  # its storage does not hold its values directly
            host = tensor.detach() if tensor.is_meta else tensor.detach().cpu()
            return lambda: host
        key, storages, rewrap = self._storages.add(tensor), self._storages, _rewrap_as(tensor)
        dtype, geometry = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())
        return lambda: rewrap(torch.empty(0, dtype=dtype, device="cpu").set_(storages.on_host[key], *geometry))

    def _take_wrapper(self, tensor: Any) -> _Rebuild:
        """A tensor that wraps others, such as a rank's part of a sharded one."""
        self.sharded |= hasattr(tensor, "placements")
        kind, geometry = type(tensor), (tensor.shape, tensor.stride())
        names, context = tensor.__tensor_flatten__()
        parts = {name: self._take_part(getattr(tensor, name)) for name in names}
        return lambda: kind.__tensor_unflatten__({name: part() for name, part in parts.items()}, context, *geometry)

    def _take_part(self, part: Any) -> Callable[[], Any]:
        return self._take(part) if isinstance(part, Tensor) else lambda: part


class _Storages:
    """The storages of the tensors; tensors that share memory still do so on the host."""

    def __init__(self) -> None:
        self._tensors: dict[_StorageKey, Tensor] = {}
        self.on_host: dict[_StorageKey, UntypedStorage] = {}

    def add(self, tensor: Tensor) -> _StorageKey:
        storage = tensor.untyped_storage()
        key = tensor.device, storage.data_ptr(), storage.nbytes()
        if key not in self._tensors:
            self._tensors[key] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        return key

    def start_copies(self) -> None:
        self._copies = []
        for device in dict.fromkeys(device for device, *_ in self._tensors):
            on_device = {key: tensor for key, tensor in self._tensors.items() if key[0] == device}
            kind = TensorReadback if device.type == "cuda" else HostReadback
            self._copies.append((list(on_device), kind(list(on_device.values()))))
        self._tensors.clear()

    def finish_copies(self) -> None:
        for _, readback in self._copies:
            readback.send()
        for keys, readback in self._copies:
            for place, key in enumerate(keys):
                self.on_host[key] = readback.open(place).untyped_storage()


class _StructureWriter(pickle.Pickler):
    """Pickles everything but the tensors, for each of which it keeps a function that makes it again."""

    def __init__(self, take: Callable[[Tensor], _Rebuild]) -> None:
        self.file = io.BytesIO()
        self.rebuilds: list[_Rebuild] = []
        self._take = take
        self._numbers: dict[int, tuple[int, Tensor]] = {}
        super().__init__(self.file, protocol=pickle.HIGHEST_PROTOCOL)

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.rebuilds), value  # kept alive, so that its id stays unique
            self.rebuilds.append(self._take(value))
        return self._numbers[id(value)][0]


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
    """A function that turns a plain tensor into a tensor of the same class, such as a parameter."""
    kind, requires_grad = type(tensor), tensor.requires_grad
    if isinstance(tensor, torch.nn.Parameter):
        return lambda plain: torch.nn.Parameter(plain, requires_grad)
    return lambda plain: plain.as_subclass(kind).requires_grad_(requires_grad)


class Saving:
    """A checkpoint that is being written."""

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
        """Wait until it is written, and return its path; raises an error if writing failed."""
        self._thread.join()
        if self._failure is not None and not self._reported:
            self._reported = True
            raise RuntimeError(self._sentence()) from self._failure
        return self.path

    def _write(self, snapshot: Snapshot) -> None:
        try:
            state = snapshot.on_host()
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
        """Write an error that was not raised yet, at the end of the program."""
        if self._failure is not None and not self._reported:
            sys.stderr.write(f"keepbusy: {self._sentence()}\n")


_LATEST: list[Saving] = []


@atexit.register
def _report_failures() -> None:
    for saving in _LATEST:
        saving.report()


def _write_shards(state: Any, path: Path, group: Any) -> None:
    """Each rank writes its part into a new folder of the first rank, which replaces `path` once all have written."""
    from torch.distributed import checkpoint

    target: list[Path | OSError] = [path]
    with ExitStack() as until_written:
        until_written.callback(dist.barrier, group)  # also after an error, since the others wait there
        if dist.get_rank() == 0:
            try:
                target = [until_written.enter_context(replacing_folder(path))]
            except OSError as error:
                target = [error]
        dist.broadcast_object_list(target, src=0, group=group)
        if isinstance(target[0], OSError):
            raise target[0]
        checkpoint.save(state, checkpoint_id=target[0], process_group=group)


_HOST_GROUPS: dict[Any, Any] = {}


def _host_group() -> Any:
    """A group of all ranks' hosts that only the writing threads use."""
    world = dist.group.WORLD
    if world not in _HOST_GROUPS:
        _HOST_GROUPS.clear()
        _HOST_GROUPS[world] = dist.new_group(backend="gloo")
    return _HOST_GROUPS[world]
