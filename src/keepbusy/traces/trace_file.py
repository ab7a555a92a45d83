"""A file of PyTorch's profiler -> `Trace`: block by block, so that it is never held whole, and several at once."""

from __future__ import annotations

import gzip
import os
import pickle
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread as PythonThread
from typing import IO, Any, TypeAlias, TypeVar, cast

from isal import igzip, isal_zlib

from keepbusy.timeline.files import BadInput, opened
from keepbusy.traces.event_columns import Collector, Trace
from keepbusy.traces.json_events import RECORD, Batches

OnProgress: TypeAlias = Callable[[str, float], Any]
"""Called now and then with what is being done, and which share of it is done, from 0 to 1."""
EachOf: TypeAlias = Callable[[list[str], Callable[[str], Any], OnProgress | None], Iterator[tuple[int, Any]]]
"""How each of many files is read: the names, what is made of one, and who wants to know."""
Made = TypeVar("Made")

BLOCK_SIZE = 256 << 10
"""Small enough that a block and its rows stay in the processor's cache: a quarter faster than 1 MB."""
SMALL = 64 << 20
"""Below this, what a file decompresses to is nobody's trouble."""
MOST_RATIO = 200
"""A long trace is about 20 times smaller compressed; only a file made to do harm shrinks so much more."""
MOST_BYTES = 64 << 30
WORTH_PROCESSES = 200 << 20
"""Bytes of JSON below which starting processes takes longer than they save."""
USUAL_RATIO = 13
_GZIP = b"\x1f\x8b"
_DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, cast("type[Exception]", isal_zlib.error))
_FOREIGN_BEGINNINGS = (
    (b"version https://git-lfs", "the pointer that Git LFS leaves in place of a file", "fetch the file: git lfs pull"),
    (b"PK\x03\x04", "a zip archive", "unpack it and give the .json or .json.gz within"),
    (b"SQLite format 3", "an SQLite database, as `nsys export` writes it", RECORD),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "unpack it and give the .json"),
    (b"BZh", "compressed with bzip2", "unpack it and give the .json"),
    (b"\xfd7zXZ", "compressed with xz", "unpack it and give the .json"),
    (b"\x80", "a pickle, perhaps of PyTorch's flight recorder", "those of a job that hangs go to keepbusy explain"),
    (b"\x89busy", "a run that keepbusy saved", "open it with keepbusy.load, or give it a name that ends in .busy"),
)
_AUTOGRAD = {"CPU functions", "CUDA functions"}
"""The processes of the autograd profiler."""


def read_trace(path: str | Path, on_progress: OnProgress | None = None) -> Trace:
    """One file, .json or .json.gz, of PyTorch 1.8 and later; raises `BadInput` for anything else."""
    try:
        return _read(os.fspath(path), on_progress)
    except MemoryError:
        raise BadInput(f"{path} needs more memory than this machine has; record fewer steps.") from None


def read_traces(paths: Sequence[str | Path], on_progress: OnProgress | None = None) -> list[Trace]:
    """All these files in their order, by a process for each core where that pays."""
    names = [os.fspath(path) for path in paths]
    if len(names) == 1:
        return [read_trace(names[0], on_progress)]
    traces = dict[int, Trace]()
    for index, answer in each_of(names, read_trace, on_progress):
        if isinstance(answer, BadInput):
            raise answer
        traces[index] = answer
    return [traces[index] for index in range(len(names))]


def each_of(
    names: list[str], made: Callable[[str], Made], on_progress: OnProgress | None = None
) -> Iterator[tuple[int, Made | BadInput]]:
    """What is made of each file, as it comes, by a process for each core where that pays. None of them is kept here.

    `made`: a function of a module, which the processes import.
    """
    sizes, done = [_size(name) for name in names], 0
    hands = deal(sizes, _cores()) if sum(sizes) >= WORTH_PROCESSES and sys.executable else []
    nobody: Iterator[tuple[int, Made | BadInput | None]] = ((index, None) for index in range(len(names)))
    for index, answer in _elsewhere(names, hands, made) if len(hands) > 1 else nobody:
        yield index, tried(names[index], made) if answer is None else answer
        done += sizes[index]
        if on_progress:
            on_progress(f"reading {len(names)} traces", done / max(sum(sizes), 1))


def tried(name: str, made: Callable[[str], Made]) -> Made | BadInput:
    try:
        return made(name)
    except BadInput as error:
        return error


def _read(path: str, on_progress: OnProgress | None) -> Trace:
    collector, batches = Collector(), Batches(path, blocks(path, on_progress))
    for batch in batches:
        collector.add(batch)
    facts, decoder = batches.facts(), batches.decoder
    skipped = decoder.bad + collector.skipped
    if 2 * skipped > decoder.bad + decoder.read:
        raise BadInput(
            f"{path} has {skipped} events of {decoder.bad + decoder.read} that cannot be read "
            f"({decoder.fault or 'no sound times'}); give a trace as PyTorch's profiler exported it."
        )
    if not collector.count:
        raise _without_events(path, facts, collector.foreign)
    return collector.trace(path, facts, skipped)


def _without_events(path: str, facts: dict[str, Any], kinds: set[tuple[str, str]]) -> BadInput:
    """What a file is that holds none of PyTorch's events. `kinds`: categories and processes of the others."""
    about, categories = facts.get("metadata"), sorted({category for category, _ in kinds if category})
    if {process for _, process in kinds} & _AUTOGRAD:
        what = f"is of the autograd profiler, which does not tell which call launched which kernel; {RECORD}."
    elif isinstance(about, dict) and "highres-ticks" in about:
        what = f"is of the profiler of JAX and TensorFlow; keepbusy reads PyTorch's: {RECORD}."
    elif categories:
        known = ", ".join(categories[:5])
        what = f"is of another profiler (its categories: {known}); keepbusy reads PyTorch's: {RECORD}."
    else:
        what = "holds no complete events (`ph: X`) of PyTorch's kinds; record at least two steps and export again."
    return BadInput(f"{path} {what}")


def blocks(path: str, on_progress: OnProgress | None = None) -> Iterator[bytes]:
    """What the file says, whether it is compressed or not and whatever its name claims."""
    with opened(path, "a trace of PyTorch's profiler") as file:
        try:
            yield from _decompressed(path, file, on_progress)
        except _DAMAGE as error:
            raise BadInput(f"{path} is a damaged gzip file ({error}); export or copy the trace again.") from None


def _decompressed(path: str, file: IO[bytes], on_progress: OnProgress | None) -> Iterator[bytes]:
    zipped = file.peek(2)[:2] == _GZIP  # type: ignore[attr-defined]
    source = igzip.IGzipFile(fileobj=file) if zipped else file
    size, done = os.fstat(file.fileno()).st_size, 0
    what = f"reading {''.join(letter if letter.isprintable() else '?' for letter in Path(path).name)}"
    while block := source.read(BLOCK_SIZE):
        if not done:
            _refuse_foreign(path, block)
        done += len(block)
        consumed = file.tell() if file.seekable() else done
        if zipped and done > SMALL and done > min(MOST_RATIO * consumed, MOST_BYTES):
            raise BadInput(
                f"{path} unpacks to more than {done >> 20} MB from {consumed >> 10} kB, which no profiler trace does; "
                "check where it comes from, or unpack it yourself and give the .json."
            )
        if on_progress and size:
            on_progress(what, min(1.0, consumed / size))
        yield block
    if not done:
        raise BadInput(f"{path} is empty; export the trace again, after the profiler has stopped.")


def _refuse_foreign(path: str, block: bytes) -> None:
    """What is known by its first bytes, or its name, to be something else."""
    for beginning, kind, advice in _FOREIGN_BEGINNINGS:
        if block.startswith(beginning):
            raise BadInput(f"{path} is {kind}; {advice}.")
    if path.endswith((".nsys-rep", ".qdrep", ".ncu-rep")):
        raise BadInput(f"{path} is a report of NVIDIA Nsight; {RECORD}.")


def deal(sizes: list[int], processes: int) -> list[list[int]]:
    """Which files each process reads: the largest first, always to the one with the least to do."""
    hands: list[list[int]] = [[] for _ in range(min(processes, len(sizes)))]
    loads = [0] * len(hands)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        least = loads.index(min(loads))
        hands[least].append(index)
        loads[least] += sizes[index]
    return hands


def _elsewhere(
    names: list[str], hands: list[list[int]], made: Callable[[str], Made]
) -> Iterator[tuple[int, Made | BadInput | None]]:
    """Answers as they come. None stands for whatever a process failed to say: that file is to be read here."""
    answers: SimpleQueue[tuple[int, Any]] = SimpleQueue()
    for hand in hands:
        PythonThread(target=_listen, args=(names, hand, made, answers), daemon=True).start()
    for _ in names:
        yield answers.get()


def _listen(
    names: list[str], hand: list[int], made: Callable[[str], Made], answers: SimpleQueue[tuple[int, Any]]
) -> None:
    """A plain Python command reads these files: a multiprocessing pool would run the user's script once more."""
    left = list(hand)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    code = f"from {__name__} import serve; from {made.__module__} import {made.__name__} as made; serve(made)"
    call = [sys.executable, "-c", code, *[names[index] for index in hand]]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        with subprocess.Popen(call, env=environment, **pipes) as process:  # type: ignore[call-overload]
            while left:
                answer = pickle.load(process.stdout)  # from our own child, never from a file
                answers.put((left.pop(0), answer))
    except (OSError, ValueError, EOFError, pickle.UnpicklingError):
        for index in left:
            answers.put((index, None))


def serve(made: Callable[[str], object]) -> None:
    """What such a process does: reads the files it was given and writes to its parent what it made of each."""
    for name in sys.argv[1:]:
        pickle.dump(tried(name, made), sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
        sys.stdout.buffer.flush()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _size(name: str) -> int:
    try:
        return Path(name).stat().st_size * (USUAL_RATIO if name.endswith(".gz") else 1)
    except (OSError, ValueError):
        return 0
