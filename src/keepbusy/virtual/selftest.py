"""Tests in a child process whether the virtual GPU works with this build of PyTorch, once for each build.

A wrong vtable can at worst crash the child, which runs `selftest_child`. Its verdict is kept in the user's cache: a
success while PyTorch, Python and keepbusy stay the same, a failure for at most a day and in the same environment,
since its reason may be elsewhere. No process is patched before a success is known.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import time
from typing import NamedTuple

from keepbusy.timeline.files import BadInput, write_whole

_WORKS = "PyTorch 2.9 and newer works, on 64-bit Linux"
PATIENCE = 120
"""Seconds. A working child takes five; one that hangs counts as a failure."""
LATE = f"not done after {PATIENCE} s: it hangs, or the machine is busy"
DAY = 86_400
"""Seconds for which a failure is believed."""
_LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch_python.so", "libc10_cuda.so", "libtorch_cuda.so")
_NOT_FOR_THE_CHILD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "KEEPBUSY_RUN")
_VARIABLES = ("LD_", "PYTHON", "TORCH", "PYTORCH", "CUDA", "MALLOC", "GLIBC", "OMP_", "MKL_")
"""Prefixes of environment variables that may change the child's result."""


class Verdict(NamedTuple):
    """The result of a trial."""

    good: bool
    stages: list[str]
    why: str
    when: float = 0.0  # seconds of the wall clock
    environment: str = ""


def check(now: Callable[[], float] = time) -> None:
    """Raise `BadInput` unless the virtual GPU is known to work with the PyTorch installed."""
    root = _torch()
    place = _place(root)
    verdict = _cached(place, now())
    if verdict is None:
        verdict = try_out()._replace(when=now(), environment=_environment())
        if verdict.why != LATE:  # a busy machine says nothing about PyTorch
            with suppress(OSError):  # without a writable home directory the trial runs each time
                place.parent.mkdir(parents=True, exist_ok=True)
                write_whole(place, json.dumps(verdict._asdict()), durable=False)
    if not verdict.good:
        after = verdict.stages[-1] if verdict.stages else "the start"
        raise BadInput(
            f"the virtual GPU does not work with PyTorch {version(root)} "
            f"(it failed after {after}: {verdict.why}); {_WORKS}."
        )


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        raise BadInput(f"PyTorch is not installed here, and `keepbusy run` needs it; {_WORKS}.")
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        raise BadInput(f"the virtual GPU runs on 64-bit Linux alone, and this is {sys.platform}; {_WORKS}.")
    return Path(spec.origin).parent


def version(root: Path) -> str:
    """PyTorch's version, read from its version.py without importing it."""
    text = (root / "version.py").read_text("utf-8")
    match = re.search(r"""^__version__\s*=\s*['"]([^'"]+)['"]""", text, re.MULTILINE)
    return match[1] if match else "of an unknown version"


def _cached(place: Path, now: float) -> Verdict | None:
    try:
        verdict = Verdict(**json.loads(place.read_text(encoding="utf-8")))
        is_fresh = 0 <= now - verdict.when < DAY and verdict.environment == _environment()
        return verdict if verdict.good or is_fresh else None
    except (OSError, ValueError, TypeError):
        return None


def _place(root: Path) -> Path:
    """The cache file for this build of PyTorch, of Python, and of the code that patches them."""
    digest = hashlib.sha256((root / "version.py").read_bytes())
    digest.update(repr((sys.version, platform.libc_ver(), platform.machine())).encode())
    headers = (root / "include" / header for header in ("ATen/detail", "c10/core/impl"))
    for path in (*(root / "lib" / name for name in _LIBRARIES), *headers):
        if path.exists():
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    for path in sorted(file for kind in ("*.py", "*.toml") for file in Path(__file__).parent.rglob(kind)):
        digest.update(path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "keepbusy" / f"virtual-{digest.hexdigest()[:16]}.json"


def _environment() -> str:
    variables = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_VARIABLES))
    return hashlib.sha256("\n".join([sys.executable, *variables]).encode()).hexdigest()[:16]


def try_out() -> Verdict:
    """Start the virtual GPU in a child process, stage by stage."""
    reading, writing = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-m", "keepbusy.virtual.selftest_child", str(writing)],
        pass_fds=(writing,),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name not in _NOT_FOR_THE_CHILD},
    )
    os.close(writing)
    try:
        errors = child.communicate(timeout=PATIENCE)[1].decode(errors="replace")
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        errors = LATE
    with os.fdopen(reading) as pipe:
        stages = pipe.read().split()
    if child.returncode == 0 and stages[-1:] == ["done"]:
        return Verdict(True, stages, "")
    # a crash in a late destructor counts too
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("Fatal Python error")]
    return Verdict(False, stages, (fatal or lines or [f"exit code {child.returncode}"])[-1][:300])
