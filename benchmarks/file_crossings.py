"""How often the way of one warm `torch.mm` on the virtual GPU crosses from one file into another, and what it costs.

Functions of ours are counted once each, in the order in which they are first called: what somebody reads who follows
the call. Run with `python benchmarks/file_crossings.py`; `--list` prints the functions.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from types import CodeType, FrameType

from keepbusy.virtual.virtual_run import Options, start

WARM_CALLS, ROUNDS, CALLS = 300, 15, 500


def main() -> None:
    start(Options(script_clocks=False))
    import torch

    seen: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and "keepbusy" in frame.f_code.co_filename and frame.f_code is not main.__code__:
            seen.setdefault(frame.f_code)

    matrix = torch.randn(16, 16, device="cuda")
    for call in range(WARM_CALLS + 1):
        if call == WARM_CALLS:
            sys.setprofile(note)
        torch.mm(matrix, matrix)
    sys.setprofile(None)
    files = [code.co_filename for code in seen]
    if "--list" in sys.argv:
        for code in seen:
            print(code.co_filename.rpartition("/keepbusy/")[2], code.co_qualname)
    crossings = sum(one != other for one, other in pairwise(files))
    durations = []
    for _ in range(ROUNDS):
        begun = time.thread_time_ns()
        for _ in range(CALLS):
            torch.mm(matrix, matrix)
        durations.append((time.thread_time_ns() - begun) / CALLS)
    print(f"{len(seen)} functions, {crossings} crossings, {min(durations) / 1e3:.1f} µs a call")


if __name__ == "__main__":
    main()
