"""The files of docs/how-to/clusters: SLURM's is run here, with two of torchrun's agents for two hosts; what those of
Kubernetes start is read by torchrun itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import parse_args
from warm_python import SOURCES, held_port, warm

import keepbusy

FILES = Path(__file__).parents[2] / "docs/how-to/clusters"
PROGRAM = """
import os, sys, torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    model(torch.randn(4, 8, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
open(f"{sys.argv[1:]}{dist.get_rank()} of {dist.get_world_size()}", "w").close()
dist.destroy_process_group()
"""


AS_STARTED = "import os, sys; os.environ['PYTHON'] = sys.executable; os.execvp(sys.argv[1], sys.argv[1:])"
"""`torchrun` and its ranks are then forks."""


def made(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """An environment in which `torchrun` is this Python's, with its program, and what SLURM would have told."""
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    tools = tmp_path / "tools"
    tools.mkdir()
    made(tools / "torchrun", 'exec $PYTHON -m torch.distributed.run "$@"')
    made(tools / "scontrol", "echo localhost")
    made(tools / "srun", 'for node in 0 1; do mkdir -p $node; TMPDIR=$PWD/$node "$@" & done; wait')
    told = {"SLURM_JOB_NODELIST": "node-[0-1]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_ID": "7"}
    paths = {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(SOURCES)}
    with held_port() as port:
        meeting = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MASTER_PORT": str(port)}
        yield os.environ | told | paths | meeting


def documents(name: str) -> Iterator[Any]:
    yaml = pytest.importorskip("yaml", reason="there is no PyYAML")
    yield from yaml.safe_load_all((FILES / name).read_text(encoding="utf-8"))


def test_the_batch_script_of_slurm_is_one_report_of_two_hosts(tmp_path: Path, host: Mapping[str, str]) -> None:
    command = ["bash", str(FILES / "train.sbatch"), "--epochs", "1"]
    assert subprocess.run(["bash", "-n", *command[1:2]]).returncode == 0
    done = warm().python("-c", AS_STARTED, *command, cwd=tmp_path, env=host, agent=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("keepbusy · train.py · virtual NVIDIA H200 · 2 ranks · ") == 1, done.stderr
    assert [*keepbusy.load(tmp_path / "run-7.busy").ranks] == [0, 1]
    assert list(tmp_path.glob("?/keepbusy-*")) == [], "nothing is left of where they met"
    assert sorted(path.name for path in tmp_path.glob("*of*")) == [f"['--epochs', '1']{rank} of 2" for rank in (0, 1)]


RECORDED = ["run", "--save", "/out/run.busy", "train.py"]


def test_the_pods_of_a_job_start_as_hosts_of_one_torchrun(tmp_path: Path, host: Mapping[str, str]) -> None:
    service, job = documents("job.yaml")
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    made(tmp_path / "tools" / "torchrun", 'printf "%s\\n" "$@"')
    told = host | {"JOB_COMPLETION_INDEX": "1"}
    command = [*container["command"], *container["args"]]
    asked = parse_args(subprocess.run(command, env=told, capture_output=True, text=True, check=True).stdout.split())
    assert service["metadata"]["name"] == spec["subdomain"]
    assert asked.master_addr == f"{job['metadata']['name']}-0.{spec['subdomain']}"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert (asked.nnodes, asked.node_rank) == (str(job["spec"]["completions"]), 1)
    assert (asked.training_script, asked.module, asked.training_script_args) == ("keepbusy", True, RECORDED)
    assert asked.nproc_per_node == str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in spec["volumes"]}


def test_what_the_training_operator_tells_torchrun_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = documents("pytorchjob.yaml")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert int(job["spec"]["nprocPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert replicas["Worker"]["template"] == replicas["Master"]["template"]
    told = {"NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": "8", "MASTER_ADDR": "train-master-0"}
    for name, value in told.items():
        monkeypatch.setenv(f"PET_{name}", value)
    first, *arguments = container["command"]
    asked = parse_args(arguments)
    assert (first, asked.nnodes, asked.node_rank, asked.nproc_per_node) == ("torchrun", "2", 1, "8")
    assert (asked.master_addr, asked.training_script) == ("train-master-0", "keepbusy")
    assert (asked.module, asked.training_script_args) == (True, RECORDED)
