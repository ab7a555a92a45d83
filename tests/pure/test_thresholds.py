"""Every threshold of what is recorded, read and explained can be switched off by the ablation."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
thresholds = importlib.import_module("thresholds")


def constants(module: str) -> Iterator[str]:
    """Numbers, and tuples of numbers, that a module keeps under a name of its own."""
    file = ROOT / "src" / Path(*module.split(".")).with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            names = [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            inside = list(ast.walk(node.value))
            number = any(isinstance(one, ast.Constant) and isinstance(one.value, (int, float)) for one in inside)
            if number and not any(isinstance(one, (ast.Call, ast.Dict)) for one in inside):
                yield from (name for name in names if name.isupper() and not name.startswith("_"))


@pytest.mark.parametrize("module", thresholds.BOUNDS)
def test_each_constant_is_a_threshold_or_a_bound(module: str) -> None:
    rules = thresholds.THRESHOLDS.get(module, ())
    assert set(constants(module)) <= {one.constant for one in rules} | set(thresholds.BOUNDS[module])


def test_each_threshold_has_a_name_of_its_own_and_is_switched_off_everywhere() -> None:
    named = [one.name for of in thresholds.THRESHOLDS.values() for one in of]
    assert len(named) == len(set(named))
    for name, (module, one) in thresholds.all_of(thresholds.THRESHOLDS).items():
        held = getattr(importlib.import_module(module), one.constant)
        with thresholds.switched_off(name):
            assert getattr(importlib.import_module(module), one.constant) == one.off != held
        assert getattr(importlib.import_module(module), one.constant) is held


def test_what_another_module_imported_by_name_is_switched_off_too() -> None:
    from keepbusy.log import rebuild
    from keepbusy.timeline import model

    with thresholds.switched_off("staged_bytes"):
        assert (
            rebuild.STAGED_BYTES
            == model.STAGED_BYTES
            == thresholds.all_of(thresholds.THRESHOLDS)["staged_bytes"][1].off
        )
    assert rebuild.STAGED_BYTES == model.STAGED_BYTES > 0
