"""What the callbacks of trainers do on a real GPU: the training is recorded from within its own process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from keepbusy.integrations import WatchedTraining


@pytest.mark.parametrize("earlier", [[], [ProfilerActivity.CUDA], [ProfilerActivity.CPU, ProfilerActivity.CUDA]])
def test_a_training_is_recorded_from_within(tmp_path: Path, earlier: list[ProfilerActivity]) -> None:
    """Also where something was profiled before in the same process, and CUPTI has stayed."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.ones(256, 512, device="cuda")
    if earlier:
        with profile(activities=earlier):
            model(x).sum().backward()
            torch.cuda.synchronize()
    training = WatchedTraining()
    training.begin()
    for _ in range(1_000):  # long enough for a look at the kernels
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
