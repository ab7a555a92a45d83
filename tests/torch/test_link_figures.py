"""`keepbusy doctor --ranks`: real processes over gloo, NCCL's part on virtual GPUs, and ranks that die or hang."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from warm_python import PATIENCE, SOURCES, WarmPython, held_port

from keepbusy.cli.doctor import device_file, law
from keepbusy.timeline.files import typed
from keepbusy.virtual.costs.device import read as read_device
from keepbusy.virtual.costs.machine_figures import LinkFigures, _meetings

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
KINDS = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier"}


def test_the_links_of_two_processes(tmp_path: Path, warm_python: WarmPython) -> None:
    done = warm_python.keepbusy("doctor", "--ranks", "2", "--save", "mine.toml", cwd=tmp_path, agent=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("keepbusy doctor · 2 ranks over gloo · PyTorch ")
    there, back = re.findall(r"rank [01] .*?([\d.]+) ", done.stdout.replace("\n", " \n"))
    assert float(there) > 0 < float(back)
    wire = read_device(str(tmp_path / "mine.toml")).wire
    assert set(wire.collectives) == KINDS
    assert wire.devices == 2
    assert all(one.latency >= 1_000 and one.bandwidth > 0 for one in wire.collectives.values())
    assert "mine.toml is this machine: keepbusy plan --gpus 2 --on mine.toml train.py" in done.stdout


@pytest.mark.sweep(room="virtual")
def test_within_a_job_of_two_hosts_the_first_rank_tells(tmp_path: Path, warm_python: WarmPython) -> None:
    agent = [warm_python.executable, "-m", "torch.distributed.run"]
    agent += ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts=0"]
    doctor = ["-m", "keepbusy", "doctor", "--ranks", "2", "--save", str(tmp_path / "two.toml")]
    with held_port() as port:
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", tmp_path.name]
        nodes = [
            subprocess.Popen(
                [*agent, *meeting, *doctor], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        said = [node.communicate(timeout=PATIENCE) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    (report,) = [out for out, _ in said if out]
    assert "on 2 ranks, 2 hosts" in report
    wire = read_device(str(tmp_path / "two.toml")).wire
    assert (wire.devices, dict(wire.collectives)) == (1, {})
    assert wire.network != read_device("h200").wire.network


MEASURING = """\
import dataclasses, json
from keepbusy.virtual.costs.machine_figures import measure_as_rank

found = measure_as_rank(100)
if found:
    with open("found.json", "w") as file:
        json.dump(dataclasses.asdict(found), file)
"""


def test_on_virtual_gpus_it_finds_the_laws_of_their_device_file(tmp_path: Path, warm_python: WarmPython) -> None:
    """NCCL's part of the program: what it finds is what the device file says, and what it writes is that again."""
    (tmp_path / "measuring.py").write_text(MEASURING, encoding="utf-8")
    options = ("--on", "h200", "--ranks", "2", "--clock", "modelled", "--values", "none", "--quiet")
    done = warm_python.keepbusy("run", *options, "measuring.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = typed(LinkFigures, json.loads((tmp_path / "found.json").read_text(encoding="utf-8")))
    wire = read_device("h200").wire
    assert (found.backend, [place.gpu for place in found.places]) == ("nccl", ["NVIDIA H200"] * 2)
    for curve in found.collectives:
        for size, took in zip(curve.sizes, curve.times, strict=True) if curve.name != "barrier" else ():
            assert took == pytest.approx(wire.collective(curve.name, size, 2), rel=0.1)
        assert curve.name == "barrier" or law(curve).bandwidth == pytest.approx(wire.bandwidth, rel=0.02)
    assert found.rates[0][1] == pytest.approx(wire.bandwidth, rel=0.15)  # with the latency of a message
    assert found.message == pytest.approx(wire.send_latency, rel=0.1)
    assert found.copies[1].alone[0] == pytest.approx(read_device("h200").copies.pinned, rel=0.05)
    path = tmp_path / "again.toml"
    path.write_text(device_file(None, found, 8), encoding="utf-8")
    again = read_device(str(path)).wire
    for name in KINDS - {"barrier"}:
        assert again.collective(name, 1 << 30, 8) == pytest.approx(wire.collective(name, 1 << 30, 8), rel=0.02)


IMPATIENT = """\
import sys
from functools import partial

from keepbusy.cli import main
from keepbusy.virtual.costs import machine_figures

machine_figures.measure_links = partial(machine_figures.measure_links, patience={patience})
sys.exit(main(["doctor", "--ranks", "2", "--save", "mine.toml"]))
"""
STRUCK = """\
import os

if os.environ.get("RANK") == "1":
    os.kill(os.getpid(), {strike})
"""
"""Read by each Python as it starts."""
SECONDS = 6
"""Within half of that a rank that is alive says so, on a busy machine, too; and one that stands still is waited for."""


@pytest.mark.parametrize(
    ("strike", "sentence"),
    [
        (signal.SIGKILL, "rank 1 was killed (SIGKILL) while the links were measured."),
        (
            signal.SIGSTOP,
            f"rank 1 gave no sign of life for {SECONDS} s, while the others waited in their first meeting.",
        ),
    ],
)
def test_a_rank_that_dies_or_stops_is_named(
    strike: signal.Signals, sentence: str, tmp_path: Path, warm_python: WarmPython
) -> None:
    site, folder = tmp_path / "site", tmp_path / "here"
    site.mkdir()
    folder.mkdir()
    (site / "sitecustomize.py").write_text(STRUCK.format(strike=int(strike)), encoding="utf-8")
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(site), str(SOURCES)])}
    done = warm_python.python("-c", IMPATIENT.format(patience=SECONDS), cwd=folder, env=environment, agent=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"keepbusy: {sentence}\n")
    assert list(folder.iterdir()) == []


def test_what_cannot_be_measured_is_one_sentence(tmp_path: Path, warm_python: WarmPython) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        done = warm_python.keepbusy("doctor", "--ranks", "2", "--save", "mine.toml", cwd=tmp_path, env=job)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"keepbusy: port {port} is taken; give the job another MASTER_PORT.\n"
    done = warm_python.keepbusy("doctor", "--ranks", "3", cwd=tmp_path, env=job)
    assert (done.returncode, done.stderr) == (2, "keepbusy: this job has 2 ranks, not 3; say --ranks 2.\n")
    done = warm_python.keepbusy("doctor", "--ranks", "none", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ranks", [2, 5, 8, 9, 12, 33])
def test_each_two_meet_once_and_nobody_is_in_two_places(ranks: int) -> None:
    meetings = _meetings(ranks)
    pairs = [pair for meeting in meetings for pair in meeting]
    assert sorted(pairs) == [(one, other) for one in range(ranks) for other in range(one + 1, ranks)]
    assert all(len({rank for pair in meeting for rank in pair}) == 2 * len(meeting) for meeting in meetings)
