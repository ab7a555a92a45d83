"""The benchmark that switches parts of a recorder off and on: it takes the recorder apart, which else nobody does."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from record_overhead import LOOKS, PARTS, Switches


def test_each_part_of_a_recorder_goes_off_and_on() -> None:
    switches = Switches()
    try:
        for part in PARTS:
            switches.throw({one: one != part for one in PARTS})
        switches.throw(dict.fromkeys(PARTS, False))
        optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
        optimizer.step()
        assert switches.run.marks.count == 0
        switches.throw(dict.fromkeys(PARTS, True))
        optimizer.step()
        assert switches.run.marks.count == 1
        assert switches.for_seconds[LOOKS] > 0
    finally:
        switches.end()
