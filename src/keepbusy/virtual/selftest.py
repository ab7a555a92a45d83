"""May this build of PyTorch carry the virtual GPU? Tried in a child process first, once for each build.

A wrong vtable can at worst end the child, which is this file, run as `python -m keepbusy.virtual.selftest PIPE`. What
it showed is kept in the user's cache: a success for as long as PyTorch, Python and keepbusy are the same; a failure for
a day at most and in the same environment, for the reason may lie elsewhere. Nothing is patched in a process that knows
of no success.
"""

from __future__ import annotations

import faulthandler
import gc
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
from typing import Any, NamedTuple

from keepbusy.timeline.files import BadInput, write_whole

_WORKS = "PyTorch 2.9 and newer works, on 64-bit Linux"
PATIENCE = 120
"""Seconds. A good child takes five; one that hangs is as bad as one that crashes."""
LATE = f"not done after {PATIENCE} s: it hangs, or the machine is busy"
DAY = 86_400
"""Seconds for which a failure is believed."""
_LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch_python.so", "libc10_cuda.so", "libtorch_cuda.so")
_NOT_FOR_THE_CHILD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "KEEPBUSY_RUN")
_VARIABLES = ("LD_", "PYTHON", "TORCH", "PYTORCH", "CUDA", "MALLOC", "GLIBC", "OMP_", "MKL_")
"""How the variables begin that the child may depend on."""


class Verdict(NamedTuple):
    """What the trial showed."""

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
        if verdict.why != LATE:  # a busy machine says nothing of PyTorch
            _remember(place, verdict)
    if not verdict.good:
        after = verdict.stages[-1] if verdict.stages else "the start"
        raise BadInput(
            f"the virtual GPU does not work with PyTorch {version(root)} "
            f"(it failed after {after}: {verdict.why}); {_WORKS}."
        )


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or not found.origin:
        raise BadInput(f"PyTorch is not installed here, and `keepbusy run` needs it; {_WORKS}.")
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        raise BadInput(f"the virtual GPU runs on 64-bit Linux alone, and this is {sys.platform}; {_WORKS}.")
    return Path(found.origin).parent


def version(root: Path) -> str:
    """As PyTorch's version.py has it, without importing it."""
    found = re.search(r"""^__version__\s*=\s*['"]([^'"]+)['"]""", (root / "version.py").read_text("utf-8"), re.M)
    return found[1] if found else "of an unknown version"


def _cached(place: Path, now: float) -> Verdict | None:
    try:
        verdict = Verdict(**json.loads(place.read_text(encoding="utf-8")))
        fresh = 0 <= now - verdict.when < DAY and verdict.environment == _environment()
        return verdict if verdict.good or fresh else None
    except (OSError, ValueError, TypeError):
        return None


def _remember(place: Path, verdict: Verdict) -> None:
    with suppress(OSError):  # a home that cannot be written costs the trial each time, and nothing else
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, json.dumps(verdict._asdict()), durable=False)


def _place(root: Path) -> Path:
    """A file for each build of PyTorch and of Python, and for each version of what we do to them."""
    digest = hashlib.sha256((root / "version.py").read_bytes())
    digest.update(repr((sys.version, platform.libc_ver(), platform.machine())).encode())
    headers = (root / "include" / header for header in ("ATen/detail", "c10/core/impl"))
    for path in (*(root / "lib" / name for name in _LIBRARIES), *headers):
        if path.exists():
            about = path.stat()
            digest.update(f"{path.name} {about.st_size} {about.st_mtime_ns}".encode())
    for path in sorted(one for kind in ("*.py", "*.toml") for one in Path(__file__).parent.rglob(kind)):
        digest.update(path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "keepbusy" / f"virtual-{digest.hexdigest()[:16]}.json"


def _environment() -> str:
    variables = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_VARIABLES))
    return hashlib.sha256("\n".join([sys.executable, *variables]).encode()).hexdigest()[:16]


def try_out() -> Verdict:
    """Bring everything up in a child, stage by stage."""
    reading, writing = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-m", "keepbusy.virtual.selftest", str(writing)],
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


# The child: it tells a pipe how far it came.


def main(pipe: int) -> None:
    import torch

    faulthandler.enable()
    for stage in (_layout, _bring_up, _values, _autograd, _modules, _graphs, _pinned, _natives):
        stage(torch)
        os.write(pipe, f"{stage.__name__[1:]}\n".encode())
    gc.collect()
    os.write(pipe, b"done\n")


def _layout(_torch: Any) -> None:
    from keepbusy.virtual.cpp_hooks import GUARD, HOOKS, slots, timer_keys

    _must(len(slots(HOOKS)) > 20 and len(slots(GUARD)) > 10, "the headers declare too little")
    timer_keys()  # raises where the map of DDP's timers is laid out otherwise


def _bring_up(_torch: Any) -> None:
    from keepbusy.virtual.costs.device import read
    from keepbusy.virtual.virtual_run import Options, bring_up

    bring_up(read("h200"), devices=8, rank=0, options=Options(measured=False, one_generator=False))


def _values(torch: Any) -> None:
    for index in (0, 1, 7):  # each replaced method must answer with the right value, not just answer
        with torch.cuda.device(index):
            made = torch.arange(6.0, device="cuda").reshape(2, 3)
            _must(made.device == torch.device("cuda", index), f"made on {made.device}, not on cuda:{index}")
            _must(type(made) is torch.Tensor and made.sum().item() == 15, "a sum is wrong")
    _must(torch.cuda.current_device() == 0, "the current device did not come back")
    _must(torch._C._get_accelerator().type == "cuda", "the accelerator is not CUDA")


def _autograd(torch: Any) -> None:
    for index in (0, 3):
        weight = torch.ones(3, 4, device=f"cuda:{index}", requires_grad=True)
        (torch.ones(2, 3, device=weight.device) @ weight).relu().sum().backward()
        gradient = weight.grad
        _must(gradient is not None and gradient.device == weight.device, "a gradient is on another device")
        _must(gradient is not None and gradient.sum().item() == 24, "a gradient is wrong")
        failing = weight * 2
        failing.register_hook(lambda _gradient: [].pop())
        try:
            failing.sum().backward()
        except IndexError:
            continue
        _must(False, "an exception in a backward pass is lost")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        product = torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
    _must(product.dtype is torch.bfloat16, "autocast does nothing")


def _modules(torch: Any) -> None:
    recurrent = torch.nn.LSTM(4, 4).cuda()
    recurrent(torch.ones(2, 1, 4, device="cuda"))[0].sum().backward()
    _must(recurrent.weight_ih_l0.grad is not None, "a recurrent network has no gradient")


def _graphs(torch: Any) -> None:
    x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        drawn = torch.rand(3, device="cuda")
    _must(x.sum().item() == 3, "a capture has run what it captured")
    graph.replay()
    first = drawn.tolist()
    graph.replay()
    _must(x.sum().item() == 9 and drawn.tolist() != first, "a replay computes nothing new")


def _pinned(torch: Any) -> None:
    _must(torch.ones(3).pin_memory().is_pinned() and not torch.ones(3).is_pinned(), "pinned memory is not told apart")


def _natives(torch: Any) -> None:
    """On a CUDA build, no native kernel may be left where a program could reach it."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    dumps = {name: torch._C._dispatch_dump(name) for name in names if name.startswith("aten::")}
    left = [name for name, dump in dumps.items() if re.search(r"^CUDA:.*RegisterCUDA", dump, re.MULTILINE)]
    _must(len(left) < 40, f"native kernels are left: {left[:5]}")


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


if __name__ == "__main__":
    main(int(sys.argv[1]))
