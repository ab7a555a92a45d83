"""Runs the user's program for `keepbusy run`: in a child process, as several ranks, with a live report meanwhile."""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import re
import resource
import select
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from keepbusy.cli import line_of, screen, sentence_of
from keepbusy.log import hostlog
from keepbusy.log.log_file import CLOCK
from keepbusy.program.processes import KeptDescriptor, high_copy, make_folder
from keepbusy.program.script import flush
from keepbusy.timeline.files import BadInput, lock, remove_stale, write_whole
from keepbusy.timeline.model import Timeline
from keepbusy.timeline.run_facts import CutShort

if TYPE_CHECKING:
    from keepbusy.explain.diagnosis import Diagnosis
    from keepbusy.log.program_log import ProgramLog

# With a real GPU: the program runs in a child process, which leaves a log to report on

DRIVER = Path("/dev/nvidiactl")
WHY_NOT = "why_not.txt"
"""The file in a run's folder that says why nothing is logged."""
KEEP = "KEEPBUSY_KEEP"
"""Names a folder in which the logs are kept."""
_REPORTING = ("keepbusy.log.logged_run", "keepbusy.explain", "keepbusy.report.verdict")
_CUDA = re.compile(r"^cuda(?:\s*:[^=]+)?\s*=\s*['\"]", re.MULTILINE)


def is_possible() -> bool:
    """Whether there is a GPU for PyTorch to use. Importing PyTorch would start the driver in this process, so its
    version file is read instead."""
    if not DRIVER.exists() or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    torch = find_spec("torch")
    version = Path(torch.origin).with_name("version.py") if torch and torch.origin else None
    return version is not None and version.exists() and bool(_CUDA.search(version.read_text(encoding="utf-8")))


def run_supervised(
    options: argparse.Namespace,
    streams: StandardStreams,
    program: Callable[[], int],
    report: Callable[[Timeline], None],
    explained: Callable[[Timeline], Diagnosis],
) -> None:
    """Never returns: this process ends as the program ended. `explained` is used for the live report."""
    kept = os.environ.get(KEEP) if rank() == 0 else None  # the other ranks leave their logs to the first
    folder = Path(tempfile.mkdtemp(prefix="keepbusy-", dir=kept)) if kept else make_folder()
    hostlog.build()
    drawing: AbstractContextManager[None] = nullcontext()
    if options.live and rank() == 0:
        drawing = live(folder, options.script, explained)
    child = ProgramProcess(lambda over: _watched(program, folder, options, over))
    streams.until = child.wait
    try:
        with drawing:
            for module in _REPORTING:  # the program imports PyTorch meanwhile
                import_module(module)
            child.wait_for_program()
        timeline = _logged_timeline(folder, options.script, streams)
        if timeline is not None:
            if timeline.facts.cut_short is None and child.killed_by is not None:
                timeline = timeline.change_facts(cut_short=CutShort(child.killed_by))
            report(timeline)
    except OSError:
        raise
    except Exception as error:  # a bug of keepbusy must not change the program's exit code
        streams.complain(sentence_of(error))
    finally:
        status = child.wait()
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    _end_as(status)


def _watched(program: Callable[[], int], folder: Path, options: argparse.Namespace, over: Callable[[], None]) -> int:
    from keepbusy.program.script import Ending, cut_short

    log: ProgramLog | None = None

    def finish() -> None:
        if log is not None:  # the program may end before the log begins
            log.end(cut_short(ending.signal))
        over()

    ending = Ending(finish)  # registered before the exit handlers of what PyTorch imports, so that it runs after them
    from keepbusy.log.program_log import start

    log, why = start(folder, options.memory, with_children=True)
    if why:
        (folder / WHY_NOT).write_text(f"The run is not recorded: {why}.", encoding="utf-8")
    return ending.exit_code(program())


def enter_meeting_place() -> None:
    """Lock the folder that the ranks of this run share. If there is none, the program runs without it."""
    if world() > 1:
        with suppress(BadInput, OSError):
            meeting_place()


def _logged_timeline(folder: Path, source: str, streams: StandardStreams) -> Timeline | None:
    """On the first rank the timeline of all ranks; None on the others, and if nothing was logged."""
    from keepbusy.log.logged_run import timeline_in

    missing = shared_logs(folder) if world() > 1 else []
    if rank() != 0:
        return None
    if (why := folder / WHY_NOT).exists():
        streams.complain(why.read_text(encoding="utf-8"))
        return None
    timeline = timeline_in(folder, source, missing)
    for sentence in timeline.facts.notes[1:]:
        streams.complain(sentence)
    return timeline


# The program's own process

_FORWARDED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT),
)
_MOMENT, _RECENT = 0.3, 1.0
"""Seconds to wait for the witness of a signal, and for which what it received counts as the same signal."""
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux."""


class ProgramProcess:
    """A program in a child process of its own, so that a report is made whatever ends it.

    It reports its end through a pipe. Its process ends later, after it has released all memory; the report is made
    meanwhile.
    """

    def __init__(self, program: Callable[[Callable[[], None]], int]) -> None:
        """`program` takes a function that it calls at its end."""
        flush()
        self._reader, writer = os.pipe()
        parent, self._child = os.getpid(), os.fork()
        if not self._child:
            os.close(self._reader)
            _die_with(parent)
            sys.exit(program(_end_report(writer)))
        os.close(writer)
        self._status: int | None = None
        self._witness = GroupWitness()
        self._before = {number: signal.signal(number, self._forward) for number in _FORWARDED}

    def _forward(self, number: int, _: FrameType | None) -> None:
        """Forward a signal that was sent to this process alone, so that the program receives each signal once."""
        if not self._witness.has_received(number):
            os.kill(self._child, number)

    def wait_for_program(self) -> None:
        """Wait until the program reports its end, or until its process has ended without a report."""
        if not os.read(self._reader, 1):
            self.wait()

    @property
    def killed_by(self) -> str | None:
        """The signal that killed the process before it could report its end, if that is known."""
        if self._status is None or not os.WIFSIGNALED(self._status):
            return None
        return signal.Signals(os.WTERMSIG(self._status)).name

    def wait(self) -> int:
        """Wait until the process has ended; return its status, as `os.waitpid` does."""
        if self._status is None:
            self._status = os.waitpid(self._child, 0)[1]
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._witness.end()
        return self._status


class GroupWitness:
    """A process that reports the signals it receives: those that a terminal, torchrun or `timeout` sends to the whole
    process group, and so to the program, too."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        self._received: dict[int, float] = {}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        parent, self._process = os.getpid(), os.fork()
        if not self._process:
            _report_signals(parent, writer)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(writer)

    def has_received(self, number: int) -> bool:
        while number not in self._received and (self._has_report(_MOMENT) or self._is_running() or self._has_report()):
            if not self._has_report():
                continue
            report = os.read(self._reader, 1)
            if not report:
                return False
            self._received[report[0]] = time.monotonic()
        return time.monotonic() - self._received.pop(number, -_RECENT) < _RECENT

    def _has_report(self, timeout: float = 0.0) -> bool:
        return bool(select.select([self._reader], [], [], timeout)[0])

    def _is_running(self) -> bool:
        """True while it runs or waits for a core, as on a busy machine: then a report may still follow."""
        with suppress(OSError):
            return Path(f"/proc/{self._process}/stat").read_text().rpartition(") ")[2][0] in "RD"
        return False

    def end(self) -> None:
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._reader)


def _report_signals(parent: int, writer: int) -> NoReturn:
    try:
        _die_with(parent)
        for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208  # others may wait for these to be closed
            if descriptor != writer:
                with suppress(OSError):  # the listing's own descriptor is closed already
                    os.close(descriptor)
        while True:
            os.write(writer, bytes([signal.sigwait(_FORWARDED)]))
    finally:
        os._exit(0)


def _end_report(descriptor: int) -> Callable[[], None]:
    """A function that reports the program's end, unless it has closed the descriptor; forks of it close theirs."""
    kept = KeptDescriptor.of(descriptor, is_inherited=False)
    os.close(descriptor)

    def report() -> None:
        with suppress(OSError):
            if kept is not None and (copy := kept.descriptor()) is not None:
                os.write(copy, b".")

    return report


def _end_as(status: int) -> None:
    """End this process as the child ended: with its exit code, or by the signal that ended it."""
    if not os.WIFSIGNALED(status):
        sys.exit(os.waitstatus_to_exitcode(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump of this process would be useless
    flush()
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _die_with(parent: int) -> None:
    """End this process when its parent is killed, since nobody else would."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


# Standard output and error


class StandardStreams:
    """Standard output and error as they were before the program, which may replace or close them."""

    def __init__(self) -> None:
        self.screen = screen()
        self.complains_to_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._kept = {number: KeptDescriptor.of(number, is_inherited=False) for number in (1, 2)}
        self.until: Callable[[], object] = lambda: None
        """Called before anything is written, to wait for the program's own output."""
        self._encodings = {1: getattr(sys.stdout, "encoding", None), 2: getattr(sys.stderr, "encoding", None)}

    def show(self, *parts: str) -> None:
        self._write(1, "".join(parts))

    def note(self, *lines: str) -> None:
        """Write to standard error, because standard output is JSON."""
        self._write(2, "".join(f"{line}\n" for line in lines))

    def complain(self, sentence: str) -> None:
        """To standard error, as one line."""
        self._write(2, line_of(sentence))

    def _write(self, number: int, text: str) -> None:
        """Write if the stream is still open. An error is ignored: the exit code is the program's own."""
        self.until()
        kept = self._kept[number]
        descriptor = kept.descriptor() if kept else None
        if descriptor is None:
            return
        rest = memoryview(text.encode(self._encodings[number] or "utf-8", "replace"))
        with suppress(OSError):
            while rest:
                rest = rest[os.write(descriptor, rest) :]


# Several ranks of one run: they are started together, and the first rank gathers their timelines or logs

PATIENCE = 30.0
"""Seconds that the first rank waits for the others' timelines once its own program has ended."""
_POLL = 0.05
_CLOCK_READINGS, _ANSWERS_WITHIN = 16, 5.0
"""How often the clock of another host is read, and the seconds to wait for its answer."""
PIECE = 4 << 20
"""Bytes of a message: the store of torchrun's agents takes at most eight megabytes."""
MEETING = "KEEPBUSY_MEETING"
"""Names the folder that the ranks share, if keepbusy started them; otherwise it is the temporary folder."""
_NAMES_OF_A_RUN = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK")
_HELD: dict[Path, int] = {}
"""Shared folders that this process has locked until it ends. A folder that no process has locked is stale."""


def launch(count: int, command: Sequence[str]) -> int:
    """Start the ranks through torchrun's agent, each with the same `keepbusy run`; return its exit code."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    agent += ["--log-dir", str(make_folder())]  # the agent would leave one of its own
    # the agent would set OMP_NUM_THREADS with a warning
    environment = {"OMP_NUM_THREADS": "1", **os.environ, MEETING: str(make_folder())}
    return subprocess.run([*agent, "-m", "keepbusy", "run", *command], check=False, env=environment).returncode


def rank() -> int:
    """The rank of this process, as its launcher numbers it; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def devices(wanted: int) -> int:
    """Devices of this host, at least one per rank. Under `srun python` a process knows only its own rank."""
    return max(wanted, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0")) + 1)


def gathered(timeline: Timeline) -> Timeline | None:
    """Leave this rank's timeline to the first rank. It gets the timeline of all ranks, the others None."""
    if world() == 1:
        return timeline
    from keepbusy.timeline.busy_file import load, save
    from keepbusy.timeline.ranks import merge

    own = meeting_place() / f"rank{rank()}.busy"
    save(timeline, own)
    paths, _ = _collected(own, ".busy")
    timelines = [load(path) for path in paths]
    _remove_folder(own.parent)
    return (
        merge([timeline_of_rank for timeline_of_rank in timelines if len(timeline_of_rank)] or timelines[:1])
        if timelines
        else None
    )


def shared_logs(folder: Path) -> list[str]:
    """Leave the logs of this rank's processes to the first rank, which puts those of all ranks into its folder. Returns
    a sentence for each rank that is missing."""
    own = meeting_place() / f"rank{rank()}.tar"
    if (why := folder / WHY_NOT).exists():
        own = own.with_suffix(".txt")
        write_whole(own, why.read_text(encoding="utf-8"), durable=False)
    else:
        unfinished = own.with_suffix(".part")
        with tarfile.open(unfinished, "w") as archive:
            for process in folder.iterdir() if rank() != 0 else ():
                archive.add(process, f"rank{rank()}-{process.name}")
        unfinished.rename(own)
    paths, missing = _collected(own, ".tar")
    for path in paths:
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
            if (clock := path.with_suffix(".clock")).exists():
                for name in archive.getnames():
                    if "/" not in name:
                        shutil.copy(clock, folder / name / CLOCK)
    _remove_folder(own.parent)
    return missing


def _remove_folder(folder: Path) -> None:
    """Remove the shared folder, once the first rank has read it."""
    if rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)


def meeting_place() -> Path:
    """The folder that only the ranks of this run share."""
    run = "-".join(os.environ.get(name, "") for name in _NAMES_OF_A_RUN)
    prefix = f"keepbusy-{os.getuid()}-"
    for folder in [*Path(tempfile.gettempdir()).glob(f"{prefix}*")]:
        remove_stale(folder)
    folder = Path(os.environ.get(MEETING) or tempfile.gettempdir()) / f"{prefix}{run}"
    while True:
        with suppress(FileExistsError):  # also a link: it is refused below
            folder.mkdir(mode=0o700)
        with suppress(FileNotFoundError, BlockingIOError):  # another process removes it as stale before it is locked
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise BadInput(f"{folder} is not this user's alone, so the ranks do not meet there; remove it.")
            if folder in _HELD or _hold(folder):
                return folder


def _hold(folder: Path) -> bool:
    """Lock the folder, as other ranks do. False if it was removed meanwhile."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        lock(descriptor, fcntl.LOCK_SH)
        if os.path.samestat(os.fstat(descriptor), folder.lstat()):
            _HELD[folder] = high_copy(descriptor)
    finally:
        os.close(descriptor)
    return folder in _HELD


def _ranks_of_this_host() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", world()))


def _store() -> Any:
    """The store of torchrun's agents, through which the hosts of a job send files; None if there is only one host."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or _ranks_of_this_host() == world():
        return None
    from torch.distributed import TCPStore

    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with suppress(RuntimeError):  # that host has stopped
        return TCPStore(*address, is_master=False, timeout=timedelta(seconds=PATIENCE))
    return None


def _send(store: Any, path: Path) -> None:
    """Send a file to the first host, which cannot see the files of this one."""
    content, key = path.read_bytes(), f"keepbusy/{rank()}"
    offsets = range(0, len(content), PIECE)
    for offset in offsets:
        store.set(f"{key}/{offset}", content[offset : offset + PIECE])
    store.set(key, f"{path.name} {len(offsets)} {_clock_ahead()}")
    with suppress(RuntimeError):  # the first rank does not answer
        for number in range(_CLOCK_READINGS):
            store.get(f"{key}/ask{number}")
            store.set(f"{key}/clock{number}", str(time.perf_counter_ns()))
    path.rename(path.with_suffix(".sent"))
    if len([*path.parent.glob("*.sent")]) == _ranks_of_this_host():
        shutil.rmtree(path.parent, ignore_errors=True)


def _receive(store: Any, sender: int, folder: Path) -> None:
    """Write the file that a rank of another host has sent into the shared folder of this one."""
    key = f"keepbusy/{sender}"
    if store.check([key]):
        name, pieces, ahead = store.get(key).decode().split()
        behind = _clock_ahead() - int(ahead)  # assumes that both hosts have the same time of day
        with suppress(RuntimeError):  # the rank has stopped waiting
            behind = _clock_behind(store, key)
        (folder / name).with_suffix(".clock").write_text(str(behind))
        (folder / name).write_bytes(b"".join(store.get(f"{key}/{number * PIECE}") for number in range(int(pieces))))


def _clock_ahead() -> int:
    """Nanoseconds by which this host's clock is ahead of the time of day."""
    return time.perf_counter_ns() - time.time_ns()


def _clock_behind(store: Any, key: str) -> int:
    """Nanoseconds by which that rank's clock is behind the one of this host, from the quickest answer."""
    readings = []
    for number in range(_CLOCK_READINGS):
        began = time.perf_counter_ns()
        store.set(f"{key}/ask{number}", "")
        store.wait([f"{key}/clock{number}"], timedelta(seconds=_ANSWERS_WITHIN))
        answer = int(store.get(f"{key}/clock{number}"))
        elapsed = time.perf_counter_ns() - began
        readings.append((elapsed, began + elapsed // 2 - answer))
    return min(readings)[1]


def _collected(own: Path, kind: str) -> tuple[list[Path], list[str]]:
    """On the first rank, the files of this kind, and a sentence for each rank that left none. A rank that was killed
    together with its supervisor leaves nothing, so there is a time limit."""
    store, folder = _store(), own.parent
    if store is not None and os.environ.get("GROUP_RANK", "0") != "0":
        _send(store, own)
    if rank() != 0:
        return [], []
    expected = range(_ranks_of_this_host() if store is None else world())
    until = time.monotonic() + PATIENCE
    while (
        awaited := [number for number in expected if not _has_left_file(folder, number)]
    ) and time.monotonic() < until:
        time.sleep(_POLL)
        for number in awaited if store is not None else ():
            _receive(store, number, folder)
    paths = [folder / f"rank{number}{kind}" for number in expected]
    missing = [_why_missing(folder, number) for number, path in zip(expected, paths, strict=True) if not path.exists()]
    return [path for path in paths if path.exists()], missing


def _has_left_file(folder: Path, number: int) -> bool:
    return any((folder / f"rank{number}.{kind}").exists() for kind in ("busy", "tar", "txt"))


def _why_missing(folder: Path, number: int) -> str:
    reason = folder / f"rank{number}.txt"
    if reason.exists():
        why = reason.read_text(encoding="utf-8")
    elif _has_left_file(folder, number):
        why = "It was not recorded in the same way as the first rank."
    else:
        why = "It was killed before it could write anything."
    return f"rank {number} is missing from this report: {why}"


# The live report: the supervising process draws it at the bottom of the terminal

INTERVAL = 0.25
_SMALLEST = 40, 5
_LOW_PRIORITY = 10
_LEAST_PAUSE, _TIMES_ITS_COST = 3.0, 10.0
"""The pause between two explanations: at least so many seconds, and so many times what one takes."""


class Terminal:
    """Standard error as a terminal."""

    def size(self) -> tuple[int, int]:
        try:
            return os.get_terminal_size(2)
        except OSError:
            return shutil.get_terminal_size()

    def write(self, text: str) -> None:
        os.write(2, text.encode("utf-8", "replace"))

    def is_seen(self) -> bool:
        """False while the program runs in the background of its shell, or if there are only a few rows."""
        is_in_front = True
        with suppress(OSError):  # a process in a session of its own, as torchrun starts them, has no background
            is_in_front = os.tcgetpgrp(2) == os.getpgrp()
        columns, rows = self.size()
        return is_in_front and columns >= _SMALLEST[0] and rows >= _SMALLEST[1]


@contextmanager
def live(folder: Path, source: str, explained: Callable[[Timeline], Diagnosis]) -> Iterator[None]:
    """Show the live report at the bottom of the terminal."""
    if not sys.stderr.isatty():
        yield
        return
    stop = threading.Event()
    so_far = RunSoFar(folder, source, explained)
    drawing = threading.Thread(target=_draw, args=(so_far, stop), name="keepbusy live", daemon=True)
    drawing.start()
    try:
        yield
    finally:
        stop.set()
        drawing.join()


def _draw(so_far: RunSoFar, stop: threading.Event) -> None:
    from keepbusy.report.run_report import live_lines

    terminal = Terminal()
    bottom = BottomLines(terminal)
    try:
        while not stop.wait(INTERVAL):
            if terminal.is_seen():
                bottom.show(live_lines(so_far.diagnosis(), terminal.size()))
    finally:
        bottom.end()


class RunSoFar:
    """Explains the log so far, repeatedly, in a thread of low priority."""

    def __init__(self, folder: Path, source: str, explained: Callable[[Timeline], Diagnosis]) -> None:
        self._folder, self._source, self._explained = folder, source, explained
        self._latest: Diagnosis | None = None
        self._thread: threading.Thread | None = None
        self._due = time.monotonic() + _LEAST_PAUSE

    def diagnosis(self) -> Diagnosis | None:
        """The latest diagnosis, or None if there is none yet."""
        if time.monotonic() > self._due and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._explain, name="keepbusy explains", daemon=True)
            self._thread.start()
        return self._latest

    def _explain(self) -> None:
        from keepbusy.log.logged_run import timeline_in

        if sys.platform == "linux":  # threads have priorities of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
        began = time.monotonic()
        with suppress(Exception):  # the log may be half written
            self._latest = self._explained(timeline_in(self._folder, self._source))
        self._due = time.monotonic() + max(_LEAST_PAUSE, _TIMES_ITS_COST * (time.monotonic() - began))


_SAVE, _RESTORE, _CLEAR = "\x1b7", "\x1b8", "\x1b[2K"


class BottomLines:
    """The last rows of a terminal. Each change is one write, so that no output of the program gets in between."""

    def __init__(self, screen: Terminal) -> None:
        self._screen = screen
        self._rows = self._count = 0

    def show(self, texts: Sequence[str]) -> None:
        """Show these lines, even after the terminal has changed its size."""
        _, rows = self._screen.size()
        room = "" if (rows, len(texts)) == (self._rows, self._count) else self._room(rows, len(texts))
        self._rows, self._count = rows, len(texts)
        self._screen.write(f"{room}{_SAVE}{self._written(texts)}{_RESTORE}")

    def end(self) -> None:
        """Give the rows back."""
        if self._rows:
            self._screen.write(f"{_SAVE}\x1b[r{self._written([''] * self._count)}{_RESTORE}")
            self._rows = self._count = 0

    def _written(self, texts: Sequence[str]) -> str:
        first = self._rows - len(texts) + 1
        return "".join(f"\x1b[{first + number};1H{_CLEAR}{text}" for number, text in enumerate(texts))

    def _room(self, rows: int, count: int) -> str:
        """Scroll up to make room, clear rows that are not needed any more, and let only the other rows scroll."""
        more = count - self._count if rows == self._rows or not self._rows else 0
        up = "\x1bD" * more + f"\x1b[{more}A" if more > 0 else ""
        freed = self._written([""] * self._count) if more < 0 else ""
        return f"{up}{_SAVE}{freed}\x1b[1;{rows - count}r{_RESTORE}"
