"""Checkpoints on a real GPU: the state at the call, whatever the training does to it meanwhile."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import keepbusy
from keepbusy.runtime import readback

DEVICE = torch.device("cuda", 0)


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(2048, 2048), torch.nn.BatchNorm1d(2048), torch.nn.Linear(2048, 2048)]
        self.model = torch.nn.Sequential(*layers).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.x = torch.randn(64, 2048, device=DEVICE)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(self.x).pow(2).mean().backward()
            self.optimizer.step()

    def state(self) -> dict:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "rate": 0.1}


def same(one: object, other: object) -> bool:
    ones, others = (torch.utils._pytree.tree_flatten(state)[0] for state in (one, other))
    pairs = list(zip(ones, others, strict=True))
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("room", [None, 0], ids=["set aside", "no room"])
def test_the_file_holds_the_state_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int | None
) -> None:
    """The copies come late, and the training overwrites everything meanwhile."""
    if room is not None:
        monkeypatch.setattr(readback, "_room", lambda *_: room)
    training = Training()
    training.steps(2)
    torch.save(training.state(), tmp_path / "plain.pt")
    with torch.cuda.stream(readback.readback_stream(DEVICE)):
        torch.cuda._sleep(200_000_000)
    saving = keepbusy.save_later(training.state(), tmp_path / "later.pt")
    training.steps(20)
    plain = torch.load(tmp_path / "plain.pt", map_location="cpu")
    assert same(torch.load(saving.wait()), plain)


def test_training_that_saves_gives_the_losses_of_one_that_does_not(tmp_path: Path) -> None:
    states = []
    for saves in (False, True):
        training = Training()
        for step in range(6):
            training.steps(3)
            if saves and step % 2 == 0:
                saving = keepbusy.save_later(training.state(), tmp_path / f"{step}.pt")
        states.append(
            torch.utils._pytree.tree_map(lambda one: one.cpu() if hasattr(one, "cpu") else one, training.state())
        )
    saving.wait()
    assert same(*states)


def test_the_call_comes_back_before_the_device_is_done(tmp_path: Path) -> None:
    training = Training()
    training.steps(1)
    keepbusy.save_later(training.state(), tmp_path / "first.pt").wait()
    torch.cuda._sleep(1_000_000_000)  # half a second
    start = time.perf_counter()
    saving = keepbusy.save_later(training.state(), tmp_path / "second.pt")
    assert time.perf_counter() - start < 0.2
    assert not saving.done
    saving.wait()


def test_memory_is_reused_from_one_checkpoint_to_the_next(tmp_path: Path) -> None:
    training, seen = Training(), []
    for _ in range(6):
        training.steps(2)
        keepbusy.save_later(training.state(), tmp_path / "one.pt").wait()
        stats = getattr(torch.cuda, "host_memory_stats", dict)()
        seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), stats.get("num_host_alloc", 0)))
    assert seen[-1] == seen[2]
