"""`keepbusy run` where there is a GPU: the program in a child process, and the report of what it left."""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from keepbusy.cli.console.output import KeptDescriptor, StandardStreams
from keepbusy.cli.program import launch
from keepbusy.cli.program.live import live
from keepbusy.instrument.processes import make_folder
from keepbusy.timeline.files import BadInput
from keepbusy.timeline.model import Timeline

if TYPE_CHECKING:
    from keepbusy.explain.diagnosis import Diagnosis


_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux."""


class ProgramProcess:
    """A program in a child process of its own, so that whatever ends it, its report is still made.

    It says when it is over. Its process ends later, for all its memory and the GPU's is given back; the report is made
    meanwhile.
    """

    def __init__(self, program: Callable[[Callable[[], None]], int]) -> None:
        """`program` is given what says that it is over."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._heard, says = os.pipe()
        parent, self._child = os.getpid(), os.fork()
        if not self._child:
            os.close(self._heard)
            _die_with(parent)
            sys.exit(program(_said_by(says)))
        os.close(says)
        self._status: int | None = None
        self._before = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        self._before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells the child itself

    def _forward(self, number: int, _: FrameType | None) -> None:
        os.kill(self._child, number)

    def hear(self) -> None:
        """Until it says so; where it cannot any more, until its process has ended."""
        if not os.read(self._heard, 1):
            self.wait()

    def wait(self) -> int:
        """Until its process has ended; returns how, as `os.waitpid` tells it."""
        if self._status is None:
            self._status = os.waitpid(self._child, 0)[1]
            for number, handler in self._before.items():
                signal.signal(number, handler)
        return self._status


def _said_by(descriptor: int) -> Callable[[], None]:
    """Where the program has not closed it, nor what it forks: these close it."""
    kept = KeptDescriptor.of(descriptor)
    os.close(descriptor)

    def say() -> None:
        with suppress(OSError):
            if kept is not None and (copy := kept.descriptor()) is not None:
                os.write(copy, b".")

    return say


def end_as(status: int) -> None:
    """End this process as the child ended: with its exit code, or by the signal that ended it."""
    if not os.WIFSIGNALED(status):
        sys.exit(os.waitstatus_to_exitcode(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core of this process would tell nobody anything
    sys.stdout.flush()
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _die_with(parent: int) -> None:
    """Nobody else would end the child of a supervisor that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


DRIVER = Path("/dev/nvidiactl")
KEEP = "KEEPBUSY_KEEP"
"""Names a folder in which the profiler's traces are to stay."""
_REPORTING = ("keepbusy.recording.recorded_run", "keepbusy.explain", "keepbusy.report.terminal")
_CUDA = re.compile(r"^cuda(?:\s*:[^=]+)?\s*=\s*['\"]", re.MULTILINE)


def is_possible() -> bool:
    """Whether there is a GPU for PyTorch to use. Asking PyTorch itself would wake the driver in this process."""
    return DRIVER.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and _speaks_cuda()


def _speaks_cuda() -> bool:
    """PyTorch's own word on what it was built for, read and not imported."""
    torch = find_spec("torch")
    version = Path(torch.origin).with_name("version.py") if torch and torch.origin else None
    return version is not None and version.exists() and bool(_CUDA.search(version.read_text(encoding="utf-8")))


def run(
    options: argparse.Namespace,
    streams: StandardStreams,
    program: Callable[[], int],
    report: Callable[[Timeline], None],
    explained: Callable[[Timeline], Diagnosis],
) -> None:
    """Does not come back: it ends as the program ended. `explained` is asked while it runs, if somebody looks on."""
    kept = os.environ.get(KEEP)
    folder = Path(tempfile.mkdtemp(prefix="keepbusy-", dir=kept)) if kept else make_folder()
    meanwhile = live(folder, options.script, explained) if _is_seen(options) else None
    child = ProgramProcess(lambda over: _watched(program, folder, options, over))
    streams.until = child.wait
    try:
        with meanwhile or nullcontext():
            for room in _REPORTING:  # the program imports PyTorch meanwhile
                import_module(room)
            child.hear()
        whole = _whole(folder, options.script, streams)
        if whole is not None:
            report(whole)
    except BadInput as error:
        streams.complain(str(error))
    finally:
        status = child.wait()
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    end_as(status)


def _is_seen(options: argparse.Namespace) -> bool:
    """Of several ranks, one draws."""
    return options.live and launch.rank() == 0


def _watched(program: Callable[[], int], folder: Path, options: argparse.Namespace, over: Callable[[], None]) -> int:
    from keepbusy.instrument.script import Ending

    def finish() -> None:
        watched.end()
        over()

    ending = Ending(finish)  # registered before the exit handlers of all that PyTorch imports: it runs after them
    from keepbusy.recording.recorder import RunOptions, start

    watched = start(RunOptions(str(folder), _shared(), options.after, _is_seen(options), options.memory))
    code = program()
    if code < 0:
        ending.by(-code)
    return code if code >= 0 else 128 - code


def _shared() -> str:
    """Where ranks that were started one by one tell each other which windows are to come."""
    with suppress(BadInput, OSError):  # if not there, then nowhere: it is no reason not to run
        return str(launch.meeting_place()) if launch.world() > 1 else ""
    return ""


def _whole(folder: Path, source: str, streams: StandardStreams) -> Timeline | None:
    """What all processes of this rank left, and on the first rank what all ranks did."""
    timelines, why = _left(folder, source)
    if launch.world() > 1:
        timelines, why = launch.shared(timelines, why)
    whole = _without_turns(folder, source, why) if why and not timelines else None
    for sentence in why if whole is None else ():
        streams.complain(sentence)
    if not timelines:
        return whole
    from keepbusy.recording.recorded_run import together

    return together(timelines)


def _without_turns(folder: Path, source: str, why: Sequence[str]) -> Timeline | None:
    """What is known of the whole run is worth a report, also where no turn was recorded."""
    from keepbusy.recording.recorded_run import without_turns

    runs = [without_turns(one, {"source": source, "notes": tuple(why)}) for one in folder.iterdir() if one.is_dir()]
    known = [one for one in runs if one.facts.run is not None or one.facts.plain_runs]
    return max(known, key=lambda one: one.facts.run.time if one.facts.run else 0, default=None)


def _left(folder: Path, source: str) -> tuple[list[Timeline], list[str]]:
    """Of the processes that took steps, each rank's; and why any are missing."""
    from keepbusy.recording.recorded_run import facts_in, timeline_in

    found, why = dict[int, Timeline](), dict[int, str]()
    left = {one: facts_in(one) for one in folder.iterdir() if one.is_dir()}
    for one in sorted(left, key=lambda one: -left[one].get("steps", 0)):
        rank = left[one].get("rank", launch.rank())
        if rank not in found and (left[one].get("steps", 0) or len(left) == 1):
            try:
                found[rank] = timeline_in(one, {"source": source})
            except BadInput as error:
                why.setdefault(rank, str(error))
    if not found:
        return [], [*why.values()][:1] or [f"{source} took no step."]
    return [found[rank] for rank in sorted(found)], [
        f"rank {rank} is missing from this report: {why[rank]}" for rank in sorted(why) if rank not in found
    ]
