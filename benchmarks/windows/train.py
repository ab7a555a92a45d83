"""Trains on the GPU: `train.py STEPS [fixed_evaluation] [saved_later] [drifts] [dies_in=N]`; says how long it took.

Every fortieth step it writes a checkpoint, every fiftieth it evaluates, reading each batch's loss. With `drifts` each
step of the second half does some more host work. With `dies_in=N` it kills itself within keepbusy's N-th window.
"""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

import keepbusy

STEPS, HOW = int(sys.argv[1]), set(sys.argv[2:])
DIES = next((int(one[8:]) for one in HOW if one.startswith("dies_in=")), 0)
WIDTH, DEPTH, BATCHES = 1024, 24, 60
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
if not CUDA:  # to try it out
    WIDTH, DEPTH, BATCHES = 64, 4, 60


def words(count: int) -> int:
    """Bookkeeping of no use, on the host."""
    return len(sorted(str(number) for number in range(count)))


def evaluate(model: torch.nn.Module, batches: list[torch.Tensor]) -> float:
    total = 0.0
    for batch in batches:
        loss = model(batch).pow(2).mean()
        total += loss.item()
        words(1500)
    return total


def evaluate_fixed(model: torch.nn.Module, batches: list[torch.Tensor]) -> float:
    total = torch.zeros((), device=DEVICE)
    for batch in batches:
        total += model(batch).pow(2).mean()
        words(1500)
    return float(total)


class Windows:
    """Counts keepbusy's windows, as far as the interpreter shows them."""

    def __init__(self) -> None:
        self.count, self.open = 0, False

    def look(self) -> bool:
        monitoring = getattr(sys, "monitoring", None)
        now = any(monitoring.get_tool(number) == "keepbusy" for number in range(6)) if monitoring else False
        self.count += now and not self.open
        self.open = now
        return now


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    data, validation = torch.randn(64, WIDTH, device=DEVICE), [torch.randn(1024, WIDTH, device=DEVICE)] * BATCHES
    windows, path, took = Windows(), Path(tempfile.mkdtemp()) / "model.pt", []
    for step in range(1, STEPS + 1):
        began = time.perf_counter()
        loss = model(data).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if "drifts" in HOW and step > STEPS // 2:
            words(10_000)
        if step % 50 == 0:
            (evaluate_fixed if "fixed_evaluation" in HOW else evaluate)(model, validation)
        if step % 40 == 0:
            if "saved_later" in HOW:
                keepbusy.save_later(model.state_dict(), path)
            else:
                torch.save(model.state_dict(), path)
        took.append(time.perf_counter() - began)
        if step % 100 == 0:
            print(f"<{step}>", flush=True)
        if DIES and windows.look() and windows.count == DIES:
            words(3000)
            os.kill(os.getpid(), signal.SIGSEGV)
    if CUDA:
        torch.cuda.synchronize()
    print("TOOK " + json.dumps({"mean": 1e3 * sum(took[30:]) / len(took[30:]), "seconds": sum(took)}), flush=True)


main()
