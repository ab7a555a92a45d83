"""What Kineto's recording costs per event on this host: `python kineto_cost.py OUT.json`.

Each workload is timed plain, then under the profiler, in a process of its own for each recorder; every workload keeps
the GPU waiting for the host, so the added time is host time.
"""

import collections
import json
import os
import sys
import tempfile
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile, record_function

CPU, CUDA = ProfilerActivity.CPU, ProfilerActivity.CUDA
RECORDERS = {
    "cuda": dict(activities=[CUDA]),
    "cpu": dict(activities=[CPU]),
    "cpu+cuda": dict(activities=[CPU, CUDA]),
    "cpu+cuda, shapes": dict(activities=[CPU, CUDA], record_shapes=True),
    "cpu+cuda, stacks": dict(activities=[CPU, CUDA], with_stack=True),
}


def nothing():
    pass


def workloads():
    """name -> (a function that does it once, how often a measurement repeats it)"""
    x = torch.randn(64, 64, device="cuda")
    deep = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]).to("cuda")
    other = torch.randn(64, 64, device="cuda")

    def train():
        deep.zero_grad()
        F.mse_loss(deep(x), other).backward()

    def python():
        for _ in range(100):
            nothing()

    def module():
        with torch.no_grad():
            deep(x)

    return {
        "add_ (1 op, 1 launch)": (lambda: x.add_(1e-9), 1000),
        "add (1 op, 1 allocation, 1 launch)": (lambda: x + 1.0, 1000),
        "view (1 op, no launch)": (lambda: x.view(-1), 1000),
        "copy_ on the device": (lambda: other.copy_(x), 1000),
        "item": (lambda: x[0, 0].item(), 300),
        "8 modules forward": (module, 100),
        "8 modules forward and backward": (train, 60),
        "100 empty Python calls": (python, 100),
    }


def timed(work, count):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e6


def measure(recorder):
    works = workloads()
    for work, count in works.values():
        timed(work, count)
    plain = {name: min(timed(work, count) for _ in range(3)) for name, (work, count) in works.items()}
    recorded, after = {}, {}
    with profile(**RECORDERS[recorder]) as traced:
        for name, (work, count) in works.items():
            timed(work, 20)
            torch.cuda.synchronize()
            with record_function(f"workload {name}"):
                recorded[name] = timed(work, count)
    for name, (work, count) in works.items():
        after[name] = min(timed(work, count) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        traced.export_chrome_trace(f"{folder}/trace.json")
        with open(f"{folder}/trace.json") as file:
            events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    windows = {
        event["name"][9:]: (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("workload ")
    }
    rows = {}
    for name, (work, count) in works.items():
        low, high = windows.get(name, (0, 0))
        seen = collections.Counter(event["cat"] for event in events if low <= event["ts"] < high and "cat" in event)
        rows[name] = dict(
            plain_us=round(plain[name], 2),
            recorded_us=round(recorded[name], 2),
            added_us=round(recorded[name] - plain[name], 2),
            after_us=round(after[name], 2),
            events={cat: round(number / count, 2) for cat, number in sorted(seen.items()) if number >= count // 2},
        )
    return rows


if __name__ == "__main__":
    target, result = sys.argv[1], {}
    for recorder in RECORDERS:  # nothing here has touched CUDA: each child starts it afresh
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(read)
            try:
                with os.fdopen(write, "w") as out:
                    json.dump(
                        dict(rows=measure(recorder), gpu=torch.cuda.get_device_name(), torch=torch.__version__), out
                    )
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as answer:
            text = answer.read()
        os.waitpid(pid, 0)
        if text:
            result[recorder] = json.loads(text)
        print(
            recorder,
            *(
                f"\n  {name:36s} plain {row['plain_us']:8.2f} us  recorded {row['recorded_us']:8.2f}  after {row['after_us']:8.2f}  {row['events']}"
                for name, row in json.loads(text or '{"rows": {}}')["rows"].items()
            ),
            flush=True,
        )
        with open(target, "w") as out:
            json.dump(result, out, indent=1)
