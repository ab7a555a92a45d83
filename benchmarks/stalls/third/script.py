"""How a program of this set runs as a plain script, and what all of them ask about the machine.

    PYTHONPATH=benchmarks/stalls:benchmarks/stalls/third python one/X.py [--fixed]
    PYTHONPATH=... torchrun --standalone --nproc_per_node=2 ranks/X.py [--fixed]

The only output is the whole run's seconds, without imports and process start. STALLBENCH_SMALL=1 shrinks the shapes
for a CPU, where the ranks talk through gloo; THIRD_SCALE=0.5 halves the number of turns.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = float(os.environ.get("THIRD_SCALE", 1))


def turns(full, small):
    """How often the main loop turns: `full` times the scale, or `small` with STALLBENCH_SMALL=1."""
    return small if os.environ.get("STALLBENCH_SMALL") == "1" else max(small, round(full * SCALE))


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def start_ranks():
    """Joins the other ranks if torchrun, or measure_third.py, started several."""
    if "LOCAL_RANK" in os.environ:
        local = int(os.environ["LOCAL_RANK"])
        if DEVICE == "cuda":
            torch.cuda.set_device(local)
            dist.init_process_group("nccl", device_id=torch.device("cuda", local))
        else:
            dist.init_process_group("gloo")


def run(main):
    start_ranks()
    flags = [argument.partition("=")[2] or True for argument in sys.argv[1:] if argument.startswith("--fixed")]
    start = time.perf_counter()
    main(lambda: None, fixed=flags[0] if flags else False)
    synchronize()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{time.perf_counter() - start:.3f}")
    if dist.is_initialized():
        dist.destroy_process_group()
