"""Say what this machine can do, and what is set on it that makes a GPU wait.

It takes a few seconds, in which the GPU should have nothing else to do.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from keepbusy.cli.console.output import replacing, without_pytorch
from keepbusy.report.words import duration
from keepbusy.timeline.errors import BadInput
from keepbusy.virtual.costs import device

if TYPE_CHECKING:
    from keepbusy.recording.machine_figures import MachineFigures, Wires


# A measured machine as a device file, which the virtual GPU takes.

_MEASURED = device.read("h200")
_REACHED = _MEASURED.efficiency


def written(machine: MachineFigures, met: Wires | None) -> str:
    """The file's text. Peaks follow from what was reached, by the shares that an H200 reaches of its own."""
    return "\n".join(_lines(machine, met)) + "\n"


def _lines(machine: MachineFigures, met: Wires | None) -> Iterator[str]:
    yield f"# {machine.name}, as `keepbusy doctor` measured it. Rates and bandwidth are peaks: what was reached,"
    yield "# divided by the share that an H200 reaches of its own. What is not here is as on that H200."
    yield f'name = "{machine.name}"'
    yield f'capability = "{machine.capability[0]}.{machine.capability[1]}"'
    yield f"multiprocessors = {machine.multiprocessors}"
    yield from _table("matrix", {dtype: _peak(dtype, rate) for dtype, rate in machine.products.items()})
    yield from _table("memory", _memory(machine))
    yield from _table("host", _host(machine))
    yield from _table("copies", _copies(machine))
    if met is not None:
        yield from _table("wire", _wire(met))


def _table(name: str, values: dict[str, str]) -> Iterator[str]:
    yield ""
    yield f"[{name}]"
    yield from (f'{key} = "{value}"' for key, value in values.items())


def _peak(dtype: str, rate: float) -> str:
    """A product as long as the one that was measured runs at the sustained share of the peak."""
    share = _REACHED.simt if dtype == "float32" else _REACHED.sustained
    return f"{rate / share / 1e3:.3g} TFLOP/s"


def _memory(machine: MachineFigures) -> dict[str, str]:
    return {
        "size": f"{machine.memory / 2**30:.1f} GiB",
        "bandwidth": f"{machine.bandwidth / _REACHED.streaming:.4g} GB/s",
        "malloc": _time(machine.malloc),
        "free": _time(machine.free),
    }


def _host(machine: MachineFigures) -> dict[str, str]:
    """An operator that launches is dispatched and launched; each takes half of what both took."""
    half = _time(machine.launch // 2)
    return {"operator": half, "backward": half, "view": _time(machine.view), "launch": half}


def _copies(machine: MachineFigures) -> dict[str, str]:
    return {
        "pinned": f"{(machine.to_device + machine.to_host) / 2:.3g} GB/s",
        "to_device": f"{machine.pageable_to_device:.3g} GB/s",
        "to_host": f"{machine.pageable_to_host:.3g} GB/s",
    }


def _wire(met: Wires) -> dict[str, str]:
    latency = max(met.small - _MEASURED.wire.hop * (met.ranks - 1), 1_000)
    return {"latency": _time(latency), "bandwidth": f"{met.bandwidth:.3g} GB/s"}


def _time(nanoseconds: int) -> str:
    return f"{max(nanoseconds, 1)} ns"


EXAMPLES = """\
examples:
  keepbusy doctor
  keepbusy doctor --save my-gpu.toml && keepbusy run --on my-gpu.toml train.py
"""
_SLOW_HOST = 15_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--save", metavar="GPU.toml", type=Path, help="write a device file, with which other machines can be this one"
    )


def run(options: argparse.Namespace) -> Iterable[str]:
    if options.save and options.save.suffix != ".toml":
        raise BadInput(f"{options.save} is no name for a device file; it ends in .toml.")
    found = harms(os.environ, len(os.sched_getaffinity(0)), ask_driver())
    missing = _missing()
    if missing and options.save:
        raise BadInput(f"there is nothing to write into {options.save}: {missing}")
    if missing:
        return "\n".join([f"keepbusy doctor · {_software()}", "", missing, "", *_told(found), ""])
    return _examined(found, options.save)


def _missing() -> str:
    """Why nothing can be measured here, if so."""
    if find_spec("torch") is None:
        return without_pytorch("Measuring")
    import torch

    if torch.cuda.is_available():
        return ""
    if not Path("/dev/nvidiactl").exists():
        return "There is no GPU here. `keepbusy run` takes a virtual one: keepbusy run --on h200 train.py"
    if torch.version.cuda is None:
        return f"There is a GPU, but this PyTorch ({torch.__version__}) was built without CUDA; install one with it."
    return f"There is a GPU, but PyTorch cannot use it: CUDA {torch.version.cuda} may want a newer driver."


def _examined(found: list[Harm], path: Path | None) -> Iterator[str]:
    import torch

    from keepbusy.recording import machine_figures

    count = torch.cuda.device_count()
    yield f"keepbusy doctor · {torch.cuda.get_device_name()} · {_software()}\n\n"
    measured = machine_figures.measure()
    met = machine_figures.measure_all_reduces(count) if count > 1 else None
    yield "".join(f"  {name:<26}{value}\n" for name, value in _figures(measured, met, count))
    yield "\n" + "\n".join([*_told([*found, *_slow(measured)]), ""])
    if path:
        with replacing(path) as part:
            part.write_text(written(measured, met), encoding="utf-8")
        yield f"\n{path} is this machine: keepbusy run --on {path} train.py\n"


def _software() -> str:
    versions = [f"Python {platform.python_version()}"]
    if "torch" in sys.modules:
        import torch

        cuda = f" (CUDA {torch.version.cuda})" if torch.version.cuda else " (no CUDA)"
        versions.insert(0, f"PyTorch {torch.__version__.partition('+')[0]}{cuda}")
    return " · ".join([*_driver(), *versions])


def _driver() -> list[str]:
    """As its module says; none where it is not loaded."""
    try:
        said = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return []
    version = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", said)
    return [f"driver {version[1]}"] if version else []


def _figures(machine: MachineFigures, met: Wires | None, count: int) -> Iterator[tuple[str, str]]:
    yield "launching one kernel", f"{duration(machine.launch)} of the host"
    yield ".item() on an idle GPU", duration(machine.read)
    yield "copies, pinned", _ways(machine.to_device, machine.to_host)
    yield "copies, pageable", _ways(machine.pageable_to_device, machine.pageable_to_host)
    yield "pinning memory", f"{duration(round(machine.pinning * 1_000_000))} a megabyte, the first time"
    yield "memory", f"{_rate(machine.bandwidth)}, {machine.memory / 2**30:.1f} GiB"
    yield "memory from the driver", f"{duration(machine.malloc)}, and {duration(machine.free)} to give it back"
    yield "matrix products", " · ".join(f"{dtype} {rate / 1e3:.0f} TFLOP/s" for dtype, rate in machine.products.items())
    if count > 1:
        yield f"{count} GPUs", _wires(met)


def _ways(inward: float, home: float) -> str:
    return f"{_rate(inward)} to the device, {_rate(home)} home"


def _wires(met: Wires | None) -> str:
    if met is None:
        return "they could not meet in an all-reduce; torchrun's own output says why"
    reach = "each reaches the others' memory" if met.peers else "not all reach each other's memory"
    return f"{reach}; all-reduce {_rate(met.bandwidth)} a GPU, {duration(met.small)} for a small one"


def _rate(bytes_a_nanosecond: float) -> str:
    if bytes_a_nanosecond >= 1_000:
        return f"{bytes_a_nanosecond / 1e3:.1f} TB/s"
    return f"{bytes_a_nanosecond:.0f} GB/s" if bytes_a_nanosecond >= 10 else f"{bytes_a_nanosecond:.1f} GB/s"


def _slow(machine: MachineFigures) -> Iterator[Harm]:
    if machine.launch > _SLOW_HOST:
        yield Harm(
            f"a launch takes {duration(machine.launch)}, three times what is common",
            "look for other work on this host, a debugger or a power-saving governor",
        )


def _told(found: list[Harm]) -> list[str]:
    if not found:
        return ["Nothing is set here that makes a GPU wait."]
    return [f"!  {harm.what}: {harm.remedy}." for harm in found]


# What is set on this machine that makes a GPU wait, or that hides it: debug flags, too few cores, clocks held down.


class Harm(NamedTuple):
    """A setting that costs time, and what to do."""

    what: str
    remedy: str


_FLAGS: tuple[tuple[str, Callable[[str], bool], str], ...] = (
    ("CUDA_LAUNCH_BLOCKING", lambda value: value not in ("", "0"), "makes the host wait for every kernel"),
    ("TORCH_DISTRIBUTED_DEBUG", lambda value: value.upper() == "DETAIL", "checks every collective with another one"),
    ("NCCL_DEBUG", lambda value: value.upper() in ("TRACE", "INFO"), "writes a log from every rank"),
    ("NCCL_P2P_DISABLE", lambda value: value == "1", "keeps GPUs from reaching each other's memory"),
    ("NCCL_BLOCKING_WAIT", lambda value: value == "1", "makes the host wait for every collective"),
    ("TORCH_NCCL_BLOCKING_WAIT", lambda value: value == "1", "makes the host wait for every collective"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", lambda value: value == "1", "asks the driver for every tensor's memory"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", lambda value: value == "1", "lets streams wait for one another"),
    ("NVIDIA_TF32_OVERRIDE", lambda value: value == "0", "keeps matrix products in float32 from the tensor cores"),
    ("PYTHONTRACEMALLOC", lambda value: value not in ("", "0"), "slows every allocation of Python's"),
    ("PYTHONDEVMODE", lambda value: value not in ("", "0"), "makes Python check itself all the time"),
)


def harms(environment: Mapping[str, str], cores: int, driver: str) -> list[Harm]:
    """All that is found, in what `ask_driver` says too."""
    return [*_flags(environment), *_cores(cores), *_clocks(driver)]


def _flags(environment: Mapping[str, str]) -> Iterator[Harm]:
    for name, is_harmful, why in _FLAGS:
        value = environment.get(name)
        if value is not None and is_harmful(value):
            yield Harm(f"{name}={value} {why}", f"unset {name}, unless you are hunting a bug with it")


def _cores(count: int) -> Iterator[Harm]:
    if count < 4:
        yield Harm(
            f"this process may use {count} {'core' if count == 1 else 'cores'} only",
            "give it a core for the loop, and one for each of the loader's workers",
        )


_ASKED = "clocks_throttle_reasons.sw_thermal_slowdown,clocks_throttle_reasons.hw_slowdown,utilization.gpu,memory.used"


def ask_driver() -> str:
    """A line a GPU, or nothing where there is no driver to ask."""
    command = ["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _clocks(answer: str) -> Iterator[Harm]:
    for number, line in enumerate(answer.splitlines()):
        words = [word.strip() for word in line.split(",")]
        if len(words) != 4:
            continue
        hot, slowed, busy, used = words
        if "Active" in (hot, slowed):
            yield Harm(f"GPU {number} has lowered its clocks", "look after its cooling and power")
        if busy.isdecimal() and int(busy) > 5:
            yield Harm(
                f"GPU {number} is {busy}% busy with something else ({used} MiB in use)",
                "stop that, or read the figures below with it in mind",
            )
