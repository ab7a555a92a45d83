"""Every layout of a GPT of a billion parameters over 512 GPUs: how long the table takes, and how much memory.

python benchmarks/plan_512.py                         # asked: under two minutes and 4 GB on a machine of two cores
python benchmarks/plan_512.py --layouts shard=0,shard=3 --json
"""

from __future__ import annotations

import sys
from pathlib import Path

from many_ranks import watched

PROGRAM = (str(Path(__file__).parent / "plans" / "gpt.py"), "4096", "6")
"""Eight sequences of 1,024 tokens on each GPU, six steps."""


def main() -> None:
    said, took = watched("plan", "--gpus", "512", *sys.argv[1:], *PROGRAM)
    sys.stdout.write(f"{said}{took}; asked 120 s and 4 GB\n")


if __name__ == "__main__":
    main()
