"""SARIF: valid by its own schema, and each line with what it costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema.validators import validator_for

import keepbusy
from keepbusy.explain.diagnosis import Diagnosis
from keepbusy.report.exports import sarif

SCHEMA = json.loads(Path(__file__).with_name("sarif-schema-2.1.0.json").read_text(encoding="utf-8"))
RUNS = Path(__file__).parents[1] / "gpu" / "truth" / "live"


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    return keepbusy.explain(keepbusy.load(RUNS / "item_every_step.busy"))


def results(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text)["runs"][0]["results"]
    return found


def test_it_is_valid_by_the_schema(diagnosis: Diagnosis) -> None:
    assert list(validator_for(SCHEMA)(SCHEMA).iter_errors(json.loads(sarif(diagnosis)))) == []


def test_every_line_of_a_cause_is_a_result_with_its_cost(diagnosis: Diagnosis) -> None:
    """A warning; where that rounds to nothing, a note."""
    told = [one for one in results(sarif(diagnosis)) if "rank" in one]
    sites = [(cause, site) for cause in diagnosis.causes for site in cause.sites if site.where.line]
    assert len(told) == len(sites) > 0
    for one, (cause, site) in zip(told, sites, strict=True):
        place = one["locations"][0]["physicalLocation"]
        assert one["ruleId"] == cause.cause
        assert place["region"]["startLine"] == site.where.line
        assert place["artifactLocation"]["uri"].endswith(Path(site.where.file).name)
        assert cause.advice in one["message"]["text"]
        assert one["level"] == ("warning" if one["rank"] else "note")
        assert one["rank"] == pytest.approx(100 * min(1, site.wait / diagnosis.plain_step), abs=0.1)


def test_a_line_that_costs_nothing_is_no_warning(diagnosis: Diagnosis) -> None:
    cause = diagnosis.causes[0]
    free = replace(cause.sites[0], wait=0)
    told = results(sarif(replace(diagnosis, causes=(replace(cause, sites=(cause.sites[0], free)),), harmless=())))
    assert [one["level"] for one in told] == ["warning", "note"]


def test_rules_are_those_of_the_results(diagnosis: Diagnosis) -> None:
    driver = json.loads(sarif(diagnosis))["runs"][0]["tool"]["driver"]
    assert {rule["id"] for rule in driver["rules"]} == {one["ruleId"] for one in results(sarif(diagnosis))}
    assert driver["version"] == keepbusy.__version__


def test_places_below_this_folder_are_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As code scanning wants them; a space is written as in every URI."""
    found = keepbusy.explain(keepbusy.load(RUNS / "item_every_step.busy"))
    cause = found.causes[0]
    where = replace(cause.where, file=str(tmp_path / "my code" / "train.py"), line=3, exact=True)
    moved = replace(found, causes=(replace(cause, sites=(replace(cause.sites[0], where=where),)),), harmless=())
    monkeypatch.chdir(tmp_path)
    (one,) = results(sarif(moved))
    assert one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "my%20code/train.py"
    monkeypatch.chdir("/")
    (one,) = results(sarif(moved))
    assert one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].endswith("/my%20code/train.py")
