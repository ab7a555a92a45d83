"""`run --fix` on a real GPU: values used before they have come, or memory that is given out too early, show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fix_programs
import late_gradients_ranks
import pytest
import torch
from fix_programs import fixed, found_by

HERE = Path(__file__).parent
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))
    busy = staticmethod(lambda _: False)  # that a program this small waits for nothing is no reason to leave it alone
    monkeypatch.setattr("keepbusy.fix.live.host_waits.DeferredCopies._is_idle", busy)


@pytest.mark.parametrize("name", fix_programs.PROGRAMS)
def test_the_result_is_the_same(name: str, tmp_path: Path) -> None:
    source, path = fix_programs.HEAD + fix_programs.PROGRAMS[name], tmp_path / "train.py"
    expected = found_by(source, path)
    found, fixes = fixed(source, path)
    assert found == expected
    assert not any(one.off_because.startswith("a ") for one in fixes.switches)


LATE = """
class Many(Dataset):
    def __init__(self, count, width): self.count, self.width = count, width
    def __len__(self): return self.count
    def __getitem__(self, at): return torch.full((self.width,), float(at)), at

def fed(count=1500, width=700, **options): return DataLoader(Many(count, width), batch_size=2, num_workers=2, **options)
def late(): torch.cuda._sleep(400_000)  # a fifth of a millisecond: the host is far ahead of what reads its batches
device = torch.device("cuda")
"""
LATE_READERS = {
    "each batch used once": (
        """
for x, y in fed(shuffle=True):
    x, y = x.to(device), y.to(device, non_blocking=True)
    late()
    found.append(x.sum() + y.sum())
""",
        1490,
    ),
    "pinned, and changed on the host and on the device once it was moved": (
        """
for x, y in fed(pin_memory=True):
    there = x.to(device)
    late()
    x.fill_(-1.0)
    found.append(there.sum())
    there.mul_(-1)
""",
        740,
    ),
    "large ones": (
        """
for x, y in fed(200, 1 << 21):
    x = x.to(device)
    late()
    found.append(x[:, ::4099].sum())
""",
        90,
    ),
}


@pytest.mark.parametrize("name", LATE_READERS)
def test_no_copy_is_wrong_under_a_late_reader(name: str, tmp_path: Path) -> None:
    program, least = LATE_READERS[name]
    source = f"{fix_programs.HEAD}{LATE}{program}\nfound = torch.stack([one.double() for one in found]).tolist()\n"
    expected = found_by(source, tmp_path / "train.py")
    found, fixes = fixed(source, tmp_path / "train.py", tried=False)
    assert found == expected
    (copies,) = [one for one in fixes.switches if one.name == "copies"]
    assert not copies.off_because
    assert copies.done.total() >= least


def test_memory_stays_what_it_is(tmp_path: Path) -> None:
    """Of 400 batches of 16 MB some are on their way, and no more."""
    source = f"""{fix_programs.HEAD}{LATE}
torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); before = torch.cuda.memory_allocated()
for x, y in fed(400, 1 << 21):
    x = x.to(device)
    late()
    found.append(x[:, 0].sum().item())
found = (torch.cuda.max_memory_allocated() - before) >> 24
"""
    assert int(fixed(source, tmp_path / "train.py", tried=False)[0]) < 16


OPERATORS = """
a.mul_(0.999).add_(b, alpha=0.001)  a.sub_(b, alpha=0.3)  a.add_(0.1)  a.sub_(0.3)  a.mul_(b)  a.mul_(scale)  a.neg_()
a.copy_(b / c)  a.copy_(c.sqrt())  a.lerp_(b, 0.1)  a.lerp_(b, 0.9)  a.clamp_(-0.5, 0.5)  a.zero_()  a.copy_(b)
a += 0.3 * b  a -= 0.1 * b / (c.sqrt() + 1e-8)  a.copy_(0.1 * b.clamp(max=0.7) + 0.9 * a)
"""
PERHAPS = "a.addcmul_(b, c, value=0.3)  a.addcdiv_(b, c, value=-0.3)"
"""Joint launches of these round otherwise in some versions of PyTorch: there they run as they are written."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_joint_launches_round_as_single_ones_do(dtype: str, tmp_path: Path) -> None:
    certain, perhaps = (some.replace("\n", "  ").strip().split("  ") for some in (OPERATORS, PERHAPS))
    loops = certain + perhaps
    source = f"""{fix_programs.HEAD}
shapes = (1,), (7, 3), (1000,), (70001,), (64, 32, 3, 3), (0,), (513, 513)
rows = [[torch.randn(shape, device="cuda").to(torch.{dtype}) for shape in shapes] for _ in range(3)]
rows = [[x.to(memory_format=torch.channels_last) if x.ndim == 4 else x for x in row] for row in rows]
scale = torch.full((), 0.3, device="cuda", dtype=torch.{dtype})
for step in range(6):
    for row in rows: row[0].normal_(); row[1].normal_(); row[2].normal_()
    for x in rows[2]: torch.Tensor.abs_(x)
"""
    for one in loops:
        source += f"    for a, b, c in zip(rows[0], rows[1], rows[2]):\n        {one}\n"
        source += "    found += [x.double().sum().item() for x in rows[0]]\n"
    source += "found += [x._version > 60 for x in rows[0]]\n"
    expected = found_by(source, tmp_path / "train.py")
    found, fixes = fixed(source, tmp_path / "train.py", tried=False)
    (foreach,) = [one for one in fixes.switches if one.name == "foreach"]
    assert found == expected
    lines = source.splitlines()
    joint = {lines[line].strip() for _, line in foreach.done}  # what stands below the loop's own line
    assert {*certain} - joint == set()
    assert len(joint) + len(foreach.notes) == len(loops)


def ranks(*command: str, cwd: Path) -> str:
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*agent, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.fixture(scope="module")
def gradients() -> dict[str, Any]:
    """What two ranks over NCCL found."""
    told = ranks("late_gradients_ranks.py", "nccl", cwd=HERE)
    return json.loads(next(line for line in told.splitlines() if line.startswith("{")))


@TWO
@pytest.mark.parametrize("name", late_gradients_ranks.PROGRAMS)
def test_gradients_travel_once_a_step_over_nccl(gradients: dict[str, Any], name: str) -> None:
    late_gradients_ranks.check(name, gradients[name])


TRAINING = """
import os, torch, torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 16)).cuda()
model = nn.parallel.DistributedDataParallel(net, device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
torch.manual_seed(rank)
losses = []
for i in range(160):
    x = torch.randint(-2, 3, (64, 256), device="cuda").float()
    loss = model(x).square().mean() / 4
    loss.backward()
    losses.append(loss.item())
    torch.cuda._sleep(1_000_000)
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
if rank == 0: print("losses", losses)
dist.destroy_process_group()
"""


@TWO
def test_ranks_that_are_fixed_train_as_they_did(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    plain = ranks("train.py", cwd=tmp_path)
    fix = ("-m", "keepbusy", "run", "--fix", "--also", "gradients", "--quiet", "train.py")
    late = ranks(*fix, cwd=tmp_path)
    was, now = (
        json.loads(next(one for one in text.splitlines() if one.startswith("losses"))[7:]) for text in (plain, late)
    )
    assert was[:13] == now[:13]  # in which the ranks are watched
    assert now == pytest.approx(was, rel=1e-5)
    assert was[-1] < was[0]
    assert "111 backward passes whose gradients travelled with those of the last micro-batch" in late
