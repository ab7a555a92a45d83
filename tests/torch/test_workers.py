"""Loader workers of a program on the virtual GPU: their own time counts, not how long ours makes them run ahead."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

LOADER = """\
import time
import torch
from torch.utils.data import DataLoader, Dataset

class Drawn(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        begun = time.thread_time()
        while time.thread_time() < begun + 0.02:  # the processor's, however busy the machine is
            pass
        return torch.ones(8)

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
large = torch.ones(1000, 1000).cuda()
for x in DataLoader(Drawn(), batch_size=1, num_workers=2, WORKERS):
    large @ large  # tens of milliseconds here, a tenth of one on the device
    model(x.cuda()).sum().backward()
    optimizer.step()
"""


def test_workers_do_not_run_ahead_while_values_are_computed(run) -> None:
    done = run(LOADER.replace("WORKERS", "pin_memory=True"), before=("--clock", "measured", "--json"))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["causes"][0]["cause"] == "input_late"
    assert said["plain_step"] > 7  # 20 ms, in turns; the device needs a fraction of one


def test_spawned_workers_say_nothing_and_work(run) -> None:
    source = LOADER.replace("WORKERS", 'multiprocessing_context="spawn"').replace("num_workers=2", "num_workers=1")
    begin = source.index("model =")
    guarded = "if __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in source[begin:].splitlines())
    done = run(source[:begin] + guarded, before=("--clock", "measured"))
    assert done.returncode == 0, done.stderr
    assert " of an iteration." in done.stdout


def test_on_a_modelled_clock_they_take_no_time_and_nothing_else_is_said(run) -> None:
    done = run(LOADER.replace("WORKERS", ""), before=("--clock", "modelled"))
    assert (done.returncode, done.stderr) == (0, "")
