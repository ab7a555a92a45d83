"""What a profile tells of the GPU after something else in its process: each case is a process of its own.

    python benchmarks/gpu/earlier_profiles.py

Of each case: the kernels and the calls of CUDA in a profile of five steps, and what `keepbusy.record` makes of sixty
more. A GPU is needed; a minute is enough.
"""

from __future__ import annotations

import subprocess
import sys

BEGIN = """
import collections, json, os, tempfile, time
import torch
from torch.profiler import ProfilerActivity, profile

CPU, CUDA = ProfilerActivity.CPU, ProfilerActivity.CUDA
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.ones(256, 512, device="cuda")


def step():
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss.item()


def profiled(*activities):
    torch.cuda.synchronize()
    with profile(activities=list(activities)) as recorded:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
    return recorded


def graph():
    side = torch.cuda.CUDAGraph()
    with torch.cuda.graph(side):
        y = x @ x.T
    for _ in range(50):
        side.replay()
    torch.cuda.synchronize()


for _ in range(3):
    step()
"""
PROFILED = """
path = tempfile.mktemp(".json")
profiled(CPU, CUDA).export_chrome_trace(path)
rows = collections.Counter(row.get("cat") for row in json.load(open(path))["traceEvents"])
said = f"{rows['kernel']} kernels, {rows['cuda_runtime']} calls"
"""
RECORDED = """
import keepbusy
with keepbusy.record() as run:
    for _ in range(60):
        step()
try:
    told = f"{run.explain().steps} steps"
except Exception as error:
    told = str(error)
print(said, "| record:", told + (" (at the second look)" if run._run._blind else ""))
"""
LETS_GO = "os.environ['TEARDOWN_CUPTI'] = '1'\n"
BEFORE = {
    "nothing": "",
    "CPU and GPU profiled": "profiled(CPU, CUDA)",
    "the GPU profiled": "profiled(CUDA)",
    "the GPU profiled, ten seconds": "profiled(CUDA); time.sleep(10)",
    "the CPU profiled": "profiled(CPU)",
    "graphs": "graph()",
    "the GPU profiled, then graphs": "profiled(CUDA)\nfor _ in range(20): graph()",
    "the GPU profiled, CUPTI let go": LETS_GO + "profiled(CUDA)\nfor _ in range(5): step(); time.sleep(0.05)",
    "the GPU profiled just before, CUPTI to let go": LETS_GO + "profiled(CUDA)",
}


def main() -> None:
    cases = {f"{name}; profile and record": f"{BEGIN}{code}\n{PROFILED}{RECORDED}" for name, code in BEFORE.items()}
    cases |= {f"{name}; record": f"{BEGIN}{code}\nsaid = ''\n{RECORDED}" for name, code in BEFORE.items()}
    running = {
        name: subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name, code in cases.items()
    }
    for name, process in running.items():
        try:
            out, errors = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = "", "hangs"
        print(f"{name}: {out.strip() or errors.strip()[-300:]} (exit code {process.returncode})", flush=True)


if __name__ == "__main__":
    main()
