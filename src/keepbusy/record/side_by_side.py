"""Several traces at once, in a process for each core.

The processes are plain Python commands rather than a multiprocessing pool, since a pool would run
the user's script again in each of them.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Thread as Helper
from typing import TypeAlias

from keepbusy.record.events import Trace
from keepbusy.record.unzip import OnProgress
from keepbusy.timeline.errors import BadInput

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
