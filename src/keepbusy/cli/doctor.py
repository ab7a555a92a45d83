"""Say what this machine and its links can do, and what is set on it that makes a GPU wait.

It takes a few seconds, with several ranks up to a minute, in which the GPUs should have nothing else to do.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from keepbusy.cli.checkup import link_table
from keepbusy.cli.checkup.device_file import written
from keepbusy.cli.checkup.link_table import rate
from keepbusy.cli.checkup.settings import Harm, ask_driver, flags, harms
from keepbusy.cli.console import values
from keepbusy.cli.console.output import check_place, replacing, without_pytorch
from keepbusy.report.words import duration
from keepbusy.timeline.files import BadInput

if TYPE_CHECKING:
    from keepbusy.recording.machine_figures import LinkFigures, MachineFigures


EXAMPLES = """\
examples:
  keepbusy doctor
  keepbusy doctor --ranks 8 --save my-node.toml && keepbusy plan --gpus 8 --on my-node.toml train.py
  torchrun --nnodes 4 --nproc-per-node 8 -m keepbusy doctor --ranks 32 --save my-cluster.toml
"""
_SLOW_HOST = 15_000
_DRIVER = Path("/dev/nvidiactl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        type=values.whole_number("ranks", 4096),
        metavar="N",
        help="measure the links of so many ranks (default: as many as there are GPUs)",
    )
    parser.add_argument(
        "--save", metavar="GPU.toml", type=Path, help="write a device file, with which other machines can be this one"
    )


def run(options: argparse.Namespace) -> Iterable[str]:
    if options.save:
        if options.save.suffix != ".toml":
            raise BadInput(f"{options.save} is no name for a device file; it ends in .toml.")
        check_place(options.save)
    found = harms(os.environ, len(os.sched_getaffinity(0)), ask_driver())
    links, missing = bool(options.ranks and options.ranks > 1), _missing()
    if not missing or (links and find_spec("torch") and not _DRIVER.exists()):  # gloo's need no GPU
        return _examined(found, options.ranks, options.save)
    if options.save or links:
        raise BadInput(f"there is nothing to {f'write into {options.save}' if options.save else 'measure'}: {missing}")
    return "\n".join([f"keepbusy doctor · {_software()}", "", missing, "", *_told(found), ""])


def _missing() -> str:
    """Why no GPU can be measured here, if so."""
    if find_spec("torch") is None:
        return without_pytorch("Measuring")
    import torch

    if torch.cuda.is_available():
        return ""
    if not _DRIVER.exists():
        return "There is no GPU here. `keepbusy run` takes a virtual one: keepbusy run --on h200 train.py"
    if torch.version.cuda is None:
        return f"There is a GPU, but this PyTorch ({torch.__version__}) was built without CUDA; install one with it."
    return f"There is a GPU, but PyTorch cannot use it: CUDA {torch.version.cuda} may want a newer driver."


def _examined(found: list[Harm], asked: int | None, path: Path | None) -> Iterator[str]:
    """The links first: who is another rank of a job has nothing more to say."""
    import torch

    gpus = torch.cuda.device_count()
    ranks = asked or max(gpus, 1)
    _check(ranks, gpus)
    links = _linked(ranks) if ranks > 1 else None
    if ranks > 1 and links is None:
        return
    machine = _measured() if gpus else None
    yield _head(machine, links)
    if machine:
        yield "\n" + "".join(f"  {name:<26}{value}\n" for name, value in _figures(machine))
        found = [*found, *_slow(machine)]
    if links:
        yield from link_table.told(links)
        mine = set(flags(os.environ))  # which are told with the ranks that have them
        found = [*(harm for harm in found if harm not in mine), *link_table.harms(links)]
    yield "\n" + "\n".join([*_told(found), ""])
    if path:
        with replacing(path) as part:
            part.write_text(written(machine, links, gpus), encoding="utf-8")
        plan = f"keepbusy plan --gpus {ranks}" if links else "keepbusy run"
        yield f"\n{path} is this machine: {plan} --on {path} train.py\n"


def _head(machine: MachineFigures | None, links: LinkFigures | None) -> str:
    gpu, over = machine.name if machine else "", f"{len(links.places)} ranks over {links.backend}" if links else ""
    return f"keepbusy doctor · {' · '.join(filter(None, [gpu, over, _software()]))}\n"


def _measured() -> MachineFigures:
    from keepbusy.recording.machine_figures import measure

    return measure()


def _check(ranks: int, gpus: int) -> None:
    """Before anything is started."""
    world = int(os.environ.get("WORLD_SIZE", "0"))
    if "RANK" in os.environ and world != ranks:
        raise BadInput(f"this job has {world} ranks, not {ranks}; say --ranks {world}.")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if "RANK" in os.environ else ranks
    if gpus and here > gpus:
        raise BadInput(f"{here} ranks need {here} GPUs, and this host has {gpus}; say --ranks {gpus}.")


def _linked(ranks: int) -> LinkFigures | None:
    """None in a rank of a job that is not its first."""
    from keepbusy.recording.machine_figures import measure_as_rank, measure_links

    return measure_as_rank() if "RANK" in os.environ else measure_links(ranks)


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


def _figures(machine: MachineFigures) -> Iterator[tuple[str, str]]:
    yield "launching one kernel", f"{duration(machine.launch)} of the host"
    yield ".item() on an idle GPU", duration(machine.read)
    yield "copies, pinned", _ways(machine.to_device, machine.to_host)
    yield "copies, pageable", _ways(machine.pageable_to_device, machine.pageable_to_host)
    yield "pinning memory", f"{duration(round(machine.pinning * 1_000_000))} a megabyte, the first time"
    yield "memory", f"{rate(machine.bandwidth)}, {machine.memory / 2**30:.1f} GiB"
    yield "memory from the driver", f"{duration(machine.malloc)}, and {duration(machine.free)} to give it back"
    yield "matrix products", " · ".join(f"{dtype} {rate / 1e3:.0f} TFLOP/s" for dtype, rate in machine.products.items())


def _ways(inward: float, home: float) -> str:
    return f"{rate(inward)} to the device, {rate(home)} home"


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
