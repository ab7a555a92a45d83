"""What the virtual GPU says to programs with CUDA graphs is what an H200 said (graph_programs.py asked it)."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_programs import all_programs, said

from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.pytorch.randomness import DEFAULTS

TRUTH: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "gpu" / "truth" / "graph_rules.json").read_text(encoding="utf-8")
)["said"]
DIFFERENT = {
    "asks: capture": "CUDA ends the process there; here it is refused",
    "memory_of_a_graph": "on a GPU the random state of all graphs takes 1 kB, and a segment of 2 MB with it",
    "checkpoint_within": "there cuBLAS was not warmed up",
    "dump": "there no file came of it; here one does",
    "external_event": "refused by name",
}
PROGRAMS = all_programs()


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device draws from its own generator, and neither a seed nor a stream of another test is left."""
    monkeypatch.setattr(DEFAULTS, "shared", False)
    monkeypatch.setattr(torch.cuda, "default_generators", DEFAULTS.all())
    torch.manual_seed(0)
    torch.cuda.set_stream(torch.cuda.default_stream())


@pytest.mark.parametrize("name", sorted(TRUTH.keys() - DIFFERENT))
def test_it_says_what_a_gpu_says(name: str) -> None:
    assert json.loads(json.dumps(quietly(name))) == TRUTH[name]
    assert MACHINE.recording is None


@pytest.mark.parametrize("name", sorted(DIFFERENT))
def test_differences_are_still_there(name: str) -> None:
    """Else their reasons would outlive them."""
    assert json.loads(json.dumps(quietly(name))) != TRUTH[name]


def test_every_program_was_asked() -> None:
    assert TRUTH.keys() == PROGRAMS.keys()


def quietly(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return said(PROGRAMS[name])
