"""What these programs share: their device, their arguments and a stopwatch.

    torchrun --standalone --nproc_per_node=2 ranks/NAME.py [--fixed] [--steps 20 …]

Rank 0 prints the run's own seconds, without imports and process start, as its last line. Where there is no GPU the ranks
talk through gloo; every size is an option, so that a CPU can bear them.
"""
import argparse
import os
import time

import torch
import torch.distributed as dist

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if CUDA else torch.device("cpu")


def run(main, backend="nccl", **sizes):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if CUDA:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group(backend if CUDA else "gloo")
    torch.manual_seed(0)
    start = time.perf_counter()
    main(args)
    if CUDA:
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        print(f"{time.perf_counter() - start:.3f}", flush=True)
    dist.destroy_process_group()
