"""Short scripts without steps, as tutorials show them, and the reports they give. `make snapshots` writes them anew."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import snippets

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.relative_to(ROOT) for path in ROOT.glob("examples/snippets/*.py"))
NAMED = {
    "all_reduce": "accuracy = (x @ x).mean()",
    "cpu_copy": "kept.append(y.cpu())",
    "empty_cache": "torch.cuda.empty_cache()",
    "made_on_the_host": 'noise = torch.randn(4096, 4096).to("cuda")',
    "nonzero": "kinds = y.unique()",
    "one_stream": 'x = batch.to("cuda", non_blocking=True)',
    "pageable_copy": 'y = x.to("cuda", non_blocking=True)',
}
"""Of snippets with a fault the line that the report quotes first."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them, from one process."""
    folder = tmp_path_factory.mktemp("reports")
    done = subprocess.run(
        [sys.executable, snippets.__file__, folder, *SCRIPTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def test_there_are_twenty() -> None:
    assert len(SCRIPTS) >= 20


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_report_of_a_snippet(script: Path, reports: Path) -> None:
    kept = ROOT / script.with_suffix(".out")
    told = (reports / kept.name).read_text(encoding="utf-8")
    command = shlex.join(["keepbusy", *snippets.command(ROOT / script, str(script))])
    whole = f"$ {command}\n{told}"
    if os.environ.get("KEEPBUSY_SNAPSHOTS") == "write":
        kept.write_text(whole, encoding="utf-8")
    assert whole == kept.read_text(encoding="utf-8"), "if this is meant, `make snapshots` and read `git diff`"


@pytest.mark.parametrize("name", NAMED)
def test_it_quotes_the_right_line_first(name: str) -> None:
    script = ROOT / "examples" / "snippets" / f"{name}.py"
    source = {line.strip() for line in script.read_text(encoding="utf-8").splitlines()} - {""}
    report = script.with_suffix(".out").read_text(encoding="utf-8").splitlines()
    assert [line.strip() for line in report if line.strip() in source][:1] == [NAMED[name]]
