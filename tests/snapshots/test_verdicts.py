"""The first twelve lines of a report: for every recording of the tests they fit, and ten are kept as files.

`make snapshots` writes the files anew.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from warm_python import WarmPython

from keepbusy import cli
from keepbusy.explain import explain
from keepbusy.report import verdict
from keepbusy.timeline.busy_file import load

HERE = Path(__file__).parent
TRUTH = HERE.parent / "gpu" / "truth"
RECORDINGS = sorted(TRUTH.rglob("*.busy"))
KEPT = (
    "fourth/graph_pooling",
    "fourth/healthy_evaluation",
    "fourth/rank0_saves",
    "public/vae.stalled",
    "seventh/shop_demand",
    "third/slow_loader_rank1",
    "with_stack/accumulate_ddp.stalled",
    "with_stack/healthy_resnet.stalled",
    "with_stack/lstm_by_hand.stalled",
)
PREDICTION = re.compile(r"\d → [<\d.]+ (?:s|ms|µs)")


def check(text: str, commands: int) -> None:
    """What holds of every verdict."""
    lines = text.splitlines()
    assert len(lines) <= verdict.HEIGHT
    assert [line for line in lines if len(line) > verdict.WIDTH] == []
    assert lines[0].startswith("keepbusy · ")
    assert "keepbusy " in lines[-1] if commands else True
    items = [line for line in lines if re.match(r"\d  ", line)]
    named = re.compile(r" \([\d.–< µms]+\)$|only with |the run [\d.]+ ")
    assert all(named.search(line) for line in items if PREDICTION.search(line))


@pytest.mark.sweep(room="explain")
@pytest.mark.sweep(room="report")
@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: str(path.relative_to(TRUTH).with_suffix("")))
def test_every_verdict_fits_twelve_lines_of_eighty_columns(path: Path) -> None:
    diagnosis = explain(load(path))
    commands = verdict.Commands(
        "keepbusy run --fix train.py --device cuda",
        "keepbusy fix train.py --device cuda",
        "keepbusy show run.busy",
        "keepbusy explain run.busy --full",
    )
    check(verdict.render(diagnosis, commands), 4)
    if not diagnosis.plan:
        assert len(verdict.render(diagnosis, commands).splitlines()) <= 3


@pytest.mark.parametrize("name", KEPT)
def test_the_verdict_is_as_kept(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(TRUTH.parent)
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(["explain", f"truth/{name}.busy"]) == 0
    said = capsys.readouterr().out
    check(said, 0)
    compare_with_file(said, name.rpartition("/")[2].removesuffix(".stalled"))


def test_a_run_that_failed_says_so_first(warm_python: WarmPython) -> None:
    done = warm_python.keepbusy("run", "--clock", "modelled", "--values", "none", "crashed.py", cwd=HERE / "programs")
    assert done.returncode == 1
    text = done.stdout.lstrip("\n")
    assert text.startswith("The script failed with ValueError at crashed.py:12 after ")
    compare_with_file(text, "crashed")


def compare_with_file(text: str, name: str) -> None:
    kept = HERE / "verdicts" / f"{name}.txt"
    if os.environ.get("KEEPBUSY_SNAPSHOTS") == "write":
        kept.write_text(text, encoding="utf-8")
    assert text == kept.read_text(encoding="utf-8"), "if this is meant, `make snapshots` and read `git diff`"
