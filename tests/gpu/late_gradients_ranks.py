"""Two ranks: programs with micro-batches, as they are and with late gradients. Prints JSON.

Over gloo on the host; called with `nccl`, on a GPU each.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from keepbusy.fix.live.late_gradients import LateGradients
from keepbusy.fix.syntax.loop_turns import MARK, mark_last_turns
from keepbusy.instrument.patches import Patches

HEAD = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
rank, found = dist.get_rank(), []
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
torch.manual_seed(rank)
data = [torch.randn(6, 4) for _ in range(42)]
def loss_of(x): return model(x).square().mean() / 4
"""
TURN = """
total = 0.0
for i, x in enumerate(data):
    {before}
    loss = loss_of(x)
    loss.backward()
    total += loss.item()
    {after}
    if {last}:
        {step}; optimizer.step()
        optimizer.zero_grad()
found.append(total)
"""


def turn(before: str = "pass", after: str = "pass", last: str = "(i + 1) % 4 == 0", step: str = "pass") -> str:
    return TURN.format(before=before, after=after, last=last, step=step)


PROGRAMS = {
    "four micro-batches": turn(),
    "clipped once a step": turn(step="found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())"),
    "an inner loop": """
for step in range(8):
    for at in range(4):
        loss = loss_of(data[4 * step + at])
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "a group that is left, and thrown away": turn() + "optimizer.zero_grad()\n" + turn(),
    "a group that is left, and goes on": turn() + turn(),
    "gradients looked at in the middle": "def look():\n    return model.module[0].weight.grad.norm().item()\n"
    + turn(before="found.append(look()) if i == 30 else None"),
    "a step in the middle": "def step_now(): optimizer.step()\n" + turn(before="step_now() if i == 30 else None"),
    "gradients looked at after each": turn(after="found.append(model.module[0].weight.grad.norm().item())"),
    "a function after each": "def log(): found.append(model.module[0].weight.grad.norm().item())\n"
    + turn(after="log()"),
    "a condition that the turn changes": "each = 4\n" + turn(after="each = 4", last="(i + 1) % each == 0"),
    "other turns on each rank": turn(last="(i + rank) % 4 == 0"),
    "a hook for what travels": "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
    "model.register_comm_hook(None, default_hooks.fp16_compress_hook)\n" + turn(),
    "evaluated in between": turn() + "model.eval()\nwith torch.no_grad(): found.append(loss_of(data[0]).item())\n"
    "model.train()\n" + turn(),
}
HELD = {
    **dict.fromkeys(("four micro-batches", "clipped once a step"), (23, "")),
    "an inner loop": (15, ""),
    **dict.fromkeys(
        ("a group that is left, and thrown away", "a group that is left, and goes on", "evaluated in between"), (55, "")
    ),
    "gradients looked at in the middle": (14, "the program looks at gradients between micro-batches"),
    "a step in the middle": (14, "an optimizer stepped before the last micro-batch"),
    "other turns on each rank": (0, "optimizers step in other turns than the source says"),
}
"""How many backward passes keep their gradients for later, and why it ends; elsewhere none does."""


def check(name: str, ranks: list[tuple[float, int, str, int, int]]) -> None:
    """What `main` tells of a program: weights, buffers, losses and what it found of its gradients, on both ranks."""
    times, off_because = HELD.get(name, (0, ""))
    for furthest, done, why, collectives, with_it in ranks:
        assert furthest < 5e-6 if times else furthest == 0
        assert done == times
        assert why.startswith(off_because) if off_because else not why
        assert with_it < collectives or not times


def result(source: str, fix: LateGradients | None) -> tuple[list[torch.Tensor], int]:
    """Weights, buffers and what was found; and how many collectives that took."""
    tree, patches = ast.parse(HEAD + source), Patches()
    if fix is not None:
        mark_last_turns(tree)
        fix.patch(patches)
        fix.switch.on = True
        setattr(builtins, MARK, fix.mark)
    names: dict[str, Any] = {}
    group = dist.distributed_c10d._get_default_group()
    before = group._get_sequence_number_for_group()
    try:
        exec(compile(tree, "train.py", "exec"), names)
    finally:
        patches.undo()
    values = [*names["model"].state_dict().values(), torch.tensor(names["found"])]
    return [one.double() for one in values], group._get_sequence_number_for_group() - before


def main() -> None:
    backend = "nccl" if "nccl" in sys.argv else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group(backend)
    told = {}
    for name, source in PROGRAMS.items():
        fix = LateGradients()
        (plain, was), (late, now) = result(source, None), result(source, fix)
        both = [(a.flatten(), b.flatten()) for a, b in zip(plain, late, strict=True) if a.numel()]
        furthest = max(((a - b).abs() / (a.abs() + 1e-2)).max().item() for a, b in both)
        ranks: list[Any] = [None, None]
        dist.all_gather_object(ranks, (furthest, fix.switch.done.total(), fix.switch.off_because, was, now))
        told[name] = ranks
    if dist.get_rank() == 0:
        print(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
