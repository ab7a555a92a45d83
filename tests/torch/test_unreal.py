"""Runs that compute nothing: shapes, memory and time as if they did."""

from __future__ import annotations

import json

LARGE = """\
import torch
from torch import nn

with torch.device("cuda"):
    model = nn.Sequential(*[nn.Linear(16384, 16384) for _ in range(32)])  # 34 GB
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 16384, device="cuda")
for step in range(4):
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
print(torch.cuda.max_memory_allocated() >> 30)
mask = x > 0
print(tuple(x[mask].shape), tuple(mask.nonzero().shape), x[:1, :3].tolist())
lstm = nn.LSTM(8, 8).cuda()
out, _ = lstm(torch.ones(4, 2, 8))[0].sum().backward(), None
print(lstm.weight_ih_l0.grad.sum().item())
"""


def test_a_model_larger_than_memory_takes_its_steps(run) -> None:
    source = LARGE.replace("lstm(torch.ones(4, 2, 8))", 'lstm(torch.ones(4, 2, 8, device="cuda"))')
    done = run(source, before=("--values", "none", "--clock", "modelled"))
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert printed[:4] == ["0.0"] * 4
    assert 64 <= int(printed[4]) <= 80
    assert printed[5] == "(524288,) (524288, 2) [[0.0, 0.0, 0.0]]"
    assert printed[6] == "0.0"
    assert "The run computed nothing" in done.stdout


def test_time_and_memory_are_those_of_a_real_run(run) -> None:
    source = LARGE.replace("16384", "256").replace("  # 34 GB", "").split("print(torch.cuda")[0]
    source += "import sys\nsys.stderr.write(str(torch.cuda.max_memory_allocated()))\n"
    found = []
    for values in ("real", "none"):
        done = run(source, before=("--values", values, "--clock", "modelled", "--json"))
        found.append((json.loads(done.stdout)["plain_step"], done.stderr.splitlines()[-1]))
    assert found[0] == found[1]
