"""Ray itself, on a local cluster: a training whose workers are recorded, and traces that the cluster reads.

`pip install 'keepbusy[ray]'`; skipped without it. Ray takes half a minute to start a cluster and two trainings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray_programs
import test_many_ranks
from warm_python import PATIENCE

import keepbusy
from keepbusy.traces import read

pytest.importorskip("ray.train", reason="there is no Ray")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one program left that starts Ray once."""
    folder = tmp_path_factory.mktemp("ray")
    (folder / "train.py").write_text(ray_programs.TRAINING, encoding="utf-8")
    (folder / "traces").mkdir()
    test_many_ranks.write(folder / "traces")
    command = [sys.executable, "train.py", str(folder / "results"), str(folder / "traces")]
    environment = {**os.environ, "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Any:
    return json.loads((folder / "found.json").read_text(encoding="utf-8"))


def test_one_report_of_all_workers_comes_out(found: Any, folder: Path) -> None:
    report = found["report"]
    assert report.startswith("keepbusy · train.py · virtual NVIDIA H200 · 2 ranks · ")
    timeline = keepbusy.load(folder / "run.busy")
    assert [*timeline.ranks] == [0, 1]
    assert len(timeline.marks_of(0)) == len(timeline.marks_of(1)) > 8


def test_who_waits_for_whom_among_workers_is_told(folder: Path) -> None:
    """The second one does three hundred small things more."""
    diagnosis = keepbusy.explain(keepbusy.load(folder / "run.busy"))
    late = next(one for one in diagnosis.causes if one.cause == "peer_late")
    assert late.wait > diagnosis.plain_step / 4


def test_a_loop_that_fails_fails_as_it_would_and_what_is_missing_is_said(found: Any) -> None:
    first, second = found["said"]
    assert "a row is missing" in first
    assert second == "Rank 0 is missing from this report: it has no GPU"


def test_a_cluster_reads_the_ranks_as_this_process_does(found: Any, folder: Path) -> None:
    assert found["told"] == [0, 0]
    alone, on_ray = ((folder / f"{number}.busy").read_bytes() for number in (0, 1))
    assert alone == on_ray
    assert read(sorted((folder / "traces").iterdir())).facts.cluster is not None
