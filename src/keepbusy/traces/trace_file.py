"""PyTorch's profiler JSON -> `Trace`."""

from __future__ import annotations

import gzip
import os
import pickle
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Thread as Helper
from typing import IO, Any, TypeAlias, cast

from isal import igzip, isal_zlib

from keepbusy.timeline.errors import BadInput
from keepbusy.timeline.files import open_input
from keepbusy.traces import foreign_files
from keepbusy.traces.event_columns import Collector, Trace
from keepbusy.traces.json_events import Batches

# The bytes of a trace, block by block, decompressed on the way: a file is never held whole.

OnProgress: TypeAlias = Callable[[str, float], Any]
"""Called now and then with what is being done, and which share of it is done, from 0 to 1."""

BLOCK = 256 << 10
"""Small enough that a block and its rows stay in the processor's cache: a quarter faster than 1 MB."""
SMALL = 64 << 20
"""Below this, what a file decompresses to is nobody's trouble."""
MOST_RATIO = 200
"""A long trace is about 20 times smaller compressed; only a file made to do harm shrinks so much more."""
MOST_BYTES = 64 << 30
_GZIP = b"\x1f\x8b"
_DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, cast("type[Exception]", isal_zlib.error))


def blocks(path: str, on_progress: OnProgress | None = None) -> Iterator[bytes]:
    """What the file says, whether it is compressed or not and whatever its name claims."""
    try:
        with open_input(Path(path)) as file:
            yield from _decompressed(path, file, on_progress)
    except BadInput:
        raise
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist; give the path of a PyTorch profiler trace.") from None
    except IsADirectoryError:
        raise BadInput(f"{path} is a directory, not a trace; name the traces in it, as in {path}/*.json.gz.") from None
    except _DAMAGE as error:
        raise BadInput(f"{path} is a damaged gzip file ({error}); export or copy the trace again.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"{path} cannot be read ({reason}); give the path of a readable trace.") from None


def _decompressed(path: str, file: IO[bytes], on_progress: OnProgress | None) -> Iterator[bytes]:
    zipped = file.peek(2)[:2] == _GZIP  # type: ignore[attr-defined]
    source = igzip.IGzipFile(fileobj=file) if zipped else file
    size, done = os.fstat(file.fileno()).st_size, 0
    what = f"reading {''.join(letter if letter.isprintable() else '?' for letter in Path(path).name)}"
    while block := source.read(BLOCK):
        if not done:
            foreign_files.refuse_by_beginning(path, block)
        done += len(block)
        consumed = file.tell() if file.seekable() else done
        if zipped:
            _refuse_bomb(path, consumed, done)
        if on_progress and size:
            on_progress(what, min(1.0, consumed / size))
        yield block
    if not done:
        raise BadInput(f"{path} is empty; export the trace again, after the profiler has stopped.")


def _refuse_bomb(path: str, consumed: int, done: int) -> None:
    if (done > SMALL and done > MOST_RATIO * consumed) or done > MOST_BYTES:
        raise BadInput(
            f"{path} unpacks to more than {done >> 20} MB from {consumed >> 10} kB, which no profiler trace does; "
            "check where it comes from, or unpack it yourself and give the .json."
        )


# Several traces at once, in a process for each core.
#
# The processes are plain Python commands rather than a multiprocessing pool, since a pool would run
# the user's script again in each of them.

Answer: TypeAlias = Trace | BadInput
Answers: TypeAlias = "SimpleQueue[tuple[int, Answer | None]]"

_WORTH_IT = 200 << 20
"""Bytes of JSON below which starting processes takes longer than they save."""
_USUAL_RATIO = 13


def read_all(
    read: Callable[[str], Trace], command: str, names: list[str], on_progress: OnProgress | None
) -> list[Trace]:
    """Every file read by `read`, here or by processes that run `command` with the names behind it."""
    sizes = [_size(name) for name in names]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(len(names), cores) if sum(sizes) >= _WORTH_IT and sys.executable else 1
    answers = _here(read, names) if workers < 2 else _elsewhere(command, names, deal(sizes, workers))
    traces, done = dict[int, Trace](), 0
    for index, answer in answers:
        traces[index] = _trace(answer if answer is not None else read(names[index]))
        done += sizes[index]
        if on_progress:
            on_progress(f"reading {len(names)} traces", done / max(sum(sizes), 1))
    return [traces[index] for index in range(len(names))]


def answer_parent(read: Callable[[str], Trace]) -> None:
    """What such a process does: reads the files it was given and writes each trace to its parent."""
    for name in sys.argv[1:]:
        pickle.dump(_answer(read, name), sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
        sys.stdout.buffer.flush()


def deal(sizes: list[int], workers: int) -> list[list[int]]:
    """Which files each worker takes: the largest first, always to the one with the least to do."""
    hands: list[list[int]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        least = loads.index(min(loads))
        hands[least].append(index)
        loads[least] += sizes[index]
    return hands


def _answer(read: Callable[[str], Trace], name: str) -> Answer:
    try:
        return read(name)
    except BadInput as error:
        return error


def _trace(answer: Answer) -> Trace:
    if isinstance(answer, BadInput):
        raise answer
    return answer


def _here(read: Callable[[str], Trace], names: list[str]) -> Iterator[tuple[int, Answer | None]]:
    for index, name in enumerate(names):
        yield index, _answer(read, name)


def _elsewhere(command: str, names: list[str], hands: list[list[int]]) -> Iterator[tuple[int, Answer | None]]:
    answers: Answers = SimpleQueue()
    for hand in hands:
        Helper(target=_listen, args=(command, names, hand, answers), daemon=True).start()
    for _ in names:
        yield answers.get()


def _listen(command: str, names: list[str], hand: list[int], answers: Answers) -> None:
    """Passes on what one process says. For whatever it fails to say there is None: then it is read here."""
    left = list(hand)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    call = [sys.executable, "-c", command, *[names[index] for index in hand]]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        with subprocess.Popen(call, env=environment, **pipes) as process:  # type: ignore[call-overload]
            while left:
                answer = pickle.load(process.stdout)  # from our own child, never from a file
                answers.put((left.pop(0), answer))
    except (OSError, ValueError, EOFError, pickle.UnpicklingError):
        for index in left:
            answers.put((index, None))


def _size(name: str) -> int:
    try:
        return Path(name).stat().st_size * (_USUAL_RATIO if name.endswith(".gz") else 1)
    except (OSError, ValueError):
        return 0


def read_traces(paths: Sequence[str | Path], on_progress: OnProgress | None = None) -> list[Trace]:
    """All these files in their order, on all cores where that pays."""
    names = [os.fspath(path) for path in paths]
    if len(names) == 1:
        return [read_trace(names[0], on_progress)]
    traces = read_all(read_trace, f"from {__name__} import serve; serve()", names, on_progress)
    return [replace(trace, events=trace.events.change()) for trace in traces]  # a copy by pickle is writable


def read_trace(path: str | Path, on_progress: OnProgress | None = None) -> Trace:
    """One file, .json or .json.gz, of PyTorch 1.8 and later; raises `BadInput` for anything else."""
    try:
        return _read(os.fspath(path), on_progress)
    except MemoryError:
        raise BadInput(f"{path} needs more memory than this machine has; record fewer steps.") from None


def _read(path: str, on_progress: OnProgress | None) -> Trace:
    collector = Collector()
    batches = Batches(path, blocks(path, on_progress))
    for rows in batches:
        collector.add(rows)
    facts = batches.facts()
    skipped = batches.decoder.bad + collector.skipped
    _refuse_bad(path, batches, skipped)
    if not len(collector):
        foreign_files.refuse_by_content(path, facts, collector.foreign)
        raise BadInput(
            f"{path} holds no complete events (`ph: X`) of PyTorch's kinds; record at least two steps and export again."
        )
    return Trace(
        path=path,
        events=collector.events(),
        names=tuple(collector.names),
        threads=collector.threads.table(),
        collectives=tuple(collector.collectives),
        facts=facts,
        skipped=skipped,
    )


def serve() -> None:
    """The other end of `read_traces`, in a process of its own."""
    answer_parent(read_trace)


def _refuse_bad(path: str, batches: Batches, skipped: int) -> None:
    decoder = batches.decoder
    if 2 * skipped > decoder.bad + decoder.read:
        raise BadInput(
            f"{path} has {skipped} events of {decoder.bad + decoder.read} that cannot be read "
            f"({decoder.fault or 'no sound times'}); give a trace as PyTorch's profiler exported it."
        )
