"""Ranks that agree, on real GPUs, through NCCL and gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """\
import os
import tempfile
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard
import keepbusy
from keepbusy.runtime import Readings, gather_later, together

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).cuda()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder)
readings, gathered, stopped = Readings(), [], None
for step, count in enumerate(together(range(8 + rank))):
    loss = model(torch.randn(16, 64, device="cuda")).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    gathered.append((gather_later(loss.detach()), loss.detach().clone()))
    readings.add(loss=loss if step < 4 or rank else loss / 0)
    if step == 2:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        wanted = {name: value.full_tensor().clone() for name, value in state["model"].items()}
        saving = keepbusy.save_later(state, folder[0] + "/step2")
    if keepbusy.agree(readings.nonfinite()):
        stopped = step
        break
assert stopped == 6, stopped  # infinite at step 4, known at 5, agreed at 6
for every, mine in gathered:
    assert every.tensor.shape == (world,) and every.tensor[rank] == mine.item()
saving.wait()
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
checkpoint.load(state, checkpoint_id=folder[0] + "/step2")
for name, value in state["model"].items():
    assert torch.equal(value.full_tensor(), wanted[name]), name
assert sum(1 for _ in together(range(3 + rank))) == 3
for step in range(9):
    if keepbusy.agree(torch.tensor(float(step == 2 and rank == 1), device="cuda")):
        break
assert step == 4, step  # a flag of the device counts a call later
os.write(1, b"fine\n")
dist.destroy_process_group()
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_stop_together_and_gather_and_save_their_shards(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = os.pathsep.join(str(Path(one).resolve()) for one in sys.path)  # also what was named relative to here
    done = subprocess.run(
        [sys.executable, *ranks, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": found},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 2
