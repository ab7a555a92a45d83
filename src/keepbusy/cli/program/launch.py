"""Several ranks of one run: started together, and brought back together by the first of them."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepbusy.instrument.processes import make_folder
from keepbusy.timeline.files import BadInput

if TYPE_CHECKING:
    from keepbusy.timeline.model import Timeline


PATIENCE = 30.0
"""Seconds that the first rank waits for the others' timelines once its own program has ended."""
_POLL = 0.05
PIECE = 4 << 20
"""Bytes: the store of torchrun's agents takes no message of more than eight megabytes."""
_FORGOTTEN = 24 * 3600.0
"""Seconds after which nobody comes to where ranks were to meet: the first of them was killed."""


def launch(count: int, command: Sequence[str]) -> int:
    """Start the ranks through torchrun's own agent, each with the same `keepbusy run`; returns its exit code."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    agent += ["--log-dir", str(make_folder())]  # it would leave one of its own
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # what the agent would set, with a warning
    return subprocess.run([*agent, "-m", "keepbusy", "run", *command], check=False, env=environment).returncode


def rank() -> int:
    """Of this process, as its launcher numbers it; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def devices(asked: int) -> int:
    """Each rank of this host has a device of its own."""
    return max(asked, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def gathered(timeline: Timeline) -> Timeline | None:
    """On the first rank the timeline of all of them, on the others nothing."""
    if world() == 1:
        return timeline
    from keepbusy.timeline.ranks import merge

    timelines, _ = shared([timeline], [])
    return merge([one for one in timelines if len(one)] or timelines[:1]) if timelines else None


def shared(timelines: Sequence[Timeline], why: Sequence[str]) -> tuple[list[Timeline], list[str]]:
    """Leave this rank's for the first, which gets those of all ranks, and why any are missing."""
    from keepbusy.timeline.busy_file import save

    store, left = _store(), meeting_place() / f"rank{rank()}.{'busy' if timelines else 'txt'}"
    for one in timelines[:1]:
        save(one, left)
    if not timelines:
        _say(why, left)
    if store is not None and os.environ.get("GROUP_RANK", "0") != "0":
        _send(store, left)
    return ([], []) if rank() != 0 else _collected(left.parent, store)


def meeting_place() -> Path:
    """One that the ranks of this run know, and no other run."""
    run = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}-{os.environ.get('MASTER_PORT', '')}"
    own = f"keepbusy-{os.getuid()}-"
    for one in Path(tempfile.gettempdir()).glob(f"{own}*"):
        with suppress(OSError):
            if one.lstat().st_uid == os.getuid() and one.lstat().st_mtime < time.time() - _FORGOTTEN:
                shutil.rmtree(one, ignore_errors=True)
    folder = Path(tempfile.gettempdir()) / f"{own}{run}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise BadInput(f"{folder} is not this user's alone, so the ranks do not meet there; remove it.")
    return folder


def _say(why: Sequence[str], path: Path) -> None:
    from keepbusy.timeline.files import replacing

    with replacing(path, durable=False) as part:
        part.write_text(" ".join(why) or "It left nothing.", encoding="utf-8")


def _of_this_host() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", world()))


def _store() -> Any:
    """Of a job on several hosts what torchrun's agents hold, through which all ranks are heard; else None."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or _of_this_host() == world():
        return None
    from torch.distributed import TCPStore

    at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with suppress(RuntimeError):  # that host is gone
        return TCPStore(*at, is_master=False, timeout=timedelta(seconds=PATIENCE))
    return None


def _send(store: Any, path: Path) -> None:
    """To the first host, which does not see the files of this one."""
    content, key = path.read_bytes(), f"keepbusy/{rank()}"
    begins = range(0, len(content), PIECE)
    for begin in begins:
        store.set(f"{key}/{begin}", content[begin : begin + PIECE])
    store.set(key, f"{path.name} {len(begins)}")
    path.rename(path.with_suffix(".sent"))
    if len([*path.parent.glob("*.sent")]) == _of_this_host():
        shutil.rmtree(path.parent, ignore_errors=True)


def _receive(store: Any, one: int, folder: Path) -> None:
    """As if it had been left here, once it has been sent."""
    key = f"keepbusy/{one}"
    if store.check([key]):
        name, pieces = store.get(key).decode().split()
        (folder / name).write_bytes(b"".join(store.get(f"{key}/{place * PIECE}") for place in range(int(pieces))))


def _collected(folder: Path, store: Any) -> tuple[list[Timeline], list[str]]:
    """One that was killed together with its supervisor says nothing at all. Of other hosts only the store tells."""
    from keepbusy.timeline.busy_file import load

    expected = range(_of_this_host() if store is None else world())
    until = time.monotonic() + PATIENCE
    while (silent := [one for one in expected if not _has_spoken(folder, one)]) and time.monotonic() < until:
        time.sleep(_POLL)
        for one in silent if store is not None else ():
            _receive(store, one, folder)
    timelines = [load(path) for one in expected if (path := folder / f"rank{one}.busy").exists()]
    why = [_why_missing(folder, one) for one in expected if not (folder / f"rank{one}.busy").exists()]
    shutil.rmtree(folder, ignore_errors=True)
    return timelines, why


def _has_spoken(folder: Path, one: int) -> bool:
    return (folder / f"rank{one}.busy").exists() or (folder / f"rank{one}.txt").exists()


def _why_missing(folder: Path, one: int) -> str:
    said = folder / f"rank{one}.txt"
    why = said.read_text(encoding="utf-8") if said.exists() else "It was killed before it could write anything."
    return f"rank {one} is missing from this report: {why}"
