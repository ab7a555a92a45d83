"""Fixes: for each cause, the edit that fixes it everywhere."""

from __future__ import annotations

from dataclasses import replace

from keepbusy.explain.causes import host, peers
from keepbusy.explain.edit import Finding
from keepbusy.explain.places import by_place
from keepbusy.explain.scene import Scene

OF_ONE_HOST = {
    "host_sync": host.find_reads,
    "blocking_copy": host.find_blocking,
    "copy_not_overlapped": host.find_in_line,
    "input_late": host.find_input,
    "made_on_host": host.find_made,
    "launch_bound": host.find_launches,
    "allocator": host.find_allocations,
    "host_work": host.find_work,
}
FINDERS = OF_ONE_HOST | {"peer_late": peers.find_late, "exposed_collective": peers.find_exposed}

__all__ = ["FINDERS", "Finding", "findings"]


def findings(scene: Scene) -> dict[str, Finding]:
    """Only causes that were seen at all, each with its places."""
    found = {cause: find(scene) for cause, find in (FINDERS if scene.among_ranks else OF_ONE_HOST).items()}
    # what makes a tensor on the host, or waits for a message there, is told once, under its own name
    told = found["made_on_host"].edit.drop
    if scene.among_ranks:
        told = told | found["exposed_collective"].edit.drop
    found["host_work"] = found["host_work"].without(told)
    return {
        cause: replace(finding, places=by_place(scene, finding.rows, cause))
        for cause, finding in found.items()
        if len(finding.rows)
    }
