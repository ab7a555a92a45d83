"""Small programs with CUDA graphs, and what each of them says: on a GPU, and on the virtual one.

    python tests/torch/graph_programs.py --out tests/gpu/truth/graph_rules.json      (needs a GPU)

Each program returns what a user can see: values, or the first lines of the errors that it met.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import graph_life  # noqa: F401  # the programs of these three join the list
import graph_streams  # noqa: F401
import graph_values  # noqa: F401
import torch
from graph_asking import (
    ASKED,
    IN_EVERY_MODE,
    PROGRAMS,
    ask,
    ask_in_every_mode,
    said,
)


def all_programs() -> dict[str, Callable[[], Any]]:
    asked = {f"asks: {name}": partial(ask, name) for name in ASKED}
    modes = {f"modes: {name}": partial(ask_in_every_mode, name) for name in IN_EVERY_MODE}
    return {**asked, **modes, **PROGRAMS}


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path)
    options.add_argument("--only")
    chosen = options.parse_args()
    if chosen.only:
        print("ANSWER " + json.dumps(said(all_programs()[chosen.only])))
        raise SystemExit

    def apart(name: str) -> Any:
        """In a process of its own: a capture that failed may leave the device in any state."""
        done = subprocess.run(
            [sys.executable, __file__, "--only", name], capture_output=True, text=True, timeout=100, check=False
        )
        answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        return json.loads(answers[-1][7:]) if answers else f"ended with {done.returncode}"

    with ThreadPoolExecutor(8) as threads:
        answers = {name: threads.submit(apart, name) for name in all_programs()}
    answers = {name: answer.result() for name, answer in answers.items()}
    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "said": answers}
    text = json.dumps(found, indent=1)
    if chosen.out:
        chosen.out.write_text(text + "\n")
    for name, answer in answers.items():
        print(name, json.dumps(answer)[:400])
