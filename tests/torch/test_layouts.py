"""One rank that stands for all that do the same, and the layouts that `keepbusy plan` tries with it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from warm_python import SOURCES, WarmPython

import keepbusy
from keepbusy.timeline.busy_file import load

DDP = """\
import os
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(512, 2048, device="cuda")
for _ in range(6):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
told = torch.tensor([float(dist.get_rank() + 1)], device="cuda")
dist.all_reduce(told)
print(dist.get_world_size(), told.item())
"""
SPREAD = """\
import torch, keepbusy
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

model = nn.Sequential(*(Block() for _ in range(3))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(640, 256))
loader = torch.utils.data.DataLoader(data, batch_size=128)
model, optimizer, loader = keepbusy.spread(model, optimizer, loader, example=data.tensors[0][:8])
for (x,) in loader:
    model(x.cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
MODELLED = ("--on", "h200", "--values", "none", "--clock", "modelled")


@pytest.fixture
def run(tmp_path: Path, warm_python: WarmPython):
    def run(source: str, *arguments: str, verb: str = "run"):
        (tmp_path / "train.py").write_text(source)
        environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
        return warm_python.keepbusy(verb, *arguments, "train.py", cwd=tmp_path, env=environment, agent=True)

    return run


def test_one_rank_stands_for_all_and_takes_as_long_as_if_they_ran(run, tmp_path: Path) -> None:
    one = run(DDP, *MODELLED, "--ranks", "2", "--alike", "--quiet", "--save", "one.busy")
    all_of_them = run(DDP, *MODELLED, "--ranks", "2", "--quiet", "--save", "all.busy")
    assert (one.returncode, all_of_them.returncode) == (0, 0), one.stderr + all_of_them.stderr
    alone, together = (keepbusy.explain(load(tmp_path / name)) for name in ("one.busy", "all.busy"))
    assert alone.plain_step == pytest.approx(together.plain_step, rel=0.03)
    assert (alone.ranks, together.ranks) == ((0,), (0, 1))
    assert one.stdout.split()[0] == "2"


def test_hundreds_of_ranks_are_one_process_whose_sums_are_those_of_all(run) -> None:
    done = run(DDP.replace("2048", "64"), "--clock", "modelled", "--ranks", "512", "--alike", "--quiet")
    assert (done.returncode, done.stdout.split()) == (0, ["512", "512.0"]), done.stderr


COLLECTIVES = """\
import torch, torch.distributed as dist
dist.init_process_group("nccl")
one = torch.arange(4.0, device="cuda")
parts = [torch.empty_like(one) for _ in range(4)]
dist.gather(one, parts)
print([part.tolist() for part in parts] == [one.tolist()] * 4)
own = torch.empty(4, device="cuda")
dist.scatter(own, [one + rank for rank in range(4)])
print(own.tolist())
dist.all_to_all_single(own, one)
print(own.tolist())
work = dist.all_reduce(one, async_op=True)
doubled = work.get_future().then(lambda future: future.value()[0] * 2)
work.wait()
torch.cuda.synchronize()
print(work.is_completed(), work.is_success(), doubled.wait().tolist())
"""


def test_of_every_collective_one_rank_brings_what_all_would(run) -> None:
    done = run(COLLECTIVES, "--on", "h200", "--clock", "modelled", "--ranks", "4", "--alike", "--quiet")
    assert done.stdout.splitlines() == [
        "True",
        "[0.0, 1.0, 2.0, 3.0]",
        "[0.0, 1.0, 2.0, 3.0]",
        "True True [0.0, 8.0, 16.0, 24.0]",
    ], done.stderr


def test_ranks_that_send_to_one_another_are_not_alike(run) -> None:
    source = DDP.split("model =", maxsplit=1)[0] + "dist.send(torch.ones(1, device='cuda'), 1)\n"
    done = run(source, *MODELLED, "--ranks", "8", "--alike")
    assert done.returncode == 1
    assert "ranks that send to one another do different things; run them all: keepbusy run --ranks 8" in done.stderr


def test_more_ranks_than_a_machine_starts_must_be_alike(run) -> None:
    done = run(DDP, *MODELLED, "--ranks", "512")
    assert (done.returncode, done.stderr) == (
        2,
        "keepbusy: --ranks 512 is more than one machine starts; if all do the same, add --alike.\n",
    )


SHARDED = """\
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
with torch.device("cuda"):
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
layers = []
for _ in range(2):
    loss = model(torch.ones(1, 1024, device="cuda")).sum()
    layers.append(torch.cuda.memory_allocated() / 2**22)
    loss.backward()
    layers.append(torch.cuda.memory_allocated() / 2**22)
    model.zero_grad()
print(*(round(one, 1) for one in layers))
"""


def test_what_fsdp_gathers_is_given_back_after_each_layer(run) -> None:
    """Half of eight layers is on each of two ranks, and after the backward pass half of their gradients."""
    done = run(SHARDED, *MODELLED, "--ranks", "2", "--alike", "--quiet")
    assert (done.returncode, done.stdout) == (0, "4.0 8.0 4.0 8.0\n"), done.stderr


def test_one_gpu_is_planned_too(run) -> None:
    done = run(SPREAD, "--gpus", "1", verb="plan")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if "shard=" in line] == ["shard=0", "write"]


def test_a_plan_names_the_layout_its_memory_and_its_line(run) -> None:
    done = run(SPREAD, "--gpus", "16", "--layouts", "shard=0,shard=3+tensor=2", "--json", verb="plan")
    assert done.returncode == 0, done.stderr
    first, second = sorted(json.loads(done.stdout)["layouts"], key=lambda one: one["shard"])
    assert (first["shard"], first["tensor"], second["shard"], second["tensor"]) == (0, 1, 3, 2)
    assert 0 < second["peak"] < first["peak"]
    assert first["fits"]
    assert second["step"] > 0
    assert (first["batches"], second["batches"]) == (1, 1)


def test_a_program_that_does_not_spread_is_told_to_at_once(run, tmp_path: Path) -> None:
    """After the first layout: no other would be asked for either."""
    done = run(f"{DDP}open('runs', 'a').write('.')", "--gpus", "2", "--jobs", "1", verb="plan")
    assert done.returncode == 2
    assert done.stderr.startswith("keepbusy: the program does not call keepbusy.spread, ")
    assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "runs").read_text() == "."


@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=pytest.mark.sweep(room="virtual")) for how in ("each", "together")), "schedule"]
)
def test_the_page_on_overlap_shows_what_its_commands_print(how: str, warm_python: WarmPython) -> None:
    """PyTorch's own schedule tells its stages by messages what to expect: those have values in a run without any."""
    page = Path(__file__).parents[2] / "docs/how-to/overlap.md"
    text = page.read_text(encoding="utf-8")
    shown = next(block for block in text.split("```console\n")[1:] if f"pipeline.py {how}\n" in block).split("```")[0]
    command, *lines = shown.splitlines()
    words = command.removeprefix("$ keepbusy ").split()
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "COLUMNS": "100", "NO_COLOR": "1"}
    done = warm_python.keepbusy(*words, cwd=page.parent / "overlap", env=environment)
    assert done.returncode == 0, done.stderr
    assert [line for line in lines if line not in done.stdout.splitlines()] == [], done.stdout
