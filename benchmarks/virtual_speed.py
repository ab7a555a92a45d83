"""Claim: a small operator of the virtual GPU takes 25 us, a program of a CPU's size 1.3 times its time there, and a
training step of 7 billion parameters without values less than two minutes.

    python benchmarks/virtual_speed.py [a checkout of karpathy/nanoGPT]

nanoGPT runs its `train.py` unchanged, as its README says for a CPU, on made-up text: plain on the CPU, and on the
virtual GPU, three times in turns.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

SMALL = """
import time, torch
from torch.nn import functional
x, weight = torch.ones(8, 8, device="cuda"), torch.ones(8, 8, device="cuda", requires_grad=True)
for name, call in {
    "add": lambda: x + x,
    "mul_": lambda: x.mul_(1.0),
    "linear": lambda: functional.linear(x, weight),
    "view": lambda: x.view(64),
}.items():
    spent = []
    for _ in range(10):
        begun = time.perf_counter()
        for _ in range(200):
            call()
        spent.append((time.perf_counter() - begun) / 200)
    print(f"{name:8s} {sorted(spent)[5] * 1e6:6.1f} us (least {min(spent) * 1e6:.1f})")
"""
LARGE = """
import time, torch
from torch import nn
with torch.device("cuda"):
    layer = nn.TransformerEncoderLayer(4096, 32, 16384, batch_first=True, norm_first=True, dtype=torch.bfloat16)
    model = nn.Sequential(nn.Embedding(32000, 4096, dtype=torch.bfloat16), nn.TransformerEncoder(layer, 32),
                          nn.Linear(4096, 32000, dtype=torch.bfloat16))
optimizer = torch.optim.AdamW(model.parameters())
print(f"{sum(one.numel() for one in model.parameters()) / 1e9:.1f} billion parameters")
begun = time.perf_counter()
for step in range(3):
    tokens = torch.randint(0, 32000, (2, 2048), device="cuda")
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: {time.perf_counter() - begun:.1f} s")
"""
OPTIONS = [
    "config/train_shakespeare_char.py", "--compile=False", "--eval_iters=20", "--log_interval=1", "--block_size=64",
    "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128", "--max_iters=60", "--lr_decay_iters=2000",
    "--dropout=0.0", "--dtype=float32",
]  # fmt: skip
KEEPBUSY = [sys.executable, "-m", "keepbusy", "run", "--on", "h200", "--clocks", "real"]
TURNS = 3


def main(checkout: str = "") -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(run(Path(folder), SMALL), end="")
        begun = time.perf_counter()
        print(run(Path(folder), LARGE, "--values", "none"), end="")
        print(f"from nothing to the report: {time.perf_counter() - begun:.0f} s")
        if checkout:
            nanogpt(Path(shutil.copytree(checkout, Path(folder) / "nanoGPT")))


def run(folder: Path, source: str, *options: str) -> str:
    script = folder / "program.py"
    script.write_text(source)
    done = subprocess.run([*KEEPBUSY, *options, str(script)], capture_output=True, text=True, check=True, cwd=folder)
    return done.stdout.partition("\nkeepbusy")[0]


def nanogpt(folder: Path) -> None:
    text = folder / "data" / "shakespeare_char"
    for part in ("train", "val"):
        np.random.default_rng(0).integers(0, 65, 100_000, dtype=np.uint16).tofile(text / f"{part}.bin")
    (text / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))
    plain, virtual = [], []
    for _ in range(TURNS):
        plain.append(trained(folder, [sys.executable], "cpu"))
        virtual.append(trained(folder, KEEPBUSY, "cuda"))
    ours, theirs = (median(milliseconds for milliseconds, _ in turns) for turns in (virtual, plain))
    losses = "the same" if virtual[0][1] == plain[0][1] else "OTHERS"
    print(f"nanoGPT  {theirs:.1f} ms a step on the CPU, {ours:.1f} on the virtual GPU: x {ours / theirs:.2f}")
    print(f"         of {len(plain[0][1])} losses: {losses}")


def trained(folder: Path, command: list[str], device: str) -> tuple[float, list[str]]:
    """Milliseconds that a step took, by its own word, and its losses."""
    done = subprocess.run(
        [*command, "train.py", *OPTIONS, f"--device={device}"],
        capture_output=True, text=True, check=True, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    steps = re.findall(r"iter \d+: loss ([\d.]+), time ([\d.]+)ms", done.stdout)
    return median(float(time) for _, time in steps), [loss for loss, _ in steps]


if __name__ == "__main__":
    main(*sys.argv[1:2])
