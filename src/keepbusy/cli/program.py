"""The user's program where `keepbusy run` runs it: in a child process, as several ranks, with lines drawn meanwhile."""

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

# Where there is a GPU: the program in a child process, and the report of what it left

DRIVER = Path("/dev/nvidiactl")
WHY_NOT = "why_not.txt"
"""In a run's folder, why nothing is logged."""
KEEP = "KEEPBUSY_KEEP"
"""Names a folder in which what was logged is to stay."""
_REPORTING = ("keepbusy.log.logged_run", "keepbusy.explain", "keepbusy.report.verdict")
_CUDA = re.compile(r"^cuda(?:\s*:[^=]+)?\s*=\s*['\"]", re.MULTILINE)


def is_possible() -> bool:
    """Whether there is a GPU for PyTorch to use. Importing PyTorch would wake the driver in this process, so what
    it was built for is read from its file."""
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
    """Does not come back: it ends as the program ended. `explained` is asked while it runs, if somebody looks on."""
    kept = os.environ.get(KEEP) if rank() == 0 else None  # the others leave theirs for the first
    folder = Path(tempfile.mkdtemp(prefix="keepbusy-", dir=kept)) if kept else make_folder()
    hostlog.build()
    drawing: AbstractContextManager[None] = nullcontext()
    if options.live and rank() == 0:  # of several ranks, one draws
        drawing = live(folder, options.script, explained)
    child = ProgramProcess(lambda over: _watched(program, folder, options, over))
    streams.until = child.wait
    try:
        with drawing:
            for room in _REPORTING:  # the program imports PyTorch meanwhile
                import_module(room)
            child.hear()
        whole = _whole(folder, options.script, streams)
        if whole is not None:
            if whole.facts.cut_short is None and child.killed_by is not None:
                whole = whole.change_facts(cut_short=CutShort(child.killed_by))
            report(whole)
    except OSError:
        raise
    except Exception as error:  # a fault of ours is no end of the program's, whose exit code is its own
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
        if log is not None:  # nobody has ended it before it began
            log.end(cut_short(ending.signal))
        over()

    ending = Ending(finish)  # registered before the exit handlers of all that PyTorch imports: it runs after them
    from keepbusy.log.program_log import start

    log, why = start(folder, options.memory, with_children=True)
    if why:
        (folder / WHY_NOT).write_text(f"The run is not recorded: {why}.", encoding="utf-8")
    code = program()
    if code < 0:
        ending.by(-code)
    return code if code >= 0 else 128 - code


def meet() -> str:
    """Where the ranks of this run leave each other what they tell; "" where there is one rank, or no such place."""
    with suppress(BadInput, OSError):  # if not there, then nowhere: it is no reason not to run
        return str(meeting_place()) if world() > 1 else ""
    return ""


def _whole(folder: Path, source: str, streams: StandardStreams) -> Timeline | None:
    """On the first rank what all ranks did; on the others, and where nothing was logged, nothing."""
    from keepbusy.log.logged_run import timeline_in

    missing = shared_logs(folder) if world() > 1 else []
    if rank() != 0:
        return None
    if (why := folder / WHY_NOT).exists():
        streams.complain(why.read_text(encoding="utf-8"))
        return None
    whole = timeline_in(folder, source, missing)
    for sentence in whole.facts.notes[1:]:
        streams.complain(sentence)
    return whole


# The program's own process

_FORWARDED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT),
)
_MOMENT, _RECENT = 0.3, 1.0
"""Seconds that a signal is held back for who else may have heard it, and for which it then counts as the same one."""
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux."""


class ProgramProcess:
    """A program in a child process of its own, so that whatever ends it, its report is still made.

    It says when it is over. Its process ends later, for all its memory and the GPU's is given back; the report is made
    meanwhile.
    """

    def __init__(self, program: Callable[[Callable[[], None]], int]) -> None:
        """`program` is given what says that it is over."""
        flush()
        self._heard, says = os.pipe()
        parent, self._child = os.getpid(), os.fork()
        if not self._child:
            os.close(self._heard)
            _die_with(parent)
            sys.exit(program(_said_by(says)))
        os.close(says)
        self._status: int | None = None
        self._witness = GroupWitness()
        self._before = {number: signal.signal(number, self._forward) for number in _FORWARDED}

    def _forward(self, number: int, _: FrameType | None) -> None:
        """What was sent to this process alone: the program is to hear of it once."""
        if not self._witness.has_heard(number):
            os.kill(self._child, number)

    def hear(self) -> None:
        """Until it says so; where it cannot any more, until its process has ended."""
        if not os.read(self._heard, 1):
            self.wait()

    @property
    def killed_by(self) -> str | None:
        """The signal, where its process is known to have died of one before it could say that it was over."""
        if self._status is None or not os.WIFSIGNALED(self._status):
            return None
        return signal.Signals(os.WTERMSIG(self._status)).name

    def wait(self) -> int:
        """Until its process has ended; returns how, as `os.waitpid` tells it."""
        if self._status is None:
            self._status = os.waitpid(self._child, 0)[1]
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._witness.end()
        return self._status


class GroupWitness:
    """A process that hears of signals as the program does where they are sent to the whole group of processes: by a
    terminal, torchrun or `timeout`."""

    def __init__(self) -> None:
        self._told, says = os.pipe()
        self._heard: dict[int, float] = {}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        parent, self._process = os.getpid(), os.fork()
        if not self._process:
            _bear_witness(parent, says)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(says)

    def has_heard(self, number: int) -> bool:
        while number not in self._heard and (self._says(_MOMENT) or self._is_at_work() or self._says()):
            if not self._says():
                continue
            came = os.read(self._told, 1)
            if not came:
                return False
            self._heard[came[0]] = time.monotonic()
        return time.monotonic() - self._heard.pop(number, -_RECENT) < _RECENT

    def _says(self, within: float = 0.0) -> bool:
        return bool(select.select([self._told], [], [], within)[0])

    def _is_at_work(self) -> bool:
        """Or waits for a processor, as on a busy machine: it has not yet said what it has heard."""
        with suppress(OSError):
            return Path(f"/proc/{self._process}/stat").read_text().rpartition(") ")[2][0] in "RD"
        return False

    def end(self) -> None:
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._told)


def _bear_witness(parent: int, says: int) -> NoReturn:
    try:
        _die_with(parent)
        for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208  # nobody is to wait for what it holds open
            if descriptor != says:
                with suppress(OSError):  # the list's own is closed by now
                    os.close(descriptor)
        while True:
            os.write(says, bytes([signal.sigwait(_FORWARDED)]))
    finally:
        os._exit(0)


def _said_by(descriptor: int) -> Callable[[], None]:
    """Where the program has not closed it, nor what it forks: these close it."""
    kept = KeptDescriptor.of(descriptor, is_inherited=False)
    os.close(descriptor)

    def say() -> None:
        with suppress(OSError):
            if kept is not None and (copy := kept.descriptor()) is not None:
                os.write(copy, b".")

    return say


def _end_as(status: int) -> None:
    """End this process as the child ended: with its exit code, or by the signal that ended it."""
    if not os.WIFSIGNALED(status):
        sys.exit(os.waitstatus_to_exitcode(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core of this process would tell nobody anything
    flush()
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _die_with(parent: int) -> None:
    """Nobody else would end the child of a supervisor that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


# Standard output and error, whatever the program does to them


class StandardStreams:
    """Standard output and error as they were before a program ran in this process: it may replace or close them."""

    def __init__(self) -> None:
        self.screen = screen()
        self.complains_to_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._kept = {number: KeptDescriptor.of(number, is_inherited=False) for number in (1, 2)}
        self.until: Callable[[], object] = lambda: None
        """Waited for before anything is written: the program may have something to say until then."""
        self._encodings = {1: getattr(sys.stdout, "encoding", None), 2: getattr(sys.stderr, "encoding", None)}

    def show(self, *parts: str) -> None:
        self._write(1, "".join(parts))

    def note(self, *lines: str) -> None:
        """Write to standard error, where standard output is JSON."""
        self._write(2, "".join(f"{line}\n" for line in lines))

    def complain(self, sentence: str) -> None:
        """To standard error, as one line."""
        self._write(2, line_of(sentence))

    def _write(self, number: int, text: str) -> None:
        """What nobody takes any more is nobody's loss: the exit code is the program's own."""
        self.until()
        kept = self._kept[number]
        descriptor = kept.descriptor() if kept else None
        if descriptor is None:
            return
        rest = memoryview(text.encode(self._encodings[number] or "utf-8", "replace"))
        with suppress(OSError):
            while rest:
                rest = rest[os.write(descriptor, rest) :]


# Several ranks of one run: started together, and brought back together by the first of them

PATIENCE = 30.0
"""Seconds that the first rank waits for the others' timelines once its own program has ended."""
_POLL = 0.05
_CLOCK_READINGS, _ANSWERS_WITHIN = 16, 5.0
"""So often another host's clock is asked for, and seconds until it has answered or is gone."""
PIECE = 4 << 20
"""Bytes: the store of torchrun's agents takes no message of more than eight megabytes."""
MEETING = "KEEPBUSY_MEETING"
"""Names the folder of the process that started the ranks, in which they meet; others meet in the temporary one."""
_NAMES_OF_A_RUN = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK")
_HELD: dict[Path, int] = {}
"""Where this process meets other ranks, locked until it ends. What no process has locked is stale."""


def launch(count: int, command: Sequence[str]) -> int:
    """Start the ranks through torchrun's own agent, each with the same `keepbusy run`; returns its exit code."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    agent += ["--log-dir", str(make_folder())]  # it would leave one of its own
    own = {"OMP_NUM_THREADS": "1", **os.environ}  # what the agent would set, with a warning
    environment = {**own, MEETING: str(make_folder())}
    return subprocess.run([*agent, "-m", "keepbusy", "run", *command], check=False, env=environment).returncode


def rank() -> int:
    """The rank of this process, as its launcher numbers it; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def devices(asked: int) -> int:
    """Each rank of this host has a device of its own. Under `srun python` it knows only its own rank."""
    return max(asked, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0")) + 1)


def gathered(timeline: Timeline) -> Timeline | None:
    """Leave this rank's timeline for the first rank, which gets one timeline of all ranks; the others get None."""
    if world() == 1:
        return timeline
    from keepbusy.timeline.busy_file import load, save
    from keepbusy.timeline.ranks import merge

    own = meeting_place() / f"rank{rank()}.busy"
    save(timeline, own)
    found, _ = _collected(own, ".busy")
    timelines = [load(path) for path in found]
    _forget(own.parent)
    return merge([one for one in timelines if len(one)] or timelines[:1]) if timelines else None


def shared_logs(folder: Path) -> list[str]:
    """Leave the logs of this rank's processes for the first rank, in whose folder those of all ranks are then. Returns
    which are missing."""
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
    found, missing = _collected(own, ".tar")
    for path in found:
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
            if (clock := path.with_suffix(".clock")).exists():
                for name in archive.getnames():
                    if "/" not in name:
                        shutil.copy(clock, folder / name / CLOCK)
    _forget(own.parent)
    return missing


def _forget(place: Path) -> None:
    """Remove the folder, once the first rank has read what the ranks left there."""
    if rank() == 0:
        shutil.rmtree(place, ignore_errors=True)


def meeting_place() -> Path:
    """The folder in which the ranks of this run meet, and no other run's."""
    run = "-".join(os.environ.get(name, "") for name in _NAMES_OF_A_RUN)
    own = f"keepbusy-{os.getuid()}-"
    for folder in [*Path(tempfile.gettempdir()).glob(f"{own}*")]:
        remove_stale(folder)
    folder = Path(os.environ.get(MEETING) or tempfile.gettempdir()) / f"{own}{run}"
    while True:
        with suppress(FileExistsError):  # also a link: it is refused below
            folder.mkdir(mode=0o700)
        with suppress(FileNotFoundError, BlockingIOError):  # somebody takes it for a stale one before it is locked
            about = folder.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
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
    """Send a file to the first host, which does not see the files of this one."""
    content, key = path.read_bytes(), f"keepbusy/{rank()}"
    begins = range(0, len(content), PIECE)
    for begin in begins:
        store.set(f"{key}/{begin}", content[begin : begin + PIECE])
    store.set(key, f"{path.name} {len(begins)} {_clock_ahead()}")
    with suppress(RuntimeError):  # the first rank is not there yet, or not any more
        for number in range(_CLOCK_READINGS):
            store.get(f"{key}/ask{number}")
            store.set(f"{key}/clock{number}", str(time.perf_counter_ns()))
    path.rename(path.with_suffix(".sent"))
    if len([*path.parent.glob("*.sent")]) == _of_this_host():
        shutil.rmtree(path.parent, ignore_errors=True)


def _receive(store: Any, one: int, folder: Path) -> None:
    """Write what a rank of another host has sent, as if that rank had left it here."""
    key = f"keepbusy/{one}"
    if store.check([key]):
        name, pieces, ahead = store.get(key).decode().split()
        behind = _clock_ahead() - int(ahead)  # by what both hosts take for the time of day
        with suppress(RuntimeError):  # it has waited for long, and gone
            behind = _clock_behind(store, key)
        (folder / name).with_suffix(".clock").write_text(str(behind))
        (folder / name).write_bytes(b"".join(store.get(f"{key}/{place * PIECE}") for place in range(int(pieces))))


def _clock_ahead() -> int:
    """Nanoseconds by which this host's clock is ahead of the time of day."""
    return time.perf_counter_ns() - time.time_ns()


def _clock_behind(store: Any, key: str) -> int:
    """Nanoseconds by which that rank's clock is behind the one of this host: by the answer that came soonest."""
    readings = []
    for number in range(_CLOCK_READINGS):
        asked = time.perf_counter_ns()
        store.set(f"{key}/ask{number}", "")
        store.wait([f"{key}/clock{number}"], timedelta(seconds=_ANSWERS_WITHIN))
        its = int(store.get(f"{key}/clock{number}"))
        took = time.perf_counter_ns() - asked
        readings.append((took, asked + took // 2 - its))
    return min(readings)[1]


def _collected(own: Path, kind: str) -> tuple[list[Path], list[str]]:
    """On the first rank, what all ranks have left of this kind, and of the others why they have not. One that was
    killed together with its supervisor says nothing at all."""
    store, folder = _store(), own.parent
    if store is not None and os.environ.get("GROUP_RANK", "0") != "0":
        _send(store, own)
    if rank() != 0:
        return [], []
    expected = range(_of_this_host() if store is None else world())
    until = time.monotonic() + PATIENCE
    while (silent := [one for one in expected if not _has_spoken(folder, one)]) and time.monotonic() < until:
        time.sleep(_POLL)
        for one in silent if store is not None else ():
            _receive(store, one, folder)
    paths = [folder / f"rank{one}{kind}" for one in expected]
    missing = [_why_missing(folder, one) for one, path in zip(expected, paths, strict=True) if not path.exists()]
    return [path for path in paths if path.exists()], missing


def _has_spoken(folder: Path, one: int) -> bool:
    return any((folder / f"rank{one}.{kind}").exists() for kind in ("busy", "tar", "txt"))


def _why_missing(folder: Path, one: int) -> str:
    said = folder / f"rank{one}.txt"
    if said.exists():
        why = said.read_text(encoding="utf-8")
    elif _has_spoken(folder, one):
        why = "It was not recorded in the same way as the first rank."
    else:
        why = "It was killed before it could write anything."
    return f"rank {one} is missing from this report: {why}"


# How the program is doing, drawn at the bottom of the terminal by the process around it

INTERVAL = 0.25
_SMALLEST = 40, 5
_MODEST = 10
_FIRST_LOOK, _TIMES_ITS_COST = 3.0, 10.0
"""Seconds from one explanation to the next, and how many times as long as it takes."""


class Terminal:
    """Standard error, where it is one and somebody looks at it."""

    def size(self) -> tuple[int, int]:
        try:
            return os.get_terminal_size(2)
        except OSError:
            return shutil.get_terminal_size()

    def write(self, text: str) -> None:
        os.write(2, text.encode("utf-8", "replace"))

    def is_seen(self) -> bool:
        """Not while the program runs in the background of its shell, nor on a handful of rows."""
        is_in_front = True
        with suppress(OSError):  # a session of its own, as torchrun starts them: nobody can send it to the background
            is_in_front = os.tcgetpgrp(2) == os.getpgrp()
        columns, rows = self.size()
        return is_in_front and columns >= _SMALLEST[0] and rows >= _SMALLEST[1]


@contextmanager
def live(folder: Path, source: str, explained: Callable[[Timeline], Diagnosis]) -> Iterator[None]:
    """While this lasts, the end of the terminal says how the run is doing."""
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
    """What the log tells by now: explained again and again, in a thread of its own at a low priority."""

    def __init__(self, folder: Path, source: str, explained: Callable[[Timeline], Diagnosis]) -> None:
        self._folder, self._source, self._explained = folder, source, explained
        self._latest: Diagnosis | None = None
        self._thread: threading.Thread | None = None
        self._due = time.monotonic() + _FIRST_LOOK

    def diagnosis(self) -> Diagnosis | None:
        """The latest one; None until there is one."""
        if time.monotonic() > self._due and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._explain, name="keepbusy explains", daemon=True)
            self._thread.start()
        return self._latest

    def _explain(self) -> None:
        from keepbusy.log.logged_run import timeline_in

        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _MODEST)
        began = time.monotonic()
        with suppress(Exception):  # what is half written says more the next time
            self._latest = self._explained(timeline_in(self._folder, self._source))
        self._due = time.monotonic() + max(_FIRST_LOOK, _TIMES_ITS_COST * (time.monotonic() - began))


# How it leaves alone what the program prints

_SAVE, _RESTORE, _CLEAR = "\x1b7", "\x1b8", "\x1b[2K"


class BottomLines:
    """The last rows of a terminal. Each change is one write, so that nothing of the program's gets between."""

    def __init__(self, screen: Terminal) -> None:
        self._screen = screen
        self._rows = self._count = 0

    def show(self, texts: Sequence[str]) -> None:
        """Put these lines there; also after the terminal has changed its size."""
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
        """Should the program stand where our lines are to be, all goes up; then all rows but those scroll. What is no
        longer ours is empty."""
        more = count - self._count if rows == self._rows or not self._rows else 0
        up = "\x1bD" * more + f"\x1b[{more}A" if more > 0 else ""
        freed = self._written([""] * self._count) if more < 0 else ""
        return f"{up}{_SAVE}{freed}\x1b[1;{rows - count}r{_RESTORE}"
