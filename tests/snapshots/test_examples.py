"""The examples and the reports they give: NAME.out begins with its command. `make snapshots` writes them anew."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
BLAMED = {
    "slow_loader": "for pictures, labels in loader:",
    "gpt_item": "running_loss += loss.item()",
    "diffusion_noise": "noise = torch.randn(clean.shape).to(device)",
    "ddp_late_rank": "validation_loss = loss_of(model.module, kept_apart)",
}
"""Of each example with a fault the line it stands in; the others have none."""
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_the_report_of_an_example(name: str) -> None:
    kept = EXAMPLES / f"{name}.out"
    command, _, expected = kept.read_text(encoding="utf-8").partition("\n")
    said = _run(command.removeprefix("$ "))
    if os.environ.get("KEEPBUSY_SNAPSHOTS") == "write":
        kept.write_text(f"{command}\n{said}", encoding="utf-8")
        expected = said
    assert said == expected, "if this is meant, `make snapshots` and read `git diff`"


def _run(command: str) -> str:
    program, *arguments = shlex.split(command)
    assert program == "keepbusy"
    done = subprocess.run(
        [sys.executable, "-m", "keepbusy", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_it_blames_the_right_line_first(name: str) -> None:
    """The first line of the program that a report quotes."""
    report = (EXAMPLES / f"{name}.out").read_text(encoding="utf-8")
    source = {line.strip() for line in (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()} - {""}
    quoted = [line.strip() for line in report.splitlines() if line.strip() in source]
    assert quoted[:1] == [BLAMED[name]] if name in BLAMED else not quoted


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_an_ordinary_program(name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert "keepbusy" not in source
    assert 'device = "cuda"\n' in source
    assert 20 <= len(source.splitlines()) <= 60
