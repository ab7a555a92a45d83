"""What a plan foretold of the fixes that were then made while the program ran."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keepbusy.explain.diagnosis import PlannedFix
    from keepbusy.fix.live.switch import FixSwitch, Place

_MADE_BY = {
    "copies": {"prefetch", "pin_memory", "keep_on_device", "make_on_device", "copy_beside"},
    "late_numbers": {"readback", "drop_sync"},
    "draws": {"make_on_device", "move_off_the_loop"},
    "workers": {"prepare_in_workers"},
    "syncs": {"drop_sync"},
    "cache": {"keep_memory"},
    "garbage": {"move_off_the_loop"},
    "fused": {"fuse_optimizer"},
}
"""Of each fix that is made while the program runs, the plan's fixes that it stands for."""


def foretold(plan: Sequence[PlannedFix], switch: FixSwitch) -> int | None:
    """What the plan says that this fix gains a turn, at the lines where it was made; None if it does not name it."""
    done = {_place(*one) for one in switch.done}
    gains = [
        one.gain
        for one in plan
        if one.fix.partition("=")[0] in _MADE_BY.get(switch.name, ())
        and (switch.name == "workers" or done & {_place(where.file, where.line) for where in one.where})
    ]
    return sum(gains) if gains else None


def _place(file: str, line: int) -> Place:
    return (str(Path(file).resolve()) if file else ""), line
