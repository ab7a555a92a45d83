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


def foretold(plan: Sequence[PlannedFix], *switches: FixSwitch) -> int | None:
    """What these fixes gain a turn by the plan, at the lines where they were made; None if it names none of them.

    What two of them are for counts once: a tensor that is made on the host is drawn there, and copied.
    """
    gains = [one.gain for one in plan if any(_stands_for(switch, one) for switch in switches)]
    return sum(gains) if gains else None


def _stands_for(switch: FixSwitch, planned: PlannedFix) -> bool:
    if planned.fix.partition("=")[0] not in _MADE_BY.get(switch.name, ()):
        return False
    done = {_place(*one) for one in switch.done}
    return switch.name == "workers" or any(_place(where.file, where.line) in done for where in planned.where)


def _place(file: str, line: int) -> Place:
    return (str(Path(file).resolve()) if file else ""), line
