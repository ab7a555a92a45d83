"""How often one reads on in another file on the way of a call: each function once, in the order of first calls.

python benchmarks/crossings.py            (no GPU needed)
"""

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import keepbusy
from keepbusy.virtual.virtual_run import Options, start

SOURCES = Path(keepbusy.__file__).parent


def way(call: Callable[[], Any], room: str) -> list[tuple[str, str]]:
    """File and name of each function of the room that the call goes through."""
    found: dict[Any, tuple[str, str]] = {}

    def on_event(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(SOURCES / room)) and not code.co_name.startswith("<"):
            found.setdefault(code, (str(Path(code.co_filename).relative_to(SOURCES)), code.co_qualname))

    sys.setprofile(on_event)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found.values())


def crossings(functions: list[tuple[str, str]]) -> int:
    return sum(one[0] != two[0] for one, two in pairwise(functions))


def next_of_prefetch() -> list[tuple[str, str]]:
    batch = {"x": torch.zeros(64, 64), "y": torch.zeros(64, dtype=torch.int64), "z": [torch.zeros(3)] * 3}
    batches = iter(keepbusy.prefetch([batch] * 9))
    for _ in range(4):
        next(batches)
    return way(lambda: next(batches), "runtime")


if __name__ == "__main__":
    start(Options(devices=1, measured=False, one_generator=True))
    functions = next_of_prefetch()
    print(*(f"  {file}: {name}" for file, name in functions), sep="\n")
    print(f"next(prefetch): {len(functions)} functions, {crossings(functions)} crossings")
