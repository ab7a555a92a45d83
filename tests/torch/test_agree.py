"""Ranks that decide together: the same answer at the same call, a step late, and nobody is left behind."""

from __future__ import annotations

import json

import pytest
import torch

import keepbusy
from keepbusy.runtime import agreement, gather_later, together

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


def told(run, script: str) -> list[str]:
    """What each rank tells, once all of them have come to a good end."""
    done = run(BEGIN + script + "dist.destroy_process_group()\n", before=("--ranks", "2"))
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("found")]


AGREES = """\
tell("found", stops(lambda step: step == 3 and rank == 1))  # known a call later
tell("found", stops(lambda step: step == 0))  # afresh, whatever was said before
tell("found", stops(lambda step: False))
tell("found", stops(lambda step: torch.tensor(step == 3 and rank == 1, device="cuda")))  # of the device: one later
tell("found", stops(lambda step: keepbusy.readback(torch.full((2,), step == 3.0, device="cuda").sum())))
tell("found", stops(lambda step: ["loss"] * (rank == 0 and step >= 2)))

def late(step):
    readings.add(loss=torch.tensor(float("nan") if step == 3 and rank == 1 else 1.0, device="cuda"))
    return readings.nonfinite()

readings = Readings()
tell("found", stops(late))
"""


def test_all_ranks_hear_a_yes_at_the_call_after_it_was_said(run) -> None:
    found = told(run, AGREES)
    answers = [4, 1, None, 5, 5, 3, 5]
    assert sorted(found) == sorted(f"found {answer}" for answer in answers * 2)


TOGETHER = """\
tell("found", len(list(together(range(3 + 2 * rank)))))
tell("found", len(list(together(range(5 * rank)))))
tell("found", len(list(together([None, 0, None]))))

def breaks(at):
    count = 0
    for batch in together(range(10)):
        count += 1
        if batch == at:
            break
    return count

tell("found", breaks(2 if rank == 0 else None))  # the other one does one step more
tell("found", breaks(4))

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
tell("found", count, failure)
"""


def test_loops_of_unequal_length_end_together(run) -> None:
    found = told(run, TOGETHER)
    counts = ["3", "3", "0", "0", "3", "3", "3", "4", "5", "5", "1 None", "1 a broken file"]
    assert sorted(found) == sorted(f"found {count}" for count in counts)


GATHERS = """\
every = [gather_later(torch.tensor([rank + 0.5, step], device="cuda")) for step in range(3)]
tell("found", every[1].tensor.tolist())
tell("found", gather_later(rank + 10).tensor.tolist(), gather_later(torch.tensor(rank / 2)).tensor.tolist())
mine = torch.tensor(float(rank), device="cuda")
later = gather_later(mine)
mine.fill_(7)
if rank == 0:  # nobody else has to read it
    tell("found", later.tensor.tolist())
"""


def test_values_of_all_ranks_come_home_later(run) -> None:
    found = told(run, GATHERS)
    assert sorted(found) == sorted(
        ["found [[0.5, 1.0], [1.5, 1.0]]", "found [10, 11] [0.0, 0.5]"] * 2 + ["found [0.0, 1.0]"]
    )


LEAVES = """\
if rank == 0:
    try:
        tell("found", stops(lambda step: False))
    except RuntimeError as error:
        tell("found", str(error)[:17])
else:
    keepbusy.agree(False)
"""


def test_a_rank_that_has_ended_is_an_error_for_the_others_and_no_wait_without_end(run) -> None:
    assert told(run, LEAVES) == ["found a rank has ended"]


LOOP = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import keepbusy
from keepbusy.runtime import gather_later

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
layers = [torch.nn.Linear(256, 256) for _ in range(24)] + [torch.nn.Linear(256, 4096), torch.nn.Linear(4096, 4096)]
model = DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), device_ids=[dist.get_rank()])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, losses = torch.randn(1024, 256, device="cuda"), []
for step in range(10):
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {asks}
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("asks", "syncs"),
    [
        ("flag = torch.isnan(loss).float(); dist.all_reduce(flag); stop = flag.item()", True),
        ("losses.append(gather_later(loss)); stop = keepbusy.agree(torch.isnan(loss))", False),
    ],
)
def test_no_sync_stands_in_a_loop_that_agrees(run, asks: str, syncs: bool) -> None:
    script = LOOP.replace("{asks}", asks)
    done = run(script, before=("--ranks", "2", "--clock", "modelled", "--values", "none", "--json"))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    named = {cause["cause"] for cause in [*said["causes"], *said["harmless"]]}
    assert ("host_sync" in named) is syncs


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
        with pytest.raises(RuntimeError, match=r"agree\(\) was called on rank 2 of 4 before .* init_process_group"):
            keepbusy.agree(False)


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_ALONE", type(agreement._ALONE)())
