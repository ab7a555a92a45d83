"""With a modelled clock operators on the host's tensors take their time: their laws are those of a measured host."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_python import Run

from keepbusy.virtual.costs.device import read
from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.pytorch.host_side import PYTHON, PythonCalls, time_of

MEASURED = Path(__file__).parents[1] / "gpu" / "truth" / "host_operators.json"
MEASURED_IN = read("h100")  # a common host, as all but the H200 of the device files have
FLOAT, BYTES, LONG = torch.float32, torch.uint8, torch.int64
CASES: dict[str, tuple[str, list[torch.dtype], torch.dtype, int]] = {
    "zeros": ("zeros", [], FLOAT, 1),
    "rand": ("rand", [], FLOAT, 1),
    "randn": ("randn", [], FLOAT, 1),
    "randint": ("randint", [], LONG, 1),
    "randperm": ("randperm", [], LONG, 1),
    "add": ("add", [FLOAT, FLOAT], FLOAT, 1),
    "sqrt": ("sqrt", [FLOAT], FLOAT, 1),
    "where": ("where", [LONG], LONG, 1),
    "bytes to float": ("to", [BYTES], FLOAT, 1),
    "float to half": ("to", [FLOAT], torch.bfloat16, 1),
    "clone": ("clone", [FLOAT], FLOAT, 1),
    "stack of rows": ("stack", [FLOAT], FLOAT, 1),
    "roll": ("roll", [FLOAT], FLOAT, 1),
    "argmax": ("argmax", [FLOAT], LONG, 16),
    "gather": ("getitem", [FLOAT, LONG], FLOAT, 1),
    "sort": ("sort", [FLOAT], FLOAT, 1),
    "avg_pool 3x3": ("avg_pool2d", [FLOAT], FLOAT, 1),
    "resize": ("interpolate", [FLOAT], FLOAT, 1),
    "conv 3x3": ("conv2d", [FLOAT], FLOAT, 1),
}
"""Of each measured case the operator, the types of its inputs and of its result, and how many times shorter that is."""

SHARDED = """
import time, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
for shard in (False, True):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))).cuda()
    for layer in (*model, model) if shard else ():
        fully_shard(layer)
    for _ in range(3):
        began = time.perf_counter()
        model(torch.ones(4, 8, device="cuda")).sum().backward()
    print("step", time.perf_counter() - began)
dist.destroy_process_group()
"""


def test_the_laws_hold_against_what_was_measured() -> None:
    ratios = {}
    for case, times in json.loads(MEASURED.read_text())["nanoseconds"].items():
        for where, measured in times.items():
            size, threads = where.split(" x")
            if case in CASES and threads == "16" and size != "16":
                ratios[f"{case} {size}"] = _predicted(case, int(size)) / measured
    assert 0.7 < statistics.median(ratios.values()) < 1.4
    assert statistics.median(max(one, 1 / one) for one in ratios.values()) < 1.6


def _predicted(case: str, size: int) -> int:
    name, taken, given, shorter = CASES[case]
    inputs, result = [torch.empty(size, dtype=one) for one in taken], torch.empty(size // shorter, dtype=given)
    return time_of(replace(MACHINE.device, host_tensors=MEASURED_IN.host_tensors), name, inputs, [result])


def _spent(does: Callable[[], Any]) -> int:
    """Modelled nanoseconds of the host, written down or not yet."""
    host = MACHINE.clock.host()
    before = host.now + host.modelled_time
    does()
    return host.now + host.modelled_time - before


def test_drawing_a_million_numbers_takes_milliseconds() -> None:
    duration = 1_000_000 * MACHINE.device.host_tensors.draw
    assert _spent(lambda: torch.randn(1_000_000)) == pytest.approx(duration, rel=0.01)
    assert _spent(torch.empty(1_000_000).uniform_) == pytest.approx(duration, rel=0.01)


def test_a_view_takes_next_to_none_and_a_copy_takes_its_bytes() -> None:
    x = torch.zeros(1000, 9000)
    assert _spent(lambda: x[10:20].T) < 10_000
    assert _spent(x.T.contiguous) == pytest.approx(72_000_000 / MACHINE.device.host_tensors.streaming, rel=0.01)
    assert _spent(lambda: x.add_(1)) == pytest.approx(72_000_000 / MACHINE.device.host_tensors.streaming, rel=0.01)
    assert _spent(lambda: (x.shape, x.device, x.dtype, x.grad)) == 0


def test_writing_into_a_part_takes_what_is_written() -> None:
    batch, picture = torch.zeros(64, 1000), torch.zeros(1000)

    def write() -> None:
        batch[3] = picture

    assert _spent(write) < MACHINE.device.host.view + 500


def test_sleeping_takes_as_long_as_it_was_to_last() -> None:
    assert _spent(lambda: time.sleep(2e-6)) == 2_000


def test_what_the_device_computes_is_no_work_of_the_host() -> None:
    """Its values come from operators on host tensors, which the program never called."""
    weight = torch.randn(256, 256, device="cuda", requires_grad=True)

    def backward(goes_back: Callable[[torch.Tensor], Any]) -> int:
        weight.grad = None
        loss = (weight @ weight).relu().sum()
        return _spent(lambda: goes_back(loss))

    method, function = backward(torch.Tensor.backward), backward(torch.autograd.backward)
    assert method == function < 1_000_000


def test_python_beside_operators_takes_time_by_its_calls() -> None:
    def recurring(depth: int) -> int:
        return recurring(depth - 1) if depth > 1 else 1

    host = MACHINE.clock.host()
    before = host.modelled_time
    with PythonCalls():
        recurring(10)
        with PythonCalls():  # as one hook calls another: each call counts once
            recurring(30)
    assert host.modelled_time - before == 40 * PYTHON.call
    host.modelled_time = before


def test_a_block_that_is_gathered_costs_the_host_its_hooks(run: Run) -> None:
    ended = run(SHARDED, before=("--clock", "modelled", "--values", "none", "--ranks", "2", "--alike", "--quiet"))
    told = [float(line.split()[-1]) for line in ended.stdout.splitlines()]
    plain, sharded = told
    # some thousand calls a block; what is gathered and scattered alone takes 0.7 ms a block
    assert sharded - plain > 8 * 900 * PYTHON.call / 1e9, ended.stderr


SMALL = """
import torch
from torch import nn
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def suppress(boxes):
    for _ in range(200):
        boxes = torch.minimum(boxes, boxes + 1).clamp(min=0)
    return boxes

for step in range(20):
    out = model(torch.ones(64, 64, device="cuda"))
    boxes = suppress(out.detach().cpu())
    kept = [1, 2, 3]
    loss = boxes.sum().cuda() * out.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_many_small_operators_stand_where_they_are(run: Run) -> None:
    """Each takes some microseconds and has no row of its own: together they are no work of the line after them."""
    ended = run(SMALL, before=("--clock", "modelled", "--json"))
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    [work] = [one for one in told["plan"] if "host_work" in one["causes"]]
    assert (work["fix"], work["where"]) == ("compute_on_gpu", ["train.py:14"])


def test_what_torchscript_traces_on_the_host_is_traced_as_ever(run: Run) -> None:
    """There sizes are tensors."""
    traces = "traced = torch.jit.trace(torch.nn.Linear(8, 8), torch.ones(1, 8))"
    done = run(f"import torch\n{traces}\nprint('linear' in traced.code)\n", before=("--clock", "modelled"))
    assert done.stdout.splitlines()[:1] == ["True"], done.stderr
