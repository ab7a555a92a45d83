"""One sample of each operator in PyTorch's own database; `make operators` takes all of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from warm_python import PATIENCE

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


@pytest.fixture(scope="module")
def sweeps() -> dict[str, Sweep]:
    """What one process prints of each way."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("operator_sweep.py")), "1", "3"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr[-500:]
    printed = re.findall(r"((?:.*\n)*?)(\d+) of .* samples right \(.*\) ?(.*)\n", done.stdout)
    return {way: (rows.splitlines(), int(right)) for rows, right, way in printed}


def test_operators_give_what_the_cpu_gives_bit_for_bit(sweeps: dict[str, Sweep]) -> None:
    wrong, right = sweeps[""]
    assert [row for row in wrong if row.split()[0] not in KNOWN] == []
    assert right >= 600


@pytest.mark.parametrize("way", ["half", "autocast"])
def test_what_runs_in_thirty_two_bits_runs_in_sixteen(sweeps: dict[str, Sweep], way: str) -> None:
    stopped, right = sweeps[way]
    assert [row for row in stopped if row.split()[0] not in REFUSED] == []
    assert right >= 150
