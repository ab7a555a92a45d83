"""What a checkpoint costs the training: written in the loop, by torch.distributed.checkpoint, by keepbusy, not at all.

    python benchmarks/runtime/save_later.py [--folder /dev/shm]      (needs a GPU; writes save_later.json to $OUT)

Twenty-five training steps with one checkpoint of the model and its optimizer early on; what a variant takes longer than
the steps alone is what the checkpoint cost. Whatever is still being written then is waited for outside of the timing.
"""

import argparse
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rounds import milliseconds, show, take_turns, write
from torch.distributed import checkpoint
from torch.nn.functional import cross_entropy

import keepbusy
from keepbusy.runtime import readback

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "stalls"))
from models import TextClassifier, size

STEPS, SAVED_AFTER = size(25, 8), 2


class Save:
    """Nothing is saved. Others say what happens at the checkpoint, before an update, and after the loop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[float] = []

    def save(self, state: dict[str, Any]) -> None: ...

    def before_update(self) -> None: ...

    def finish(self) -> None: ...


class InTheLoop(Save):
    def save(self, state: dict[str, Any]) -> None:
        torch.save(state, self.folder / "in_the_loop.pt")


class Async(Save):
    """`async_save` as its documentation has it."""

    def save(self, state: dict[str, Any]) -> None:
        self.future = checkpoint.async_save(state, checkpoint_id=self.folder / "async")

    def finish(self) -> None:
        self.future.result()


class AsyncStaged(Save):
    """`async_save` with its stager in a thread and pinned memory; the program waits before it updates anything."""

    response: Any = None

    def save(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        stager = DefaultStager(StagingOptions(True, False, True, True))  # PyTorch 2.11 closes it after each save
        self.response = checkpoint.async_save(state, checkpoint_id=self.folder / "staged", async_stager=stager)

    def before_update(self) -> None:
        if self.response is not None:
            self.response.staging_completion.result()

    def finish(self) -> None:
        self.response.upload_completion.result()
        self.response = None


class Later(Save):
    def save(self, state: dict[str, Any]) -> None:
        self.saving = keepbusy.save_later(state, self.folder / "later.pt")

    def finish(self) -> None:
        self.saving.wait()


class LaterWithoutRoom(Later):
    """As if the device had no memory to spare."""

    def save(self, state: dict[str, Any]) -> None:
        room, readback._room = readback._room, lambda *_: 0
        try:
            super().save(state)
        finally:
            readback._room = room


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = TextClassifier(width=768, layers=8, heads=12).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(0, 8192, (size(32, 2), size(512, 16)), device="cuda")
        self.target = torch.zeros(len(self.tokens), dtype=torch.int64, device="cuda")

    def run(self, way: Save) -> float:
        spent = milliseconds(lambda: self._steps(way))
        way.finish()
        return spent

    def _steps(self, way: Save) -> None:
        for step in range(STEPS):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = cross_entropy(self.model(self.tokens).float(), self.target)
            self.optimizer.zero_grad()
            loss.backward()
            way.before_update()
            self.optimizer.step()
            if step == SAVED_AFTER:
                start = time.perf_counter()
                way.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})
                way.calls.append((time.perf_counter() - start) * 1e3)

    def gigabytes(self) -> float:
        return 3 * sum(parameter.nbytes for parameter in self.model.parameters()) / 1e9


def ways(folder: Path) -> dict[str, Save]:
    made: dict[str, Callable[[Path], Save]] = {
        "no checkpoint": Save,
        "torch.save in the loop": InTheLoop,
        "dcp.async_save": Async,
        "dcp.async_save, staged": AsyncStaged,
        "save_later": Later,
        "save_later, no room": LaterWithoutRoom,
    }
    return {name: make(folder) for name, make in made.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--folder", type=Path, help="where to write (default: the folder for temporary files)")
    folder = Path(tempfile.mkdtemp(dir=options.parse_args().folder))
    warnings.simplefilter("ignore")  # async_save says each time that there is but one process
    try:
        training, all_ways = Training(), ways(folder)
        rows = take_turns({name: lambda way=way: training.run(way) for name, way in all_ways.items()})
    finally:
        shutil.rmtree(folder)
    title = f"{STEPS} steps with a checkpoint of {training.gigabytes():.2f} GB: milliseconds in all"
    show(title, rows, "no checkpoint")
    calls = {name: way.calls for name, way in all_ways.items()}
    print("\nmilliseconds until the call came back: the first, and each other")
    for name, spent in calls.items():
        print(f"  {name:28} {'  '.join(f'{one:8.1f}' for one in spent)}")
    write("save_later", {"gigabytes": training.gigabytes(), "loop_ms": rows, "call_ms": calls})


if __name__ == "__main__":
    main()
