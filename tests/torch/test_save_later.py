"""Checkpoints written beside the training: the state at the call, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch.utils._pytree import tree_flatten
from warm_python import WarmPython

import keepbusy
from keepbusy.runtime import readback, save_later


@pytest.fixture(autouse=True)
def _no_failure_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_later, "_LATEST", [])


class Training:
    def __init__(self, device: str = "cuda") -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.BatchNorm1d(600)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.x = torch.randn(4, 600).to(device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).pow(2).mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": [3]}


def same(one: Any, other: Any) -> bool:
    (ones, shape), (others, other_shape) = tree_flatten(one), tree_flatten(other)
    pairs = zip(ones, others, strict=True)
    return shape == other_shape and all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("room", [1 << 40, 1 << 20, 0], ids=["all set aside", "some of it", "no room"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_file_holds_what_torch_save_would_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, device: str
) -> None:
    monkeypatch.setattr(readback, "_room", lambda *_: room)
    training = Training(device)
    training.step()
    torch.save(training.state(), tmp_path / "plain.pt")
    saving = keepbusy.save_later(training.state(), tmp_path / "later.pt")
    training.step()
    assert saving.wait() == tmp_path / "later.pt"
    assert saving.done
    plain, later = torch.load(tmp_path / "plain.pt", map_location="cpu"), torch.load(tmp_path / "later.pt")
    assert same(plain, later)
    assert later["model"]._metadata == plain["model"]._metadata
    assert sorted(path.name for path in tmp_path.iterdir()) == ["later.pt", "plain.pt"]


def test_changes_after_the_call_do_not_get_in(tmp_path: Path) -> None:
    weight, steps, history = torch.ones(700, 700, device="cuda"), torch.zeros(()), [1]
    torch.cuda._sleep(1_000_000_000)
    saving = keepbusy.save_later({"weight": weight, "steps": steps, "history": history}, tmp_path / "one.pt")
    weight.zero_(), steps.add_(5), history.append(2)
    assert torch.cuda.current_stream().query() is False
    found = torch.load(saving.wait())
    assert (found["weight"].mean().item(), found["steps"].item(), found["history"]) == (1.0, 0.0, [1])


def test_tensors_that_share_memory_share_it_in_the_file(tmp_path: Path) -> None:
    weight = torch.arange(12.0, device="cuda").view(3, 4)
    state = {"whole": weight, "row": weight[1], "turned": weight.t(), "again": weight}
    found = torch.load(keepbusy.save_later(state, tmp_path / "one.pt").wait())
    assert found["row"].tolist() == [4, 5, 6, 7]
    assert found["turned"].stride() == (1, 4)
    assert found["again"] is found["whole"]
    found["whole"].zero_()
    assert found["row"].sum() + found["turned"].sum() == 0


def test_other_kinds_of_tensors_keep_theirs(tmp_path: Path) -> None:
    state = {
        "parameter": torch.nn.Parameter(torch.ones(2, device="cuda"), requires_grad=False),
        "sparse": torch.eye(3).to_sparse(),
        "conjugate": torch.tensor([1 + 2j]).cuda().conj(),
        "empty": torch.empty(0, 3, device="cuda"),
        "half": torch.ones(3, dtype=torch.bfloat16, device="cuda"),
        "meta": torch.empty(3, device="meta"),
    }
    found = torch.load(keepbusy.save_later(state, tmp_path / "one.pt").wait())
    assert isinstance(found["parameter"], torch.nn.Parameter)
    assert not found["parameter"].requires_grad
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))
    assert found["conjugate"].tolist() == [1 - 2j]
    assert (found["empty"].shape, found["half"].dtype, found["meta"].device.type) == ((0, 3), torch.bfloat16, "meta")


def test_a_whole_model_may_be_given(tmp_path: Path) -> None:
    training = Training()
    path = keepbusy.save_later(training.model, tmp_path / "model.pt").wait()
    found = torch.load(path, weights_only=False)
    assert torch.equal(found(training.x.cpu()), training.model.cpu()(training.x.cpu()))


def test_a_failure_is_raised_where_it_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "one.pt").mkdir()
    failed = keepbusy.save_later({"a": torch.ones(2)}, tmp_path / "one.pt")
    with pytest.raises(RuntimeError, match=r"one\.pt was not written \(.*Is a directory.*\); what was there before is"):
        failed.wait()
    keepbusy.save_later({"a": torch.ones(2)}, tmp_path / "two.pt").wait()  # it has been told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.pt", "two.pt"]


def test_a_failure_nobody_waited_for_is_raised_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "one.pt").mkdir()
    keepbusy.save_later({"a": torch.ones(2)}, tmp_path / "one.pt")
    with pytest.raises(RuntimeError, match=r"one\.pt was not written"):
        keepbusy.save_later({"a": torch.ones(2)}, tmp_path / "two.pt")
    keepbusy.save_later({"a": torch.ones(2)}, tmp_path / "two.pt").wait()


def test_a_folder_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*runs; make it first"):
        keepbusy.save_later({}, tmp_path / "runs" / "one.pt")


def test_an_old_checkpoint_stays_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = keepbusy.save_later({"a": 1}, tmp_path / "one.pt").wait()

    def fails(state: Any, part: IO[bytes]) -> None:
        part.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(RuntimeError, match="No space left on device"):
        keepbusy.save_later({"a": 2}, path).wait()
    assert torch.load(path) == {"a": 1}
    assert [one.name for one in tmp_path.iterdir()] == ["one.pt"]


def test_a_checkpoint_keeps_its_mode(tmp_path: Path) -> None:
    path = keepbusy.save_later({"a": 1}, tmp_path / "one.pt").wait()
    path.chmod(0o600)
    keepbusy.save_later({"a": 2}, path).wait()
    assert (torch.load(path), path.stat().st_mode & 0o777) == ({"a": 2}, 0o600)


KILLED = """\
import os
import torch
import keepbusy

def half(state, file):
    file.write(b"half")
    os.kill(os.getpid(), 9)

torch.save = half
keepbusy.save_later({"a": 1}, "step1.pt").wait()
"""


def test_what_a_killed_training_left_goes_with_its_next_checkpoint(tmp_path: Path, warm_python: WarmPython) -> None:
    warm_python.python("-c", KILLED, cwd=tmp_path)
    assert len([*tmp_path.iterdir()]) == 1
    keepbusy.save_later({"a": 2}, tmp_path / "step2.pt").wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step2.pt"]


ENDS = """\
import sys
import torch
import keepbusy
keepbusy.save_later({"a": torch.ones(1000, 1000)}, sys.argv[1])
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "1 / 0"])
def test_the_program_does_not_end_before_it_is_written(tmp_path: Path, end: str, warm_python: WarmPython) -> None:
    warm_python.python("-c", ENDS.replace("{end}", end), str(tmp_path / "one.pt"), cwd=tmp_path)
    assert torch.load(tmp_path / "one.pt")["a"].sum() == 1e6


def test_a_failure_nobody_asked_for_is_told_at_the_end(tmp_path: Path, warm_python: WarmPython) -> None:
    (tmp_path / "one.pt").mkdir()
    done = warm_python.python("-c", ENDS.replace("{end}", ""), "one.pt", cwd=tmp_path)
    assert done.stderr.startswith("keepbusy: the checkpoint one.pt was not written ([Errno 21]")


LOOP = """\
import torch
import keepbusy

layers = [torch.nn.Linear(256, 256) for _ in range(24)] + [torch.nn.Linear(256, 4096), torch.nn.Linear(4096, 4096)]
model = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(1024, 256, device="cuda")
folder = "."
for step in range(12):
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step in (4, 8):
        {save}
"""


@pytest.mark.parametrize(
    ("save", "costs"),
    [
        ("torch.save(model.state_dict(), f'{folder}/{step}')", {"blocking_copy"}),
        ("keepbusy.save_later(model.state_dict(), f'{folder}/{step}')", set()),
    ],
)
def test_a_checkpoint_makes_nobody_wait(run, save: str, costs: set[str]) -> None:
    done = run(LOOP.replace("{save}", save), before=("--clock", "modelled", "--values", "none", "--json"))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [one["fix"] for one in told["plan"] if "blocking_copy" in one["causes"]] == ["save_later"] * len(costs)
    named = {cause["cause"] for cause in told["causes"]}
    assert named & {"host_sync", "blocking_copy", "copy_not_overlapped"} == costs


SHARDED = """\
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard
import keepbusy

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
x = torch.randn(4, 8).cuda()

def state():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}

for step in range(3):
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step < 2:  # the second one takes the first one's place
        saving = keepbusy.save_later(state(), "sharded")
        wanted = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
saving.wait()
loaded = state()
checkpoint.load(loaded, checkpoint_id="sharded")
assert loaded["step"] == 1
for name, value in loaded["model"].items():
    assert torch.equal(value.full_tensor().cpu(), wanted[name]), name
dist.barrier()
os.write(1, b"%s\\n" % " ".join(sorted(os.listdir("sharded"))).encode())
dist.destroy_process_group()
"""


def test_sharded_models_are_written_by_all_ranks_into_a_folder(run, tmp_path: Path) -> None:
    done = run(SHARDED, before=("--ranks", "2"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == [".metadata __0_0.distcp __1_0.distcp"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sharded", "train.py"]


REFUSED = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import keepbusy

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
model = nn.Linear(8, 4).cuda()
fully_shard(model)
try:
    keepbusy.save_later(model.state_dict(), "/proc/sharded").wait()
except RuntimeError as error:
    print(str(error).partition(" (")[0], flush=True)
dist.destroy_process_group()
"""


def test_where_no_folder_can_be_made_all_ranks_hear_of_it(run) -> None:
    done = run(REFUSED, before=("--ranks", "2", "--quiet"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.replace("\n", "") == "the checkpoint /proc/sharded was not written" * 2  # lines may mix
