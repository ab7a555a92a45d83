"""One variant of a case as a program of its own, or a rank of it: `python variant.py cases/NAME.py stalled|fixed`."""

import importlib.util
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import keepbusy


def main(path: str, variant: str) -> None:
    if "WORLD_SIZE" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    case = importlib.util.module_from_spec(spec)
    sys.modules[Path(path).stem] = case  # a loader's workers look for it
    spec.loader.exec_module(case)
    case.main(keepbusy.step, fixed=variant == "fixed")
    torch.cuda.synchronize()
    if "WORLD_SIZE" in os.environ:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
