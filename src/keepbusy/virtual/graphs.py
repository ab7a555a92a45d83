"""CUDA graphs: what a capture keeps."""

from __future__ import annotations

from typing import NamedTuple

from keepbusy.timeline.model import NONE


class NotWhileCapturing(RuntimeError):  # noqa: N818 -- CUDA calls it so
    """What a GPU refuses to do while one of its streams is capturing."""


class Node(NamedTuple):
    """A command to come."""

    kind: int
    name: str
    work: int
    size: int
    group: int


class Graph:
    """Commands in the order in which they were captured; at replay they run one after the other."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(self, kind: int, name: str, work: int, size: int = 0, group: int = NONE) -> None:
        self.nodes.append(Node(kind, name, work, size, group))
