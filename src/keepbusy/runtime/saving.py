"""`save_later`: a checkpoint that is brought home and written while the training goes on."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from keepbusy.runtime.reading import refuse_capture
from keepbusy.runtime.snapshot import Snapshot


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


class Saving:
    """A checkpoint on its way to its file."""

    def __init__(self, snapshot: Snapshot, path: Path) -> None:
        self.path = path
        self._failure: BaseException | None = None
        self._told = False
        self._group = _group() if snapshot.sharded else None
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name=f"keepbusy: {path.name}")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it is written, or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Come back once it is written, with its path; raises what kept it from being written."""
        self._thread.join()
        if self._failure is not None and not self._told:
            self._told = True
            raise RuntimeError(self._sentence()) from self._failure
        return self.path

    def _write(self, snapshot: Snapshot) -> None:
        try:
            if self._group is None:
                _write_file(snapshot.home(), self.path)
            else:
                _write_shards(snapshot.home(), self.path, self._group)
        except BaseException as failure:
            self._failure = failure

    def _sentence(self) -> str:
        return f"the checkpoint {self.path} was not written ({self._failure}); what was there before is unchanged."

    def tell(self) -> None:
        """At the end of the program, what nobody has asked for."""
        if self._failure is not None and not self._told:
            sys.stderr.write(f"keepbusy: {self._sentence()}\n")


_LATEST: list[Saving] = []


@atexit.register
def _tell() -> None:
    for saving in _LATEST:
        saving.tell()


def _write_file(state: Any, path: Path) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        torch.save(state, part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write_shards(state: Any, path: Path, group: Any) -> None:
    """Each rank its part; the first one renames the folder once all have written theirs."""
    from torch.distributed import checkpoint

    part = path.with_name(f".{path.name}.part")
    checkpoint.save(state, checkpoint_id=part, process_group=group)
    if dist.get_rank() == 0:
        _replace_folder(part, path)
    dist.barrier(group)


def _replace_folder(part: Path, path: Path) -> None:
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.replace(old)
    part.replace(path)
    shutil.rmtree(old, ignore_errors=True)


_GROUPS: dict[Any, Any] = {}


def _group() -> Any:
    """Of the present world a group on the hosts that only the writing threads use."""
    world = dist.group.WORLD
    if world not in _GROUPS:
        _GROUPS.clear()
        _GROUPS[world] = dist.new_group(backend="gloo")
    return _GROUPS[world]
