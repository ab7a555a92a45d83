"""The tree of a virtual run, from the command line on: in the report, as JSON, in the file and on the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from warm_python import WarmPython

from keepbusy.explain import explain
from keepbusy.report.page.contents import words_of
from keepbusy.timeline.busy_file import load

TRAIN = """\
import torch

net = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.ones(4096, 2048, device="cuda")


def train():
    for batch in range(20):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        if batch % 5 == 4:
            shuffled = torch.randperm(1 << 20)


for epoch in range(3):
    train()
    with torch.no_grad():
        told = net(x).mean().item()
"""
RANKS = """\
import os, torch, torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
x = torch.ones(4096, 4096, device="cuda")
for step in range(8):
    y = x @ x
    if dist.get_rank() == 1:
        y = (y @ x) @ (x @ x)
    dist.all_reduce(y)
    torch.cuda.synchronize()
dist.destroy_process_group()
"""
SPAWNED = """\
import os, torch, torch.multiprocessing as mp, torch.distributed as dist


def work(rank):
    dist.init_process_group("nccl", init_method=f"file://{os.getcwd()}/meet", rank=rank, world_size=2)
    x = torch.ones(2048, 2048, device=f"cuda:{rank}")
    for step in range(6):
        y = x @ x
        dist.all_reduce(y)
        torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""


UNANNOUNCED = """\
import torch

x = torch.ones(1024, 1024, device="cuda")


def work():
    for turn in range(100):
        y = (x @ x).relu()
        z = y.sum()
        if turn % 7 == 3:
            z.item()


work()
"""


SETUP = """\
import torch

for turn in range(40):
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.Adam(model.parameters())
"""
DECODER = """\
import torch

start = torch.nn.Embedding(100, 64).cuda()
layers = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(12)]).cuda()
end = torch.nn.Linear(64, 100).cuda()
ids = torch.zeros(1, 1, dtype=torch.long, device="cuda")
with torch.no_grad():
    for token in range(30):
        x = start(ids)
        for layer in layers:
            x = layer(x).relu()
        ids = torch.cat([ids, end(x[:, -1]).argmax(-1, keepdim=True)], 1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, text in (("train", TRAIN), ("ranks", RANKS), ("spawned", SPAWNED), ("unannounced", UNANNOUNCED)):
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def told(warm_python: WarmPython, folder: Path, *arguments: str) -> Any:
    done = warm_python.keepbusy(*arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def parts(part: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["where"]: one for one in part["parts"]}


def test_a_training_run(warm_python: WarmPython, folder: Path) -> None:
    command = ["run", "--clock", "modelled", "--values", "none", "--json"]
    first = told(warm_python, folder, *command, "--save", "train.busy", "train.py")
    run = first["run"]
    assert sum(part["time"] for part in run["parts"]) == pytest.approx(run["time"], abs=1e-5)
    epochs = parts(run)["train.py:18"]
    batches = parts(epochs)["train.py:9"]
    assert (batches["turns"], batches["function"]) == (60, "train")
    [slow] = batches["kinds"]
    assert (slow["count"], slow["every"], slow["where"]) == (12, 5.0, "train.py:15")
    assert 0.9 * run["time"] > run["busy"] > 0.1 * run["time"]
    assert epochs["time"] >= batches["time"] > 0.9 * epochs["time"]
    assert all(one["run"] is not None for one in first["plan"])  # what the run takes after each fix

    assert told(warm_python, folder, *command, "train.py")["run"] == run
    assert told(warm_python, folder, "explain", "train.busy", "--json")["run"] == run
    shown = words_of(explain(load(folder / "train.busy"), turns=True), "")["run"]
    assert [(part["place"], part["iterations"]) for part in shown["parts"][-1]["parts"]] == [("train.py:9", 60)]


def test_where_ranks_differ(warm_python: WarmPython, folder: Path) -> None:
    run = told(
        warm_python, folder, "run", "--ranks", "2", "--clock", "modelled", "--values", "none", "--json", "ranks.py"
    )
    assert parts(run["run"])["ranks.py:6"]["turns"] == 8
    [differ] = [note for note in run["notes"] if note.startswith("ranks.py:6: ")]
    assert "the GPU of rank 0 is busy" in differ


def test_ranks_that_the_program_spawns_have_a_tree(warm_python: WarmPython, folder: Path) -> None:
    run = told(
        warm_python, folder, "run", "--gpus", "2", "--clock", "modelled", "--values", "none", "--json", "spawned.py"
    )
    assert parts(run["run"])["spawned.py:7"]["turns"] == 6


def test_a_measured_run_holds_what_really_took_time(warm_python: WarmPython, folder: Path) -> None:
    (folder / "slow.py").write_text(
        "import time, torch\n"
        "x = torch.ones(64, 64, device='cuda')\n"
        "for step in range(4):\n"
        "    time.sleep(0.05)\n"
        "    y = x @ x\n"
        "    y.sum().item()\n",
        encoding="utf-8",
    )
    run = told(warm_python, folder, "run", "--json", "slow.py")["run"]
    loop = parts(run)["slow.py:3"]
    assert loop["turns"] == 4
    longest = max(loop["lines"], key=lambda line: line["time"])
    assert (longest["where"], longest["time"] > 0.19) == ("slow.py:4", True)


def test_where_nothing_announces_a_step_it_is_a_turn_of_the_loop_that_the_gpu_works_in(
    warm_python: WarmPython, folder: Path
) -> None:
    """And not seven of them, after which the launches repeat themselves."""
    said = told(warm_python, folder, "run", "--clock", "modelled", "--json", "unannounced.py")
    [loop] = [part for part in said["run"]["parts"] if part["kind"] == "loop"]
    assert loop["turns"] == 100
    assert 80 <= said["steps"] <= 100
    assert said["plain_step"] == pytest.approx(loop["turn"], rel=0.3)


def test_what_only_sets_up_has_no_steps_and_nothing_to_compile(warm_python: WarmPython, folder: Path) -> None:
    (folder / "setup.py").write_text(SETUP, encoding="utf-8")
    done = warm_python.keepbusy("run", "--clock", "modelled", "--full", "setup.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "setup.py:3  for turn in range(40)" in done.stdout
    assert " step" not in done.stdout
    assert "torch.compile" not in done.stdout


def test_a_turn_of_a_loop_that_trains_nothing_is_no_step(warm_python: WarmPython, folder: Path) -> None:
    (folder / "decoder.py").write_text(DECODER, encoding="utf-8")
    done = warm_python.keepbusy("run", "--clock", "modelled", "--values", "none", "--full", "decoder.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    header = done.stdout.splitlines()[1]  # how wide it is depends on how many digits the run has
    assert header.endswith((" iterations of line 8", " iterations of decoder.py:8")), header
    assert "An iteration takes" in done.stdout
    assert "decoder.py:8  for token in range(30)  ×30" in done.stdout
    assert "steps" not in done.stdout.splitlines()[1]
