"""`keepbusy run --fix` and `keepbusy fix`, from the command line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from warm_python import warm

pytest.importorskip("libcst")

PROGRAM = """\
import torch

def main():
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, total = [torch.ones(64, 64) for _ in range(3)], 0.0
    for step in range(60):
        loss = model(data[step % 3].to("cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        torch.cuda.empty_cache()  # costly
    print(total)

torch.manual_seed(0)
main()
"""


def keepbusy(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return warm().keepbusy(*arguments, cwd=folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def test_a_program_is_fixed_while_it_runs(folder: Path) -> None:
    plain = keepbusy(folder, "run", "--clock", "modelled", "--quiet", "train.py")
    fixed = keepbusy(folder, "run", "--fix", "--clock", "modelled", "--quiet", "train.py")
    assert plain.returncode == fixed.returncode == 0
    program, report = fixed.stdout.split("\nkeepbusy --fix\n")
    assert program == plain.stdout
    assert "at train.py:8" in report
    assert "calls of empty_cache() in the loop" in report
    assert " less\n" in report
    left = keepbusy(folder, "run", "--fix", "--without", "cache,copies", "--clock", "modelled", "--quiet", "train.py")
    assert "empty_cache" not in left.stdout
    wrong = keepbusy(folder, "run", "--fix", "--without", "everything", "train.py")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("keepbusy: 'everything' is no fix; the fixes are copies, late_numbers, ")


def test_a_fix_is_proven_shown_and_written(folder: Path) -> None:
    shown = keepbusy(folder, "fix", "--clock", "modelled", "train.py")
    assert shown.returncode == 0, shown
    assert "readback at train.py:12\n  gains " in shown.stdout
    assert "losses within 1e-05: the sum is kept in the loss's own type" in shown.stdout
    assert shown.stdout.endswith("nothing was written; --write does\n")
    assert (folder / "train.py").read_text() == PROGRAM
    written = keepbusy(folder, "fix", "--write", "--clock", "modelled", "train.py")
    assert written.stdout.endswith("written: train.py\n")
    now = PROGRAM.replace("loss.item()", "loss.detach()").replace("    print", "    total = float(total)\n    print")
    assert (folder / "train.py").read_text() == now


def test_a_program_that_fails_is_told_of_in_a_sentence(folder: Path) -> None:
    (folder / "train.py").write_text("raise ValueError('no data')")
    done = keepbusy(folder, "fix", "train.py")
    assert done.returncode == 2
    assert done.stderr == "keepbusy: train.py ended with exit code 1: ValueError: no data\n"
