"""Stopping together: an all-reduce read every step, keepbusy's agreement, and none, which is the bound.

torchrun --nproc-per-node 2 benchmarks/runtime/agree.py        (writes agree.json to $OUT)
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rounds import milliseconds, show, take_turns, write
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import keepbusy
from keepbusy.runtime import gather_later

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "stalls"))
from models import TextClassifier, size

STEPS = size(10, 3)
Asks = Callable[[Tensor], object]


def nobody(loss: Tensor) -> None: ...


def all_reduce(_: Tensor) -> bool:
    flag = torch.zeros(1, device="cuda")
    dist.all_reduce(flag)
    return flag.item() > 0


def agree(_: Tensor) -> bool:
    return keepbusy.agree(False)


def agree_on_nan(loss: Tensor) -> bool:
    return keepbusy.agree(torch.isnan(loss))


class Gathered:
    """The mean loss of all ranks, shown a step late."""

    def __init__(self) -> None:
        self.before = None

    def __call__(self, loss: Tensor) -> None:
        if self.before is not None:
            self.shown = f"{self.before.tensor.mean():.4f}"
        self.before = gather_later(loss)


def gathered_at_once(loss: Tensor) -> str:
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return f"{mean.item():.4f}"


class Training:
    def __init__(self, prepares: bool, batch: int, length: int, **shape: int) -> None:
        torch.manual_seed(0)
        model = TextClassifier(**shape).cuda()
        self.model = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(0, 8192, (size(batch, 2), size(length, 16)), device="cuda")
        self.target = torch.zeros(len(self.tokens), dtype=torch.int64, device="cuda")
        self.prepares = prepares

    def run(self, asks: Asks) -> float:
        return milliseconds(lambda: self._steps(asks), STEPS)

    def _steps(self, asks: Asks) -> None:
        for _ in range(STEPS):
            if self.prepares:
                torch.randn(size(16, 2), size(512, 16), size(48, 8)).argmax(-1)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = cross_entropy(self.model(self.tokens).float(), self.target)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            asks(loss)


def stops_together() -> list[int]:
    """The step at which each rank stopped, after the last one said yes at step 7."""
    step = 0
    for step in range(20):
        if keepbusy.agree(step == 7 and dist.get_rank() == dist.get_world_size() - 1):
            break
    return [int(one) for one in gather_later(step).tensor]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    asks = {
        "nobody asks": nobody,
        "all_reduce and item": all_reduce,
        "agree": agree,
        "agree on a NaN of the device": agree_on_nan,
        "all_reduce of the loss, read": gathered_at_once,
        "gather_later, a step late": Gathered(),
    }
    trainings = {
        "the host prepares batches": Training(True, 16, 512, width=768, layers=8, heads=12),
        "launch-bound": Training(False, 8, 64, width=64, layers=8, heads=4),
        "GPU-bound": Training(False, 16, 512, width=768, layers=8, heads=12),
    }
    found: dict[str, object] = {"stopped_at": stops_together()}
    for title, training in trainings.items():
        rows = take_turns({name: lambda one=one, t=training: t.run(one) for name, one in asks.items()})
        found[title] = rows
        if dist.get_rank() == 0:
            show(f"{dist.get_world_size()} ranks, {title}: milliseconds a step", rows, "nobody asks")
    if dist.get_rank() == 0:
        print(f"\nall ranks stopped at the same step: {found['stopped_at']}")
        write("agree", {"ranks": dist.get_world_size(), **found})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
