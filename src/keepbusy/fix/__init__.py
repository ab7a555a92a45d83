"""A script with its fixes: written into its source, in memory or on disk, and kept from coming undone."""

from __future__ import annotations

ASKED = ("accumulate", "fuse_optimizer", "keep_shapes", "num_workers", "prepare_in_workers", "save_later")
"""Fixes that `run --fix` makes only where they are named: results may differ then, by rounding or by a random seed, or
a file is there a little later."""
IN_THE_SOURCE = {
    "accumulate": ("accumulate",),
    "compile": ("fuse_optimizer",),
    "drop_sync": ("drop_sync",),
    "fuse_optimizer": ("fuse_optimizer",),
    "graph": ("graph", "fuse_optimizer"),
    "keep_memory": ("keep_memory",),
    "keep_on_device": ("keep_on_device",),
    "keep_shapes": ("keep_shapes",),
    "make_on_device": ("make_on_device",),
    "num_workers": ("num_workers",),
    "pin_memory": ("pin_memory",),
    "prefetch": ("prefetch", "make_on_device"),
    "prepare_in_workers": ("prepare_in_workers",),
    "read_at_once": ("readback",),
    "readback": ("readback", "save_later", "keep_shapes"),
    "save_later": ("save_later",),
}
"""Of each of the plan's fixes that `fix` writes, the edits that serve it. What is not here is advice for a person."""


def is_made_in_memory(fix: str) -> bool:
    ways = IN_THE_SOURCE.get(fix.partition("=")[0], ())
    return any(way not in ASKED for way in ways)


def is_written(fix: str) -> bool:
    return fix.partition("=")[0] in IN_THE_SOURCE
