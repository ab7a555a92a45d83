"""Ranks that decide together: the same answer at the same call, a step late, and nobody is left behind."""

from __future__ import annotations

import json

import pytest
import torch

import keepbusy
from keepbusy.runtime import agree, gather_later, together

BEGIN = """\
import os
import torch
import torch.distributed as dist
import keepbusy
from keepbusy.runtime import Readings, gather_later, together

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank)

def tell(*found):
    os.write(1, (" ".join(map(str, found)) + chr(10)).encode())

def stops(flag_at):
    for step in range(20):
        if keepbusy.agree(flag_at(step)):
            return step
"""


AGREES = """\
tell("agreed", stops(lambda step: step == 3 and rank == 1))  # known a call later
tell("agreed", stops(lambda step: step == 0))  # afresh, whatever was said before
tell("agreed", stops(lambda step: False))
tell("agreed", stops(lambda step: torch.tensor(step == 3 and rank == 1, device="cuda")))  # of the device: one later
tell("agreed", stops(lambda step: keepbusy.readback(torch.full((2,), step == 3.0, device="cuda").sum())))
tell("agreed", stops(lambda step: ["loss"] * (rank == 0 and step >= 2)))

def late(step):
    readings.add(loss=torch.tensor(float("nan") if step == 3 and rank == 1 else 1.0, device="cuda"))
    return readings.nonfinite()

readings = Readings()
tell("agreed", stops(late))
"""


TOGETHER = """\
tell("together", len(list(together(range(3 + 2 * rank)))))
tell("together", len(list(together(range(5 * rank)))))
tell("together", len(list(together([None, 0, None]))))

def breaks(at):
    count = 0
    for batch in together(range(10)):
        count += 1
        if batch == at:
            break
    return count

tell("together", breaks(2 if rank == 0 else None))  # the other one does one step more
tell("together", breaks(4))

def fails():
    yield 0
    if rank == 1:
        raise OSError("a broken file")
    yield from range(5)

count, failure = 0, None
try:
    for _ in together(fails()):
        count += 1
except OSError as error:
    failure = error
tell("together", count, failure)
"""


GATHERS = """\
every = [gather_later(torch.tensor([rank + 0.5, step], device="cuda")) for step in range(3)]
tell("gathered", every[1].tensor.tolist())
tell("gathered", gather_later(rank + 10).tensor.tolist(), gather_later(torch.tensor(rank / 2)).tensor.tolist())
mine = torch.tensor(float(rank), device="cuda")
later = gather_later(mine)
mine.fill_(7)
if rank == 0:  # nobody else has to read it
    tell("gathered", later.tensor.tolist())
"""


LEAVES = """\
if rank == 0:
    try:
        tell("left", stops(lambda step: False))
    except RuntimeError as error:
        tell("left", str(error)[:16])
else:
    keepbusy.agree(False)
dist.destroy_process_group()
"""


def test_ranks_decide_together(run) -> None:
    done = run(BEGIN + AGREES + TOGETHER + GATHERS + LEAVES, before=("--ranks", "2"))
    assert done.returncode == 0, done.stderr
    told = sorted(
        line for line in done.stdout.splitlines() if line.startswith(("agreed", "together", "gathered", "left"))
    )
    steps = [4, 1, None, 5, 5, 3, 5]  # each is heard by both ranks, at the same call
    counts = ["3", "3", "0", "0", "3", "3", "3", "4", "5", "5", "1 None", "1 a broken file"]
    values = ["[[0.5, 1.0], [1.5, 1.0]]", "[10, 11] [0.0, 0.5]"] * 2 + ["[0.0, 1.0]"]
    assert [line for line in told if line.startswith("agreed")] == sorted(f"agreed {step}" for step in steps * 2)
    assert [line for line in told if line.startswith("together")] == sorted(f"together {count}" for count in counts)
    assert [line for line in told if line.startswith("gathered")] == sorted(f"gathered {value}" for value in values)
    assert [line for line in told if line.startswith("left")] == ["left a rank has ended"]  # and no wait without end


LOOP = """\
import torch
import torch.distributed as dist
import keepbusy
from keepbusy.runtime import gather_later

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
layers = [torch.nn.Linear(256, 256) for _ in range(24)] + [torch.nn.Linear(256, 4096), torch.nn.Linear(4096, 4096)]
model = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, losses = torch.randn(1024, 256, device="cuda"), []
for step in range(10):
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(gather_later(loss))
    if keepbusy.agree(torch.isnan(loss)):
        break
dist.destroy_process_group()
"""


def test_no_sync_stands_in_a_loop_that_agrees(run) -> None:
    done = run(LOOP, before=("--ranks", "2", "--clock", "modelled", "--values", "none", "--json"))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["ranks"] == [0, 1]
    assert "host_sync" not in {cause["cause"] for cause in [*said["causes"], *said["harmless"]]}


class TestAlone:
    def test_a_single_process_gets_its_flag_back(self) -> None:
        assert [keepbusy.agree(flag) for flag in (False, True, 0, ["loss"], "")] == [False, True, False, True, False]

    def test_a_flag_of_the_device_counts_a_call_later(self) -> None:
        flags = [torch.tensor(step == 1, device="cuda") for step in range(4)]
        assert [keepbusy.agree(flag) for flag in flags] == [False, False, True, False]

    def test_loops_and_values_are_its_own(self) -> None:
        assert list(together([1, 2, 3])) == [1, 2, 3]
        assert gather_later(torch.tensor([1.0, 2.0], device="cuda")).tensor.tolist() == [[1.0, 2.0]]
        assert gather_later(3).tensor.tolist() == [3]

    def test_a_rank_that_has_no_process_group_yet_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("RANK", "2")
        with pytest.raises(RuntimeError, match=r"agree\(\) was called on rank 2 of 4 before .*init_process_group"):
            keepbusy.agree(False)


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agree, "_SINGLE_PROCESS", type(agree._SINGLE_PROCESS)())
