"""From what stands on the command line to a timeline: traces, a folder of them, or a saved run."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from keepbusy.timeline.files import BadInput

if TYPE_CHECKING:
    from keepbusy.timeline.model import Timeline
    from keepbusy.traces.trace_file import EachOf

SAVED = ".busy"
Progress: TypeAlias = Callable[[str, float], None]
READ = 0.5
"""To read a long trace takes so much of explaining it."""


def part(on_progress: Progress | None, begin: float, end: float) -> Progress | None:
    """Of what is done in parts, who wants to know how far all of it is."""
    return on_progress and (lambda what, share: on_progress(what, begin + share * (end - begin)))


def open_timeline(paths: Sequence[Path], on_progress: Progress | None, each: EachOf | None = None) -> Timeline:
    """Load a saved run, or read the traces of all ranks of one run."""
    saved = [path for path in paths if path.suffix == SAVED]
    if not saved:
        from keepbusy.traces import read

        return read(paths, on_progress, each)
    if len(paths) > 1:
        raise BadInput(
            f"{saved[0]} is a whole saved run, but {len(paths)} files were given; "
            "give it alone, or compare two runs with `keepbusy compare`."
        )
    from keepbusy.timeline.busy_file import load

    return load(saved[0])


def expand(arguments: Iterable[str]) -> list[Path]:
    """The files meant: a folder means its traces, a quoted pattern what it matches; each file once."""
    found = [path for argument in arguments for path in _files_of(argument)]
    if not found:
        raise BadInput("no file was named; give a trace, a folder of traces or a saved run.busy.")
    return list({path.resolve(): path for path in reversed(found)}.values())[::-1]


def _files_of(argument: str) -> list[Path]:
    path = Path(argument)
    if path.is_dir():
        return _traces_in(path)
    if path.exists():
        return [path]
    found = matches(argument)
    if not found:
        raise BadInput(f"{argument}: there is no such file or folder.")
    return found


def matches(pattern: str) -> list[Path]:
    """The files that a pattern of the shell's means."""
    if not set(pattern) & set("*?["):
        return []
    anchor = Path(pattern).anchor
    return sorted(Path(anchor).glob(str(Path(pattern).relative_to(anchor))))


def _traces_in(folder: Path) -> list[Path]:
    for endings in ((".trace.json", ".trace.json.gz"), (".json", ".json.gz")):
        found = sorted(path for path in folder.iterdir() if path.name.endswith(endings) and path.is_file())
        if found:
            return found
    found = flight_dumps(sorted(folder.iterdir()))
    if found:
        return found
    raise BadInput(f"{folder}: this folder holds no traces (*.trace.json or *.trace.json.gz).")


def flight_dumps(paths: Iterable[Path]) -> list[Path]:
    """Those that PyTorch's flight recorder wrote of a job that hung."""
    from keepbusy.hang.flight_recorder import is_dump

    return [path for path in paths if path.is_file() and path.suffix != SAVED and is_dump(path)]


@contextmanager
def no_garbage_search() -> Iterator[None]:
    """Nothing that a trace becomes holds itself: to look for that among millions of rows takes a tenth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def progress(quiet: bool = False) -> Iterator[Progress | None]:
    """A bar on the terminal while something takes long; nothing where stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    with Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        transient=True,
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
