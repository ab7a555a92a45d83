"""May this build of PyTorch carry the virtual GPU? Tried in a child process first, once for each build.

A wrong vtable can at worst end the child. The verdict is kept in the user's cache; nothing is
patched in a process that has not seen a good one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from keepbusy.timeline.errors import BadInput

WORKS = "the CPU and CUDA builds of PyTorch 2.11 and 2.13 on 64-bit Linux work"
PATIENCE = 120
"""Seconds. A good child takes five; one that hangs is as bad as one that crashes."""
_LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch_python.so", "libc10_cuda.so", "libtorch_cuda.so")
_NOT_FOR_THE_CHILD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "KEEPBUSY_RUN")


class Verdict(NamedTuple):
    """What the trial showed."""

    good: bool
    stages: list[str]
    why: str


def check() -> None:
    """Raise `BadInput` unless the virtual GPU is known to work with the PyTorch installed."""
    root = _torch()
    verdict = _cached(root) or _remember(root, try_out())
    if not verdict.good:
        after = verdict.stages[-1] if verdict.stages else "the start"
        raise BadInput(
            f"the virtual GPU does not work with PyTorch {version(root)} "
            f"(it failed after {after}: {verdict.why}); {WORKS}."
        )


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or not found.origin:
        raise BadInput(f"PyTorch is not installed here, and `keepbusy run` needs it; {WORKS}.")
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        raise BadInput(f"the virtual GPU runs on 64-bit Linux alone, and this is {sys.platform}; {WORKS}.")
    return Path(found.origin).parent


def version(root: Path) -> str:
    """Without importing it."""
    known: dict[str, str] = {}
    exec((root / "version.py").read_text(encoding="utf-8").split("from typing")[0], known)
    return known.get("__version__", "of an unknown version")


def try_out() -> Verdict:
    """Bring everything up in a child, stage by stage."""
    reading, writing = os.pipe()
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_THE_CHILD}
    child = subprocess.Popen(
        [sys.executable, "-m", "keepbusy.virtual.trial", str(writing)],
        pass_fds=(writing,),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
    )
    os.close(writing)
    try:
        said = child.communicate(timeout=PATIENCE)[1].decode(errors="replace")
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        said = f"it hung for {PATIENCE} s"
    with os.fdopen(reading) as pipe:
        stages = pipe.read().split()
    # a crash in a late destructor counts too
    good = child.returncode == 0 and stages[-1:] == ["done"]
    return Verdict(good, stages, "" if good else _last_line(said, child.returncode))


def _last_line(said: str, code: int) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("Fatal Python error")]
    return (fatal or lines or [f"exit code {code}"])[-1][:300]


def _cached(root: Path) -> Verdict | None:
    try:
        return Verdict(**json.loads(_place(root).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _remember(root: Path, verdict: Verdict) -> Verdict:
    place = _place(root)
    part = place.with_suffix(f".{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(verdict._asdict()), encoding="utf-8")
        part.replace(place)
    except OSError:
        pass  # a home that cannot be written costs the trial each time, and nothing else
    return verdict


def _place(root: Path) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "keepbusy" / f"virtual-{_key(root)}.json"


def _key(root: Path) -> str:
    """Changes with the build of PyTorch, with Python, and with what we do to them."""
    digest = hashlib.sha256((root / "version.py").read_bytes())
    digest.update(sys.version.encode())
    for name in _LIBRARIES:
        path = root / "lib" / name
        if path.exists():
            about = path.stat()
            digest.update(f"{name} {about.st_size} {about.st_mtime_ns}".encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
