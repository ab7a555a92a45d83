"""A CPU profile turned into one of a GPU that there is not: each operator launches a kernel, each read waits for it.

What it shows is made up, but its host side is PyTorch's own: the clock, the threads, the operators within lines.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

KERNEL, LAUNCH, LAG = 10.0, 2.0, 1.0
_READS = ("aten::_local_scalar_dense", "aten::nonzero")


def pretend(path: Path) -> None:
    """Rewrite the trace."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    rows = trace["traceEvents"]
    operators = [row for row in rows if row.get("cat") == "cpu_op" and row["name"].startswith("aten::")]
    operators = [row for row in operators if row["dur"] > 2 * LAUNCH]
    operators.sort(key=lambda row: row["ts"])
    free, added = 0.0, list[dict[str, Any]]()
    for number, row in enumerate(operators, start=1):
        launched = row["ts"] + row["dur"] / 2 - LAUNCH / 2
        begin = max(free, launched + LAG)
        free = begin + KERNEL
        added += _launch(row, number, launched, begin)
        if row["name"] in _READS:
            added.append(_call(row, "cudaStreamSynchronize", launched + LAUNCH / 2, LAUNCH / 4, -1))
    trace["traceEvents"] = rows + added
    trace["deviceProperties"] = [{"name": "a GPU that there is not"}]
    path.write_text(json.dumps(trace), encoding="utf-8")


def _launch(row: dict[str, Any], number: int, launched: float, begin: float) -> list[dict[str, Any]]:
    arguments = {"device": 0, "stream": 7, "correlation": number}
    kernel = {"ph": "X", "cat": "kernel", "name": "kernel", "pid": 0, "tid": 7, "ts": begin, "dur": KERNEL}
    return [_call(row, "cudaLaunchKernel", launched, LAUNCH / 4, number), kernel | {"args": arguments}]


def _call(row: dict[str, Any], name: str, start: float, length: float, correlation: int) -> dict[str, Any]:
    place = {"pid": row["pid"], "tid": row["tid"], "ts": start, "dur": length}
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "args": {"correlation": correlation}} | place
