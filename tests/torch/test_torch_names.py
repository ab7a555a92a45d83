"""Private names of PyTorch: this version has them all, and `keepbusy doctor` says what is lost without one."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from warm_python import WarmPython

from keepbusy import torch_names
from keepbusy.torch_names import PROBES, MissingName, attribute, look_up, place, probe_all, register, takes

DOCTOR = "from keepbusy.cli import main; main(['doctor'])"


@pytest.fixture
def own_probes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    probes: list[Any] = []
    monkeypatch.setattr(torch_names, "PROBES", probes)
    return probes


def test_this_pytorch_has_all_names(tmp_path: Path, warm_python: WarmPython) -> None:
    done = warm_python.keepbusy("doctor", cwd=tmp_path)
    assert done.returncode == 0
    found = re.search(r"^PyTorch's internals: (\d+) names looked up, all as expected\.$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    assert int(found[1]) > 140


def test_doctor_says_what_is_lost_without_a_name(tmp_path: Path, warm_python: WarmPython) -> None:
    changes = (
        "import torch\n"
        "del torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_put_index\n"
        "torch.utils._pytree.tree_leaves = lambda value: None\n"
    )
    done = warm_python.python("-c", changes + DOCTOR, cwd=tmp_path)
    first, *findings = done.stdout[done.stdout.index("PyTorch's internals") :].splitlines()
    assert first.endswith("names looked up, 2 not as expected.")
    assert sorted(findings) == [
        "!  torch.utils._pytree.tree_leaves is not as expected, so keepbusy.graph, prefetch and readback take no "
        "nested values.",
        "!  torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_put_index is missing, so loaders' workers "
        "cost no time on the virtual GPU.",
    ]


def test_every_name_says_what_is_lost_without_it() -> None:
    probe_all()
    assert [probe.name for probe in PROBES if not re.fullmatch(r"[^.].{15,}[^.]", probe.lost)] == []
    assert len({probe.name for probe in PROBES}) == len(PROBES)


@pytest.mark.parametrize(
    ("path", "holds", "wrong"),
    [
        ("json:loads", takes("text"), ""),
        ("json:loads", takes(), "is not as expected"),
        ("json:_no_such_name", callable, "is missing"),
        ("no_such_module:name", callable, "is missing"),
        ("json.decoder:JSONDecoder._no_such_name", callable, "is missing"),
    ],
)
def test_a_probe_says_what_is_wrong(own_probes: list[Any], path: str, holds: Any, wrong: str) -> None:
    found = look_up(path, "nothing works", holds)
    (probe,) = own_probes
    assert probe.finding() == (f"{path.replace(':', '.')} {wrong}, so nothing works" if wrong else "")
    if wrong == "is missing":
        with pytest.raises(MissingName, match="run keepbusy doctor"):
            found()


def test_a_name_of_a_later_pytorch_is_not_missed(own_probes: list[Any]) -> None:
    for since in ((99, 0), (2, 0)):
        register("json:_no_such_name", "nothing works", since=since)
    (probe,) = own_probes
    assert probe.finding()


def test_an_attribute_is_known_by_the_methods_that_set_it(own_probes: list[Any]) -> None:
    assert attribute("threading:Thread", "_target", "nothing works") == "_target"
    attribute("threading:Thread", "_no_such_name", "nothing works")
    assert [probe.finding() for probe in own_probes] == [
        "",
        "threading.Thread._no_such_name is missing, so nothing works",
    ]


def test_a_place_is_an_owner_and_a_name(own_probes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    owner, name = place("json:loads", "nothing works")
    assert (owner, name) == (json, "loads")
    assert place("json:JSONDecoder.decode", "nothing works") == (json.JSONDecoder, "decode")
    monkeypatch.setattr(json, "JSONDecoder", SimpleNamespace())
    assert [bool(probe.finding()) for probe in own_probes] == [False, True]
