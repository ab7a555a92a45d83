"""What the callbacks of trainers do on a real GPU: the training is recorded from within its own process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from keepbusy.integrations.watched_training import WatchedTraining


def test_a_training_is_recorded_from_within(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.ones(256, 512, device="cuda")
    training = WatchedTraining()
    training.begin()
    for _ in range(60):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
    found = training.end(tmp_path)
    assert found is not None
    assert found.steps >= 2
    reads = [site.where for cause in found.causes for site in cause.sites] + [one.where for one in found.harmless]
    assert any(where.file.endswith(Path(__file__).name) for where in reads)
    assert (tmp_path / "keepbusy.html").stat().st_size > 100_000
    assert training.end(tmp_path) is None  # it is told once
