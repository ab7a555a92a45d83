"""How often one reads on in another file on the way of a call: each function once, in the order of first calls.

python benchmarks/crossings.py [--list]            (no GPU needed; with --list the functions as well)
"""

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import keepbusy
from keepbusy.virtual.virtual_run import Options, start

SOURCES = Path(keepbusy.__file__).parent
TRACE = Path(__file__).parents[1] / "tests" / "snapshots" / "traces" / "images.trace.json.gz"


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


def explain_of_a_trace() -> list[tuple[str, str]]:
    """`keepbusy explain x.json.gz`: from the command line to the report."""
    import keepbusy.cli as cli

    def explain() -> int:
        return cli.main(["explain", str(TRACE), "--plain-step", "31.3"])

    with redirect_stdout(io.StringIO()):
        explain()  # imports what it needs: the bodies of classes are no part of the way
        return way(explain, "")


def warm_mm() -> list[tuple[str, str]]:
    """One `torch.mm` on the virtual GPU whose shapes have been seen before."""
    one, two = torch.zeros(64, 64, device="cuda"), torch.zeros(64, 64, device="cuda")
    for _ in range(4):
        found = way(lambda: torch.mm(one, two), "virtual")  # the last time nothing of it is new, also not its line
    return found


if __name__ == "__main__":
    start(Options(devices=1, measured=False, one_generator=True))
    for name, call in {
        "next(prefetch)": next_of_prefetch,
        "torch.mm": warm_mm,
        "keepbusy explain x.json.gz": explain_of_a_trace,
    }.items():
        functions = call()
        if "--list" in sys.argv:
            print(*(f"  {file}: {function}" for file, function in functions), sep="\n")
        print(f"{name}: {len(functions)} functions, {crossings(functions)} crossings")
