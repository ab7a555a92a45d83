"""What all programs of this set ask about the machine and their arguments.

    PYTHONPATH=. python one/NAME.py --variant stalled|fixed
    PYTHONPATH=. torchrun --standalone --nproc_per_node=2 ranks/NAME.py --variant stalled|fixed

Rank 0 prints the whole run's seconds, without imports and process start, as its last line. FIFTH_SMALL=1 shrinks the shapes for
a CPU, where ranks talk through gloo; FIFTH_SCALE=0.5 halves the number of turns.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist

SMALL = os.environ.get("FIFTH_SMALL") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def size(full, small):
    return small if SMALL else full


def turns(full, small):
    return small if SMALL else max(small, round(full * float(os.environ.get("FIFTH_SCALE", 1))))


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def join_ranks(backend=None):
    local = int(os.environ["LOCAL_RANK"])
    if DEVICE == "cuda":
        torch.cuda.set_device(local)
        dist.init_process_group(backend or "nccl", device_id=torch.device("cuda", local))
    else:
        dist.init_process_group("gloo")


def run(main, join=True, backend=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="stalled")
    variant = parser.parse_args().variant
    if join and "LOCAL_RANK" in os.environ:
        join_ranks(backend)
    torch.manual_seed(0)
    start = time.perf_counter()
    main(variant)
    synchronize()
    seconds = time.perf_counter() - start
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"{seconds:.3f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
