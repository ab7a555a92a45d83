"""The JSON keeps its contract: the schema, the document and what is printed say the same."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from diagnoses import HEALTHY, LATE, STALLED, SYNC
from jsonschema import Draft202012Validator

from keepbusy.causes import LEDGER
from keepbusy.explain.comparison import compare
from keepbusy.explain.diagnosis import CAUSES
from keepbusy.report import as_json
from keepbusy.timeline.races import KINDS

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
EXPLAIN, COMPARE = (json.loads((REFERENCE / f"{name}.schema.json").read_text()) for name in ("explain", "compare"))
DIAGNOSES = {"stalled": STALLED, "healthy": HEALTHY, "late": LATE, "fixed": replace(STALLED, fixed=("host_sync",))}


@pytest.mark.parametrize("schema", [EXPLAIN, COMPARE], ids=["explain", "compare"])
def test_the_schemas_are_schemas(schema: dict[str, Any]) -> None:
    assert list(Draft202012Validator(Draft202012Validator.META_SCHEMA).iter_errors(schema)) == []


@pytest.mark.parametrize("name", DIAGNOSES)
def test_a_diagnosis_keeps_to_the_schema(name: str) -> None:
    said = json.loads(as_json.render(DIAGNOSES[name]))
    assert list(Draft202012Validator(EXPLAIN).iter_errors(said)) == []


@pytest.mark.parametrize("after", DIAGNOSES)
@pytest.mark.parametrize("before", DIAGNOSES)
def test_a_comparison_keeps_to_the_schema(before: str, after: str) -> None:
    said = json.loads(as_json.render_comparison(compare(DIAGNOSES[before], DIAGNOSES[after])))
    assert list(Draft202012Validator(COMPARE).iter_errors(said)) == []


def test_what_the_scorer_reads_is_there() -> None:
    said = json.loads(as_json.render(STALLED))
    assert said["version"] == 2
    assert said["plain_step"] == 31.3
    assert sum(said["ledger"].values()) == pytest.approx(said["plain_step"])
    assert {key: said["causes"][0][key] for key in ("cause", "wait", "where", "predicted_step", "remedy")} == {
        "cause": "blocking_copy",
        "wait": 20.1,
        "where": "train.py:3",
        "predicted_step": 8.9,
        "remedy": "keepbusy.prefetch",
    }
    assert said["harmless"][0] | {"place": 0} == {
        "cause": "host_sync",
        "where": "train.py:60",
        "place": 0,
        "count": 12,
        "why": "the host would not have been ahead anyway",
    }
    assert said["predicted_step"] == 8.6


def test_the_schema_knows_every_cause_and_place() -> None:
    assert EXPLAIN["$defs"]["cause"]["properties"]["cause"]["enum"] == list(CAUSES)
    assert EXPLAIN["properties"]["ledger"]["propertyNames"]["enum"] == list(LEDGER)
    assert COMPARE["properties"]["ledger"]["propertyNames"]["enum"] == list(LEDGER)
    assert EXPLAIN["$defs"]["race"]["properties"]["kind"]["enum"] == list(KINDS)


@pytest.mark.parametrize("schema", [EXPLAIN, COMPARE], ids=["explain", "compare"])
def test_every_field_is_required_described_and_documented(schema: dict[str, Any]) -> None:
    document = (REFERENCE / "json.md").read_text()
    for name, one in {schema["title"].split()[1]: schema, **schema["$defs"]}.items():
        assert one["additionalProperties"] is False
        assert one["required"] == list(one["properties"])
        section = re.split(rf"^##+ {name}$", document, flags=re.MULTILINE)[1].split("\n#")[0]
        assert re.findall(r"^\| `(\w+)`", section, re.MULTILINE) == list(one["properties"])
        assert all("description" in field or "$ref" in field for field in one["properties"].values())


def test_foreign_names_are_escaped() -> None:
    cause = replace(SYNC, what="\x1b[2J\u2028")
    text = as_json.render(replace(STALLED, causes=(cause,)))
    assert "\x1b" not in text
    assert json.loads(text)["causes"][0]["what"] == "\x1b[2J\u2028"


def test_numpy_numbers_are_plain_numbers() -> None:
    import numpy as np

    diagnosis = replace(STALLED, plain_step=np.int64(31_300_000), noise=np.int64(5), ranks=(np.int64(0),))
    assert json.loads(as_json.render(diagnosis))["plain_step"] == 31.3
