"""Claim: what the programs of the course say of a virtual H200 holds on a real one.

    python benchmarks/course_on_gpu.py [--out docs/course/h200.json] [chapter or program…]
    python benchmarks/course_on_gpu.py 5 6 full_queue reading overlap

Each program of each chapter runs as a reader would run it, also with the constants that its experiments change; those
of several ranks need as many GPUs. What each printed goes into that file, beside what others printed before, and
`make course` makes the tables from it; a program whose `assert` fails is told, and left out. It takes some three
seconds a program.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shutil
import signal
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path
from typing import NoReturn

COURSE = Path(__file__).resolve().parents[1] / "docs" / "course"
sys.path.insert(0, str(COURSE))
from build import MEASURED, Run, chapters, runs_of, variables_of  # noqa: E402

LIMIT = 60
"""Seconds after which a program is ended: it hangs."""
IMPORTED = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo")
"""What the programs import. CUDA does not outlive a fork, so none of them may begin it."""


class Started:
    """A run on one GPU, or with a GPU for each of its ranks: processes that were forked here."""

    def __init__(self, run: Run, gpu: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.script = self.folder / run.program.name
        self.script.write_text(run.text(), encoding="utf-8")
        for data in run.program.parent.glob("*.json"):
            shutil.copy(data, self.folder)
        self.children: list[int] = []
        for rank, variables in enumerate(variables_of(run.ranks)):
            child = os.fork()
            if not child:
                os.environ |= variables or ({} if run.gpus > 1 else {"CUDA_VISIBLE_DEVICES": str(gpu)})
                self._be(rank)
            self.children.append(child)

    def _be(self, rank: int) -> NoReturn:
        """The program, in a child."""
        signal.alarm(LIMIT)
        os.chdir(self.folder)
        code = 1
        with (self.folder / f"{rank}.out").open("w") as out, (self.folder / f"{rank}.err").open("w") as err:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            try:
                runpy.run_path(str(self.script), run_name="__main__")
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def lines(self) -> list[str] | None:
        """What it printed, by rank; None if it failed, and then standard error tells why."""
        codes = [os.waitpid(child, 0)[1] for child in self.children]
        said = [self.folder.joinpath(f"{rank}.out").read_text(encoding="utf-8") for rank in range(len(codes))]
        if any(codes):
            errors = [self.folder.joinpath(f"{rank}.err").read_text(encoding="utf-8") for rank in range(len(codes))]
            print(f"FAILED: {self.script.name}", *said, *(error[-1500:] for error in errors), sep="\n", flush=True)
            return None
        return [line for text in said for line in text.rstrip().splitlines()]


def needed(run: Run) -> int:
    """GPUs."""
    return max(run.ranks, run.gpus)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=MEASURED)
    parser.add_argument("wanted", nargs="*", metavar="chapter or program")
    options = parser.parse_args()
    for module in IMPORTED:
        import_module(module)
    import torch

    count = torch.cuda.device_count()  # asks the driver's library, and begins nothing
    if not count:
        sys.exit("there is no GPU here")
    asked = {
        f"{page.name[0]} {name}": run
        for page in chapters()
        for name, run in runs_of(page).items()
        if (not options.wanted or {page.name[0], run.program.stem} & set(options.wanted)) and needed(run) <= count
    }
    if not asked:
        sys.exit(f"no chapter and no program that {count} GPUs suffice for is called {' or '.join(options.wanted)}")
    found: dict[str, list[str]] = {}
    failed = []
    alone = [name for name, run in asked.items() if needed(run) == 1]
    together = [[name] for name, run in asked.items() if needed(run) > 1]
    for names in [*(alone[first : first + count] for first in range(0, len(alone), count)), *together]:
        started = {name: Started(asked[name], gpu) for gpu, name in enumerate(names)}
        for name, one in started.items():
            lines = one.lines()
            if lines is None:
                failed.append(name)
                continue
            found[name] = lines
            print(name, *lines, sep="\n    ", flush=True)
    before = json.loads(options.out.read_text(encoding="utf-8"))["runs"] if options.out.exists() else {}
    runs = {name: lines for name, lines in (before | found).items() if name not in failed}
    machine = f"PyTorch {torch.__version__.partition('+')[0]}, CUDA {torch.version.cuda}"
    told = {"machine": machine, "runs": dict(sorted(runs.items()))}
    options.out.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(found)} of {len(asked)} programs held" + "".join(f"\nfailed: {name}" for name in failed))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
