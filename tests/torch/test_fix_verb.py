"""`keepbusy run --fix` and `keepbusy fix`, from the command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from warm_python import caching_in, warm

pytest.importorskip("libcst")

PROGRAM = """\
import torch

def main():
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, total = [torch.ones(4096, 64) for _ in range(3)], 0.0  # small ones are not worth it where the GPU is idle
    for step in range(20):
        loss = model(data[step % 3].to("cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        torch.cuda.empty_cache()  # costly
    print(total)

torch.manual_seed(0)
main()
"""


def keepbusy(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The last run is kept beside the program."""
    return warm().keepbusy(*arguments, cwd=folder, env=caching_in(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def test_a_program_runs_with_the_fixes_of_its_last_run(folder: Path) -> None:
    plain = keepbusy(folder, "run", "--clock", "modelled", "train.py")
    before = (folder / "train.py").read_text()
    fixed = keepbusy(folder, "run", "--fix", "--without", "graph", "--clock", "modelled", "train.py")
    assert plain.returncode == fixed.returncode == 0, fixed
    assert fixed.stdout.splitlines()[0] == plain.stdout.splitlines()[0]
    assert "made          keep the allocator's memory at train.py:" in fixed.stdout
    assert "% shorter\n" in fixed.stdout
    assert (folder / "train.py").read_text() == before
    wrong = keepbusy(folder, "run", "--fix", "--without", "everything", "train.py")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("keepbusy: Unknown fix 'everything'. Known fixes: accumulate, ")


@pytest.mark.sweep(room="fix")
@pytest.mark.sweep(room="cli")
def test_so_it_does_by_a_saved_run_and_without_one_of_the_fixes(folder: Path) -> None:
    keepbusy(folder, "run", "--clock", "modelled", "--save", "before.busy", "train.py")
    fixed = keepbusy(folder, "run", "--fix", "--clock", "modelled", "train.py")
    shutil.rmtree(folder / "keepbusy")
    anew = keepbusy(folder, "run", "--fix", "--against", "before.busy", "--clock", "modelled", "train.py")
    assert anew.stdout.splitlines()[:-1] == fixed.stdout.splitlines()[:-1]  # the last names the command
    without = "--without", "keep_memory"
    again = keepbusy(folder, "run", "--fix", *without, "--against", "before.busy", "--clock", "modelled", "train.py")
    assert "made          keep the allocator's memory" not in again.stdout
    assert "at train.py:" in again.stdout


def test_there_are_no_fixes_without_a_run_of_the_same_source(folder: Path) -> None:
    none = keepbusy(folder, "run", "--fix", "train.py")
    assert (none.returncode, none.stdout) == (2, "")
    assert none.stderr == (
        "keepbusy: --fix takes its plan from a recorded run of this program, and there is none; record one first: "
        "`keepbusy run train.py`.\n"
    )
    keepbusy(folder, "run", "--clock", "modelled", "--save", "before.busy", "train.py")
    (folder / "other.py").write_text(PROGRAM)
    other = keepbusy(folder, "run", "--fix", "--against", "before.busy", "other.py")
    assert (other.returncode, other.stdout) == (2, "")
    assert "is one of `train.py`; record one first: `keepbusy run other.py`." in other.stderr
    later = time.time() + 60
    os.utime(folder / "train.py", (later, later))
    changed = keepbusy(folder, "run", "--fix", "train.py")
    assert (changed.returncode, changed.stdout) == (2, "")
    assert "train.py has changed since the run that --fix takes its plan from" in changed.stderr


FAILING = """\
import torch

class Trainer:
    def __init__(self):
        self.model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(9)]).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def fit(self):
        x = torch.ones(4, 8, device="cuda")
        for step in range(20):
            self.optimizer.zero_grad()
            self.loss = self.model(x).square().mean()
            self.loss.backward()
            self.optimizer.step()
            self.end(step)

    def end(self, step):
        if step == 18:
            print(self.loss.item())
            raise SystemError(f"at {step}")

Trainer().fit()
"""


def test_a_rewritten_program_fails_at_the_lines_of_its_file(folder: Path) -> None:
    """Its traceback is the one that Python shows, and what it stores is stored as ever."""
    (folder / "failing.py").write_text(FAILING)
    plain = keepbusy(folder, "run", "--clock", "modelled", "failing.py")
    fixed = keepbusy(folder, "run", "--fix", "--clock", "modelled", "failing.py")
    assert plain.returncode == fixed.returncode == 1
    assert plain.stderr == fixed.stderr
    assert "line 20, in end" in fixed.stderr
    assert plain.stdout.splitlines()[0] == fixed.stdout.splitlines()[0]
    assert "made          capture as a CUDA graph at failing.py:11-14\n" in fixed.stdout
    assert "captured_fit: " in fixed.stdout


@pytest.mark.sweep(room="fix")
def test_a_line_that_fails_within_a_graph_is_shown_where_it_stands(folder: Path) -> None:
    failing = FAILING.replace(
        'x = torch.ones(4, 8, device="cuda")\n        for step in range(20):\n',
        """\
for step in range(20):
            x = torch.ones(4, 8 if step < 18 else 9, device="cuda")
""",
    )
    (folder / "failing.py").write_text(failing)
    plain = keepbusy(folder, "run", "--clock", "modelled", "failing.py")
    fixed = keepbusy(folder, "run", "--fix", "--clock", "modelled", "failing.py")
    assert plain.returncode == fixed.returncode == 1
    shown = [[*filter(lambda line: "failing.py" in line, one.stderr.splitlines())] for one in (plain, fixed)]
    assert shown[0] == shown[1]
    assert "line 12, in fit" in fixed.stderr
    assert "captured_fit: " in fixed.stdout


BUSY = """\
import torch

def main():
    scale = torch.ones((), device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([scale], lr=0.1, fused=True)
    data, total = torch.ones(1 << 19, device="cuda"), 0.0
    for step in range(20):
        noise = torch.randn(20_000)  # of the host
        loss = (data * scale).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()  # of all steps
    print(total)

main()
"""


def test_what_holds_is_proven_and_written_also_of_a_module(folder: Path) -> None:
    package = folder / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_bytes(BUSY.rstrip().replace("\n", "\r\n").encode())  # as an editor leaves it
    (package / "train.py").chmod(0o750)
    done = keepbusy(folder, "fix", "--write", "--on", "l4", "--clock", "modelled", "-m", "mine.train")
    assert done.returncode == 0, done
    assert done.stdout.startswith("-m mine.train: a step takes ")
    assert "read the value later at mine/train.py:13\n  saves " in done.stdout
    assert "predicted); the same results to the last bit\n" in done.stdout
    assert done.stdout.endswith("\n\\ No newline at end of file\nwritten: mine/train.py\n")
    now = BUSY.rstrip().replace("loss.item()", "loss.detach().double()")
    now = now.replace("    print", "    total = float(total)\n    print").replace("\n", "\r\n")
    assert (package / "train.py").read_bytes() == now.encode()
    assert (package / "train.py").stat().st_mode & 0o777 == 0o750


RANKS = """\
import os, torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)  # or that would be tried, too
data, total = torch.randn(8192, 64, device="cuda"), 0.0
for step in range(16):
    noise = torch.randn(60_000)  # of the host
    loss = model(data).sin().cos().tanh().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total += loss.item()
print(total)
dist.destroy_process_group()
"""


@pytest.mark.sweep(room="fix")
def test_ranks_are_fixed_together(folder: Path) -> None:
    (folder / "ranks.py").write_text(RANKS)
    done = keepbusy(folder, "fix", "--on", "l4", "--clock", "modelled", "--ranks", "2", "ranks.py")
    assert done.returncode == 0, done
    assert "read the value later at ranks.py:16\n  saves " in done.stdout
    assert "+    total += loss.detach().double()\n" in done.stdout
    assert "predicted); the same results to the last bit\n" in done.stdout
    assert done.stdout.endswith("nothing was written; `keepbusy fix --write` writes these changes into the source\n")
    assert (folder / "ranks.py").read_text() == RANKS


SPAWNING = """\
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def train(rank, folder):
    dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)  # or that would be tried, too
    data, total = torch.randn(8192, 64, device="cuda"), 0.0
    for step in range(16):
        noise = torch.randn(60_000)  # of the host
        loss = model(data).sin().cos().tanh().square().mean() * (rank + 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
    print(f"{total}\\n", end="")  # in one piece: two ranks write to one file
    dist.destroy_process_group()

if __name__ == "__main__":
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(folder,), nprocs=2)
"""


@pytest.mark.sweep(room="fix")
def test_ranks_that_the_program_spawns_are_fixed_and_proven(folder: Path) -> None:
    """They run the candidate, or nothing would be saved, and say what they compute, or nothing could be compared."""
    (folder / "spawning.py").write_text(SPAWNING)
    done = keepbusy(folder, "fix", "--write", "--on", "l4", "--clock", "modelled", "--gpus", "2", "spawning.py")
    assert done.returncode == 0, done
    assert "read the value later at spawning.py:18\n  saves " in done.stdout
    assert "predicted); the same results to the last bit\n" in done.stdout
    assert "total += loss.detach().double()" in (folder / "spawning.py").read_text()


def test_ranks_that_the_program_spawns_are_fixed_while_they_run(folder: Path) -> None:
    (folder / "spawning.py").write_text(SPAWNING)
    given = ("--on", "l4", "--clock", "modelled", "--gpus", "2", "spawning.py")
    plain, fixed = keepbusy(folder, "run", *given), keepbusy(folder, "run", "--fix", *given)
    assert plain.returncode == fixed.returncode == 0, fixed
    numbers = [sorted(one.stdout.partition("\nkeepbusy")[0].split()) for one in (plain, fixed)]
    assert numbers[0] == numbers[1]
    assert "made          read the value later at spawning.py:18\n" in fixed.stdout


MANY_LAUNCHES = """\
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(6)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(20):
    x = torch.ones(8, 16, device="cuda")
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
"""


def test_a_turn_of_many_launches_is_written_as_a_graph(folder: Path) -> None:
    """Once it is written, nobody is told to capture the line again, or to do less of what proves its graph."""
    (folder / "train.py").write_text(MANY_LAUNCHES)
    done = keepbusy(folder, "fix", "--write", "--clock", "modelled", "train.py")
    assert "capture as a CUDA graph at train.py:" in done.stdout, done
    assert "predicted); results within 0.01%, for Adam and its kin round differently in a graph" in done.stdout
    assert "+@keepbusy.graph\n+def captured_step(" in done.stdout
    assert "+    loss = captured_step(" in done.stdout
    report = keepbusy(folder, "run", "--clock", "modelled", "train.py").stdout
    [call] = [at for at, line in enumerate((folder / "train.py").read_text().splitlines(), 1) if "loss = capt" in line]
    assert f"  train.py:{call} " not in report, report


LOGGED = """\
import torch

def train(model, optimizer, batches):
    for step, x in enumerate(batches):
        x = x.cuda()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(loss.item())

def test(model, batches):
    with torch.no_grad():
        for x in batches:
            print(model(x.cuda()).mean().item())

def main():
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(12)]).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    batches = [torch.ones(8, 16)] * 59 + [torch.ones(4, 16)]
    train(model, optimizer, batches)
    test(model, batches[:4])

torch.manual_seed(0)
main()
"""


@pytest.mark.sweep(room="fix")
def test_the_steps_of_a_candidate_are_the_turns_of_its_own_loop(folder: Path) -> None:
    """Which stands at other lines than in the file. That the last batch has another shape keeps the graph's own
    replays from being the steps."""
    (folder / "train.py").write_text(LOGGED)
    done = keepbusy(folder, "fix", "--clock", "modelled", "train.py")
    assert "\ncapture as a CUDA graph at train.py:" in done.stdout, done
    assert "+def captured_train(model, optimizer, x):\n" in done.stdout, done


@pytest.mark.sweep(room="fix")
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("model.parameters()", "use a fused optimizer at train.py:5\n  instead of 'torch.compile' at "),
        ("model.parameters(), **dict(fused=True)", "keepbusy can write none of them into the source\n"),
    ],
)
def test_another_fix_is_named_where_it_stands_and_the_plan_s_as_advice(folder: Path, settings: str, told: str) -> None:
    """A decision by a value of the step keeps it from being a graph."""
    source = MANY_LAUNCHES.replace("    loss.backward()", "    if loss.item() > 9:\n        break\n    loss.backward()")
    (folder / "train.py").write_text(source.replace("model.parameters()", settings))
    done = keepbusy(folder, "fix", "--clock", "modelled", "train.py")
    assert done.returncode == 0, done
    assert told in done.stdout
    assert "torch.compile at train.py:12" in done.stdout
    assert "  by hand: model = torch.compile(model)\n" in done.stdout


def test_a_program_that_computes_something_else_each_time_is_told_so(folder: Path) -> None:
    """As one that resumes where its last run ended."""
    resumed = "with open('runs', 'a') as runs:\n    runs.write('.')\n    count = float(runs.tell())\n"
    source = resumed + BUSY.replace("torch.ones((),", "torch.tensor(count,").replace("1 << 19", "1 << 18")
    (folder / "train.py").write_text(source)
    done = keepbusy(folder, "fix", "--on", "l4", "--clock", "modelled", "train.py")
    said = "left out: this program does not compute the same twice (its weights differ from step 1 on)"
    assert done.stdout.count(said) == 1, "told once, and nothing more is run"
    assert "\nnot tried, since this program does not compute the same twice (" in done.stdout


INFERENCE = """\
import torch

torch.manual_seed(0)
model, batch = torch.nn.Linear(64, 64).cuda(), torch.randn(8192, 64, device="cuda")
total = 0.0
with torch.no_grad():
    for step in range(20):
        noise = torch.randn(20_000)  # of the host
        out = model(batch).sin().cos().tanh()
        total += out.mean().item()
print(total)
"""


def test_what_only_infers_is_held_against_its_outputs(folder: Path) -> None:
    """Also in a module of another folder, of which `patch` takes no name that begins with `..` or `/`."""
    main = "import sys\nsys.path.append('../shared')\nimport infer\n"
    for name, source in (("shared/infer.py", INFERENCE), ("task/main.py", main)):
        (folder / name).parent.mkdir()
        (folder / name).write_text(source)
    done = keepbusy(folder / "task", "fix", "--on", "l4", "--clock", "modelled", "main.py")
    assert "\n--- a/shared/infer.py\n+++ b/shared/infer.py\n" in done.stdout, done
    assert f"\nthe diff names files from {folder} on: `patch -p1 -d {folder}` takes it\n" in done.stdout
    assert "+        total += out.mean().detach().double()\n" in done.stdout, done
    assert "the same results to the last bit" in done.stdout


@pytest.mark.sweep(room="fix")
def test_without_values_no_results_are_said_to_be_the_same(folder: Path) -> None:
    (folder / "infer.py").write_text(INFERENCE)
    done = keepbusy(folder, "fix", "--on", "l4", "--clock", "modelled", "--values", "none", "infer.py")
    assert done.returncode == 0, done
    assert "results not compared, since nothing is computed with --values none" in done.stdout
    assert "the same results" not in done.stdout


def test_a_program_that_fails_is_told_of_in_a_sentence(folder: Path) -> None:
    (folder / "train.py").write_text("raise ValueError('no data')")
    done = keepbusy(folder, "fix", "train.py")
    assert done.returncode == 2
    assert done.stderr == (
        "keepbusy: run 1 of train.py, as it is\nkeepbusy: train.py ended with exit code 1: ValueError: no data\n"
    )


def test_a_program_that_uses_no_gpu_is_told_so(folder: Path) -> None:
    (folder / "train.py").write_text("import torch; print(torch.ones(2).sum())")
    done = keepbusy(folder, "fix", "train.py")
    assert done.returncode == 2
    assert "\nkeepbusy: train.py ran nothing on the GPU: its tensors stay on the CPU. Move the" in done.stderr
