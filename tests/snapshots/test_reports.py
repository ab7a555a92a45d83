"""Whole terminal reports of real traces, recorded on an H200. `make snapshots` writes them anew."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from keepbusy import cli

HERE = Path(__file__).parent
SCHEMA = HERE.parents[1] / "docs" / "reference" / "explain.schema.json"
PLAIN_STEPS = {
    "images": "31.336",
    "images_pinned": "11.209",
    "images_noisy": "91.642",
    "images_loaded": "330.936",
    "tokens": "53.047",
    "tokens_checked": "18.747",
}
"""Of each trace: the time of a step without the profiler, measured in the same run."""
WITH_JSON = ("images", "tokens_checked")
"""One with a loader and copies, and one with reads."""


@pytest.mark.parametrize("name", PLAIN_STEPS)
def test_the_whole_report(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(HERE / "traces")  # where the programs lie, too
    for variable, value in {"COLUMNS": "100", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(variable, value)
    code = cli.main(["explain", f"{name}.trace.json.gz", "--plain-step", PLAIN_STEPS[name], "--full"])
    said = capsys.readouterr()
    assert (code, said.err) == (0, "")
    kept = HERE / f"{name}.txt"
    if os.environ.get("KEEPBUSY_SNAPSHOTS") == "write":
        kept.write_text(said.out, encoding="utf-8")
    assert said.out == kept.read_text(encoding="utf-8"), "if this is meant, `make snapshots` and read `git diff`"


def test_every_trace_has_its_report_and_every_report_its_trace() -> None:
    traces = {path.name.removesuffix(".trace.json.gz") for path in (HERE / "traces").glob("*.trace.json.gz")}
    assert traces == {path.stem for path in HERE.glob("*.txt")} == set(PLAIN_STEPS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.sweep(room="report") if name not in WITH_JSON else ())
        for name in PLAIN_STEPS
    ],
)
def test_the_json_of_a_real_trace_keeps_to_the_schema(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    trace = HERE / "traces" / f"{name}.trace.json.gz"
    assert cli.main(["explain", str(trace), "--plain-step", PLAIN_STEPS[name], "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    Draft202012Validator(json.loads(SCHEMA.read_text())).validate(said)
    assert sum(said["ledger"].values()) == pytest.approx(said["plain_step"], rel=1e-6)
    assert said["causes"] == sorted(said["causes"], key=lambda cause: cause["predicted_step"])
