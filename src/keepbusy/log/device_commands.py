"""What ran on the GPU, of the rows of a log: commands that were issued, and those within graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepbusy.log.log_file import CallFlag, DriverLog

COMMANDS = ("launch", "copy_to_gpu", "copy_to_host", "copy_on_gpu", "copy", "set_memory")


def device_commands(log: DriverLog) -> tuple[NDArray[Any], NDArray[Any]]:
    """Two columns of row numbers, in issue order: the call that issued a command, and the call that describes it.

    They differ for graphs: a launch issues all that was called while the graph was captured.
    """
    kinds = log.kinds()
    flags = log.rows["flags"]
    succeeded = flags & CallFlag.FAILED == 0
    commands = np.isin(kinds, COMMANDS) & succeeded
    contents = _graph_contents(log, kinds, commands & (flags & CallFlag.CAPTURED != 0))
    issued = commands & (flags & CallFlag.CAPTURED == 0)
    launches = (kinds == "graph_launch") & succeeded & (flags & CallFlag.CAPTURED == 0)
    issuers, described = list[int](), list[int]()
    for row in np.flatnonzero(issued | launches).tolist():
        inside = contents.get(row, ()) if launches[row] else (row,)
        issuers += [row] * len(inside)
        described += inside
    return np.array(issuers, np.int64), np.array(described, np.int64)


def _graph_contents(log: DriverLog, kinds: NDArray[np.str_], captured: NDArray[np.bool_]) -> dict[int, list[int]]:
    """Of each row that launches a graph: the rows of its commands."""
    open_captures: dict[int, list[int]] = {}  # by the stream where it began
    graphs: dict[int, list[int]] = {}
    executables: dict[int, list[int]] = {}
    contents = {}
    of_interest = captured | np.isin(kinds, ("capture_begin", "capture_end", "graph_create", "graph_launch"))
    for row in np.flatnonzero(of_interest).tolist():
        stream, value = int(log.rows["stream"][row]), int(log.rows["value"][row])
        match kinds[row]:
            case "capture_begin":
                open_captures[stream] = []
            case "capture_end":
                graphs[value] = open_captures.pop(stream, [])
            case "graph_create":
                executables[value] = graphs.get(log.calls[int(log.rows["call"][row])].function, [])
            case "graph_launch" if not captured[row]:
                contents[row] = executables.get(value, [])
            case _ if open_captures:
                began = stream if stream in open_captures else [*open_captures][-1]  # other streams join a capture
                open_captures[began].append(row)
    return contents
