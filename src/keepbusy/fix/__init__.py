"""A script with its fixes: applied while it runs, written into its source, and kept from coming undone."""

from __future__ import annotations

ASKED = ("fused", "gradients")
"""Fixes that `run --fix` makes only where they are named: values differ then, within a stated tolerance."""
WHILE_IT_RUNS = {
    "copies": {"prefetch", "pin_memory", "keep_on_device", "make_on_device", "copy_beside"},
    "late_numbers": {"readback", "read_at_once", "drop_sync"},
    "draws": {"make_on_device", "move_off_the_loop"},
    "workers": {"prepare_in_workers", "num_workers"},
    "syncs": {"drop_sync"},
    "graph": {"graph"},
    "cache": {"keep_memory"},
    "garbage": {"collect_between_epochs", "move_off_the_loop"},
    "fused": {"fuse_optimizer"},
    "gradients": {"accumulate"},
}
"""Of each fix that `run --fix` makes, the plan's fixes that it stands for."""
_SELDOM = "move_off_the_loop"
"""What it makes of this fix are random draws and garbage collections; most other CPU work is left to a person."""
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


def is_made_while_it_runs(fix: str) -> bool:
    made = set[str]().union(*(one for name, one in WHILE_IT_RUNS.items() if name not in ASKED))
    return fix.partition("=")[0] in made - {_SELDOM}


def is_written(fix: str) -> bool:
    return fix.partition("=")[0] in IN_THE_SOURCE
