"""Several ranks: real values, and one timeline of all of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from keepbusy.timeline.busy_file import load
from keepbusy.timeline.model import Kind, Mask, Spans

COLLECTIVES = """\
import os
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mine = torch.full((4,), float(rank + 1), device="cuda")

def check(name, found, expected):
    assert found.is_cuda and found.tolist() == expected, (name, found.tolist())

total = mine.clone()
dist.all_reduce(total)
check("all_reduce", total, [3.0] * 4)
mean = mine.clone()
work = dist.all_reduce(mean, op=dist.ReduceOp.AVG, async_op=True)
work.wait()
check("average", mean, [1.5] * 4)
first = mine.clone()
dist.broadcast(first, src=1)
check("broadcast", first, [2.0] * 4)
parts = [torch.empty_like(mine) for _ in range(world)]
dist.all_gather(parts, mine)
check("all_gather", torch.cat(parts), [1.0] * 4 + [2.0] * 4)
whole = torch.empty(8, device="cuda")
dist.all_gather_into_tensor(whole, mine)
check("all_gather_into_tensor", whole, [1.0] * 4 + [2.0] * 4)
shard = torch.empty(2, device="cuda")
dist.reduce_scatter_tensor(shard, torch.arange(4.0, device="cuda"))
check("reduce_scatter", shard, [[0.0, 2.0], [4.0, 6.0]][rank])
turned = torch.empty(4, device="cuda")
dist.all_to_all_single(turned, mine)
check("all_to_all", turned, [1.0, 1.0, 2.0, 2.0])
if rank == 0:
    dist.send(mine * 5, dst=1)
else:
    other = torch.empty(4, device="cuda")
    dist.recv(other, src=0)
    check("recv", other, [5.0] * 4)
dist.barrier()
assert dist.get_backend() == "nccl"
os.write(1, b"fine %d" % rank + bytes([10]))
dist.destroy_process_group()
"""

AMONG_FOUR = """\
import os
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mine = torch.full((4,), float(rank + 1), device="cuda")
ranks = [float(one + 1) for one in range(world)]

def check(name, found, expected):
    assert found.is_cuda and found.tolist() == expected, (name, rank, found.tolist())

total = mine.clone()
dist.reduce(total, dst=2, op=dist.ReduceOp.MAX)
if rank == 2:
    check("reduce", total, [4.0] * 4)
parts = [torch.empty_like(mine) for _ in range(world)] if rank == 1 else None
dist.gather(mine, parts, dst=1)
if rank == 1:
    check("gather", torch.stack(parts)[:, 0], ranks)
own = torch.empty(1, device="cuda")
dist.scatter(own, list(mine.clone().mul_(10).split(1)) if rank == 3 else None, src=3)
check("scatter", own, [40.0])
objects = [None] * world
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": one} for one in range(world)]
told = [rank, "x"] if rank == 0 else [None, None]
dist.broadcast_object_list(told, src=0)
assert told == [0, "x"]
out = [torch.empty(1, device="cuda") for _ in range(world)]
dist.all_to_all(out, list((torch.arange(4.0, device="cuda") + 10 * rank).split(1)))
check("all_to_all", torch.cat(out), [10.0 * one + rank for one in range(world)])
shard = torch.empty(2, device="cuda")
dist.reduce_scatter(shard, [torch.full((2,), float(one), device="cuda") for one in range(world)])
check("reduce_scatter", shard, [4.0 * rank] * 2)
there, back = torch.empty(4, device="cuda"), (rank - 1) % world
ops = [dist.P2POp(dist.isend, mine, (rank + 1) % world), dist.P2POp(dist.irecv, there, back)]
for work in dist.batch_isend_irecv(ops):
    work.wait()
check("ring", there, [float(back + 1)] * 4)
nccl = dist.group.WORLD._get_backend(torch.device("cuda"))  # as that function asks it since PyTorch 2.15
assert not getattr(nccl, "supports_coalescing", False)
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("rows", "columns"))
row = mine.clone()
dist.all_reduce(row, group=mesh.get_group("rows"))
check("rows", row, [float((rank % 2) + 1 + (rank % 2) + 3)] * 4)
pair = dist.new_group([0, 3])
if rank in (0, 3):
    both = mine.clone()
    dist.all_reduce(both, group=pair)
    check("pair", both, [5.0] * 4)
flat = torch.ones(4, device="cuda", dtype=torch.bfloat16)
dist.all_reduce(flat, op=dist.ReduceOp.SUM)
check("bfloat16", flat, [4.0] * 4)
uneven = torch.empty(world * (rank + 1), device="cuda")
dist.all_to_all_single(uneven, torch.ones(10, device="cuda") * rank, [rank + 1] * world, [1, 2, 3, 4])
check("uneven", uneven[:: rank + 1], [0.0, 1.0, 2.0, 3.0])
with dist._coalescing_manager(device=torch.device("cuda", rank)):
    a, b = mine.clone(), mine.clone()
    dist.all_reduce(a)
    dist.all_reduce(b)
check("coalesced", a, [10.0] * 4)
dist.barrier()
os.write(1, b"fine %d" % rank + bytes([10]))
dist.destroy_process_group()
"""

TENSOR_PARALLEL = """\
import os
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

rank = int(os.environ["LOCAL_RANK"])
mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))  # it begins the group and chooses the device
assert (torch.cuda.current_device(), dist.get_backend()) == (rank, "nccl")
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
split = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).cuda()
split.load_state_dict(plain.state_dict())
split = parallelize_module(split, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
x = torch.randn(4, 16)
ours, theirs = torch.optim.AdamW(split.parameters(), lr=0.01), torch.optim.AdamW(plain.parameters(), lr=0.01)
for step in range(4):
    for model, optimizer, data in ((split, ours, x.cuda()), (plain, theirs, x)):
        loss = model(data).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
assert torch.allclose(split[0].weight.full_tensor().cpu(), plain[0].weight, atol=1e-6)
os.write(1, b"same %d" % rank + bytes([10]))
dist.destroy_process_group()
"""

LATE = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(64, 64).cuda(), device_ids=[rank], find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(8, 64, device="cuda")
for step in range(8):
    if rank == 1:
        sum(range(2_000_000))  # it comes late
    loss = model(x * (rank + 1)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
same = [torch.empty_like(model.module.weight) for _ in range(2)]
dist.all_gather(same, model.module.weight.detach())
assert torch.equal(*same)
dist.destroy_process_group()
"""

SHARDED = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
model.load_state_dict(plain.state_dict())
model.cuda()
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
x = torch.randn(4, 8)
found = []
for module, device in ((plain, "cpu"), (model, "cuda")):
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = module(x.to(device)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found.append(losses)
assert torch.allclose(torch.tensor(found[0]), torch.tensor(found[1]), rtol=1e-5), found
dist.destroy_process_group()
"""


SPAWNED = """\
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def train(rank, world):
    dist.init_process_group("nccl", init_method=f"file://{os.getcwd()}/meet", rank=rank, world_size=world)
    torch.cuda.set_device(rank)
    model = DistributedDataParallel(torch.nn.Linear(64, 64).cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        loss = model(torch.ones(8, 64, device="cuda")).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, args=(2,), nprocs=2)
"""


def test_ranks_that_the_program_spawns_itself_are_in_the_report(run) -> None:
    done = run(SPAWNED, before=("--gpus", "2", "--clock", "modelled", "--json"))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["ranks"] == [0, 1]
    assert said["ledger"]["computing"] > 0


def test_every_collective_moves_the_right_values(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    done = run(COLLECTIVES, before=("--ranks", "2", "--quiet"), agent=True)
    assert done.returncode == 0, done.stderr
    left = {one.name for one in (tmp_path / "temporary").iterdir()}
    assert left <= {"torchinductor_root"}, "torchrun's own logs would stay"
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("fine")) == ["fine 0", "fine 1"]


BY_HOST = """\
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mine = torch.full((4,), float(rank + 1), device="cuda")

def check(name, found, expected):
    assert found.is_cuda and found.tolist() == expected, (name, found.tolist())

total = mine.clone()
work = dist.all_reduce(total, async_op=True)
assert work.wait() and work.is_completed()
check("all_reduce", total, [3.0] * 4)
[future] = dist.all_reduce(mine.clone(), async_op=True).get_future().wait()
check("future", future, [3.0] * 4)
first = mine.clone()
dist.broadcast(first, src=1)
check("broadcast", first, [2.0] * 4)
parts = [torch.empty_like(mine) for _ in range(2)]
dist.all_gather(parts, mine)
check("all_gather", torch.cat(parts), [1.0] * 4 + [2.0] * 4)
shard = torch.empty(4, device="cuda")
dist.reduce_scatter(shard, [mine, 10 * mine])
check("reduce_scatter", shard, [[3.0] * 4, [30.0] * 4][rank])
turned = torch.empty(4, device="cuda")
dist.all_to_all_single(turned, mine)
check("all_to_all", turned, [1.0, 1.0, 2.0, 2.0])
objects = [None, None]
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": 0}, {"rank": 1}]
told = [rank]
dist.broadcast_object_list(told, src=1, device=torch.device("cuda"))
assert told == [1]
for send in (dist.send, dist.recv):
    try:
        send(mine, 1 - rank)
        raise AssertionError("gloo sends no tensors of a GPU")
    except RuntimeError as error:
        assert "Bad address" in str(error)
there = torch.empty(4)
coming = dist.irecv(there, 1 - rank)  # asked for before it is sent, as gloo lets tensors of the host be
dist.isend(mine.cpu(), 1 - rank).wait()
coming.wait()
assert there.tolist() == [2.0 - rank] * 4
late, others = torch.ones(1), dist.new_group(backend="gloo")
if rank == 0:  # who asks for a sum of the host goes on until it waits
    asked = dist.all_reduce(late, async_op=True)
dist.barrier(others)
if rank == 1:
    asked = dist.all_reduce(late, async_op=True)
asked.wait()
assert late.item() == 2.0
dist.monitored_barrier()
dist.barrier()
assert dist.get_backend() == "gloo"

torch.manual_seed(0)
plain = nn.Linear(16, 16)
model = nn.Linear(16, 16).cuda()
model.load_state_dict(plain.state_dict())
model = DistributedDataParallel(model)
data = torch.randn(2, 8, 16)
for module, batch in ((model, data[rank].cuda()), (plain, data.view(16, 16))):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        module(batch).pow(2).mean().backward()
        optimizer.step()
assert torch.allclose(model.module.weight.cpu(), plain.weight, atol=1e-6)
os.write(1, b"fine %d" % rank + bytes([10]))
dist.destroy_process_group()
"""

BESIDE_NCCL = """\
import os
import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo,cuda:nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
by_host = dist.new_group(backend="gloo")
assert (dist.get_backend(), dist.get_backend(by_host)) == ("nccl", "gloo")
a, b = (torch.ones(1 << 22, device="cuda") for _ in range(2))
dist.all_reduce(torch.ones(2, device="cuda"))
torch.cuda.synchronize()

torch.cuda._sleep(20_000_000)
last = torch.cuda.Event()
last.record()
dist.all_reduce(a)
assert not last.query(), "who waits for NCCL goes on"
dist.all_reduce(b, group=by_host)
assert last.query(), "who waits for gloo waits for the GPU"
assert a.sum().item() == b.sum().item() == 2 << 22
on_host = torch.ones(2)
for group in (None, by_host):
    dist.all_reduce(on_host, group=group)
assert on_host.tolist() == [4.0, 4.0]
os.write(1, b"fine %d" % rank + bytes([10]))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("script", [BY_HOST, BESIDE_NCCL], ids=["alone", "beside_nccl"])
def test_gloo_takes_tensors_of_the_gpu_through_the_host(run, script: str) -> None:
    done = run(script, before=("--ranks", "2", "--quiet"))
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("fine")) == ["fine 0", "fine 1"]


def test_groups_messages_and_objects_among_four_ranks(run) -> None:
    done = run(AMONG_FOUR, before=("--ranks", "4", "--quiet"))
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("fine")) == [
        f"fine {rank}" for rank in range(4)
    ]


LEAVES = """\
import time
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
numbers = torch.arange(1000.0, device="cuda")
if rank == 1:
    dist.isend(numbers, 0)
else:
    time.sleep(0.5)  # the other one is at its end by now
    received = torch.empty_like(numbers)
    dist.recv(received, 1)
    assert torch.equal(received, numbers)
    print("all of it is here")
{end}
"""


@pytest.mark.parametrize(
    "end", ["dist.destroy_process_group()", pytest.param("", marks=pytest.mark.sweep(room="virtual"))]
)
def test_a_rank_that_is_done_ends_once_its_message_is_taken(run, end: str) -> None:
    done = run(LEAVES.replace("{end}", end), before=("--ranks", "2", "--clock", "modelled"))
    assert (done.returncode, "all of it is here\n" in done.stdout) == (0, True), done.stderr


@pytest.mark.sweep(room="virtual")
def test_tensor_parallel_training_is_that_of_one_device(run) -> None:
    done = run(TENSOR_PARALLEL, before=("--ranks", "2", "--quiet"))
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("same")) == ["same 0", "same 1"]


def test_a_late_rank_is_named_with_its_line(run) -> None:
    done = run(LATE, before=("--ranks", "2", "--json"))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["ranks"] == [0, 1]
    assert "peer_late" in [cause["cause"] for cause in said["causes"]]
    assert [late["rank"] for late in said["late"]] == [1]
    assert said["late"][0]["place"]["line"] in (14, 15)


def test_ranks_agree_on_their_buckets_without_values(run) -> None:
    source = LATE.partition("same =")[0] + "dist.destroy_process_group()\n"
    done = run(source, before=("--ranks", "2", "--values", "none"))
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout


def test_sharded_training_gives_the_losses_of_a_plain_run(run) -> None:
    done = run(SHARDED, before=("--ranks", "2", "--quiet"))
    assert done.returncode == 0, done.stderr


FAILS = """\
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64, device="cuda"))
optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(64, 64, device="cuda")
for step in range(8):
    if rank == 1 and step == 5:
        raise ValueError("bad batch")
    model(x).sum().backward()
    optimizer.step()
"""


def test_when_a_rank_fails_the_report_says_which_and_where(run) -> None:
    """Rank 0 fails as well, once its peer is gone."""
    done = run(FAILS, before=("--ranks", "2"))
    assert done.returncode != 0
    assert done.stdout.lstrip("\n").startswith("Rank 1 failed with ValueError at train.py:11 after ")


@pytest.mark.sweep(room="virtual")
@pytest.mark.parametrize("script", ["raise ValueError('one died')\n"])
def test_a_rank_that_dies_ends_the_others_with_its_message(run, script: str) -> None:
    done = run(script, before=("--ranks", "2"))
    assert done.returncode != 0
    assert "ValueError: one died" in done.stderr


OVERLAPPED = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
found = [None, None]
dist.all_gather_object(found, {"rank": rank})
assert found == [{"rank": 0}, {"rank": 1}], found
with torch.device("cuda"):
    model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(4)])
    x = torch.randn(4096, 4096)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_gradients_travel_while_the_backward_pass_goes_on(run, tmp_path: Path) -> None:
    """Without values, too: DDP reads back sizes and places that it sent to the device itself."""
    done = run(OVERLAPPED, before=("--ranks", "2", "--values", "none", "--clock", "modelled", "--save", "run.busy"))
    assert done.returncode == 0, done.stderr
    assert "train.py · virtual NVIDIA H200 · 2 ranks" in done.stdout
    timeline = load(tmp_path / "run.busy")
    spans = timeline.spans.take(np.flatnonzero(timeline.rank_of_rows == 0))
    travel = spans.take(np.flatnonzero((spans.kind == Kind.COLLECTIVE) & (spans.size > 1 << 20)))
    named = np.array([timeline.names[name] for name in spans.name.tolist()])
    kernels = spans.take(np.flatnonzero((spans.kind == Kind.KERNEL) & (np.char.find(named, "foreach") < 0)))
    updates = spans.take(np.flatnonzero((spans.kind == Kind.KERNEL) & (np.char.find(named, "foreach") >= 0)))
    assert np.mean(_any_meets(travel, kernels)) > 0.5
    assert not _any_meets(updates, travel).any()


def _any_meets(ones: Spans, others: Spans) -> Mask:
    """Which of `ones` run while one of the others does."""
    return ((ones.start[:, None] < others.end) & (ones.end[:, None] > others.start)).any(axis=1)
