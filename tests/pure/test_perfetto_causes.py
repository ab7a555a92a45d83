"""Perfetto is told what was explained: gaps by their causes, what is to blame for them, and what each fix changes."""

from __future__ import annotations

import functools
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from perfetto_reader import imported

from keepbusy.explain import explain
from keepbusy.report.exports import perfetto
from keepbusy.timeline.busy_file import load

RECORDING = Path(__file__).parents[1] / "gpu" / "truth" / "live" / "item_every_step.busy"


@functools.cache
def events() -> list[dict[str, Any]]:
    timeline = load(RECORDING)
    written: list[dict[str, Any]] = json.loads("".join(perfetto(timeline, explain(timeline, turns=True))))[
        "traceEvents"
    ]
    return written


def slices_of(thread: str) -> list[dict[str, Any]]:
    named = next(one["tid"] for one in events() if one["name"] == "thread_name" and one["args"]["name"] == thread)
    return [one for one in events() if one["ph"] == "X" and one["tid"] == named]


def test_it_opens_on_the_turns_that_were_explained() -> None:
    """A viewer shows at first all that a file holds."""
    told = explain(load(RECORDING))
    steps = slices_of("steps")
    assert len(steps) == told.steps
    times = [one["ts"] for one in events() if "ts" in one]
    assert min(times) == steps[0]["ts"] == 0
    assert max(times) <= steps[-1]["ts"] + 1.5 * steps[-1]["dur"]


def test_the_longest_gap_bears_its_cause_and_line() -> None:
    gaps = slices_of("GPU: gaps by cause")
    longest = max(gaps, key=lambda one: one["dur"])
    assert longest["name"] == "host sync at stallbench/cases/item_every_step.py:25"
    assert all(before["ts"] + before["dur"] <= after["ts"] for before, after in pairwise(gaps))


def test_a_flow_leads_from_the_call_to_its_gap() -> None:
    began = {one["id"]: one for one in events() if one["ph"] == "s" and one.get("cat") == "cause"}
    ended = {one["id"]: one for one in events() if one["ph"] == "f" and one.get("cat") == "cause"}
    assert began.keys() == ended.keys()
    assert all(began[number]["ts"] <= ended[number]["ts"] for number in began)
    slices = {(one["tid"], one["ts"]) for one in events() if one["ph"] == "X"}
    assert all((one["tid"], one["ts"]) in slices for one in (*began.values(), *ended.values()))


def test_each_fix_has_a_thread_with_what_it_changes() -> None:
    changed = slices_of("fix 1: read the value later")
    assert len(changed) >= 5
    assert all(before["ts"] + before["dur"] <= after["ts"] for before, after in pairwise(changed))


@pytest.mark.parametrize(
    "name", ["live/item_every_step", "live/copy_in_line", "with_stack/healthy_resnet.stalled", "third/rank0_accuracy"]
)
def test_perfettos_own_rules_drop_nothing(name: str) -> None:
    """Each slice is kept; each arrow leads from within the slice that it leaves to the start of its target."""
    timeline = load(RECORDING.parents[1] / f"{name}.busy")
    written = json.loads("".join(perfetto(timeline, explain(timeline, turns=True))))["traceEvents"]
    read = imported(written)
    assert not read.faults
    assert len(read.slices) == sum(one["ph"] == "X" for one in written)
    assert len(read.arrows) == sum(one["ph"] == "s" for one in written) > 100
    for arrow in read.arrows:
        assert arrow.source.start <= arrow.left < max(arrow.source.end, arrow.source.start + 1)
        assert arrow.target.start == arrow.reached
