"""Short scripts without steps, as tutorials show them, and the reports they give. `make snapshots` writes them anew."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from warm_python import WarmPython

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.relative_to(ROOT) for path in ROOT.glob("examples/snippets/*.py"))
ENVIRONMENT = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
NAMED = {
    "all_reduce": "accuracy = (x @ x).mean()",
    "cpu_copy": "kept.append(y.cpu())",
    "empty_cache": "torch.cuda.empty_cache()",
    "made_on_the_host": 'noise = torch.randn(4096, 4096).to("cuda")',
    "nonzero": "places = (y > 0).nonzero()",
    "one_stream": 'x = batch.to("cuda", non_blocking=True)',
    "pageable_copy": 'y = x.to("cuda", non_blocking=True)',
}
"""Of snippets with a fault the line that the report quotes first."""

QUICK = ("all_reduce", "empty_cache", "nonzero", "pageable_copy")
"""One with ranks, one each of memory, of a sync and of a copy."""
SWEEPS = [pytest.mark.sweep(room="virtual"), pytest.mark.sweep(room="explain"), pytest.mark.sweep(room="report")]


def command(script: Path) -> list[str]:
    ranks = ["--ranks", "2"] if "torch.distributed" in (ROOT / script).read_text(encoding="utf-8") else []
    return ["run", "--full", *ranks, "--clock", "modelled", "--values", "none", str(script)]


def test_there_are_twenty() -> None:
    assert len(SCRIPTS) >= 20


@pytest.mark.parametrize(
    "script",
    [pytest.param(script, marks=() if script.stem in QUICK else SWEEPS) for script in SCRIPTS],
    ids=lambda path: path.stem,
)
def test_the_report_of_a_snippet(script: Path, warm_python: WarmPython) -> None:
    kept = ROOT / script.with_suffix(".out")
    done = warm_python.keepbusy(*command(script), cwd=ROOT, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, "")
    whole = f"$ {shlex.join(['keepbusy', *command(script)])}\n{done.stdout}"
    if os.environ.get("KEEPBUSY_SNAPSHOTS") == "write":
        kept.write_text(whole, encoding="utf-8")
    assert whole == kept.read_text(encoding="utf-8"), "if this is meant, `make snapshots` and read `git diff`"


@pytest.mark.parametrize("name", NAMED)
def test_it_quotes_the_right_line_first(name: str) -> None:
    script = ROOT / "examples" / "snippets" / f"{name}.py"
    source = {line.strip() for line in script.read_text(encoding="utf-8").splitlines()} - {""}
    report = script.with_suffix(".out").read_text(encoding="utf-8").splitlines()
    assert [line.strip() for line in report if line.strip() in source][:1] == [NAMED[name]]
