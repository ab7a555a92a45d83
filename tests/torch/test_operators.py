"""One sample of every twelfth operator in PyTorch's own database.

`make sweeps` takes one of each operator, `make operators` all samples.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import pytest
from warm_python import SOURCES, warm

Sweep = tuple[list[str], int]
"""The rows that went wrong, and how many samples went right."""

KNOWN = {
    "tensor_split": "its indices must be on the CPU, on any GPU",
    "renorm": "the last bit: CUDA's way sums in another order than the CPU's",
    "native_dropout_backward": "the last bit: scaled as the CPU's dropout does, not as its own kernel",
    "linalg.eig": "its gradient is refused where the eigenvectors' phases are, and they differ in the last bit",
}


REFUSED = {
    "tensor_split": "as above",
    "linalg.eig": "as above",
    "nanmedian": "it takes no dtype",
    "special.i1": "PyTorch has no gradient of it in sixteen bits",
    "special.i1e": "PyTorch has no gradient of it in sixteen bits",
    "nn.functional.binary_cross_entropy": "autocast refuses it on any GPU",
    "linalg.pinv.singular": "a product before it makes sixteen bits of it, which it does not take",
}


each = pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.sweep(room="virtual"))])


@cache
def sweeps(every: int) -> dict[str, Sweep]:
    """What one process prints of each way: of one in so many operators, in sixteen bits of a third of these."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "PYTHONWARNINGS": "ignore"}
    command = ("operator_sweep.py", "1", str(3 * every), str(every))
    done = warm().python(*command, cwd=Path(__file__).parent, env=environment)
    assert done.returncode == 0, done.stderr[-500:]
    printed = re.findall(r"((?:.*\n)*?)(\d+) of .* samples right \(.*\) ?(.*)\n", done.stdout)
    return {way: (rows.splitlines(), int(right)) for rows, right, way in printed}


@each
def test_operators_give_what_the_cpu_gives_bit_for_bit(every: int) -> None:
    wrong, right = sweeps(every)[""]
    assert [row for row in wrong if row.split()[0] not in KNOWN] == []
    assert right >= 600 // every


@each
@pytest.mark.parametrize("way", ["half", "autocast"])
def test_what_runs_in_thirty_two_bits_runs_in_sixteen(way: str, every: int) -> None:
    stopped, right = sweeps(every)[way]
    assert [row for row in stopped if row.split()[0] not in REFUSED] == []
    assert right >= 150 // every
