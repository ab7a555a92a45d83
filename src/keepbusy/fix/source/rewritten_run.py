"""A program that runs with its fixes, in memory: what its processes are given, and what they leave for the report."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepbusy.fix.source.in_memory import StandIns
from keepbusy.program.patches import Function, Patches, when_imported
from keepbusy.program.script import COMPILE

if TYPE_CHECKING:
    from keepbusy.runtime.graph.graphed_step import Graphed

FILE = "KEEPBUSY_REWRITING"
"""Names the file of a `Rewriting`, for ranks that are started."""


def compile_alike(path: Path) -> None:
    """In a process that reports on the program: it compiles sources as the program does."""
    rewriting = json.loads(path.read_text(encoding="utf-8"))
    COMPILE.append(StandIns(rewriting["sources"], rewriting["origins"]).compiled)


def begin(path: Path, rank: int) -> None:
    """Called in a process of the program, before it runs. Its graphs say how they were used when it ends. They warn of
    nothing: only the program writes to its streams."""
    rewriting = json.loads(path.read_text(encoding="utf-8"))
    StandIns(rewriting["sources"], rewriting["origins"]).begin()
    follow_graphs(path.parent, rank)


def follow_graphs(folder: Path, rank: int) -> None:
    """When the process ends, its graphs write into this folder how they were used. They warn of nothing."""
    graphs: list[Graphed[..., Any]] = []
    when_imported("keepbusy.runtime.graph.graphed_step", lambda: _follow(graphs))

    def leave() -> None:
        if any(graph.calls for graph in graphs):
            text = "\n".join(graph.report() for graph in graphs if graph.calls)
            (folder / f"graphs{rank:06}.{os.getpid():010}.txt").write_text(text, encoding="utf-8")

    atexit.register(leave)
    os.register_at_fork(after_in_child=lambda: atexit.unregister(leave))


def _follow(graphs: list[Graphed[..., Any]]) -> None:
    graphed_step = sys.modules["keepbusy.runtime.graph.graphed_step"]
    vars(graphed_step)["Graphed"].warns = False

    def making(plain: Function) -> Function:
        def graph(step: Function) -> Graphed[..., Any]:
            graphed: Graphed[..., Any] = plain(step)
            graphed.name = step.__qualname__
            graphs.append(graphed)
            return graphed

        return graph

    Patches().replace(graphed_step, "graph", making)


def graphs_of(folder: Path) -> list[str]:
    """What each process that used graphs has left about them."""
    return [path.read_text(encoding="utf-8") for path in sorted(folder.glob("graphs*.txt"))]


def refusal_of(reports: Sequence[str], known: Sequence[str]) -> str:
    """Why no graph was of use but those whose names are `known`; "" if one was, or there is none."""
    lines = [line for text in reports for line in text.splitlines() if line.partition(":")[0] not in known]
    if not lines or any(": 0 replayed" not in line for line in lines):
        return ""
    return next((line.partition("; ")[2] for line in lines if "; " in line), "it was called too seldom")
