"""Several programs at once on a machine of several GPUs, each with GPUs and cores of its own."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

LIMIT = 150
"""Seconds after which a program is ended: it hangs."""


class Seat:
    """Some GPUs, and the cores beside them."""

    def __init__(self, number: int, gpus: int, seats: int) -> None:
        cores = (os.cpu_count() or 1) // seats
        self.gpus = ",".join(str(number * gpus + one) for one in range(gpus))
        self.cores = f"{number * cores}-{number * cores + cores - 1}"
        self.port = 29500 + number

    def run(self, command: list[str], folder: Path, log: Path, variables: Mapping[str, str]) -> float:
        """Runs it there; what it writes goes into the log. How many seconds the whole process took."""
        surroundings = {**os.environ, **variables, "CUDA_VISIBLE_DEVICES": self.gpus}
        began = time.perf_counter()
        with log.open("w", encoding="utf-8") as out:
            try:
                subprocess.run(
                    ["taskset", "-c", self.cores, *command],
                    cwd=folder,
                    env=surroundings,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=LIMIT,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                out.write(f"\nended after {LIMIT} s\n")
        return time.perf_counter() - began


def seat_all(works: Iterable[Any], gpus: int, each: int, do: Callable[[Any, Seat], None], seconds: float) -> None:
    """Does every work, `each` GPUs for one; none is begun after so many seconds."""
    seats = max(gpus // each, 1)
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for work in works:
        waiting.put(work)
    began = time.perf_counter()

    def sit(seat: Seat) -> None:
        while time.perf_counter() - began < seconds:
            try:
                do(waiting.get_nowait(), seat)
            except queue.Empty:
                return

    threads = [threading.Thread(target=sit, args=[Seat(number, each, seats)]) for number in range(seats)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
