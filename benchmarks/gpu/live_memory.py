"""What `keepbusy run --memory` notes of a real GPU's memory, and what noting it costs.

    python benchmarks/gpu/live_memory.py [folder for the runs and their pages]

A small GPT that reads its loss runs under keepbusy without and with `--memory`, three times in turns: the steps as they
were recorded and as they are, and what fixing the first line is to gain. Beside the peak that was noted stands what
PyTorch counts itself over other steps of the same run. A GPU is needed; two minutes are enough.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import keepbusy
import numpy as np
from keepbusy.report.page.contents import memory_peaks

PROGRAM = """\
import torch
from torch import nn

layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=0.0)
model = nn.Sequential(nn.Embedding(8192, 512), nn.TransformerEncoder(layer, 6), nn.Linear(512, 8192)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(160):
    tokens = torch.randint(8192, (16, 256), device="cuda")
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss.item()
    if step == 120:
        torch.cuda.reset_peak_memory_stats()
print(torch.cuda.max_memory_allocated())
"""


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    print("            recorded     plain     first fix    events    peak noted, counted (MB)")
    for turn in range(3):
        for flags in ([], ["--memory"]):
            name = f"{'memory' if flags else 'without'}{turn}"
            command = ["-m", "keepbusy", "run", *flags, "--quiet", "--save", f"{name}.busy", "--page", f"{name}.html"]
            done = subprocess.run(
                [sys.executable, *command, "train.py"], cwd=folder, check=True, stdout=subprocess.PIPE, text=True
            )
            print(f"{name:9}", told(folder / f"{name}.busy", int(done.stdout)), flush=True)
    run = keepbusy.explain(keepbusy.load(folder / "memory2.busy"), turns=True)
    for peak in memory_peaks(run.turns):
        for place, size in peak["lines"]:
            print(f"{size / 1e6:9.1f} MB  {run.turns.places[place]}")
        print(f"{peak['rest'] / 1e6:9.1f} MB  before these steps, or by no known line")


def told(path: Path, counted: int) -> str:
    timeline = keepbusy.load(path)
    found = keepbusy.explain(timeline, turns=True)
    recorded = np.diff(timeline.spans.start[timeline.marks]).mean()
    first = found.plan[0].predicted.step if found.plan else found.plain_step
    peaks = [peak["allocated"] / 1e6 for peak in memory_peaks(found.turns)]
    times = "".join(f"{one / 1e6:8.2f} ms" for one in (recorded, found.plain_step, first))
    return f"{times}{len(timeline.memory):10d}    {peaks} {counted / 1e6:.1f}"


if __name__ == "__main__":
    main()
