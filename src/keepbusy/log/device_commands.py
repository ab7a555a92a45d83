"""What ran on the GPU, of the rows of a log: commands that were issued, and those within graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepbusy.log.log_file import CallFlag, DriverLog

COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
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


def collective_of(log: DriverLog) -> NDArray[np.int64]:
    """Of each row that launches NCCL's kernel, the call of NCCL that did so; -1 for all others.

    The launch lies within the call, or within the end of its group, of which it is the first.
    """
    kinds, thread = log.kinds(), log.rows["thread"]
    found = np.full(len(log.rows), -1, np.int64)
    ended = log.begin + log.took
    in_group = dict[int, int]()  # by thread: the first call of its group
    for row in np.flatnonzero(np.isin(kinds, (*COLLECTIVES, "group_start", "group_end"))).tolist():
        mine, call = int(thread[row]), row
        if kinds[row] == "group_start":
            in_group[mine] = -1
            continue
        if kinds[row] == "group_end":
            call = in_group.pop(mine, -1)
        elif mine in in_group:
            in_group[mine] = row if in_group[mine] < 0 else in_group[mine]
            continue
        inside = np.arange(row, np.searchsorted(log.begin, ended[row], side="right"))
        inside = inside[(kinds[inside] == "launch") & (thread[inside] == mine)]
        found[inside] = call
    return found
