"""Programs of the sixth set, met live on H200: what their plans foretell of the run beside what their fixes gave it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepbusy.explain import explain
from keepbusy.timeline.busy_file import load

SIXTH = Path(__file__).parents[1] / "gpu" / "truth" / "sixth"
SECONDS = json.loads((SIXTH / "seconds.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("case", "rows", "within"),
    [
        (
            "two_voices",
            [("call_less_often", 92), ("readback", 96)],
            0.65,
        ),  # foretold too much, of a single recorded step
        ("memory_bank", [("turn_off_broadcasts", 51)], 0.1),
        ("lidar_sorted", [("align_ranks", 20)], 0.11),  # of all 200 turns, those beside the window included
        ("tar_shards", [("share_among_workers", 72)], 0.1),
    ],
)
def test_the_planned_fix_is_the_author_s_and_gains_the_run_what_came(
    case: str, rows: list[tuple[str, int]], within: float
) -> None:
    plan = explain(load(SIXTH / f"{case}.busy")).plan
    assert [(one.fix, one.where[0].line) for one in plan[: len(rows)]] == rows
    came = SECONDS[case]["stalled_s"][0] - SECONDS[case]["fixed_s"][0]
    assert sum(one.run_gain for one in plan[: len(rows)]) / 1e9 == pytest.approx(came, rel=within)
