"""`keepbusy run`: the program's own output, end and lines."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from warm_python import SOURCES, WarmPython, caching_in

LOOP = """\
import sys
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    x = torch.randn(512, 64)
    loss = model(x.to("cuda")).pow(2).mean()  # a blocking copy
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if torch.isnan(loss):  # a sync
        break
"""


def lines(said: dict, *causes: str) -> set[int]:
    """The lines of train.py that the report names under these causes."""
    places = [(one["cause"], site["place"]) for one in said["causes"] for site in one["sites"]]
    places += [(one["cause"], one["place"]) for one in said["harmless"]]
    planned = [
        (cause, *where.rsplit(":", 1)) for fix in said["plan"] for cause in fix["causes"] for where in fix["where"]
    ]
    places += [(cause, {"file": file, "line": int(line)}) for cause, file, line in planned]
    return {place["line"] for cause, place in places if cause in causes and place["file"] == "train.py"}


def test_the_report_names_exact_lines(run) -> None:
    done = run(LOOP, before=("--clock", "modelled", "--json"))
    said = json.loads(done.stdout)
    assert lines(said, "host_sync") == {12}
    assert lines(said, "blocking_copy") == {8}
    assert said["device"] == "virtual NVIDIA H200"
    assert said["steps"] >= 4


def test_the_next_commands_have_the_programs_arguments(run, tmp_path: Path, warm_python: WarmPython) -> None:
    """Also later, where the run is read from its file; and lines are quoted from the program, not from the file of its
    name that lies there."""
    made = LOOP.replace("x = torch.randn(512, 64)", 'x = torch.ones(512, 64).to("cuda")').replace('x.to("cuda")', "x")
    done = run(made, "--epochs", "2 3", before=("--clock", "modelled", "--on", "a100", "--save", "run.busy"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "train.py").write_text("another()\n" * 20)
    later = warm_python.keepbusy("explain", "../run.busy", "--full", cwd=tmp_path / "elsewhere")
    assert "torch.ones(512, 64)" in later.stdout
    assert "another()" not in later.stdout
    for verb in ("run --fix", "fix"):
        command = f"  keepbusy {verb} --on a100 train.py --epochs '2 3'\n"
        assert (command in done.stdout, command in later.stdout) == (True, True)


def test_the_program_is_untouched(run, tmp_path: Path) -> None:
    done = run(
        "import sys, __main__\nfrom pathlib import Path\n"
        "print(__name__, sys.argv, __main__.__file__, Path(sys.path[0]).samefile('.'), __doc__)\nsys.exit(7)\n",
        "--epochs", "2",
    )  # fmt: skip
    assert done.stdout == f"__main__ ['train.py', '--epochs', '2'] {tmp_path / 'train.py'} True None\n"
    assert done.returncode == 7
    assert done.stderr == "keepbusy: train.py ran nothing on the GPU.\n"


def test_a_quiet_run_draws_its_page(run, tmp_path: Path) -> None:
    done = run(LOOP, before=("--clock", "modelled", "--quiet", "--page", "run.html"))
    assert (done.returncode, "keepbusy ·" in done.stdout) == (0, False)
    assert "</html>" in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_who_computes_on_the_cpu_is_told_what_to_do(run) -> None:
    done = run("import torch\nprint(torch.nn.Linear(4, 4)(torch.ones(2, 4)).shape)\n")
    assert (done.returncode, done.stdout) == (0, "torch.Size([2, 4])\n")
    assert done.stderr == (
        "keepbusy: train.py ran nothing on the GPU: its tensors stay on the CPU. Move the model and each batch to the "
        'GPU: model.to("cuda") and batch.to("cuda"), or an option of the script such as --device cuda.\n'
    )
    assert run("import torch\nprint(1)\n").stderr == "keepbusy: train.py ran nothing on the GPU.\n"


def test_an_error_is_the_programs_own(run, tmp_path: Path) -> None:
    done = run(LOOP + "raise ValueError('mine')\n")
    assert done.returncode == 1
    assert done.stderr.splitlines()[:2] == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path / "train.py"}", line 14, in <module>',
    ]
    assert done.stderr.splitlines()[-1] == "ValueError: mine"
    assert " of an iteration." in done.stdout


def test_an_option_after_the_script_is_the_scripts(run) -> None:
    """One line says so where the script does not name it: somebody may have meant it for keepbusy."""
    prints = "import sys\nprint(sys.argv[1:])\n"
    done = run(prints, "--values", "none", "--epochs=2", "--gpus=4")
    assert (done.returncode, done.stdout) == (0, "['--values', 'none', '--epochs=2', '--gpus=4']\n")
    assert done.stderr.splitlines()[0] == (
        "keepbusy: --values and --gpus are passed to train.py, whose name comes before them; "
        "options of `keepbusy run` stand before the script."
    )
    own = run(f"{prints}options = ('--values', '--gpus')\n", "--values", "none", "--gpus=4")
    assert "passed to" not in own.stderr


BROKEN_OFF = """\
import os
import signal
import torch

model = torch.nn.Linear(64, 64).cuda()
for step in range(20):
    loss = model(torch.randn(512, 64, device="cuda")).pow(2).mean()
    loss.backward()
    if step == 12:
        lost = [loss.item() for _ in range(50)]
        END
"""


@pytest.mark.parametrize(
    ("end", "how", "by"),
    [
        ("raise ValueError(step)", "failed", "ValueError"),
        ("torch.ones(2).cuda() @ torch.ones(3)", "failed", "RuntimeError"),
        ("raise KeyboardInterrupt", "interrupted", "KeyboardInterrupt"),
        ("signal.raise_signal(signal.SIGTERM)", "killed", "SIGTERM"),
    ],
)
def test_what_a_run_did_in_the_iteration_that_it_did_not_finish_is_no_reason_for_advice(
    run, end: str, how: str, by: str
) -> None:
    said = json.loads(run(BROKEN_OFF.replace("END", end), before=("--clock", "modelled", "--json")).stdout)
    assert said["cut_short"] == {"how": how, "by": by, "where": "train.py:11", "rank": None}
    assert not {10, 11} & lines(said, *(one["cause"] for one in said["causes"]), "host_sync")
    assert said["causes"]


def test_a_run_that_was_cut_short_says_so_first(run) -> None:
    done = run(BROKEN_OFF.replace("END", "signal.raise_signal(signal.SIGTERM)"))
    first = next(line for line in done.stdout.splitlines() if line)
    assert first.startswith("The script was killed by SIGTERM at train.py:11 after ")


def test_a_line_that_raised_gets_no_advice(run) -> None:
    """Of a script without steps, which is explained whole."""
    source = "import torch\nx = torch.ones(64, 64, device='cuda')\nprint(x.sum().item())\n"
    failing = "y = torch.ones(3, 4).cuda() @ torch.ones(3, 4).cuda() + x.mean().item()\n"
    said = json.loads(run(source + failing, before=("--clock", "modelled", "--json")).stdout)
    everything = {cause for one in (*said["causes"], *said["harmless"]) for cause in [one["cause"]]}
    assert said["cut_short"]["where"] == "train.py:4"
    assert lines(said, *everything) <= {2, 3}


def test_what_fails_before_the_gpu_is_asked_for_anything_is_told_so(run) -> None:
    done = run("import nonsense_of_nobody\n")
    assert done.returncode == 1
    assert not done.stdout.strip()
    assert done.stderr.splitlines()[-2:] == [
        "ModuleNotFoundError: No module named 'nonsense_of_nobody'",
        "keepbusy: train.py ended with ModuleNotFoundError before anything ran on the GPU.",
    ]


def test_what_starts_keepbusy_is_no_line_of_the_program(tmp_path: Path, warm_python: WarmPython) -> None:
    """As the script that pip writes: once the program's last line has run, only that is on the stack."""
    (tmp_path / "train.py").write_text("import torch\nx = torch.randn(64, 64, device='cuda')\ny = x @ x\n")
    (tmp_path / "launcher").write_text("import sys\nfrom keepbusy.cli import main\nsys.exit(main())\n")
    done = warm_python.python("launcher", "run", "--json", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "launcher" not in done.stdout
    assert "train.py" in done.stdout


def test_an_interrupt_leaves_the_timeline_so_far(run, tmp_path: Path) -> None:
    done = run(LOOP + "raise KeyboardInterrupt\n", before=("--clock", "modelled", "--save", "run.busy"))
    assert done.returncode == -signal.SIGINT
    assert " of an iteration." in done.stdout
    assert (tmp_path / "run.busy").exists()


def test_two_modelled_runs_are_the_same_byte_for_byte(run, tmp_path: Path) -> None:
    runs = []
    for name in ("one.busy", "other.busy"):
        run(LOOP, before=("--clock", "modelled", "--save", name))
        runs.append((tmp_path / name).read_bytes())
    assert runs[0] == runs[1]


def test_a_module_runs_too(run) -> None:
    done = run("print(__name__, __spec__.name)\n", before=("-m",))
    assert done.returncode == 1  # `train.py` is no module name: what Python says of it is said
    assert "train.py" in done.stderr


def test_the_lines_of_an_installed_module_that_was_named_are_the_users_own(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    package = tmp_path / "site-packages" / "installed"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "train.py").write_text(
        "from installed.model import is_nan\n" + LOOP.replace("torch.isnan(loss)", "is_nan(loss)")
    )
    (package / "model.py").write_text("def is_nan(loss):\n    return loss.item() != loss.item()\n")
    done = warm_python.keepbusy(
        *("run", "--clock", "modelled", "--full", "-m", "installed.train"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCES), str(package.parent)])},
    )
    assert "installed/model.py:2" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("before", "says"),
    [
        (("--on", "h300"), "'h300' is no device; the devices are"),
        (("--gpus", "none"), "is no number of GPUs"),
        (("--save", "run.json"), "a saved run is named *.busy"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_sentence(run, before: tuple[str, ...], says: str) -> None:
    done = run(LOOP, before=before)
    assert done.returncode == 2
    assert done.stderr.startswith("keepbusy: ")
    assert says in done.stderr
    assert done.stderr.count("keepbusy: ") == 1
    assert done.stdout == ""


def test_a_script_that_is_not_there() -> None:
    from keepbusy.cli import main

    assert main(["run", "--clock", "modelled", "nowhere.py"]) == 2


SPAWNED = """\
import torch
import torch.multiprocessing as mp

def work(rank):
    torch.cuda.set_device(rank)
    assert torch.ones(2, device="cuda").sum().item() == 2
    assert torch.cuda.current_device() == rank

if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
    assert torch.cuda.device_count() == 2
    print("fine")
"""


def test_spawned_children_have_their_devices(run) -> None:
    done = run(SPAWNED, before=("--gpus", "2"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fine\n"


def test_host_work_stands_at_its_own_line(run) -> None:
    source = LOOP.replace("    x = torch.randn(512, 64)\n", "    sum(range(2_000_000))\n    x = torch.zeros(512, 64)\n")
    done = run(source, before=("--json",))
    assert 7 in lines(json.loads(done.stdout), "host_work"), done.stdout


@pytest.mark.parametrize("work", ["sum(range(400_000))", "[one + 1 for one in range(120_000)]"])
def test_short_host_work_stands_at_its_own_line_and_not_at_the_next_one(run, work: str) -> None:
    """A call that lets nobody else run, and a loop."""
    source = f"""\
import torch
x = torch.ones(64, 64, device="cuda")
parameter = torch.nn.Parameter(torch.ones(3, device="cuda"))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(40):
    y = x * 2
    {work}
    z = y + 1
    w = z @ x
    optimizer.step()
"""
    said = json.loads(run(source, before=("--json",)).stdout)
    cause = next(one for one in said["causes"] if one["cause"] == "host_work")
    waits = {site["place"]["line"]: site["wait"] for site in cause["sites"]}
    assert max(waits, key=lambda line: waits[line]) == 7, waits


def test_a_program_may_announce_its_own_steps(run) -> None:
    done = run(
        "import keepbusy, torch\n"
        "x = torch.ones(8, device='cuda')\n"
        "for _ in range(6):\n"
        "    for _ in range(3):\n"
        "        x = x * 2\n"
        "    keepbusy.step()\n",
        before=("--clock", "modelled", "--json"),
    )
    assert json.loads(done.stdout)["steps"] in (4, 5)


ASKING = """\
import torch

torch.manual_seed(3)
torch.cuda.set_device(0)
print(torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.is_initialized())
print(torch.ones(1, device="cuda").item(), torch.cuda.is_initialized(), torch.cuda.initial_seed())
"""


@pytest.mark.parametrize("clock", ["modelled", "measured"])
def test_a_device_counts_as_initialized_once_the_program_uses_one(run, clock: str) -> None:
    """A mesh of devices chooses the process's own by its rank, but only until then."""
    assert run(ASKING, before=("--clock", clock)).stdout.splitlines()[:2] == ["True 1 False", "1.0 True 3"]


def test_a_run_that_used_no_gpu_leaves_no_older_one_to_explain(warm_python: WarmPython, tmp_path: Path) -> None:
    env = {**caching_in(tmp_path), "PYTHONPATH": str(SOURCES)}
    used = "import torch\ntorch.ones(8, device='cuda').sum().item()\n"
    for script, code in ((used, 0), ("print(1)\n", 2)):
        (tmp_path / "train.py").write_text(script)
        warm_python.keepbusy("run", "--clock", "modelled", "train.py", cwd=tmp_path, env=env)
        assert warm_python.keepbusy("explain", cwd=tmp_path, env=env).returncode == code
