"""Runs that compute nothing: shapes, memory and time as if they did."""

from __future__ import annotations

import json
from pathlib import Path

from keepbusy.timeline.busy_file import load

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
    done = run(source, before=("--values", "none", "--clock", "modelled", "--full"))
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert printed[:4] == ["0.0"] * 4
    assert 64 <= int(printed[4]) <= 80
    assert printed[5] == "(524288,) (524288, 2) [[0.0, 0.0, 0.0]]"
    assert printed[6] == "0.0"
    assert "With --values none nothing is computed" in done.stdout


BY_VALUES = """\
import torch
x = torch.ones(6, 4, device="cuda")
counted = torch.ones(5, device="cuda", dtype=torch.long)
for made in (
    x.masked_select(x[:1] > 0), x.unique(), torch.bincount(counted), torch.bincount(counted, minlength=9),
    torch.repeat_interleave(counted), x.unique(return_inverse=True)[1],
):
    print(tuple(made.shape), made.dtype)
print(torch.equal(x, x))
"""


def test_of_shapes_that_depend_on_values_half_is_taken(run) -> None:
    done = run(BY_VALUES, before=("--values", "none", "--clock", "modelled", "--quiet"))
    assert done.stdout.splitlines() == [
        *("(12,) torch.float32", "(12,) torch.float32", "(1,) torch.int64", "(9,) torch.int64"),
        *("(5,) torch.int64", "(6, 4) torch.int64", "False"),
    ], done.stderr


FINITE = """\
import torch
net = torch.nn.Linear(8, 8).cuda()
loss = net(torch.randn(4, 8, device="cuda")).pow(2).mean()
if not torch.isfinite(loss):
    raise RuntimeError("the loss is not finite")
print([bool(one) for one in (
    torch.isfinite(net.weight).all(), (~torch.isfinite(loss)).any(), torch.isnan(loss), torch.isinf(loss),
    loss == loss, loss == 1,
)])
"""


def test_what_nobody_computed_is_finite(run) -> None:
    """Else a program that stops where its loss is not a number stops at once."""
    done = run(FINITE, before=("--values", "none", "--clock", "modelled", "--quiet"))
    assert done.stdout.splitlines() == ["[True, False, False, False, True, False]"], done.stderr


CHECKED = """\
import torch
import torch.nn.functional as F
mean = torch.nn.Linear(8, 8).cuda()(torch.randn(4, 8, device="cuda"))
drawn = torch.distributions.Normal(mean, mean.exp()).rsample()
print(tuple(drawn.shape), tuple(F.one_hot(mean.argmax(dim=1)).shape), tuple(F.one_hot(mean.argmax(dim=1), 8).shape))
"""


def test_what_pytorch_checks_is_as_it_should_be(run) -> None:
    """Else no distribution could be made. Labels read as zero: one class, unless the program says how many."""
    done = run(CHECKED, before=("--values", "none", "--clock", "modelled", "--quiet"))
    assert done.stdout.splitlines() == ["(4, 8) (4, 1) (4, 8)"], done.stderr


ON_THE_HOST = """\
import resource
import torch
from torch import nn

def held():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

before = held()
model = nn.Linear(16384, 16384)  # 1 GiB
nn.init.xavier_uniform_(model.weight)
nn.init.normal_(model.weight)
home = model.cuda().weight.detach().cpu()
print(float(home.norm()), held() - before)
home[0] = 1.0
print(float(home.sum()), tuple(home.shape), home.stride())
small = nn.Linear(8, 8)
print(bool(small.weight.any()))
"""


def test_a_large_model_that_is_made_on_the_host_takes_no_room_there(run) -> None:
    """Neither its first values nor the zeros that come back from the device are written anywhere. Megabytes."""
    done = run(ON_THE_HOST, before=("--values", "none", "--clock", "modelled"))
    assert done.returncode == 0, done.stderr
    (norm, megabytes), summed, small = (line.split(" ", 1) for line in done.stdout.splitlines()[:3])
    assert norm == "0.0"
    assert int(megabytes) < 256
    assert summed == ["16384.0", "(16384, 16384) (16384, 1)"]
    assert small == ["True"]


LAID_OUT = """\
import torch

x = torch.ones(2, 16, 8, 8).cuda().contiguous(memory_format=torch.channels_last)
layers = torch.nn.Sequential(torch.nn.Conv2d(16, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.ReLU()).cuda()
print(layers(x).stride(), layers(x.contiguous()).stride())
"""


def test_layouts_are_those_of_a_run_with_values(run) -> None:
    printed = [
        run(LAID_OUT, before=("--values", values, "--clock", "modelled")).stdout.splitlines()[0]
        for values in ("real", "none")
    ]
    assert printed == ["(1152, 1, 192, 32) (1152, 36, 6, 1)"] * 2


def test_time_and_memory_are_those_of_a_real_run(run) -> None:
    source = LARGE.replace("16384", "256").replace("  # 34 GB", "").split("print(torch.cuda")[0]
    source += "import sys\nsys.stderr.write(str(torch.cuda.max_memory_allocated()))\n"
    found = []
    for values in ("real", "none"):
        done = run(source, before=("--values", values, "--clock", "modelled", "--json"))
        found.append((json.loads(done.stdout)["plain_step"], done.stderr.splitlines()[-1]))
    assert found[0] == found[1]


KEPT = """\
import torch

sizes = torch.tensor([3, 1, 2]).cuda()
print(sizes.tolist(), sizes[1].item(), sizes.cpu().tolist(), sizes.clone().tolist())
held = torch.empty(3, dtype=torch.int64, device="cuda")
held.copy_(sizes)
print(held.tolist())
sizes.add_(1)
held[:2] = torch.zeros(2, dtype=torch.int64).cuda()
print(sizes.tolist(), held.tolist())
torch.add(held, 1, out=held)
print(held.tolist())
"""


def test_what_came_from_the_host_is_there_until_something_is_computed(run) -> None:
    done = run(KEPT, before=("--values", "none", "--clock", "modelled"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:4] == [
        "[3, 1, 2] 1 [3, 1, 2] [3, 1, 2]",
        "[3, 1, 2]",
        "[0, 0, 0] [0, 0, 2]",
        "[0, 0, 0]",
    ]


NORMED = """\
import torch

norm = torch.nn.LayerNorm(64, device="cuda")
optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
x = torch.zeros(8, 64, device="cuda")
for step in range(4):
    norm(x).sum().backward()
    optimizer.step()
"""


def test_what_pytorch_calls_to_outline_a_result_is_no_work_of_the_program(run, tmp_path: Path) -> None:
    """PyTorch knows a layer norm's shapes from Python code of its own, which makes tensors."""
    assert run(NORMED, before=("--values", "none", "--clock", "modelled", "--save", "run.busy")).returncode == 0
    timeline = load(tmp_path / "run.busy")
    frames = [timeline.names[name] for name in timeline.frames.name.tolist()]
    assert len([name for name in frames if name.startswith("aten::empty")]) == 2  # its weight and its bias
    assert "aten::native_layer_norm_backward" in frames
