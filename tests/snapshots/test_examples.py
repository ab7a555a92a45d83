"""The examples and the reports they give: NAME.out begins with its command. `make snapshots` writes them anew."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from warm_python import WarmPython

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
OF_RANKS = ("ddp_late_rank", "pipeline")
SWEEPS = [pytest.mark.sweep(room="virtual"), pytest.mark.sweep(room="explain"), pytest.mark.sweep(room="report")]
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=SWEEPS if name in OF_RANKS else ()) for name in NAMES])
def test_the_report_of_an_example(name: str, warm_python: WarmPython) -> None:
    kept = EXAMPLES / f"{name}.out"
    command, _, expected = kept.read_text(encoding="utf-8").partition("\n")
    program, *arguments = shlex.split(command.removeprefix("$ "))
    assert program == "keepbusy"
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    done = warm_python.keepbusy(*arguments, cwd=ROOT, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    if os.environ.get("KEEPBUSY_SNAPSHOTS") == "write":
        kept.write_text(f"{command}\n{done.stdout}", encoding="utf-8")
        expected = done.stdout
    assert done.stdout == expected, "if this is meant, `make snapshots` and read `git diff`"


@pytest.mark.parametrize("name", NAMES)
def test_it_blames_the_right_line_first(name: str) -> None:
    """The first line of the program that a report quotes."""
    report = (EXAMPLES / f"{name}.out").read_text(encoding="utf-8")
    source = {line.strip() for line in (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()} - {""}
    quoted = [line.strip() for line in report.splitlines() if line.strip() in source]
    assert quoted[:1] == [BLAMED[name]] if name in BLAMED else not quoted


@pytest.mark.parametrize("name", NAMES)
def test_what_has_no_fix_ends_without_commands_that_make_one(name: str) -> None:
    report = (EXAMPLES / f"{name}.out").read_text(encoding="utf-8")
    assert "What to do" in report or "keepbusy fix" not in report


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_an_ordinary_program(name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert "keepbusy" not in source
    assert 'device = "cuda"\n' in source
    assert 20 <= len(source.splitlines()) <= 60
