"""What these programs tell of themselves on real GPUs: a step's seconds, and the memory that tensors took at most."""

import json
import os
import time

import torch

WARM_UP = 4


def loop(batches):
    """The batches, and after the last one, on the first rank, one line of figures."""
    began = []
    for batch in batches:
        torch.cuda.synchronize()
        began.append(time.perf_counter())
        yield batch
    torch.cuda.synchronize()
    steps = sorted(after - before for before, after in zip(began[WARM_UP:], began[WARM_UP + 1 :], strict=False))
    if os.environ.get("RANK", "0") == "0" and steps:
        told = {"step": steps[len(steps) // 2], "peak": torch.cuda.max_memory_allocated()}
        print("PLANNED " + json.dumps(told), flush=True)
